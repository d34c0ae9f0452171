"""A classifier on its test set: confusion matrix, calibration and mistakes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.target import affordable_images
from allmlp.analysis.token_filters import evenly_spaced
from allmlp.data.dataset import Data, Dataset, ImageDataset, Split, Subset, subset
from allmlp.data.encoded_images import EncodedImages
from allmlp.data.labeled_text import LabeledTextDataset
from allmlp.data.sampler import eval_batches
from allmlp.errors import UserError
from allmlp.models.model import Model
from allmlp.report.images import EmbeddedImage, thumbnail
from allmlp.run import Run
from allmlp.tasks.classify import ClassifyModule
from allmlp.tasks.classify_text import ClassifyTextModule

BINS = 15
"""Bins of confidence, as in Guo et al."""
MISTAKES = 24
"""Maximum number of mistakes shown, the most confident first."""
MIN_EXAMPLES = 100
"""Minimum number of evaluated examples, even for slow models."""
MAX_LETTERS = 400
NO_CLASSES = "the task {} has no classes"


class Predictions(NamedTuple):
    class_names: tuple[str, ...]
    probabilities: Tensor
    """softmax of the logits, n k."""
    labels: Tensor
    """int64, n."""
    indices: list[int]
    """Indices of the examples in the split, n."""
    total: int
    """Examples in the split."""
    show: Callable[[int], EmbeddedImage | str]
    """Index of an example -> its image, or its text."""
    name: Callable[[int], str] = lambda _: ""
    """Index of an example -> the name of its file; empty where it has none."""
    test_name: str = ""
    """Name of the test file, where there are several."""

    @property
    def correct(self) -> int:
        return int((self.probabilities.argmax(1) == self.labels).sum())

    @property
    def accuracy(self) -> float:
        return self.correct / len(self.labels)


def evaluator(model: Model, run: Run, folder: str) -> tuple[Dataset, ClassifyModule | ClassifyTextModule]:
    """Data and task, in evaluation mode, of a classifier's run; nothing is downloaded."""
    # Checked before loading the data, which may take long.
    if not issubclass(run.task.dataset_type, (ImageDataset, LabeledTextDataset)):
        raise UserError(NO_CLASSES.format(type(run.task).__name__))
    data = run.data.for_model(folder)
    dataset = loaded(data.replace(download=False) if hasattr(data, "download") else data).split_validation(run.val_size)
    run.task.check_dataset(dataset)
    module = run.task.build_evaluator(model, dataset).to(model.device).eval()
    if not isinstance(module, (ClassifyModule, ClassifyTextModule)):
        raise UserError(NO_CLASSES.format(type(run.task).__name__))
    return dataset, module


def collect_predictions(model: Model, run: Run, folder: str, max_examples: int) -> Predictions:
    """Evaluate the model on at most `max_examples` of the run's evaluation split, evenly spaced; of several test files,
    of the first, which `accuracy` is about.

    Large models get fewer examples, about half a minute of a CPU core (`affordable_images`). Nothing is downloaded.
    """
    dataset, module = evaluator(model, run, folder)
    class_names: tuple[str, ...] = dataset.class_names  # type: ignore[attr-defined]
    split, test_name = first_test_file(dataset)
    indices = evenly_spaced(len(split), affordable_images(model, max_examples, least=min(max_examples, MIN_EXAMPLES)))
    chosen, logits, labels = subset(split, torch.tensor(indices)), [], []
    with torch.inference_mode():
        for batch in eval_batches(chosen, run.batch_size, model.device):
            logits.append(logits_of(module, model, batch))
            labels.append(batch.labels)
    probabilities = torch.cat(logits).cpu().double().softmax(1)
    if probabilities.shape[1] != len(class_names):
        raise UserError(f"the model has {probabilities.shape[1]} classes, the dataset has {len(class_names)}")
    if not probabilities.isfinite().all():
        raise UserError("the outputs are not finite: the model has diverged")
    return Predictions(
        class_names,
        probabilities,
        torch.cat(labels).cpu(),
        indices,
        len(split),
        viewer(dataset, split),
        lambda index: file_name(split, index),
        test_name,
    )


def logits_of(module: ClassifyModule | ClassifyTextModule, model: Model, batch: Any) -> Tensor:
    if isinstance(module, ClassifyModule):
        return model(module.normalize(batch.images))
    return module.logits(model, batch.ids.long(), batch.segments.long())


