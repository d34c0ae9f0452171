"""One model for every image size: the loss and its gradients at each size, and evaluation without fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp import compilation
from allmlp import training as loop
from allmlp.data.augment import Augment
from allmlp.data.dataset import LabeledImages
from allmlp.data.sampler import Batch
from allmlp.freezing import Freezing
from allmlp.models.model import Model
from allmlp.optim import AdamW, Muon
from allmlp.run import Budget
from allmlp.tasks.classify_any_size import ClassifyAnySize, ClassifyAnySizeModule
from allmlp.tasks.dino import Dino
from allmlp.tasks.task import StepContext, Task, TaskModule
from allmlp.tasks.translate import Translation
from allmlp.training import train
from allmlp.weights.resize import resize_model
from tiny import randomize
from train.runs import Blobs, small
from train.test_train import losses


def model_and_task(train_sizes: Sequence[int] = (), eval_sizes: Sequence[int] = ()) -> tuple[Model, TaskModule]:
    """A ResMLP of 8-pixel images and patches of two, without stochastic depth."""
    task, dataset = ClassifyAnySize(train_sizes=tuple(train_sizes), eval_sizes=tuple(eval_sizes)), Blobs().load()
    model = allmlp.create(task.configure_model(small().model, dataset), patch_size=2, drop_path=0.0, seed=0)
    randomize(model)
    return model, task.build(model, dataset)


def inputs(task: TaskModule, step: int) -> tuple[torch.Tensor, ...]:
    batch = Batch(step, 0.0, torch.arange(6), Blobs().load().train.fetch(torch.arange(6)))
    return task.prepare_batch(batch, StepContext(0.0, torch.Generator().manual_seed(0)))


def test_the_loss_is_that_of_the_resized_model() -> None:
    model, task = model_and_task(train_sizes=(4, 8, 12))
    images, labels = Blobs().load().train.fetch(torch.arange(6))
    seen = set()
    for step in range(30):
        given = inputs(task, step)
        size = given[-1].shape[0]
        if size in seen:
            continue
        seen.add(size)
        found = task.compute_loss(*given).total
        resized = torch.nn.functional.interpolate(images / 255, (size, size), mode="bicubic", antialias=True)
        other = resize_model(model, size) if size != 8 else model
        torch.testing.assert_close(found, torch.nn.functional.cross_entropy(other((resized - 0.3) / 0.25), labels))
        model.zero_grad()
        found.backward()
        assert all(weight.grad is not None and weight.grad.norm() > 0 for weight in model.parameters()), size
    assert seen == {4, 8, 12}


def test_frozen_blocks_are_in_evaluation_mode_at_every_size() -> None:
    """Without stochastic depth while the head alone is trained, and with it afterwards."""
    model = allmlp.create(small().model.configure(drop_path=0.5), num_classes=4, seed=0)
    randomize(model)
    task = ClassifyAnySize(train_sizes=(16,)).build(model, Blobs().load()).train()
    batch = Batch(0, 0.0, torch.arange(16), Blobs().load().train.fetch(torch.arange(16)))
    freezing = Freezing(task, AdamW().build(task), 0.5)
    for progress, same in ((0.1, True), (0.6, False)):
        freezing.set(progress)
        inputs = task.prepare_batch(batch, StepContext(progress, torch.Generator().manual_seed(0)))
        first, second = (task.compute_loss(*inputs).total for _ in range(2))
        assert torch.equal(first, second) == same


def test_sizes_depend_on_the_step_alone() -> None:
    """So that a resumed run, and every seed and process, has the same."""
    tasks = [model_and_task(train_sizes=(4, 8, 12, 16))[1] for _ in range(2)]
    drawn = [[inputs(task, step)[-1].shape[0] for step in range(60)] for task in tasks]
    assert drawn[0] == drawn[1] and min(drawn[0].count(size) for size in (4, 8, 12, 16)) >= 6


@torch.no_grad()
def test_evaluation_at_every_size_without_fine_tuning() -> None:
    model, task = model_and_task(eval_sizes=(4, 8, 12))
    model.eval()
    images = torch.randint(0, 256, (90, 1, 8, 8), dtype=torch.uint8)
    logits = model((images / 255 - 0.3) / 0.25)
    model.get_parameter("head.proj.bias").sub_(logits.mean(0))
    labels = (logits - logits.mean(0)).argmax(1)
    batches = [LabeledImages(images[part], labels[part]) for part in (slice(0, 60), slice(60, 90))]
    means = {name: float(total / count) for name, (total, count) in task.evaluate(model, batches).items()}
    for size in (4, 8, 12):
        resized = torch.nn.functional.interpolate(images / 255, (size, size), mode="bicubic", antialias=True)
        logits = resize_model(model, size)((resized - 0.3) / 0.25)
        assert means[f"accuracy_{size}"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert means["accuracy"] == means["accuracy_8"] == 1 and means["accuracy_4"] < means["accuracy_12"] < 1
    summary = task.summary({"accuracy": 0.9, "accuracy_4": 0.1, "accuracy_8": 0.9, "accuracy_12": 0.7})
    assert summary["worst_accuracy"] == 0.7, "sizes below the model's own do not count"


@pytest.mark.slow
def test_training_at_random_sizes_helps_at_other_sizes(tmp_path: Path) -> None:
    run = small(ema_decay=None, eval_every=10_000, save_every=10_000, budget=Budget(steps=60))
    run = run.replace(model=run.model.configure(patch_size=2, drop_path=0.0))
    found = {}
    for name, sizes in (("fixed", ()), ("any", (4, 8, 12, 16))):
        task = ClassifyAnySize(augment=Augment(), train_sizes=sizes, eval_sizes=(16,))
        found[name] = train(run.replace(task=task), tmp_path / name, "cpu")
    assert found["any"]["accuracy_16"] >= found["fixed"]["accuracy_16"] and found["any"]["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_are_compiled_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep the stack; and the loss stays the same."""
    counts = []
    for depth in (2, 3):
        torch.compiler.reset()
        counter = torch._dynamo.testing.CompileCounter()
        monkeypatch.setattr(compilation, "BACKEND", counter)
        dataset = Blobs().load()
        task = ClassifyAnySize(train_sizes=(4, 8))
        spec = task.configure_model(small().model, dataset).configure(patch_size=2).replace(depth=depth)
        module = task.build(allmlp.create(spec, seed=0), dataset)
        assert isinstance(module, ClassifyAnySizeModule)
        module.eval()  # no stochastic depth
        for network in module.networks:
            network.eval()
        given = {inputs(module, step)[-1].shape[0]: inputs(module, step) for step in range(20)}
        plain = {size: module.compute_loss(*one).total for size, one in given.items()}
        compilation.compile_task(module)
        for size, one in given.items():
            torch.testing.assert_close(module.compute_loss(*one).total, plain[size])
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] >= 2 * 3, "at each size what comes before the stack, one block, and what comes after"


@pytest.mark.parametrize("task", [ClassifyAnySize(train_sizes=(4, 8)), Dino(), Translation()])
def test_sharded_weights_are_refused(task: Task) -> None:
    with pytest.raises(allmlp.UserError, match=f"{type(task).__name__}: .*: use sharding=ddp"):
        small(task=task, sharding="fsdp")
    small(task=ClassifyAnySize(eval_sizes=(4, 8)), sharding="fsdp")


def test_a_wrong_size_is_an_error_before_training() -> None:
    with pytest.raises(allmlp.UserError, match="does not divide"):
        model_and_task(eval_sizes=(7,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_size_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays have the losses of plain steps."""
    task = ClassifyAnySize(augment=Augment(), train_sizes=(4, 8, 12))
    model = small().model.configure(patch_size=2, drop_path=0.0)
    run = small(model=model, task=task, optim=Muon(lr=1e-2), precision="float32", budget=Budget(steps=40))
    for name, records in (("plain", False), ("recorded", True)):
        monkeypatch.setattr(loop, "can_record", lambda run, world, records=records: records)
        loop.train(run, tmp_path / name, "cuda")
    assert losses(tmp_path / "recorded") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
