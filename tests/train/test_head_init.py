"""The head fitted on frozen features: logistic regression as scikit-learn computes it, and what surrounds it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import allmlp
from allmlp.data.dataset import ImageDataset, InMemory, labels_of
from allmlp.data.sampler import eval_batches
from allmlp.head_init import (
    Features,
    HeadInit,
    class_weights_of,
    cross_validated_accuracy,
    features_of,
    fit_linear,
    sample_classes,
)
from allmlp.models.model import Model
from allmlp.models.resmlp import resmlp
from allmlp.tasks.classify import Classify, ClassifyModule
from allmlp.tasks.task import TaskModule

SPEC = resmlp(2, 16, 0.1, patch_size=4, img_size=8).configure(in_chans=1, num_classes=3)


def noisy(examples: int, seed: int, counts: tuple[int, ...] = (1, 1, 1)) -> InMemory:
    """Images of three classes whose brightness overlaps; `counts` are their shares."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([label for label, share in enumerate(counts) for _ in range(share)])
    labels = labels.repeat(examples // len(labels) + 1)[:examples]
    noise = torch.randn(examples, 1, 8, 8, generator=generator) * 20
    shift = torch.randn(examples, 1, 1, 1, generator=generator) * 25
    images = (60 + 50 * labels.view(-1, 1, 1, 1) + shift + noise).clamp(0, 255).to(torch.uint8)
    return InMemory(images, labels)


def dataset(counts: tuple[int, ...] = (1, 1, 1)) -> ImageDataset:
    parts = [noisy(examples, seed, counts) for seed, examples in enumerate((90, 60, 45))]
    return ImageDataset(parts[0], parts[1], ("a", "b", "c"), (0.4,), (0.2,), validation=parts[2])


def build(data: ImageDataset, task: Classify = Classify()) -> tuple[Model, TaskModule]:
    model = allmlp.create(SPEC, seed=0)
    return model, task.build(model, data)


def evaluated(model: Model, task: TaskModule, split: InMemory) -> dict[str, float]:
    task.eval()
    with torch.no_grad():
        sums = task.evaluate(model, eval_batches(split, 16, torch.device("cpu")))
    return {name: (total / count).item() for name, (total, count) in sums.items()}


def test_it_is_the_logistic_regression_of_scikit_learn() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    data = dataset()
    model, task = build(data)
    train, l2 = features_of(model, task, data.train), 1e-2
    probe = fit_linear(train, train, (l2,), class_weights_of(task))
    values = train.values.double().numpy()
    scaled = (values - values.mean(0)) / values.std(0)
    expected = linear.LogisticRegression(C=1 / (len(values) * l2), tol=1e-8, max_iter=5000)
    expected.fit(scaled, train.labels.numpy())
    ours = (train.values.double() @ probe.weight.T + probe.bias).softmax(1)
    assert np.abs(ours.numpy() - expected.predict_proba(scaled)).max() < 1e-4


def test_the_model_predicts_what_was_fitted_and_nothing_else_changes() -> None:
    data = dataset()
    model, task = build(data)
    task.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    probe = HeadInit().initialize(model, task, data, seed=0)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"head.proj.weight", "head.proj.bias"} and all(module.training for module in task.modules())
    assert data.validation is not None
    found = evaluated(model, task, data.validation)  # type: ignore[arg-type]
    assert found["accuracy"] == pytest.approx(probe.accuracy) and found["loss"] == pytest.approx(probe.loss, abs=1e-4)
    assert found["accuracy"] > 0.6  # a third of them by chance


def test_the_penalty_is_the_one_with_the_least_loss_on_the_validation_split() -> None:
    data = dataset()
    model, task = build(data)
    train, held_out = (features_of(model, task, split) for split in (data.train, data.validation))  # type: ignore[arg-type]
    losses = {l2: fit_linear(train, held_out, (l2,), class_weights_of(task)).loss for l2 in HeadInit().l2}
    best = HeadInit().fit(model, task, data, seed=0)
    assert losses[best.l2] == min(losses.values()) and best.loss == pytest.approx(min(losses.values()), rel=1e-3)


@pytest.mark.slow
def test_without_a_validation_split_a_part_of_the_training_split_chooses() -> None:
    data = replace(dataset(), validation=None)
    model, task = build(data)
    probe = HeadInit().initialize(model, task, data, seed=0)
    assert 0.5 < probe.accuracy <= 1 and evaluated(model, task, data.test)["accuracy"] > 0.6  # type: ignore[arg-type]
    # the test split has no part in it
    other = replace(data, test=noisy(60, seed=9))
    assert torch.equal(
        HeadInit().fit(*build(other), other, seed=0).weight, HeadInit().fit(*build(data), data, 0).weight
    )