def first_test_file(dataset: Dataset) -> tuple[Split, str]:
    """The examples of the first test file, and its name where there are several."""
    if isinstance(dataset, LabeledTextDataset):
        inside = dataset.test.fetch(torch.arange(len(dataset.test))).test_set == 0
        if not inside.all():
            return subset(dataset.test, inside.nonzero().flatten()), dataset.test_names[0]
    return dataset.test, ""


@lru_cache(maxsize=1)
def loaded(data: Data) -> Dataset:
    """Load data, cached, since the runs of a report mostly share them."""
    return data.load()


def viewer(dataset: Dataset, split: Split) -> Callable[[int], EmbeddedImage | str]:
    """A function that shows an example of a split by index: its image or text."""
    if not isinstance(dataset, LabeledTextDataset):
        return lambda index: thumbnail(split.fetch(torch.tensor([index])).images[0])

    def text(index: int) -> str:
        ids = split.fetch(torch.tensor([index])).ids[0]
        words = dataset.tokenizer.decode(ids[ids != dataset.tokenizer.pad_token_id].tolist())
        return words if len(words) <= MAX_LETTERS else f"{words[:MAX_LETTERS]} ..."

    return text


def file_name(split: Split, index: int) -> str:
    if isinstance(split, Subset):
        return file_name(split.split, int(split.indices[index]))
    return split.name(index) if isinstance(split, EncodedImages) else ""


def confusion(predictions: Predictions) -> Tensor:
    """Number of examples of class i (row) predicted as class j (column), k k."""
    size = predictions.probabilities.shape[1]
    pairs = predictions.labels * size + predictions.probabilities.argmax(1)
    return torch.bincount(pairs, minlength=size * size).view(size, size)


class ConfusedPair(NamedTuple):
    label: int
    predicted: int
    count: int
    total: int
    """Examples of the true class."""


def most_confused(matrix: Tensor, most: int = 10) -> list[ConfusedPair]:
    """The most frequent pairs of a class and a wrong prediction."""
    wrong = matrix.clone().fill_diagonal_(0)
    counts, cells = wrong.flatten().topk(min(most, wrong.numel()))
    totals, size = matrix.sum(1).tolist(), len(matrix)
    return [
        ConfusedPair(cell // size, cell % size, count, totals[cell // size])
        for count, cell in zip(counts.tolist(), cells.tolist())
        if count
    ]


class CalibrationBin(NamedTuple):
    low: float
    high: float
    count: int
    confidence: float
    """Mean confidence in the bin."""
    accuracy: float


class Calibration(NamedTuple):
    bins: list[CalibrationBin]
    """Non-empty bins."""
    error: float
    """Expected calibration error."""


def calibration(predictions: Predictions, bins: int = BINS) -> Calibration:
    confidence, predicted = predictions.probabilities.max(1)
    return calibrate(confidence, predicted == predictions.labels, bins)


def calibrate(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Calibration:
    """Accuracy by confidence, and the expected calibration error.

        ECE = sum over bins b of |b| / n  |accuracy(b) - confidence(b)|

    Bins of equal width over the probability of the predicted class, (low, high]. Source: Guo et al., On Calibration of
    Modern Neural Networks, 2017.
    """
    correct = correct.double()
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1
    calibration_bins, error = [], 0.0
    for number in which.unique().tolist():
        inside = which == number
        one = CalibrationBin(
            number / bins,
            (number + 1) / bins,
            int(inside.sum()),
            float(confidence[inside].mean()),
            float(correct[inside].mean()),
        )
        calibration_bins.append(one)
        error += one.count / len(correct) * abs(one.accuracy - one.confidence)
    return Calibration(calibration_bins, error)


class Mistake(NamedTuple):
    index: int
    label: int
    predicted: int
    confidence: float
    label_probability: float
    image: EmbeddedImage | None
    text: str
    """Text of the example, if there is no image."""
    file: str


def mistakes(predictions: Predictions, most: int = MISTAKES) -> list[Mistake]:
    """Wrong predictions, the most confident first."""
    confidence, predicted = predictions.probabilities.max(1)
    wrong = (predicted != predictions.labels).nonzero().flatten()
    worst = []
    for row in wrong[confidence[wrong].argsort(descending=True, stable=True)][:most].tolist():
        label, shown = int(predictions.labels[row]), predictions.show(predictions.indices[row])
        image, text = (shown, "") if isinstance(shown, EmbeddedImage) else (None, shown)
        index, both = predictions.indices[row], (float(confidence[row]), float(predictions.probabilities[row, label]))
        worst.append(Mistake(index, label, int(predicted[row]), *both, image, text, predictions.name(index)))
    return worst
