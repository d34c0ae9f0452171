"""Roles of the parameters of a token mixer, declared by the layer itself.

A layer that mixes tokens has an attribute `token_roles`, a mapping from the names of its parameters to their roles:

    class TokenMlpLayer(nn.Module):
        token_roles = {"up.weight": "into hidden", "down.weight": "out of hidden", ...}

Analysis, pruning and resizing read it, so a new mixer needs no change there. `{}` means that no parameter acts on
tokens; a layer without the attribute is reported as not described.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from torch import Tensor, nn

TokenRole = Literal[
    "square",
    "square parameters",
    "into hidden",
    "hidden",
    "out of hidden",
    "in",
    "out",
    "kernel",
    "attention",
    "channel",
]
"""For S tokens and D hidden units:

square             S x S, row i holds the weights with which token i reads every token
square parameters  what the layer's `matrix()` builds the S x S matrix from (Toeplitz)
into hidden        D x S, the first matrix of an MLP over tokens
hidden             D, its bias
out of hidden      S x D, the second matrix
in                 n x S, rows that read tokens
out                S or S x n, an entry or a row for each token
kernel             n m k k, a convolution over the grid of patches
attention          a projection of an attention layer
channel            acts on channels only
"""


class TokenParameter(NamedTuple):
    path: str
    """Path of the layer in the model."""
    layer: nn.Module
    name: str
    """Name of the parameter in the layer."""
    role: TokenRole

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    def weight(self) -> Tensor:
        """The weight as the layer uses it: lower triangular in a causal layer, the matrix that `matrix()` builds."""
        if self.role == "square parameters":
            return self.layer.matrix()  # type: ignore[operator]
        weight = self.layer.get_parameter(self.name)
        return weight.tril() if self.role == "square" and getattr(self.layer, "causal", False) else weight


def token_parameters(model: nn.Module) -> Iterator[TokenParameter]:
    """All parameters with a declared role, from the first layer to the last."""
    for path, module in model.named_modules():
        for name, role in getattr(module, "token_roles", {}).items():
            yield TokenParameter(path, module, name, role)
