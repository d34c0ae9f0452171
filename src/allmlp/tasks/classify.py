"""Supervised image classification with label smoothing, mixup and CutMix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.augment import Augment, Mixup, one_hot
from allmlp.data.dataset import Dataset, ImageDataset, LabeledImages, Split, labels_of
from allmlp.data.sampler import Batch
from allmlp.device import sum_dtype
from allmlp.models.grid import ForwardAtSize
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Rate
from allmlp.tasks.task import Losses, Normalize, StepContext, Sums, Task, TaskModule


class Classify(Task):
    """Cross-entropy against the (smoothed, mixed) label.

        softmax:  L = - sum_k t_k log softmax(z)_k
        sigmoid:  L = - sum_k t_k log s(z_k) + (1 - t_k) log s(-z_k)

    z are the logits, t the targets and s is the sigmoid. An image has one class: with both losses, predictions, reports
    and evaluations use softmax(z).
    With `class_balance` b the loss of an example is multiplied by sum_k t_k w_k, see `balanced_weights`.
    """

    loss: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: Rate = 0.0
    augment: Augment = Augment()
    mix: Mixup | None = None
    mix_until: Rate = 1.0
    """The fraction of the run after which images are no longer mixed."""
    class_balance: Rate = 0.0
    """0 gives all examples the same weight, 1 all classes."""

    def configure_model(self, model: ModelSpec, dataset: ImageDataset) -> ModelSpec:
        return model.with_channels(len(dataset.mean)).configure(num_classes=len(dataset.class_names))

    def build(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return ClassifyModule(self, model, dataset)

    def floors(self, dataset: ImageDataset, split: Split) -> dict[str, float]:
        return {"majority": majority_accuracy(labels_of(dataset.train), labels_of(split))}


class ClassifyModule(TaskModule):
    keeps_outputs = True
    class_weights: Tensor

    def __init__(self, spec: Classify, model: Model, dataset: ImageDataset) -> None:
        super().__init__()
        self.spec, self.model, self.num_classes = spec, model, len(dataset.class_names)
        self.normalize = Normalize(dataset.mean, dataset.std, model.spec.input_size)
        weights = balanced_weights(dataset, self.num_classes, spec.class_balance)
        self.register_buffer("class_weights", weights, persistent=False)

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        images, labels = batch.examples
        uniforms = context.uniform(len(images), self.spec.augment.num_uniforms())
        mix_uniforms = context.uniform(len(images), self.spec.mix.num_uniforms() if self.spec.mix else 0)
        if context.progress >= self.spec.mix_until:
            # The first uniform decides on mixing; set it instead of branching, so that one CUDA graph serves both.
            mix_uniforms[:, :1] = 1.0
        return images, labels, uniforms, mix_uniforms

    def compute_loss(self, *inputs: Tensor) -> Losses:
        images, targets = self.augment(*inputs)
        return self.losses(self.model(self.normalize(images)), targets)

    def losses(self, logits: Tensor, targets: Tensor) -> Losses:
        correct = logits.argmax(1) == targets.argmax(1)
        return Losses(self.cross_entropy(logits, targets), {"accuracy": correct.float().mean()})

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        weights = targets @ self.class_weights if self.spec.class_balance else None
        return cross_entropy(logits, targets, self.spec.loss, weights)

    def augment(self, images: Tensor, labels: Tensor, uniforms: Tensor, mix_uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented images in [0, 1] and their targets, b k."""
        images = self.spec.augment.apply(images, uniforms)
        targets = one_hot(labels, self.num_classes, self.spec.label_smoothing)
        return self.spec.mix.apply(images, targets, mix_uniforms) if self.spec.mix else (images, targets)

    def evaluate(self, model: Model, batches: Iterable[LabeledImages]) -> Sums:
        return evaluate_classifier(model, self.normalize, batches, self.keep)


def cross_entropy(logits: Tensor, targets: Tensor, loss: str, weights: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over the examples; `weights`, b, multiply the loss of each."""
    logits = logits.float()
    if weights is not None:
        entropy = F.binary_cross_entropy_with_logits if loss == "sigmoid" else F.cross_entropy
        losses = entropy(logits, targets, reduction="none")
        return (weights * (losses.sum(1) if loss == "sigmoid" else losses)).mean()
    if loss == "sigmoid":
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)
    return F.cross_entropy(logits, targets)


def balanced_weights(dataset: Dataset, num_classes: int, balance: float) -> Tensor:
    """Class weights of mean 1 over the training examples.

        w_k = n_k^-b / mean_i n_(y_i)^-b,   n_k examples of class k

    b is `balance`: 0 gives all examples the same weight, 1 all classes.
    """
    if not balance:
        return torch.ones(num_classes)
    labels = labels_of(dataset.train).cpu()
    counts = labels[labels >= 0].bincount(minlength=num_classes).float()
    weights = counts.clamp(min=1).pow(-balance)
    return weights * counts.sum() / (weights * counts).sum()


def majority_accuracy(train: Tensor, evaluated: Tensor) -> float:
    """Accuracy of always predicting the most frequent training label; negative labels are ignored."""
    return (evaluated == train[train >= 0].bincount().argmax()).double().mean().item()


def evaluate_classifier(
    model: Model | ForwardAtSize,
    normalize: Normalize,
    batches: Iterable[LabeledImages],
    keep: Callable[[Tensor, Tensor], None] | None = None,
) -> Sums:
    """Accuracy and loss of a classifier, as sums and counts; `keep` is called with the logits and labels of a batch."""
    correct, loss_sum, count = torch.zeros(3, dtype=sum_dtype(model.device), device=model.device)
    for images, labels in batches:
        logits = model(normalize(images)).float()
        correct = correct + (logits.argmax(1) == labels).sum()
        loss_sum = loss_sum + F.cross_entropy(logits, labels, reduction="sum")
        count = count + len(labels)
        if keep is not None:
            keep(logits, labels)
    return {"accuracy": (correct, count), "loss": (loss_sum, count)}
