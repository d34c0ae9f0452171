"""DINO: the loss over pairs of views, teacher and center, local crops through resized token weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import allmlp
from allmlp import log
from allmlp import training as loop
from allmlp.cli.app import next_prediction
from allmlp.data.augment import MultiCrop
from allmlp.data.sampler import Batch
from allmlp.errors import UserError
from allmlp.layers import MeanPool
from allmlp.lora import Lora
from allmlp.models.resnet import ResNet
from allmlp.optim import Sgd
from allmlp.quantization import Quantization
from allmlp.record import read_record
from allmlp.run import Budget
from allmlp.tasks.dino import Dino, DinoModule, dino_loss
from allmlp.tasks.probe import Probe
from allmlp.tasks.task import StepContext
from command import run as run_command
from train.runs import Blobs, selfsupervised, small
from train.test_train import losses, same_weights, train_interrupted

CONVNET = ResNet(widths=(8, 16), depths=(1, 1), img_size=(8, 8), in_chans=1, num_classes=4)


def module(**changes: Any) -> DinoModule:
    run = selfsupervised()
    dataset = Blobs().load()
    task = run.task.replace(**changes)
    return task.build(allmlp.create(task.configure_model(run.model, dataset), seed=0), dataset)  # type: ignore[return-value]


def step(task: DinoModule, progress: float = 0.5) -> Tensor:
    batch = Blobs().load().train.fetch(torch.arange(6))
    context = StepContext(progress, torch.Generator().manual_seed(0))
    return task(*task.prepare_batch(Batch(0, 0.0, torch.arange(6), batch), context)).total


def test_loss_is_mean_over_pairs_of_different_views() -> None:
    p, q = torch.rand(2, 3, 7).softmax(-1), torch.rand(5, 3, 7).log_softmax(-1)
    pairs = [-(p[g] * q[v]).sum(1).mean() for g in range(2) for v in range(5) if v != g]
    torch.testing.assert_close(dino_loss(p, q), torch.stack(pairs).mean())


def test_teacher_and_center_are_updated() -> None:
    task = module(momentum=0.9)
    step(task).backward()
    before = {name: weight.clone() for name, weight in task.model.named_parameters()}
    with torch.no_grad():
        for weight in task.student.parameters():
            weight.add_(1.0)
    outputs = task.output_sum.clone()
    task.after_step(0.5)
    momentum = 1 - 0.1 * (1 + math.cos(math.pi / 2)) / 2
    for name, weight in task.model.named_parameters():
        torch.testing.assert_close(weight, before[name] + (1 - momentum) * 1.0, msg=name)
    torch.testing.assert_close(task.center, 0.1 * outputs / 12)
    assert task.output_sum.abs().sum() == 0
    unchanged = {name: weight.clone() for name, weight in task.model.named_parameters()}
    step(task)
    task.after_step(1.0)
    assert all(torch.equal(weight, unchanged[name]) for name, weight in task.model.named_parameters())


def test_every_image_counts_the_same_for_the_center() -> None:
    """Also in micro-batches of different sizes."""
    task, outputs = module(), list[Tensor]()
    task.head.register_forward_hook(lambda _, inputs, found: outputs.append(found))
    batch = Batch(0, 0.0, torch.arange(5), Blobs().load().train.fetch(torch.arange(5)))
    for inputs in task.prepare_batches(batch.split(2), StepContext(0.5, torch.Generator().manual_seed(0))):
        task(*inputs)
    task.after_step(0.5)
    assert [len(found) for found in outputs] == [6, 4]
    torch.testing.assert_close(task.center, 0.1 * torch.cat(outputs).mean(0))


def test_local_crops_pass_through_resized_token_weights() -> None:
    task = module()
    seen = []
    task.student.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    assert task.local_student is not None
    task.local_student.network.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    step(task)
    assert seen == [(2 * 6, 1, 8, 8), (3 * 6, 1, 4, 4)]
    features = task.local_student(torch.rand(4, 1, 4, 4))
    features.square().sum().backward()
    gradient = task.student.blocks[0].token.mix.weight.grad
    assert gradient.shape == (16, 16) and gradient.abs().sum() > 0
    assert module(crops=MultiCrop(num_local=0, global_size=(8, 8))).local_student is None


def test_only_the_student_is_trained_and_the_last_layer_is_frozen_at_first() -> None:
    task = module(freeze_last_layer=0.2)
    step(task, progress=0.1).backward()
    assert all(weight.grad is None for weight in (*task.model.parameters(), *task.head.parameters()))
    assert all(weight.grad is not None for weight in task.student.parameters())
    assert task.student_head.last_layer.grad.abs().sum() == 0  # type: ignore[union-attr]
    step(task, progress=0.3).backward()
    assert task.student_head.last_layer.grad.abs().sum() > 0  # type: ignore[union-attr]


def test_teacher_temperature_warms_up() -> None:
    task = module(warmup_teacher_temperature=0.02, teacher_temperature=0.5)
    entropies = []
    for progress in (0.0, 0.05, 0.1, 0.9):
        batch = Blobs().load().train.fetch(torch.arange(6))
        context = StepContext(progress, torch.Generator().manual_seed(0))
        inputs = task.prepare_batch(Batch(0, 0.0, torch.arange(6), batch), context)
        entropies.append(task(*inputs).metrics["entropy"].item())
    assert entropies[0] < entropies[1] < entropies[2] == entropies[3]


@pytest.mark.slow
def test_trains_and_saves_the_teacher(tmp_path: Path) -> None:
    run = selfsupervised().replace(budget=Budget(steps=50), log_every=10, eval_every=50, save_every=50)
    result = loop.train(run, tmp_path, "cpu")
    records = [record for record in log.read_metrics(tmp_path / log.METRICS) if record["kind"] == "train"]
    divergence = [record["loss"] - record["entropy"] for record in records]  # KL(teacher || student)
    assert divergence[-1] < 0.5 * divergence[0]
    assert 0 <= result["knn_accuracy"] <= 1
    recorded = read_record(tmp_path)["result"]
    assert recorded["trained_parameters"] == recorded["parameters"] > 0, "of the student, whose average is the teacher"
    model = allmlp.load(tmp_path)
    assert model.spec.head is None and model(torch.rand(2, 1, 8, 8)).shape == (2, 16)
    assert loop.evaluate_checkpoint(tmp_path, "cpu") == result
    labeled = small(model=run.model, init_from=str(tmp_path), budget=Budget(steps=1), ema_decay=None)
    loop.train(labeled.replace(optim=run.optim.replace(lr=0.0)), tmp_path / "labels", "cpu")
    tuned = allmlp.load(tmp_path / "labels")
    assert torch.equal(tuned.stem.proj.weight, model.stem.proj.weight) and tuned.spec.head.num_classes == 4  # type: ignore[union-attr]


@pytest.mark.slow
def test_resume_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = selfsupervised()
    loop.train(run, tmp_path / "whole", "cpu")
    train_interrupted(run, tmp_path / "cut", monkeypatch)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")


def test_unsuitable_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="image encoders, with a pool"):
        Dino().configure_model(allmlp.create("bert_tiny").spec, Blobs().load())
    assert isinstance(selfsupervised().model.pool, MeanPool)
    with pytest.raises(UserError, match=r"Dino\.teacher_temperature must be a number between 0\.001"):
        Dino(teacher_temperature=0.0)


@pytest.mark.parametrize("option", ["lora", "quantize"])
def test_options_that_would_not_reach_the_teacher_are_refused(option: str) -> None:
    """The saved teacher kept its full precision, and could not load a student with adapters."""
    with pytest.raises(UserError, match=f"leave {option} out"):
        selfsupervised().replace(**{option: Lora() if option == "lora" else Quantization()})


@pytest.mark.slow
def test_a_convnet_learns_and_is_probed(tmp_path: Path) -> None:
    """ResNet as student and teacher, local crops as they are; its classifier is trained by the probe alone."""
    run = selfsupervised().replace(
        model=CONVNET, optim=Sgd(lr=0.05, weight_decay=0.0), eval_every=1000, save_every=1000
    )
    result = loop.train(run.replace(budget=Budget(steps=20)), tmp_path / "dino", "cpu")
    assert result["knn_accuracy"] > 0.5
    body = allmlp.load(tmp_path / "dino")
    assert not body.spec.has_head and body(*body.dummy_inputs(3)).shape == (3, 16)
    fresh = allmlp.create(CONVNET, seed=run.seed)
    assert not torch.equal(body.get_parameter("conv1.weight"), fresh.get_parameter("conv1.weight"))
    assert not torch.equal(body.get_buffer("bn1.running_mean"), fresh.get_buffer("bn1.running_mean"))
    probe = run.replace(task=Probe(), init_from=str(tmp_path / "dino"), optim=Sgd(lr=0.5, weight_decay=0.0))
    assert loop.train(probe.replace(budget=Budget(steps=30)), tmp_path / "probe", "cpu")["accuracy"] > 0.5
    probed = allmlp.load(tmp_path / "probe")
    before, after = body.state_dict(), probed.state_dict()
    assert after.keys() - before.keys() == {"fc.weight", "fc.bias"}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_skipped_step_does_not_spoil_the_next_ones(tmp_path: Path) -> None:
    """One image has NaN: the center, a mean of the teacher's outputs, stays finite."""
    steps = {"budget": Budget(steps=10), "log_every": 1, "eval_every": 10, "save_every": 10}
    run = selfsupervised().replace(data=Blobs(spoiled=True), nan="skip", batch_size=8, **steps)
    loop.train(run, tmp_path, "cpu")
    assert len(losses(tmp_path)) == 9 and all(map(math.isfinite, losses(tmp_path).values()))


