"""A classifier on its own test examples: what it confuses, how sure it is and how far that can be trusted."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.filters import spread
from allmlp.analysis.subject import affordable
from allmlp.data.order import in_order
from allmlp.data.sentences import LabelledSentences
from allmlp.data.source import Data, Dataset, Split, Splits, subset
from allmlp.errors import UserError
from allmlp.models.model import Model
from allmlp.report.pictures import Picture, thumbnail
from allmlp.run import Run
from allmlp.tasks.classify import ClassifyModule
from allmlp.tasks.glue import ClassifyTextModule

BINS = 15
"""Of confidence, as Guo et al. have them."""
MISTAKES = 24
"""So many are shown, those the model is surest of."""
LEAST = 100
"""Examples that are looked at however slow the model is."""
LETTERS = 400
NO_CLASSES = "the task {} names no classes"


class Judged(NamedTuple):
    classes: tuple[str, ...]
    chances: Tensor
    """softmax of the scores, n k."""
    labels: Tensor
    """int64, n."""
    numbers: list[int]
    """Which examples of the split, n."""
    total: int
    """Of the split."""
    show: Callable[[int], Picture | str]
    """Example of the split -> its picture, or its text."""

    @property
    def accuracy(self) -> float:
        return float((self.chances.argmax(1) == self.labels).double().mean())


def judge(model: Model, run: Run, folder: str, most: int) -> Judged:
    """Ask the model about at most `most` of the examples its run is judged on, evenly spread over them.

    Of a large model fewer are asked, as many as half a minute of a CPU core allows (`affordable`). Nothing is
    downloaded for it.
    """
    if not issubclass(run.task.reads, (Dataset, LabelledSentences)):  # before its data are opened, which may take long
        raise UserError(NO_CLASSES.format(type(run.task).__name__))
    data = run.data.like(folder)
    dataset = opened(data.replace(download=False) if hasattr(data, "download") else data).hold_out(run.hold_out)
    run.task.accept(dataset)
    module = run.task.judge(model, dataset).eval()
    if not isinstance(module, (ClassifyModule, ClassifyTextModule)):
        raise UserError(NO_CLASSES.format(type(run.task).__name__))
    classes: tuple[str, ...] = dataset.classes  # type: ignore[attr-defined]
    numbers = spread(len(dataset.test), affordable(model, most, least=min(most, LEAST)))
    asked, scores, labels = subset(dataset.test, torch.tensor(numbers)), [], []
    with torch.inference_mode():
        for batch in in_order(asked, run.batch, model.device):
            if isinstance(module, ClassifyModule):
                scores.append(model(module.pixels(batch.images)))
            else:
                scores.append(module.scores(model, batch.ids.long(), batch.segments.long()))
            labels.append(batch.labels)
    chances = torch.cat(scores).double().softmax(1).cpu()
    if chances.shape[1] != len(classes):
        raise UserError(f"the model knows {chances.shape[1]} classes, the data have {len(classes)}")
    if not chances.isfinite().all():
        raise UserError("its scores are not numbers: the model has diverged")
    show = picture_of(dataset.test) if isinstance(module, ClassifyModule) else text_of(dataset)
    return Judged(classes, chances, torch.cat(labels).cpu(), numbers, len(dataset.test), show)


@lru_cache(maxsize=1)
def opened(data: Data) -> Splits:
    """Runs that are compared mostly share their data: they are opened once."""
    return data.open()


def picture_of(split: Split) -> Callable[[int], Picture]:
    return lambda number: thumbnail(split.fetch(torch.tensor([number])).images[0])


def text_of(dataset: Any) -> Callable[[int], str]:
    def text(number: int) -> str:
        ids = dataset.test.fetch(torch.tensor([number])).ids[0]
        words = dataset.tokenizer.decode(ids[ids != dataset.tokenizer.pad].tolist())
        return words if len(words) <= LETTERS else f"{words[:LETTERS]} ..."

    return text


def confusion(judged: Judged) -> Tensor:
    """How many examples of class i (row) are said to be class j (column): k k."""
    size = judged.chances.shape[1]
    pairs = judged.labels * size + judged.chances.argmax(1)
    return torch.bincount(pairs, minlength=size * size).view(size, size)


class Confused(NamedTuple):
    truth: int
    said: int
    count: int
    of: int
    """Examples of the true class."""


def confused(matrix: Tensor, most: int = 10) -> list[Confused]:
    """The pairs of classes that are taken for each other most often."""
    wrong = matrix.clone().fill_diagonal_(0)
    counts, places = wrong.flatten().topk(min(most, wrong.numel()))
    totals, size = matrix.sum(1).tolist(), len(matrix)
    return [
        Confused(place // size, place % size, count, totals[place // size])
        for count, place in zip(counts.tolist(), places.tolist())
        if count
    ]


class Bin(NamedTuple):
    low: float
    high: float
    count: int
    confidence: float
    """The mean of what the model says in it."""
    accuracy: float


class Calibration(NamedTuple):
    bins: list[Bin]
    """Those that are not empty."""
    error: float


def calibration(judged: Judged, bins: int = BINS) -> Calibration:
    """Whether a model that says 80 % is right 80 times of 100.

        ECE = sum over bins b of |b| / n  |accuracy(b) - confidence(b)|

    Bins of equal width over the probability of the class it names, (low, high]. Source: Guo et al., On Calibration of
    Modern Neural Networks, 2017.
    """
    confidence, said = judged.chances.max(1)
    right = (said == judged.labels).double()
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1
    found, error = [], 0.0
    for number in which.unique().tolist():
        inside = which == number
        one = Bin(
            number / bins,
            (number + 1) / bins,
            int(inside.sum()),
            float(confidence[inside].mean()),
            float(right[inside].mean()),
        )
        found.append(one)
        error += one.count / len(right) * abs(one.accuracy - one.confidence)
    return Calibration(found, error)


class Mistake(NamedTuple):
    number: int
    truth: int
    said: int
    confidence: float
    chance: float
    """What the model gives the true class."""
    picture: Picture | None
    text: str
    """Where it is no picture."""


def mistakes(judged: Judged, most: int = MISTAKES) -> list[Mistake]:
    """The mistakes that the model is surest of, first."""
    confidence, said = judged.chances.max(1)
    wrong = (said != judged.labels).nonzero().flatten()
    found = []
    for row in wrong[confidence[wrong].argsort(descending=True, stable=True)][:most].tolist():
        truth, shown = int(judged.labels[row]), judged.show(judged.numbers[row])
        picture, text = (shown, "") if isinstance(shown, Picture) else (None, shown)
        chances = float(confidence[row]), float(judged.chances[row, truth])
        found.append(Mistake(judged.numbers[row], truth, int(said[row]), *chances, picture, text))
    return found
