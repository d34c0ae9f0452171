"""What frozen features know: nearest neighbours, and a linear classifier on top of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.order import Step, in_order
from allmlp.data.source import Batch, Dataset, Split, subset
from allmlp.errors import UserError
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Count, NonNegative
from allmlp.tasks.classify import Classify, ClassifyModule
from allmlp.tasks.task import Losses, Moment, Pixels, Task, TaskModule


class Neighbours(Task):
    """The k nearest training pictures vote for a picture's class; nothing is trained.

        score_c(x) = sum over the k nearest i of class c of exp(cos(f(x), f(x_i)) / temperature)

    Source: Wu et al., 2018, with DINO's k and temperature. `bank` training examples, evenly spread, are looked at.
    """

    k: Count = 20
    temperature: NonNegative = 0.07
    bank: Count = 50_000

    def build(self, model: Model, dataset: Dataset) -> TaskModule:
        return NeighboursModule(self, model, dataset)


class NeighboursModule(TaskModule):
    def __init__(self, spec: Neighbours, model: Model, dataset: Dataset) -> None:
        super().__init__()
        self.spec, self.model, self.classes = spec, model, len(dataset.classes)
        self.pixels = Pixels(dataset.mean, dataset.std, model.spec.image_size)
        self.known = spread(dataset.train, spec.bank)

    def forward(self, step: Step, moment: Moment) -> Losses:
        raise UserError("Neighbours only judges: it trains nothing")

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> dict[str, tuple[Tensor, Tensor]]:
        return judge_neighbours(self.spec, model, self.pixels, self.known, batches, self.classes)


def judge_neighbours(
    spec: Neighbours, model: Model, pixels: Pixels, known: Split, batches: Iterable[Batch], classes: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """k-NN accuracy as a sum and a count; every process looks at the whole bank."""
    pairs = [(directions(model, pixels(images)), labels) for images, labels in in_order(known, 500, model.device)]
    bank, names = torch.cat([found for found, _ in pairs]), torch.cat([labels for _, labels in pairs])
    right = seen = torch.zeros((), dtype=torch.float64, device=model.device)
    for images, labels in batches:
        votes = vote(directions(model, pixels(images)), bank, names, classes, spec.k, spec.temperature)
        right, seen = right + (votes.argmax(1) == labels).sum(), seen + len(labels)
    return {"knn_accuracy": (right, seen)}


def spread(split: Split, examples: int) -> Split:
    """At most `examples` of a split, evenly spread over it."""
    if len(split) <= examples:
        return split
    return subset(split, torch.linspace(0, len(split) - 1, examples).long())


def directions(model: Model, images: Tensor) -> Tensor:
    """Pooled features of length one, b c."""
    features = model.forward_features(images)
    pool = getattr(model, "pool", None)
    pooled = features.mean(1) if pool is None else pool(features, None)
    return F.normalize(pooled.float(), dim=1)


def vote(queries: Tensor, bank: Tensor, labels: Tensor, classes: int, k: int, temperature: float) -> Tensor:
    """Scores of each class, b classes; queries and bank have length one."""
    near = (queries @ bank.T).topk(min(k, len(bank)), dim=1)
    scores = torch.zeros(len(queries), classes, device=queries.device)
    return scores.scatter_add_(1, labels[near.indices], (near.values / temperature).exp())


class Probe(Classify):
    """Linear evaluation: everything but the head is frozen, in evaluation mode."""

    def fit(self, model: ModelSpec, dataset: Dataset) -> ModelSpec:
        if not isinstance(model, Encoder):
            raise UserError("a probe needs one of this library's encoders")
        return super().fit(model, dataset)

    def build(self, model: Model, dataset: Dataset) -> TaskModule:
        return ProbeModule(self, model, dataset)


class ProbeModule(ClassifyModule):
    def __init__(self, spec: Probe, model: Model, dataset: Dataset) -> None:
        super().__init__(spec, model, dataset)
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.startswith("head."))

    @property
    def flops(self) -> int:
        return super().flops // 3

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.model.eval()
        return self
