"""Image classification: losses against their equations, and evaluation against a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

import allmlp
from allmlp.data.augment import Augment, HorizontalFlip, Mixup
from allmlp.data.sampler import Batch, eval_batches
from allmlp.models.huggingface import HuggingFaceImages
from allmlp.models.model import Model
from allmlp.tasks.classify import Classify, ClassifyModule, majority_accuracy
from allmlp.tasks.dino import Dino
from allmlp.tasks.distill import Distill
from allmlp.tasks.probe import Probe
from allmlp.tasks.task import StepContext, Task
from train.runs import Blobs, small


def model_of(task: Classify) -> Model:
    """Untrained, in evaluation mode, with logits that differ."""
    model = allmlp.create(task.configure_model(small().model, Blobs().load()), seed=0).eval()
    with torch.no_grad():
        model.get_parameter("head.proj.weight").normal_(generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize(
    "task", [Classify(), Probe(), Distill(teacher="unused"), Dino()], ids=lambda task: type(task).__name__
)
def test_a_model_is_configured_for_the_channels_of_the_data(task: Task) -> None:
    """A named model ended in "expected images with 3 channels, got 1", a ResNet in a traceback."""
    for name in ("mixer_nano", "resnet18_cifar"):
        spec = task.configure_model(allmlp.preset(name).spec, Blobs().load())
        assert spec.input_channels == 1
        (images,) = allmlp.create(spec, seed=0).dummy_inputs()
        assert images.shape[1] == 1


def test_a_network_of_another_package_is_configured_for_the_channels() -> None:
    spec = Classify().configure_model(HuggingFaceImages("deit_ti16"), Blobs().load())
    assert spec == HuggingFaceImages("deit_ti16", num_classes=4, in_chans=1)


def test_a_trained_model_of_other_channels_is_refused(tmp_path: Path) -> None:
    allmlp.save(allmlp.create(small().model.configure(in_chans=3), seed=0), tmp_path / "colors")
    run = small(init_from=str(tmp_path / "colors"))
    with pytest.raises(allmlp.UserError, match=r"colors reads images with 3 channels, those of the run have 1: train"):
        allmlp.train(run, tmp_path / "gray")


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@torch.no_grad()
def test_loss_matches_its_equation(loss: Literal["softmax", "sigmoid"]) -> None:
    """With label smoothing 0.2 over four classes: 0.85 for the label and 0.05 for each other class."""
    task, dataset = Classify(loss, label_smoothing=0.2), Blobs().load()
    model = model_of(task)
    batch = dataset.train.fetch(torch.arange(6))
    module = task.build(model, dataset).eval()
    context = StepContext(0.0, torch.Generator().manual_seed(0))
    found = module.compute_loss(*module.prepare_batch(Batch(0, 0.0, torch.arange(6), batch), context))
    terms, correct = [], []
    for image, label in zip(*batch):
        z = model((image[None] / 255 - 0.3) / 0.25)[0]
        t = torch.full((4,), 0.05).index_fill(0, label, 0.85)
        softmax, sigmoid = (
            -(t * z.log_softmax(0)).sum(),
            -(t * z.sigmoid().log() + (1 - t) * (-z).sigmoid().log()).sum(),
        )
        terms.append(softmax if loss == "softmax" else sigmoid)
        correct.append(z.argmax() == label)
    torch.testing.assert_close(found.total, torch.stack(terms).mean())
    torch.testing.assert_close(found.metrics["accuracy"], torch.stack(correct).float().mean())


def test_mixing_ends_before_the_run_does() -> None:
    """From `mix_until` on every target is one (smoothed) label; the other augmentations draw what they drew before."""
    dataset, batch = Blobs().load(), Blobs().load().train.fetch(torch.arange(6))
    for mix in (Mixup(), Mixup(per_sample=False), Mixup(mixup_alpha=0.0), Mixup(cutmix_alpha=0.0)):
        task = Classify(augment=Augment((HorizontalFlip(),)), mix=mix, mix_until=0.8)
        module = task.build(model_of(task), dataset)

        def augment(progress: float, module: ClassifyModule = module) -> tuple[torch.Tensor, torch.Tensor]:
            context = StepContext(progress, torch.Generator().manual_seed(0))
            return module.augment(*module.prepare_batch(Batch(0, 0.0, torch.arange(6), batch), context))

        before, after = augment(0.79), augment(0.8)
        assert (before[1].max(1).values < 1).all()
        torch.testing.assert_close(after[1], torch.nn.functional.one_hot(batch.labels, 4).float())
        plain = Classify(augment=task.augment).build(model_of(task), dataset)
        uniforms = StepContext(0.8, torch.Generator().manual_seed(0)).uniform(6, task.augment.num_uniforms())
        torch.testing.assert_close(after[0], plain.augment(*batch, uniforms, torch.empty(6, 0))[0])


@torch.no_grad()
def test_evaluation_matches_a_plain_loop_for_every_batch_size() -> None:
    task, dataset = Classify(label_smoothing=0.2), Blobs().load()
    model = model_of(task)
    images, labels = dataset.test.fetch(torch.arange(32))
    log_p = model((images / 255 - 0.3) / 0.25).log_softmax(1)
    loss = -sum(float(row[label]) for row, label in zip(log_p, labels.tolist())) / 32
    accuracy = sum(int(row.argmax()) == label for row, label in zip(log_p, labels.tolist())) / 32
    for size in (5, 32):
        batches = eval_batches(dataset.test, size, torch.device("cpu"))
        sums = task.build_evaluator(model, dataset).eval().evaluate(model, batches)
        means = {name: float(total / count) for name, (total, count) in sums.items()}
        assert means == pytest.approx({"loss": loss, "accuracy": accuracy})


def test_majority_is_that_of_the_training_labels() -> None:
    """The most frequent label in training, which need not be the most frequent one where it is evaluated."""
    train, evaluated = torch.tensor([2, 0, 2, -1, -1, -1, 1]), torch.tensor([0, 0, 0, 2])
    assert majority_accuracy(train, evaluated) == 0.25