def test_a_feature_that_hardly_varies_does_not_decide() -> None:
    """A feature of allmlp:cifar10 with a spread of 1e-4 got weights of 1,700: in int8 all images were of one class."""
    labels = torch.arange(90) % 3
    values = torch.randn(90, 6, generator=torch.Generator().manual_seed(0)) + F.one_hot(labels, 6)
    values[:, 5] = 0.01 + 1e-4 * values[:, 0]
    train = Features(values, labels)
    probe = fit_linear(train, train, (1e-3,), torch.ones(3, dtype=torch.float64))
    assert probe.weight[:, 5].abs().max() < 5 * probe.weight[:, :5].abs().max()
    values[:, 5] = 0.01
    other = fit_linear(train, train, (1e-3,), torch.ones(3, dtype=torch.float64))
    assert probe.loss == pytest.approx(other.loss, rel=1e-3)


def test_rare_classes_count_more_with_class_balance() -> None:
    data = dataset((40, 4, 1))
    recalls = []
    for balance in (0.0, 1.0):
        model, task = build(data, Classify(class_balance=balance))
        probe = HeadInit(l2=(1e-1,)).fit(model, task, data, seed=0)
        features = features_of(model, task, noisy(300, seed=7))
        predicted = (features.values.double() @ probe.weight.T + probe.bias).argmax(1)
        recalls.append((predicted == features.labels)[features.labels > 0].double().mean().item())
    assert recalls[1] > recalls[0] + 0.1
    assert isinstance(task, ClassifyModule)
    counts = labels_of(data.train).bincount()
    assert (task.class_weights * counts).sum() / counts.sum() == pytest.approx(1.0)
    assert task.class_weights[2] / task.class_weights[0] == pytest.approx((counts[0] / counts[2]).item())


def test_a_sample_has_equal_shares_of_the_classes() -> None:
    labels = torch.cat([torch.zeros(50), torch.ones(8), torch.full((2,), 2.0)]).long()
    split = InMemory(torch.zeros(60, 1, 8, 8, dtype=torch.uint8), labels)
    assert sample_classes(split, 60, 0) is split
    assert labels_of(sample_classes(split, 15, 0)).bincount().tolist() == [7, 6, 2]
    assert labels_of(sample_classes(split, 2, 0)).bincount().numel() <= 2


def test_models_without_a_classifier_are_refused() -> None:
    with pytest.raises(allmlp.UserError, match="at least one penalty"):
        HeadInit(l2=())
    data = dataset()
    model = allmlp.create(SPEC, seed=0)
    model.head.proj.bias = None  # type: ignore[union-attr]
    with pytest.raises(allmlp.UserError, match="a model that ends in a linear classifier"):
        HeadInit().fit(model, Classify().build(model, data), data, seed=0)


@pytest.mark.slow
def test_cross_validation_judges_every_example_once_by_others() -> None:
    data = dataset()
    model, task = build(data)
    assert data.validation is not None
    parts = [features_of(model, task, split) for split in (data.train, data.validation)]
    both = Features(*map(torch.cat, zip(*parts)))
    found = HeadInit(l2=(1e-2,)).cross_validate(model, task, data, seed=0, examples=1000)
    order = torch.randperm(135, generator=torch.Generator().manual_seed(0)).tensor_split(5)
    correct = 0
    for fold in order:
        rest = torch.tensor([index for index in range(135) if index not in set(fold.tolist())])
        probe = fit_linear(both.take(rest), both.take(fold), (1e-2,), class_weights_of(task))
        scores = both.values[fold].double() @ probe.weight.T + probe.bias
        correct += int((scores.argmax(1) == both.labels[fold]).sum())
    assert found == pytest.approx(correct / 135)
    noise = both._replace(labels=both.labels[torch.randperm(135, generator=torch.Generator().manual_seed(1))])
    weights = class_weights_of(task)
    assert cross_validated_accuracy(noise, (1e-4,), weights, 0) < 0.5 < found  # fitted on itself, noise scores more
    assert cross_validated_accuracy(both.take(torch.arange(3)), (1.0,), weights, 0) <= 1  # fewer examples than folds
