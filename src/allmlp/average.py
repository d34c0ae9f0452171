"""The moving average of the weights, which is judged and kept in place of the last ones.

average += pull (weights - average),   pull = 1 - min(ema, (1 + t) / (10 + t)) at step t
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from allmlp.models.model import Model


def pull_at(ema: float | None, step: int) -> float:
    return max(1 - (ema or 0.0), 9 / (10 + step))


def follow(average: list[Tensor], weights: list[nn.Parameter], pull: float | Tensor) -> None:
    if average:
        apart = torch._foreach_sub([weight.detach() for weight in weights], average)
        torch._foreach_mul_(apart, pull)
        torch._foreach_add_(average, apart)


@contextmanager
def averaged(model: Model, trained: list[nn.Parameter], average: list[Tensor]) -> Iterator[Model]:
    """The model with its average weights for a while, where there is an average."""
    if not average:
        yield model
        return
    own = [weight.detach().clone() for weight in trained]
    overwrite(trained, average)
    try:
        yield model
    finally:
        overwrite(trained, own)


@torch.no_grad()
def overwrite(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
