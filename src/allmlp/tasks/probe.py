"""Evaluation of frozen features: k-nearest neighbors and linear probing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.dataset import ImageDataset, LabeledImages, Split, evenly_spaced, subset
from allmlp.data.sampler import Batch, eval_batches
from allmlp.device import sum_dtype
from allmlp.errors import UserError
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec
from allmlp.models.resnet import ResNet
from allmlp.spec import Count
from allmlp.tasks.classify import Classify, ClassifyModule
from allmlp.tasks.task import Normalize, StepContext, Sums, Task, TaskModule, Temperature


class KnnEval(Task):
    """Weighted k-NN classification with the training images as bank; evaluation only.

        score_c(x) = sum over the k nearest i of class c of exp(cos(f(x), f(x_i)) / temperature)

    Source: Wu et al., 2018, with DINO's k and temperature. The bank is at most `bank_size` images, evenly spaced.
    """

    k: Count = 20
    temperature: Temperature = 0.07
    bank_size: Count = 50_000

    def build(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return KnnEvalModule(self, model, dataset)

    def floors(self, dataset: ImageDataset, split: Split) -> dict[str, float]:
        return Classify().floors(dataset, split)


class KnnEvalModule(TaskModule):
    def __init__(self, spec: KnnEval, model: Model, dataset: ImageDataset) -> None:
        super().__init__()
        self.spec, self.model, self.num_classes = spec, model, len(dataset.class_names)
        self.normalize = Normalize(dataset.mean, dataset.std, model.spec.input_size)
        self.bank = subsample(dataset.train, spec.bank_size)

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        raise UserError("KnnEval only evaluates; choose another task for training")

    def evaluate(self, model: Model, batches: Iterable[LabeledImages]) -> Sums:
        return evaluate_knn(self.spec, model, self.normalize, self.bank, batches, self.num_classes)


def evaluate_knn(
    spec: KnnEval, model: Model, normalize: Normalize, bank: Split, batches: Iterable[LabeledImages], num_classes: int
) -> Sums:
    """k-NN accuracy as a sum and a count; every process computes the features of the whole bank."""
    stored = eval_batches(bank, 500, model.device)
    encoded = [(normalized_features(model, normalize(images)), labels) for images, labels in stored]
    bank_features, bank_labels = (torch.cat(parts) for parts in zip(*encoded))
    correct = count = torch.zeros((), dtype=sum_dtype(model.device), device=model.device)
    for images, labels in batches:
        queries = normalized_features(model, normalize(images))
        scores = knn_scores(queries, bank_features, bank_labels, num_classes, spec.k, spec.temperature)
        correct, count = correct + (scores.argmax(1) == labels).sum(), count + len(labels)
    return {"knn_accuracy": (correct, count)}


def subsample(split: Split, examples: int) -> Split:
    """At most `examples` of a split, evenly spaced."""
    if len(split) <= examples:
        return split
    return subset(split, evenly_spaced(len(split), examples))


def pooled_features(model: Model, images: Tensor) -> Tensor:
    """Pooled features, b c: by the model's pool, or averaged over the tokens if it has none."""
    return pool_features(model, model.forward_features(images))


def pool_features(model: Model, features: Tensor) -> Tensor:
    """Pool features, from b s c to b c."""
    pool = getattr(model, "pool", None)
    return features.mean(1) if pool is None else pool(features, None)


def normalized_features(model: Model, images: Tensor) -> Tensor:
    """Pooled features of norm 1, b c."""
    return F.normalize(pooled_features(model, images).float(), dim=1)


def knn_scores(queries: Tensor, bank: Tensor, labels: Tensor, num_classes: int, k: int, temperature: float) -> Tensor:
    """Class scores, b num_classes, relative to the weight of the nearest neighbor, to avoid overflow at low
    temperatures; queries and bank have norm 1.
    """
    # Autocast would round cosines near 1, which most are, to eight bits.
    with torch.autocast(queries.device.type, enabled=False):
        nearest = (queries @ bank.T).topk(min(k, len(bank)), dim=1)
    scores = torch.zeros(len(queries), num_classes, device=queries.device)
    weights = ((nearest.values - nearest.values[:, :1]) / temperature).exp()
    return scores.scatter_add_(1, labels[nearest.indices], weights)


class Probe(Classify):
    """Linear probing: everything but the head is frozen and in evaluation mode."""

    @property
    def against_plan(self) -> str:
        return "it trains the head alone"

    def configure_model(self, model: ModelSpec, dataset: ImageDataset) -> ModelSpec:
        if not isinstance(model, Encoder | ResNet):
            raise UserError("a probe needs one of this library's image models")
        return super().configure_model(model, dataset)

    def build(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return ProbeModule(self, model, dataset)


class ProbeModule(ClassifyModule):
    def __init__(self, spec: Probe, model: Model, dataset: ImageDataset) -> None:
        super().__init__(spec, model, dataset)
        model.requires_grad_(False)
        model.get_submodule(model.parts()["head"]).requires_grad_(True)

    @property
    def flops(self) -> int:
        return super().flops // 3

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.model.eval()
        return self
