"""Steps recorded as CUDA graphs: replays train as plain steps do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from allmlp import parallel
from allmlp import training as loop
from allmlp.data.augment import Mixup
from allmlp.optim import AdamW, Lamb, Muon, Optim, Sgd
from allmlp.spec import override
from allmlp.train_step import TrainStep
from train.runs import quiet, small
from train.test_train import losses, train_interrupted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mix", [None, Mixup()], ids=["plain", "mixed"])
def test_replays_have_the_same_losses(mix: Mixup | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(task=small().task.replace(mix=mix), optim=Muon(lr=1e-2), precision="float32")
    for name, records in (("plain", False), ("recorded", True)):
        monkeypatch.setattr(loop, "can_record", lambda run, world, records=records: records)
        loop.train(run, tmp_path / name, "cuda")
    assert losses(tmp_path / "recorded") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optim", [AdamW(lr=1e-3), Lamb(lr=1e-2), Muon(lr=1e-2)], ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled", "ignore:The CUDA Graph is empty")
def test_recorded_optimizers(optim: Optim, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every capturable optimizer, compiled or not, and with random numbers inside the step (dropout)."""
    model = override(small().model, "block.dropout", 0.3)
    run = small(model=model, optim=optim, precision="float32", compile=compiled)
    for name, records in (("plain", False), ("recorded", True), ("again", True)):
        monkeypatch.setattr(loop, "can_record", lambda run, world, records=records: records)
        loop.train(run, tmp_path / name, "cuda")
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "recorded"), rel=1e-5)
    recorded, plain = losses(tmp_path / "recorded"), losses(tmp_path / "plain")
    assert recorded[max(recorded)] == pytest.approx(plain[max(plain)], rel=0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "can_record", lambda run, world: True)
    run = small(optim=Muon(lr=1e-2), precision="float32")
    loop.train(run, tmp_path / "whole", "cuda")
    train_interrupted(run, tmp_path / "cut", monkeypatch, device="cuda")
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


def test_which_runs_are_recorded() -> None:
    gpu, cpu = (parallel.World(0, 1, torch.device(kind)) for kind in ("cuda", "cpu"))
    run = quiet().replace(compile=True, optim=Muon(), precision="bfloat16")
    assert loop.can_record(run, gpu) and not loop.can_record(run, cpu)
    assert not loop.can_record(run, parallel.World(0, 2, torch.device("cuda")))
    changes: list[dict[str, Any]] = [{"compile": False}, {"grad_accum_steps": 2}, {"grad_checkpointing": True}]
    changes += [{"nan": "skip"}, {"optim": Sgd()}, {"optim": Muon(weight_decay_end=0.4)}, {"precision": "float16"}]
    for change in changes:
        assert not loop.can_record(run.replace(**change), gpu), change


@pytest.mark.slow
def test_unfreezing_records_the_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which weights have gradients is part of a recording. The stand-in for a GPU notes them at its first call."""
    recordings: list[set[str]] = []

    class NotedStep:
        def __init__(self, step: TrainStep) -> None:
            self.step, self.trained = step, set[str]()

        def __call__(self, *inputs: Any) -> Any:
            trained = {name for name, weight in self.step.task.named_parameters() if weight.requires_grad}
            if not self.trained:
                recordings.append(trained)
                self.trained = trained
            assert self.trained == trained
            return self.step(*inputs)

    run = small(freeze_fraction=0.5)
    loop.train(run, tmp_path / "plain", "cpu")
    monkeypatch.setattr(loop, "can_record", lambda run, world: True)
    monkeypatch.setattr(loop, "RecordedStep", NotedStep)
    loop.train(run, tmp_path / "recorded", "cpu")
    first, second = recordings
    assert first < second and all(name.startswith("model.head.") for name in first)
    assert losses(tmp_path / "recorded") == losses(tmp_path / "plain")
