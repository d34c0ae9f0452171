"""Initialization of a classifier head by logistic regression on the features of the frozen model (a linear probe)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.data.dataset import Dataset, Split, labels_of, subset
from allmlp.data.sampler import eval_batches
from allmlp.errors import UserError
from allmlp.models.model import Model
from allmlp.spec import Count, NonNegative, Spec
from allmlp.tasks.task import TaskModule
from allmlp.threads import Threads

BATCH_SIZE = 64
MAX_ITERATIONS = 100
HELD_OUT = 0.2
"""Fraction of the training examples for choosing the L2 penalty if the data have no validation split."""
LEAST_STD = 0.01
"""Minimum spread of a feature, relative to the median one. An almost constant feature would get weights so large that
rounding, as in int8 or bfloat16, decides the class.
"""
FOLDS = 5
"""Folds of cross-validation."""


class HeadInit(Spec):
    """Fit the classifier W, b on pooled features f of the frozen model before the first step.

        minimize  mean_i w_i CE(W z_i + b, y_i) + l2 / 2 ||W||^2,   z = (f - mean) / std over the training examples

    w are the class weights of the task; a std is at least 0.01 of the median one. The penalty with the smallest loss on
    the validation split is used. The standardization is folded into W and b, so that the model is unchanged.
    """

    l2: tuple[NonNegative, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    """Candidates for the penalty."""
    max_examples: Count = 20_000
    """Maximum number of training examples to fit on, balanced over the classes."""

    def check(self) -> None:
        if not self.l2:
            raise UserError("HeadInit.l2 needs at least one penalty")

    def initialize(self, model: Model, task: TaskModule, dataset: Dataset, seed: int) -> LinearProbe:
        """Set the weights of the classifier of `model`; the same in every process."""
        layer = classifier(model)
        probe = self.fit(model, task, dataset, seed)
        with torch.no_grad():
            layer.weight.copy_(probe.weight)
            layer.bias.copy_(probe.bias)
        return probe

    def fit(
        self, model: Model, task: TaskModule, dataset: Dataset, seed: int, examples: int | None = None
    ) -> LinearProbe:
        """Fit the best linear classifier on the features, with its accuracy on the validation split. At most `examples`
        of each split are used.
        """
        limit = min(self.max_examples, examples or self.max_examples)
        train = features_of(model, task, sample_classes(dataset.train, limit, seed))
        if dataset.validation is not None:
            held_out = features_of(model, task, sample_classes(dataset.validation, limit, seed))
            return fit_linear(train, held_out, self.l2, class_weights_of(task))
        return fit_holding_out(train, self.l2, class_weights_of(task), seed)

    def cross_validate(self, model: Model, task: TaskModule, dataset: Dataset, seed: int, examples: int) -> float:
        """Cross-validated accuracy of a linear probe on at most `examples` of each of both splits."""
        splits = [split for split in (dataset.train, dataset.validation) if split is not None]
        parts = [features_of(model, task, sample_classes(split, examples, seed)) for split in splits]
        features = Features(*map(torch.cat, zip(*parts)))
        return cross_validated_accuracy(features, self.l2, class_weights_of(task), seed)


class Features(NamedTuple):
    values: Tensor
    """float32, n c, on the CPU."""
    labels: Tensor

    def take(self, indices: Tensor) -> Features:
        return Features(self.values[indices], self.labels[indices])


class LinearProbe(NamedTuple):
    weight: Tensor
    """k c."""
    bias: Tensor
    l2: float
    accuracy: float
    """Accuracy on the validation split."""
    loss: float


def classifier(model: Model) -> nn.Linear:
    """The linear layer that computes the class scores, the last one of the head."""
    parts = model.parts()
    head = model.get_submodule(parts["head"]) if "head" in parts else model
    layers = [module for module in head.modules() if isinstance(module, nn.Linear)]
    if not layers or layers[-1].bias is None:
        name = type(model.spec).__name__
        raise UserError(f"head_init needs a model that ends in a linear classifier; {name} does not")
    return layers[-1]


@torch.no_grad()
def features_of(model: Model, task: TaskModule, split: Split) -> Features:
    """Inputs of the classifier layer for every (labeled) example, preprocessed as for evaluation."""
    features: list[Tensor] = []
    labels: list[Tensor] = []
    threads = Threads(active=model.device.type == "cpu")

    def batches() -> Iterator[Any]:
        for examples in threads.over(eval_batches(split, BATCH_SIZE, model.device)):
            labels.append(examples.labels.cpu())
            yield examples

    hook = classifier(model).register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].float().cpu()))
    modes = {module: module.training for module in task.modules()}
    task.eval()
    try:
        task.evaluate(model, batches())
    finally:
        hook.remove()
        for module, training in modes.items():
            module.training = training
    values = torch.cat(features)
    if values.ndim != 2 or len(values) != sum(map(len, labels)):
        raise UserError("head_init needs a classifier with one vector per example")
    return Features(values, torch.cat(labels))


def sample_classes(split: Split, examples: int, seed: int) -> Split:
    """At most `examples` labeled examples of a split, balanced over the classes as far as possible."""
    labels = labels_of(split).cpu()
    if (labels < 0).any():  # evaluation has no loss for unlabeled examples
        labeled = (labels >= 0).nonzero().flatten()
        split, labels = subset(split, labeled), labels[labeled]
    if len(split) <= examples:
        return split
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    # Rank of each example within its class: the first of every class come first, then the second, ...
    by_class = order[labels[order].argsort(stable=True)]
    counts = labels[by_class].unique_consecutive(return_counts=True)[1]
    rank = torch.cat([torch.arange(int(count)) for count in counts])
    return subset(split, by_class[rank.argsort(stable=True)[:examples]].sort().values)


def class_weights_of(task: TaskModule) -> Tensor:
    return task.class_weights.cpu().double()  # type: ignore[union-attr]


def fit_holding_out(train: Features, penalties: tuple[float, ...], class_weights: Tensor, seed: int) -> LinearProbe:
    """Choose the penalty on a part of the examples, and fit with it on all of them."""
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
    count = max(round(HELD_OUT * len(order)), 1)
    chosen = fit_linear(train.take(order[count:]), train.take(order[:count]), penalties, class_weights)
    whole = fit_linear(train, train, (chosen.l2,), class_weights)
    return whole._replace(accuracy=chosen.accuracy, loss=chosen.loss)


def cross_validated_accuracy(
    features: Features, penalties: tuple[float, ...], class_weights: Tensor, seed: int
) -> float:
    """Fraction of the examples classified correctly by a probe fitted on the other folds."""
    order = torch.randperm(len(features.labels), generator=torch.Generator().manual_seed(seed))
    folds = [fold for fold in order.tensor_split(FOLDS) if len(fold)]
    correct = 0.0
    for number, fold in enumerate(folds):
        others = torch.cat([*folds[:number], *folds[number + 1 :]])
        probe = fit_linear(features.take(others), features.take(fold), penalties, class_weights)
        correct += probe.accuracy * len(fold)
    return correct / len(order)


def fit_linear(train: Features, held_out: Features, penalties: tuple[float, ...], class_weights: Tensor) -> LinearProbe:
    """Multinomial logistic regression by L-BFGS for each penalty, largest first, starting from the last fit."""
    mean, std = train.values.double().mean(0), train.values.double().std(0, correction=0)
    std = std.clamp(min=max(LEAST_STD * std.median().item(), 1e-6))
    inputs, tests = ((part.values.double() - mean) / std for part in (train, held_out))
    weights = class_weights[train.labels]
    weight = torch.zeros(len(class_weights), inputs.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(class_weights), dtype=torch.float64, requires_grad=True)
    best: LinearProbe | None = None
    for l2 in sorted(penalties, reverse=True):
        optimizer = torch.optim.LBFGS(
            [weight, bias],
            max_iter=MAX_ITERATIONS,
            tolerance_grad=1e-6,
            tolerance_change=1e-10,
            line_search_fn="strong_wolfe",
        )

        def objective(l2: float = l2, optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
            optimizer.zero_grad()
            losses = F.cross_entropy(F.linear(inputs, weight, bias), train.labels, reduction="none")
            total = (weights * losses).mean() + l2 / 2 * weight.square().sum()
            total.backward()
            return total

        with torch.enable_grad():
            optimizer.step(objective)
        with torch.no_grad():
            scores = F.linear(tests, weight, bias)
            loss = (class_weights[held_out.labels] * F.cross_entropy(scores, held_out.labels, reduction="none")).mean()
            if best is None or loss < best.loss:
                folded = weight / std
                accuracy = (scores.argmax(1) == held_out.labels).double().mean().item()
                best = LinearProbe(folded.clone(), bias - folded @ mean, l2, accuracy, loss.item())
    assert best is not None
    return best
