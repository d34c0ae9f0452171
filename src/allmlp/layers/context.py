"""Arguments of a layer besides its input: a BuildContext when it is built, a Context in the forward pass."""

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
    """What a module passes to the `build` of its children: sizes, and the initialization of plain linear layers."""

    tokens: int
    channels: int
    init: Init
    grid: tuple[int, int] | None = None
    variates: int = 1
    """Number of variates of a multivariate series; as many consecutive rows of the batch form one example."""

    def require_grid(self, mixer: str) -> tuple[int, int]:
        if self.grid is None or self.grid[0] * self.grid[1] != self.tokens:
            raise UserError(f"{mixer} needs a plain grid of patches: an image stem without a class token")
        return self.grid


def check_tokens(count: int, most: int) -> None:
    """Raise UserError if there are more tokens than the layer is built for; fewer are accepted."""
    if count > most:
        raise UserError(f"the layer is built for at most {most} tokens, got {count}")


def check_mask(mask: Tensor | None, x: Tensor) -> None:
    """Raise UserError unless `mask`, b s, is a boolean mask of the tokens x, b s or b s c: attention adds a mask of
    another type to its scores.
    """
    if mask is not None and mask.dtype != torch.bool:
        dtype = str(mask.dtype).removeprefix("torch.")
        raise UserError(f"the mask must be bool, True at real tokens, not {dtype}: pass mask.bool()")
    if mask is not None and tuple(mask.shape) != tuple(x.shape[:2]):
        raise UserError(f"the mask {list(mask.shape)} does not match the tokens {list(x.shape)}")


def as_grid(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens b s c as b h w c."""
    if x.shape[1] != grid[0] * grid[1]:
        raise UserError(f"the layer is built for a grid of {grid[0]}x{grid[1]} tokens, got {x.shape[1]} tokens")
    return x.unflatten(1, grid)


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

    def extend_mask(self, layer: nn.Module, mask: Tensor | None, x: Tensor) -> Tensor | None:
        """The mask of all tokens so far, given that of the new ones `x` (b s ...); tokens without a mask are real."""
        if mask is None and layer not in self.seen:
            return None
        if layer not in self.seen and self.length:
            self.seen[layer] = x.new_ones(len(x), self.length, dtype=torch.bool)
        return self.extend(layer, x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask)

    def once(self, layer: nn.Module, make: Callable[[], Tensor]) -> Tensor:
        """Compute a value in the first step and reuse it in all later ones."""
        if layer not in self.fixed:
            self.fixed[layer] = make()
        return self.fixed[layer]

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order (beam search)."""
        for store in (self.seen, self.fixed):
            for layer, x in store.items():
                store[layer] = x.index_select(0, rows)


class Context(NamedTuple):
    """The data of one call, passed to every block together with the activations."""

    mask: Tensor | None = None
    """b s, True at real tokens; None if all are real."""
    memory: Tensor | None = None
    """b m c, the encoder output for cross-attention."""
    memory_mask: Tensor | None = None
    bias: Tensor | None = None
    """h s s, relative position scores shared by all attention layers."""
    cache: Cache | None = None
    documents: Tensor | None = None
    """b s, the number of each token's document, 0 at padding; None unless rows hold several documents."""

    # No properties: torch.compile of torch 2.8 does not evaluate those of a named tuple.
    def same_document(self) -> Tensor | None:
        """b s s, whether two tokens may see each other; padding sees padding."""
        return None if self.documents is None else self.documents[:, :, None] == self.documents[:, None, :]

    def is_special(self) -> bool:
        """Whether tokens are mixed in a way that the fused operators do not support."""
        return self.cache is not None or self.documents is not None

    def start(self) -> int:
        """Position of the first token of this call."""
        return 0 if self.cache is None else self.cache.length

    def zero_padding(self, x: Tensor) -> Tensor:
        """Set padding to zero, so that a fixed mixing matrix does not read it."""
        return x if self.mask is None else x * self.mask.unsqueeze(-1).to(x.dtype)