def test_a_pretrained_convnet_is_a_start_and_not_a_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was saved with a classifier of random weights, whose classes were predicted."""
    folder, photo = tmp_path / "dino", tmp_path / "photo.png"
    Image.new("L", (8, 8)).save(photo)
    run = selfsupervised().replace(model=CONVNET, budget=Budget(steps=1))
    loop.train(run, folder, "cpu")
    code, _, err = run_command(capsys, "predict", folder, photo)
    assert code == 2 and "features, not class scores" in err and f"allmlp train DATA --model {folder}" in err
    assert run_command(capsys, "embed", folder, photo, "--out", tmp_path / "features.npy")[0] == 0
    classifier = allmlp.create(CONVNET, seed=1)  # a student that begins as a trained classifier leaves its head behind
    allmlp.save(classifier, tmp_path / "classifier")
    loop.train(run.replace(init_from=str(tmp_path / "classifier")), tmp_path / "from_classifier", "cpu")
    assert not allmlp.load(tmp_path / "from_classifier").spec.has_head


def test_a_pretrained_model_is_a_start_and_not_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next command was `allmlp predict`, which failed, and its evaluation on other images ended in a traceback."""
    folder, photos = tmp_path / "dino", tmp_path / "photos"
    loop.train(selfsupervised().replace(budget=Budget(steps=1)), folder, "cpu")
    next_prediction(folder)
    assert capsys.readouterr().err.endswith(f"\nnext: allmlp train DATA --model {folder}\n")
    for name in "ab":
        (photos / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(photos / name / "0.png")
    for command in (("predict", folder, photos / "a" / "0.png"), ("eval", folder, photos)):
        code, _, err = run_command(capsys, *command)
        assert code == 2 and "features, not class scores" in err and f"allmlp train DATA --model {folder}" in err
    resized = tmp_path / "resized"
    for command, named in (
        (("export", folder, tmp_path / "dino.pt2"), folder),
        (("resize", folder, resized, "--img-size", "16"), resized),
    ):
        code, _, err = run_command(capsys, *command)
        assert code == 0 and err.endswith(f"next: allmlp train DATA --model {named}\n")
    with pytest.raises(UserError, match="features, not class scores"):
        allmlp.predict(allmlp.load(folder), photos / "a" / "0.png")
