"""The accuracy of a classifier with pruned token-mixing matrices: smallest entries, 4 x 4 blocks, or low rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.figures import COLORS, new_figure, styled
from allmlp.analysis.token_filters import evenly_spaced
from allmlp.data.dataset import Data, ImageDataset, LabeledImages
from allmlp.data.detect import NAMED, detect_data
from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.errors import UserError
from allmlp.models.model import Model
from allmlp.spec import discover, parse
from allmlp.tasks.classify import evaluate_classifier
from allmlp.tasks.task import Normalize
from allmlp.weights.pruning import low_rank, token_matrices, without_blocks, without_smallest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRACTIONS = {"smallest": (0.25, 0.5, 0.6, 0.7, 0.8, 0.9), "blocks": (0.25, 0.5, 0.7), "rank": (0.25, 0.5, 0.75)}
BLOCK = 4
BATCH_SIZE = 100


class PruningPoint(NamedTuple):
    method: str
    removed: float
    """Fraction of the numbers in the token-mixing matrices that need not be stored."""
    accuracy: float


def load_test_images(
    data: str, count: int, class_names: tuple[str, ...] = (), size: tuple[int, int] | None = None
) -> LabeledImages:
    """Test images of a dataset, evenly spaced, since those of a folder are sorted by class. `data` is as for `allmlp
    eval`, with images of the model's `size`, or a kind such as Cifar10, or its JSON. The dataset must have the model's
    `class_names`, if there are any.
    """
    discover("allmlp.data")
    if data.startswith("{") or (data.isidentifier() and data not in NAMED and not Path(data).exists()):
        spec = parse(data, Data, "--data")
    else:
        spec = detect_data(data)
        spec = spec.replace(img_size=size) if size and hasattr(spec, "img_size") else spec
    dataset = spec.load()
    if not isinstance(dataset, ImageDataset) or not dataset.class_names:
        raise UserError(f"{data} is not a dataset of images with class labels")
    if class_names and class_names != dataset.class_names:
        raise UserError(f"{data} has other classes than the model, or in another order: it has no accuracy on them")
    return dataset.test.fetch(torch.tensor(evenly_spaced(len(dataset.test), count)))


def pruning_curve(model: Model, preprocessing: ImagePreprocessing, images: LabeledImages) -> Iterator[PruningPoint]:
    """The accuracy of the model as it is, and with growing fractions removed; the weights are restored."""
    matrices = {name: matrix.clone() for name, matrix in token_matrices(model).items()}
    yield PruningPoint("none", 0.0, accuracy(model, preprocessing, images))
    try:
        for method, fractions in FRACTIONS.items():
            for fraction in fractions:
                replace(model, matrices, lambda matrix, by=method, of=fraction: pruned(matrix, by, of))
                yield PruningPoint(method, fraction, accuracy(model, preprocessing, images))
    finally:
        replace(model, matrices, lambda matrix: matrix)


def pruned(matrix: Tensor, method: str, fraction: float) -> Tensor:
    if method == "smallest":
        return without_smallest(matrix, round(fraction * matrix.numel()))
    if method == "blocks":
        return without_blocks(matrix, fraction, BLOCK)
    # Two factors have R (m + n) numbers instead of m n.
    return low_rank(matrix, max(round((1 - fraction) * matrix.numel() / sum(matrix.shape)), 1))


@torch.no_grad()
def replace(model: Model, matrices: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> None:
    weights = dict(model.named_parameters())
    for name, matrix in matrices.items():
        weights[name].copy_(change(matrix))


@torch.inference_mode()
def accuracy(model: Model, preprocessing: ImagePreprocessing, images: LabeledImages) -> float:
    normalize = Normalize(preprocessing.mean, preprocessing.std, model.spec.input_size).to(model.device)
    batches = zip(*(whole.to(model.device).split(BATCH_SIZE) for whole in (images.images, images.labels)))
    correct, count = evaluate_classifier(model, normalize, (LabeledImages(*batch) for batch in batches))["accuracy"]
    return float(correct / count)


@styled
def draw_curve(points: list[PruningPoint]) -> Figure:
    """Accuracy over the fraction removed, one line per method."""
    figure = new_figure(3.6, 2.4)
    axes = figure.subplots()
    for method, color in zip(FRACTIONS, COLORS):
        line = [points[0], *(point for point in points if point.method == method)]
        x, y = [100 * point.removed for point in line], [100 * point.accuracy for point in line]
        axes.plot(x, y, "o-", ms=3, color=color, label=method)
    axes.set(xlabel="removed from the token-mixing matrices (%)", ylabel="accuracy (%)")
    axes.legend()
    return figure
