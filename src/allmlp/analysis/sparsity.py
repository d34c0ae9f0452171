"""The fraction of near-zero weights, as in figure 3 of the ResMLP paper."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.analysis.module_path import module_path
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.token_roles import TokenRole, token_parameters
from allmlp.models.model import Model

MatrixKind = Literal["token", "channel", "attention", "other"]
KINDS: dict[TokenRole | None, MatrixKind] = {
    "square": "token",
    "square parameters": "token",
    "into hidden": "token",
    "out of hidden": "token",
    "in": "token",
    "kernel": "token",
    "attention": "attention",
    "channel": "channel",
}


class Sparsity(NamedTuple):
    name: str
    kind: MatrixKind
    """Axis mixed by the matrix: tokens (the paper's linear layers), channels (its MLPs), attention, or other."""
    stack: str
    block: int | None
    weights: int
    fraction: float
    """Fraction of the weights below 5 % of the largest one in the matrix."""


def small_fraction(weight: Tensor, limit: float = 0.05) -> float:
    """The fraction of weights whose absolute value is below `limit` times the largest one.

    fraction = #{|w| < limit max|w|} / #w
    """
    size = weight.abs()
    return float((size < limit * size.max()).double().mean())


def sparsity(model: Model) -> list[Sparsity]:
    """The fraction in every parameter of two or more axes and in every Toeplitz vector, not in biases, norms, scales.

    Of a causal matrix only the lower triangle counts.
    """
    declared = {one.full_name: one for one in token_parameters(model)}
    channel = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, ChannelMlpLayer))
    matrices = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            role = declared[name].role if name in declared else None
            if parameter.dim() < 2 and role != "square parameters":
                continue
            weight = used_entries(declared[name].layer, parameter.cpu()) if role == "square" else parameter.cpu()
            kind = KINDS.get(role, "channel" if role is None and name.startswith(channel) else "other")
            matrices.append(Sparsity(name, kind, *module_path(name), weight.numel(), small_fraction(weight)))
    return matrices


def used_entries(layer: nn.Module, square: Tensor) -> Tensor:
    """The entries of a token matrix that the layer uses: the lower triangle of a causal one."""
    return square[torch.ones_like(square, dtype=torch.bool).tril()] if getattr(layer, "causal", False) else square
