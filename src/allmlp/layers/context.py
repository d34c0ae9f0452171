"""What a layer gets besides its input: a BuildContext when it is built, a Context when it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.layers.init import Init


@dataclass(frozen=True)
class BuildContext:
    """What a parent passes to the `build` of its parts: sizes, and the initialization of plain linear layers."""

    tokens: int
    channels: int
    init: Init
    grid: tuple[int, int] | None = None
    variates: int = 1
    """Of a multivariate series: this many consecutive rows of the batch are one example."""

    def require_grid(self, mixer: str) -> tuple[int, int]:
        if self.grid is None or self.grid[0] * self.grid[1] != self.tokens:
            raise UserError(f"{mixer} needs a plain grid of patches: an image stem without a class token")
        return self.grid


def check_tokens(found: int, most: int) -> None:
    """Layers over tokens take fewer than they are built for, never more."""
    if found > most:
        raise UserError(f"the layer is built for at most {most} tokens, got {found}")


class Cache:
    """The state of step-by-step decoding with a causal model.

    Each layer stores the activations it mixes over (b t c); `length` counts the tokens before the current call.
    """

    def __init__(self) -> None:
        self.length = 0
        self.seen: dict[nn.Module, Tensor] = {}
        self.fixed: dict[nn.Module, Tensor] = {}

    def extend(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Append the new tokens of `layer` and return all of them."""
        if layer in self.seen:
            x = torch.cat([self.seen[layer], x], dim=1)
        self.seen[layer] = x
        return x

    def once(self, layer: nn.Module, make: Callable[[], Tensor]) -> Tensor:
        """A value that is the same in every step, computed in the first."""
        if layer not in self.fixed:
            self.fixed[layer] = make()
        return self.fixed[layer]

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order (beam search)."""
        for store in (self.seen, self.fixed):
            for layer, x in store.items():
                store[layer] = x.index_select(0, rows)


class Context(NamedTuple):
    """Passed to every block along with the activations."""

    mask: Tensor | None = None
    """b s, True where a token is real; None where all are."""
    memory: Tensor | None = None
    """b m c, the encoder output for cross-attention."""
    memory_mask: Tensor | None = None
    bias: Tensor | None = None
    """h s s, relative position scores shared by all attention layers."""
    cache: Cache | None = None
    documents: Tensor | None = None
    """b s, the number of the document of each token, 0 for padding, where a row holds several; None otherwise."""

    # No properties: torch.compile of torch 2.8 does not evaluate those of a named tuple.
    def same_document(self) -> Tensor | None:
        """b s s, whether two tokens may see each other; padding sees padding."""
        return None if self.documents is None else self.documents[:, :, None] == self.documents[:, None, :]

    def is_special(self) -> bool:
        """Whether tokens are mixed in a way that fused operators do not know."""
        return self.cache is not None or self.documents is not None

    def start(self) -> int:
        """The position of the first token of this call."""
        return 0 if self.cache is None else self.cache.length

    def zero_padding(self, x: Tensor) -> Tensor:
        """Set padding to zero, so that a fixed mixing matrix does not read it."""
        return x if self.mask is None else x * self.mask.unsqueeze(-1).to(x.dtype)
