"""Supervised classification: softmax or sigmoid loss on smoothed, mixed labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.images import Augment, Mix, one_hot
from allmlp.data.images import Step as Place
from allmlp.data.order import Step
from allmlp.data.source import Batch, Dataset
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Rate
from allmlp.tasks.task import Losses, Moment, Pixels, Task, TaskModule


class Classify(Task):
    """Cross-entropy against the (smoothed, mixed) label.

    softmax:  L = - sum_k t_k log softmax(z)_k
    sigmoid:  L = - sum_k t_k log s(z_k) + (1 - t_k) log s(-z_k)
    """

    loss: Literal["softmax", "sigmoid"] = "softmax"
    smoothing: Rate = 0.0
    augment: Augment = Augment()
    mix: Mix | None = None

    def fit(self, model: ModelSpec, dataset: Dataset) -> ModelSpec:
        return model.configure(classes=len(dataset.classes))

    def build(self, model: Model, dataset: Dataset) -> TaskModule:
        return ClassifyModule(self, model, dataset)


class ClassifyModule(TaskModule):
    def __init__(self, spec: Classify, model: Model, dataset: Dataset) -> None:
        super().__init__()
        self.spec, self.model, self.classes = spec, model, len(dataset.classes)
        self.pixels = Pixels(dataset.mean, dataset.std, model.spec.image_size)

    def prepare(self, step: Step, moment: Moment) -> tuple[Tensor, ...]:
        images, labels = step.batch
        epoch = torch.tensor(int(step.epoch), device=labels.device)
        draws = moment.uniform(len(images), self.spec.augment.numbers())
        mixing = moment.uniform(len(images), self.spec.mix.numbers() if self.spec.mix else 0)
        return images, labels, epoch, step.indices.to(labels.device), draws, mixing

    def learn(self, *inputs: Tensor) -> Losses:
        images, targets = self.augmented(*inputs)
        logits = self.model(self.pixels(images))
        right = logits.argmax(1) == targets.argmax(1)
        return Losses(cross_entropy(logits, targets, self.spec.loss), {"accuracy": right.float().mean()})

    def augmented(
        self, images: Tensor, labels: Tensor, epoch: Tensor, indices: Tensor, draws: Tensor, mixing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pictures in [0, 1] and their targets, b k."""
        images = self.spec.augment.transform(images, draws, Place(epoch, indices))
        targets = one_hot(labels, self.classes, self.spec.smoothing)
        return self.spec.mix.transform(images, targets, mixing) if self.spec.mix else (images, targets)

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> dict[str, tuple[Tensor, Tensor]]:
        return judge(model, self.pixels, batches)


def cross_entropy(logits: Tensor, targets: Tensor, kind: str) -> Tensor:
    logits = logits.float()
    if kind == "sigmoid":
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)
    return F.cross_entropy(logits, targets)


def judge(model: Model, pixels: Pixels, batches: Iterable[Batch]) -> dict[str, tuple[Tensor, Tensor]]:
    """Accuracy and loss of a classifier, as sums and counts."""
    right = wrong = torch.zeros((), dtype=torch.float64)
    seen = torch.zeros((), dtype=torch.float64)
    for images, labels in batches:
        logits = model(pixels(images)).float()
        right = right.to(logits.device) + (logits.argmax(1) == labels).sum()
        wrong = wrong.to(logits.device) + F.cross_entropy(logits, labels, reduction="sum")
        seen = seen.to(logits.device) + len(labels)
    return {"accuracy": (right, seen), "loss": (wrong, seen)}
