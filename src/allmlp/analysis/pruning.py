"""What a classifier loses with its weights over tokens: smallest entries, blocks of 4 x 4, or low rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.plots import COLOURS, styled
from allmlp.data.inputs import Inputs
from allmlp.data.source import Batch, Data, Dataset
from allmlp.errors import UserError, require
from allmlp.models.model import Model
from allmlp.spec import discover, parse
from allmlp.tasks.classify import judge
from allmlp.tasks.task import Pixels
from allmlp.weights.prune import of_rank, token_matrices, without_blocks, without_smallest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = {"smallest": (0.25, 0.5, 0.6, 0.7, 0.8, 0.9), "blocks": (0.25, 0.5, 0.7), "rank": (0.25, 0.5, 0.75)}
SIDE = 4
AT_ONCE = 100


class Point(NamedTuple):
    way: str
    removed: float
    """The share of the numbers in the matrices over tokens that is saved."""
    accuracy: float


def first_pictures(data: str, count: int) -> Batch:
    """The first test pictures of a dataset: `data` is its kind, such as Cifar10, or its JSON."""
    discover("allmlp.data")
    spec = parse(data, Data, "--data")
    opened = spec.open()
    if not isinstance(opened, Dataset):
        raise UserError(f"{data} holds no labelled pictures")
    return opened.test.fetch(torch.arange(min(count, len(opened.test))))


def curve(model: Model, inputs: Inputs, pictures: Batch) -> Iterator[Point]:
    """The accuracy as it is, and with a growing share removed in each way; the model is left as it was."""
    matrices = {name: matrix.clone() for name, matrix in token_matrices(model).items()}
    yield Point("none", 0.0, accuracy(model, inputs, pictures))
    try:
        for way, shares in SHARES.items():
            for share in shares:
                replace(model, matrices, lambda matrix, way=way, share=share: without(matrix, way, share))
                yield Point(way, share, accuracy(model, inputs, pictures))
    finally:
        replace(model, matrices, lambda matrix: matrix)


def without(matrix: Tensor, way: str, share: float) -> Tensor:
    if way == "smallest":
        return without_smallest(matrix, round(share * matrix.numel()))
    if way == "blocks":
        return without_blocks(matrix, share, SIDE)
    # Two factors have R (m + n) numbers instead of m n.
    return of_rank(matrix, max(round((1 - share) * matrix.numel() / sum(matrix.shape)), 1))


@torch.no_grad()
def replace(model: Model, matrices: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> None:
    weights = dict(model.named_parameters())
    for name, matrix in matrices.items():
        weights[name].copy_(change(matrix))


@torch.inference_mode()
def accuracy(model: Model, inputs: Inputs, pictures: Batch) -> float:
    pixels = Pixels(inputs.mean, inputs.std, model.spec.image_size)
    parts = zip(pictures.images.split(AT_ONCE), pictures.labels.split(AT_ONCE))
    right, seen = judge(model, pixels, (Batch(*part) for part in parts))["accuracy"]
    return float(right / seen)


@styled
def figure(points: list[Point]) -> Figure:
    """Accuracy over the share removed, a line for each way."""
    whole = points[0]
    canvas = require("matplotlib.figure", "analysis").Figure(figsize=(3.6, 2.4), layout="constrained")
    axes = canvas.subplots()
    for way, colour in zip(SHARES, COLOURS):
        line = [whole, *(point for point in points if point.way == way)]
        axes.plot(
            [100 * p.removed for p in line], [100 * p.accuracy for p in line], "o-", ms=3, color=colour, label=way
        )
    axes.set(xlabel="numbers removed from the matrices over tokens (%)", ylabel="accuracy (%)")
    axes.legend()
    return canvas
