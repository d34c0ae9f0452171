"""Training in float16: the loss is scaled, steps that overflow are skipped, and runs resume exactly."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler

from allmlp import log, train_step
from allmlp import training as loop
from allmlp.data.sampler import Loader, Sampler
from allmlp.device import default_dtype
from allmlp.ema import ModelEma
from allmlp.errors import UserError
from allmlp.optim import AdamW, Muon, Optim, Sgd
from allmlp.parallel import World
from allmlp.tasks.task import StepContext
from allmlp.train_step import TrainStep
from train.runs import quiet, small
from train.test_train import losses, same_weights, train_interrupted

CPU = World(0, 1, torch.device("cpu"))


def loss_scales(out: Path) -> list[float]:
    return [one["loss_scale"] for one in log.read_metrics(out / log.METRICS) if one["kind"] == "train"]


def made(optim: Optim, scale: float = 2.0**16, dtype: torch.dtype = torch.float16, **options: Any) -> TrainStep:
    """A step of a small classifier."""
    run = quiet()
    assert run.model is not None
    torch.manual_seed(0)
    dataset = run.data.load()
    task = run.task.build(run.task.configure_model(run.model, dataset).build(), dataset).train()
    step = TrainStep(task, optim.build(task), CPU, dtype, **options)
    step.load_scaler({**step.scaler.state_dict(), "scale": scale})
    return step


def micro_batches(step: TrainStep, count: int = 1) -> list[tuple[Tensor, ...]]:
    loader = Loader(quiet().data.load().train, Sampler(64, 24, seed=0), CPU.device)
    inputs = step.task.prepare_batch(loader.fetch(0), StepContext(0.5, torch.Generator().manual_seed(0)))
    return list(zip(*(part.chunk(count) for part in inputs)))


@pytest.mark.slow
@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), Muon(lr=1e-2)], ids=lambda spec: type(spec).__name__)
def test_a_run_resumes_with_its_scale(optim: Optim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale, and the steps since it changed, are part of the checkpoint."""
    monkeypatch.setattr(train_step, "GradScaler", partial(GradScaler, init_scale=2.0**24, growth_interval=3))
    run = small(precision="float16", optim=optim)
    loop.train(run, tmp_path / "whole", "cpu")
    train_interrupted(run, tmp_path / "cut", monkeypatch)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")
    scales = loss_scales(tmp_path / "whole")
    assert loss_scales(tmp_path / "cut") == scales and len(set(scales)) > 3
    assert any(later > earlier for earlier, later in pairwise(scales))


def test_float16_learns_as_float32_does(tmp_path: Path) -> None:
    for precision in ("float16", "float32"):
        loop.train(quiet().replace(precision=precision), tmp_path / precision, "cpu")
    half, single = losses(tmp_path / "float16"), losses(tmp_path / "float32")
    assert half != single and half == pytest.approx(single, rel=0.02)
    assert "loss_scale" not in (tmp_path / "float32" / log.METRICS).read_text()


@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), Sgd(lr=1e-2), Muon(lr=1e-2)], ids=lambda spec: type(spec).__name__)
def test_a_step_that_overflows_changes_nothing(optim: Optim) -> None:
    step = made(optim, max_grad_norm=1.0)
    step.ema = ModelEma(step.task.model, 0.9)
    step.ema.set_step(0)
    step(micro_batches(step))
    state = [step.task.state_dict(), step.ema.average, *step.optimizer.state.values()]
    before = [{name: value.clone() for name, value in part.items() if value is not None} for part in state]
    step.load_scaler({**step.scaler.state_dict(), "scale": 2.0**127})
    found = step(micro_batches(step))
    assert found.total.isfinite() and step.loss_scale == 2.0**126
    for part, old in zip(state, before, strict=True):
        assert all(torch.equal(part[name], value) for name, value in old.items())
    step.load_scaler({**step.scaler.state_dict(), "scale": 2.0**8})
    step(micro_batches(step))
    assert not all(torch.equal(state[0][name], value) for name, value in before[0].items())
    assert not all(torch.equal(state[1][name], value) for name, value in before[1].items())


def test_gradients_are_clipped_after_unscaling() -> None:
    """An update of plain SGD has the norm lr * max_grad_norm, whatever the scale."""
    for scale in (2.0**4, 2.0**12):
        step = made(Sgd(lr=0.5, momentum=0.0, weight_decay=0.0), scale, max_grad_norm=1e-3)
        before = [weight.detach().clone() for weight in step.task.parameters()]
        step(micro_batches(step))
        change = [new - old for new, old in zip(step.task.parameters(), before, strict=True)]
        assert torch.cat([one.flatten() for one in change]).norm().item() == pytest.approx(5e-4, rel=1e-2)


def test_accumulated_gradients_are_those_of_the_batch() -> None:
    found = []
    for count in (1, 3):
        step = made(Sgd())
        step.backward(micro_batches(step, count))
        step.scaler.unscale_(step.optimizer)
        found.append(torch.cat([w.grad.flatten() for w in step.task.parameters() if w.grad is not None]))
    assert torch.allclose(*found, rtol=0.02, atol=1e-4) and found[0].abs().max() > 1e-3


def test_gradients_that_are_never_finite_end_the_run() -> None:
    step = made(AdamW(), 2.0**-23)
    next(step.task.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    step(micro_batches(step))
    with pytest.raises(UserError, match=r"not finite in float16 .* set precision=float32"):
        step(micro_batches(step))


def test_precision_by_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """T4, V100 and RTX 20 have no bfloat16."""
    gpu, run = torch.device("cuda"), small()
    for capability, dtype in {(7, 5): torch.float16, (8, 0): torch.bfloat16, (12, 0): torch.bfloat16}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert default_dtype(gpu) == loop.compute_dtype(run, gpu) == dtype
        assert loop.compute_dtype(run.replace(precision="float32"), gpu) == torch.float32
        recorded = run.replace(compile=True, grad_accum_steps=1)
        assert loop.can_record(recorded, World(0, 1, gpu)) == (dtype == torch.bfloat16)
    assert default_dtype(torch.device("cpu")) == default_dtype(torch.device("mps")) == torch.float32
