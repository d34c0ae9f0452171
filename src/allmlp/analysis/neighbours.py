"""Which pictures are alike to a model: nearest neighbours in its features."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.models.model import Model
from allmlp.tasks.probe import directions


class Neighbour(NamedTuple):
    index: int
    """In the bank."""
    cosine: float
    """Between the pooled features of both, 1 for the same direction."""


@torch.inference_mode()
def features(model: Model, images: Tensor, batch: int = 50) -> Tensor:
    """Pooled features of length one, n c; the pictures are as the model reads them."""
    return torch.cat([directions(model, part) for part in images.split(batch)])


def neighbours(queries: Tensor, bank: Tensor, k: int = 5, own: Tensor | None = None) -> list[list[Neighbour]]:
    """The k nearest of the bank to each query, nearest first; features of length one.

    `own` is where each query itself stands in the bank, which is then passed over; -1 where it does not.
    """
    cosine = queries @ bank.T
    if own is not None:
        inside = own >= 0
        cosine[inside.nonzero().flatten(), own[inside]] = -torch.inf
    near = cosine.topk(min(k, len(bank) - (own is not None)), dim=1)
    rows = zip(near.indices.tolist(), near.values.tolist())
    return [[Neighbour(*pair) for pair in zip(*row)] for row in rows]


def agreement(bank: Tensor, labels: Tensor) -> float:
    """The share of the bank whose nearest other picture has the same label."""
    near = neighbours(bank, bank, 1, torch.arange(len(bank)))
    return float((labels[[row[0].index for row in near]] == labels).double().mean())
