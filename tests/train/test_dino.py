"""DINO: the loss pair by pair, the teacher and its centre, small crops through resized weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp import log
from allmlp import train as loop
from allmlp.data.images import MultiCrop
from allmlp.data.order import Step
from allmlp.layers import Mean
from allmlp.run import Budget, Cadence
from allmlp.tasks.dino import Dino, DinoModule, between_views
from allmlp.tasks.task import Moment
from train.runs import Blobs, selfsupervised, small
from train.test_train import losses, same_weights, train_with_break


def module(**changes: Any) -> DinoModule:
    run = selfsupervised()
    dataset = Blobs().open()
    task = run.task.replace(**changes)
    return task.build(allmlp.create(task.fit(run.model, dataset), seed=0), dataset)  # type: ignore[return-value]


def step(task: DinoModule, progress: float = 0.5) -> Tensor:
    batch = Blobs().open().train.fetch(torch.arange(6))
    moment = Moment(progress, torch.Generator().manual_seed(0))
    return task(Step(0, 0.0, torch.arange(6), batch), moment).total


def test_the_loss_is_the_mean_over_pairs_of_different_views() -> None:
    p, q = torch.rand(2, 3, 7).softmax(-1), torch.rand(5, 3, 7).log_softmax(-1)
    pairs = [-(p[g] * q[v]).sum(1).mean() for g in range(2) for v in range(5) if v != g]
    torch.testing.assert_close(between_views(p, q), torch.stack(pairs).mean())


def test_teacher_and_centre_follow() -> None:
    task = module(momentum=0.9)
    step(task).backward()
    before = {name: weight.clone() for name, weight in task.model.named_parameters()}
    with torch.no_grad():
        for weight in task.student.parameters():
            weight.add_(1.0)
    answer = task.answers.clone()
    task.after_step(0.5)
    keep = 1 - 0.1 * (1 + math.cos(math.pi / 2)) / 2
    for name, weight in task.model.named_parameters():
        torch.testing.assert_close(weight, before[name] + (1 - keep) * 1.0, msg=name)
    torch.testing.assert_close(task.centre, 0.1 * answer)
    assert task.answers.abs().sum() == 0
    unchanged = {name: weight.clone() for name, weight in task.model.named_parameters()}
    step(task)
    task.after_step(1.0)
    assert all(torch.equal(weight, unchanged[name]) for name, weight in task.model.named_parameters())


def test_small_crops_are_smaller_and_teach_the_token_weights() -> None:
    task = module()
    seen = []
    task.student.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    assert task.small is not None
    task.small.shape.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    step(task)
    assert seen == [(2 * 6, 1, 8, 8), (3 * 6, 1, 4, 4)]
    small = task.small(torch.rand(4, 1, 4, 4))
    small.square().sum().backward()
    gradient = task.student.blocks[0].token.mix.weight.grad
    assert gradient.shape == (16, 16) and gradient.abs().sum() > 0
    assert module(crops=MultiCrop(local=0, global_size=(8, 8))).small is None


def test_only_the_student_learns_and_the_last_layer_waits() -> None:
    task = module(frozen=0.2)
    step(task, progress=0.1).backward()
    assert all(weight.grad is None for weight in (*task.model.parameters(), *task.head.parameters()))
    assert all(weight.grad is not None for weight in task.student.parameters())
    assert task.student_head.directions.grad.abs().sum() == 0  # type: ignore[union-attr]
    step(task, progress=0.3).backward()
    assert task.student_head.directions.grad.abs().sum() > 0  # type: ignore[union-attr]


def test_the_teacher_s_temperature_rises() -> None:
    task = module(first_temperature=0.02, teacher_temperature=0.5)
    entropies = []
    for progress in (0.0, 0.05, 0.1, 0.9):
        batch = Blobs().open().train.fetch(torch.arange(6))
        moment = Moment(progress, torch.Generator().manual_seed(0))
        entropies.append(task(Step(0, 0.0, torch.arange(6), batch), moment).shown["entropy"].item())
    assert entropies[0] < entropies[1] < entropies[2] == entropies[3]


def test_it_learns_and_keeps_the_teacher(tmp_path: Path) -> None:
    run = selfsupervised().replace(budget=Budget(steps=120), cadence=Cadence(log=10, evaluate=120, save=120))
    result = loop.train(run, tmp_path, "cpu")
    records = [record for record in log.read(tmp_path / log.METRICS) if record["kind"] == "train"]
    apart = [record["loss"] - record["entropy"] for record in records]  # the divergence of student and teacher
    assert apart[-1] < 0.5 * apart[0]
    assert 0 <= result["knn_accuracy"] <= 1
    model = allmlp.load(tmp_path)
    assert model.spec.head is None and model(torch.rand(2, 1, 8, 8)).shape == (2, 16)
    assert loop.judge_again(tmp_path, "cpu") == result
    labels = small(model=run.model, init_from=str(tmp_path), budget=Budget(steps=1), ema=None)
    loop.train(labels.replace(optim=run.optim.replace(lr=0.0)), tmp_path / "labels", "cpu")
    tuned = allmlp.load(tmp_path / "labels")
    assert torch.equal(tuned.stem.proj.weight, model.stem.proj.weight) and tuned.spec.head.classes == 4  # type: ignore[union-attr]


def test_interrupted_it_goes_on_as_if_nothing_had_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = selfsupervised()
    loop.train(run, tmp_path / "whole", "cpu")
    train_with_break(run, tmp_path / "cut", monkeypatch)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")


def test_models_it_cannot_train(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="image encoders, with a pool"):
        Dino().fit(allmlp.create("bert_tiny").spec, Blobs().open())
    assert isinstance(selfsupervised().model.pool, Mean)
