"""The training loop: it trains, and resumes exactly wherever it was stopped."""

from __future__ import annotations

import json
import math
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter

import allmlp
from allmlp import checkpoint, compilation, log, pace, parallel
from allmlp import training as loop
from allmlp.data.augment import Augment, Translate
from allmlp.data.dataset import ImageDataset
from allmlp.data.preprocessing import read_preprocessing
from allmlp.ema import ModelEma, one_minus_decay_at
from allmlp.layers.scale import DropPath
from allmlp.models.resnet import ResNet
from allmlp.optim import AdamW, Lamb, Muon, Sgd
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.spec import to_dict
from allmlp.tasks.classify import Classify, ClassifyModule
from allmlp.tasks.task import Losses, StepContext
from train.runs import Blobs, small

train = loop.train


def losses(out: Path) -> dict[int, float]:
    found = [record for record in log.read_metrics(out / log.METRICS) if record["kind"] == "train"]
    return {record["step"]: record["loss"] for record in found if "loss" in record}


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(out / "model.safetensors") for out in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def learning_rates(out: Path) -> dict[int, float]:
    return {record["step"]: record["lr"] for record in log.read_metrics(out / log.METRICS) if record["kind"] == "train"}


def die_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Let the process die before it has trained `step`."""
    original = loop.Loader.fetch

    def fetch(self: loop.Loader, number: int) -> Any:
        if number == step:
            raise RuntimeError("the process dies here")
        return original(self, number)

    patch.setattr(loop.Loader, "fetch", fetch)


def train_interrupted(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch, step: int = 6, device: str = "cpu"
) -> dict[str, float]:
    """A run that dies before `step`, and is resumed."""
    with monkeypatch.context() as patch:
        die_at(step, patch)
        with pytest.raises(RuntimeError, match="dies here"):
            train(run, out, device)
    return train(run, out, device)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(small(), out, "cpu")
    return out


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    task = small().task.replace(mix=None, augment=Augment((Translate(1),)))
    run = small(task=task, budget=Budget(steps=120), ema_decay=None, log_every=20, eval_every=1000, save_every=1000)
    assert train(run, tmp_path, "cpu")["accuracy"] > 0.9


@pytest.mark.slow
def test_what_a_run_leaves(whole: Path) -> None:
    assert {"run.json", "metrics.jsonl", "config.json", "model.safetensors", "preprocessing.json"} <= set(
        os.listdir(whole)
    )
    record = json.loads((whole / "run.json").read_text())
    assert list(record) == ["run", "processes", "environment", "data", "result"]
    assert record["run"] == to_dict(small()) and record["environment"]["torch"] == torch.__version__
    assert list(losses(whole)) == list(range(1, 13))
    evaluations = [record for record in log.read_metrics(whole / log.METRICS) if record["kind"] == "eval"]
    assert [record["step"] for record in evaluations] == [6, 12]
    model = allmlp.load(whole)
    assert model.spec.head.num_classes == 4 and read_preprocessing(whole).class_names == ("a", "b", "c", "d")
    again = loop.evaluate_checkpoint(whole, "cpu")
    assert again["accuracy"] == pytest.approx(evaluations[-1]["accuracy"])
    result, dataset = record["result"], small().data.load()
    assert result["test"] == pytest.approx(again) and result["steps"] == 12 and result["seconds"] > 0
    assert result["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert result["epochs"] == pytest.approx(12 * small().batch_size / len(dataset.train))
    assert record["data"] == {"sha256": dataset.checksum(), "train": len(dataset.train), "test": len(dataset.test)}
    (common, _), *_ = Counter(dataset.train.examples.labels.tolist()).most_common()
    assert result["test"]["majority"] == (dataset.test.examples.labels == common).double().mean().item()
    assert [folder.name for folder in checkpoint.complete(whole)] == ["step-000000008", "step-000000012"]


@pytest.mark.slow
@pytest.mark.curves
def test_curves_are_drawn(tmp_path: Path) -> None:
    """The lines of training and evaluation are in the figure, each in its color."""
    pytest.importorskip("matplotlib")
    train(small(), tmp_path, "cpu")
    with Image.open(tmp_path / "curves.png") as image:
        colors = {color for _, color in image.convert("RGB").getcolors(2**24) or []}
    assert {(31, 119, 180), (255, 127, 14)} <= colors
    assert (tmp_path / "curves.svg").read_text().count('<g id="line2d_') > 4


def test_the_same_run_twice_is_the_same(whole: Path, tmp_path: Path) -> None:
    train(small(), tmp_path, "cpu")
    assert losses(tmp_path) == losses(whole) and same_weights(tmp_path, whole)


def test_a_finished_run_is_not_trained_again(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = losses(whole)
    monkeypatch.setattr(loop.TrainStep, "__call__", None)
    assert train(small(), whole, "cpu")["accuracy"] >= 0 and losses(whole) == before


@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), Sgd(lr=0.05), Lamb(), Muon(lr=1e-2)], ids=repr)
def test_an_interrupted_run_resumes_exactly(optim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(optim=optim)
    train(run, tmp_path / "whole", "cpu")
    train_interrupted(run, tmp_path / "cut", monkeypatch)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")


# Each line starts a run in a fork, so that what it imports is imported once; the next one kills it.
FORKS = """
import multiprocessing, sys
from multiprocessing.connection import wait
from pathlib import Path
import torch._dynamo, torch.utils.tensorboard
from allmlp.training import train
from train.runs import small

forks = multiprocessing.get_context("fork")
while sys.stdin.readline():
    process = forks.Process(target=train, args=(small(), Path(sys.argv[1]), "cpu"))
    process.start()
    wait([process.sentinel, sys.stdin])
    process.kill()
    process.join()
    print(process.exitcode, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_kill_at_random_moments(whole: Path, tmp_path: Path) -> None:
    """kill -9 again and again, also while a checkpoint is written: the losses are those of the uninterrupted run."""
    moments, written, codes = random.Random(0), tmp_path / log.METRICS, list[int]()
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    environment, pipe = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, subprocess.PIPE
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        for _ in range(5):
            before = written.stat().st_size if written.exists() else 0
            print("start", file=server.stdin, flush=True)
            while not (written.exists() and written.stat().st_size > before):
                if select.select([server.stdout], [], [], 0.002)[0]:
                    break
            time.sleep(moments.uniform(0.0, 0.1))
            print("kill", file=server.stdin, flush=True)
            codes.append(int(server.stdout.readline()))
            found = checkpoint.newest(tmp_path)
            assert found is None or found[0] == checkpoint.complete(tmp_path)[-1], "a checkpoint was left half-written"
            if found is not None and found[1]["step"] == 12:
                break
        server.stdin.close()
    assert codes[0] == -signal.SIGKILL and set(codes) <= {-signal.SIGKILL, 0}
    train(small(), tmp_path, "cpu")
    # Memory alignment differs between processes, and with it the order of summation.
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-5)


def test_ctrl_c_saves_and_says_how_to_resume(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step that is being trained is finished and saved; a second Ctrl-C would end it."""
    monkeypatch.setattr("allmlp.errors.IMPORTED", ["my_mixers"])
    with monkeypatch.context() as patch:
        original = loop.TrainStep.backward

        def interrupted(step: loop.TrainStep, batches: Any) -> Any:
            if len(losses(tmp_path)) == 5:
                signal.raise_signal(signal.SIGINT)
            return original(step, batches)

        patch.setattr(loop.TrainStep, "backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(small(), tmp_path, "cpu")
    resume = f"allmlp --import my_mixers train --resume {tmp_path}"
    assert f"stopped at step 6; resume with: {resume}" in capsys.readouterr().err
    assert checkpoint.newest(tmp_path)[1]["step"] == 6  # type: ignore[index]
    train(small(), tmp_path, "cpu")
    assert losses(tmp_path) == losses(whole) and same_weights(tmp_path, whole)


def test_ctrl_c_in_an_evaluation_saves_the_steps_before(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resumed run evaluates first."""
    run = small(eval_every=5, save_every=100)
    with monkeypatch.context() as patch:
        original = ClassifyModule.evaluate

        def interrupted(task: ClassifyModule, model: Any, batches: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return original(task, model, batches)

        patch.setattr(ClassifyModule, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path, "cpu")
    assert f"stopped at step 5; resume with: allmlp train --resume {tmp_path}" in capsys.readouterr().err
    assert checkpoint.newest(tmp_path)[1]["step"] == 5  # type: ignore[index]
    train(run, tmp_path, "cpu")
    records = log.read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "eval"][:2] == [5, 10]
    assert losses(tmp_path) == losses(whole) and same_weights(tmp_path, whole)


@pytest.mark.parametrize("optim", [Sgd(lr=0.1), AdamW(lr=1e-2)], ids=lambda spec: type(spec).__name__)
def test_accumulation_is_the_same_batch(optim: Any, tmp_path: Path) -> None:
    """In micro-batches or at once, without augmentation, which draws per pass. SGD sees the scale of gradients."""
    task = small().task.replace(mix=None, augment=small().task.augment.replace(transforms=()))
    model = small().model.configure(drop_path=0.0)
    for parts in (1, 3):
        run = small(task=task, model=model, optim=optim, max_grad_norm=None, grad_accum_steps=parts)
        train(run, tmp_path / str(parts), "cpu")
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "3"), rel=1e-4)


def test_every_step_has_the_learning_rate_of_its_middle(whole: Path) -> None:
    expected = {step: 1e-2 * small().schedule.at((step - 0.5) / 12) for step in range(1, 13)}
    assert learning_rates(whole) == pytest.approx(expected)
    assert min(expected.values()) > 0


def test_a_step_clips_updates_and_averages() -> None:
    """One step of plain SGD, written out: w -= lr g max_norm / |g|, average += 9/10 (w - average)."""
    model = allmlp.create(small().model.configure(drop_path=0.0), num_classes=4, seed=0)
    task = Classify().build(model, Blobs().load()).train()
    world = parallel.World(0, 1, torch.device("cpu"))
    batch = loop.Loader(Blobs().load().train, loop.Sampler(64, 8, 0), world.device).fetch(0)
    inputs = task.prepare_batch(batch, StepContext(0.5, torch.Generator()))
    before = [weight.detach().clone() for weight in model.parameters()]
    gradients = torch.autograd.grad(task(*inputs).total, list(model.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert norm > 0.02
    ema = ModelEma(model, 0.9)
    ema.set_step(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loop.TrainStep(task, optimizer, world, max_grad_norm=0.01, ema=ema)([inputs])
    expected = [weight - 0.5 * gradient * 0.01 / norm for weight, gradient in zip(before, gradients)]
    torch.testing.assert_close(list(model.parameters()), expected)
    averages = [weight + 0.9 * (after - weight) for weight, after in zip(before, expected)]
    torch.testing.assert_close([ema.average[name] for name, _ in model.named_parameters()], averages)
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_a_single_step_trains(warmup: float, tmp_path: Path) -> None:
    start = allmlp.create(small().model, num_classes=4, seed=0).state_dict()
    run = small(
        budget=Budget(steps=1), ema_decay=None, optim=Sgd(lr=0.1), schedule=CosineSchedule(warmup_fraction=warmup)
    )
    train(run, tmp_path, "cpu")
    assert not torch.equal(allmlp.load(tmp_path).state_dict()["head.proj.weight"], start["head.proj.weight"])


def test_gradient_checkpointing_changes_nothing(whole: Path, tmp_path: Path) -> None:
    train(small(grad_checkpointing=True), tmp_path, "cpu")
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-5)


# --- EMA --------------------------------------------------------------------------------------------


def test_the_average_is_saved(tmp_path: Path) -> None:
    train(small(ema_decay=None), tmp_path / "last", "cpu")
    train(small(ema_decay=0.9), tmp_path / "average", "cpu")
    assert losses(tmp_path / "last") == losses(tmp_path / "average")
    last, average = (allmlp.load(tmp_path / name).state_dict() for name in ("last", "average"))
    assert not torch.equal(last["head.proj.weight"], average["head.proj.weight"])


def test_the_average_forgets_its_start() -> None:
    """1 - decay falls as 9 / (10 + t) until the decay is reached: soon the initial weights weigh next to nothing."""
    assert [one_minus_decay_at(0.999, step) for step in (0, 80, 1_000_000)] == pytest.approx([0.9, 0.1, 0.001])
    assert one_minus_decay_at(0.5, 80) == 0.5
    model: Any = torch.nn.Linear(1, 1)
    model.device = torch.device("cpu")
    torch.nn.init.constant_(model.weight, 100.0)
    ema = ModelEma(model, 0.999)
    torch.nn.init.constant_(model.weight, 1.0)
    for step in range(50):
        ema.set_step(step)
        ema.update()
    assert ema.average["weight"].item() == pytest.approx(1.0, abs=1e-4)


def test_the_average_includes_buffers() -> None:
    """Running statistics are averaged, counters copied, and all of them restored after evaluation."""
    model: Any = torch.nn.BatchNorm1d(2)
    model.device = torch.device("cpu")
    ema = ModelEma(model, 0.5)
    ema.set_step(1000)
    model(torch.full((4, 2), 10.0))
    mean = model.running_mean.clone()
    ema.update()
    with ema.swap() as averaged:
        torch.testing.assert_close(averaged.running_mean, mean / 2)
        assert averaged.num_batches_tracked == 1
    torch.testing.assert_close(model.running_mean, mean)


def test_no_decay_no_average() -> None:
    model: Any = torch.nn.Linear(1, 1)
    model.device = torch.device("cpu")
    ema = ModelEma(model, None)
    ema.update()
    with ema.swap() as same:
        assert same is model and not ema.average


# --- a budget of minutes ----------------------------------------------------------------------------


class FakeClock:
    """Every step takes what `duration` says; nothing else takes time."""

    def __init__(self, patch: pytest.MonkeyPatch, duration: Callable[[int], float]) -> None:
        self.now = 0.0
        original = loop.TrainStep.__call__

        def call(step: loop.TrainStep, batches: Any) -> Any:
            self.steps += 1
            self.now += duration(self.steps)
            return original(step, batches)

        self.steps = 0
        patch.setattr(loop.TrainStep, "__call__", call)
        patch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        (lambda step: 1.0, 60),
        (lambda step: 30.0 if step == 1 else 0.5, 120),  # compilation, which does not count
        (lambda step: {1: 90.0, 4: 5.0}.get(step, 0.5), 120),  # longer than the budget; a step that is recorded
        (lambda step: 5.0 if step == 6 else 0.5, 120),  # one slow step
        (lambda step: 1.0 if step < 30 else 2.0, 45),  # somebody else uses the machine
        (lambda step: 1.0 if step < 60 else 0.3, 60),  # the last planned step leaves time for more
        (lambda step: 20.0 if step < 3 else 0.5, 120),  # the second step is slow, too
        (lambda step: 70.0, 1),
        (lambda step: 25.0, 3),
    ],
    ids=["constant", "compiled", "recorded", "disturbed", "slower", "faster", "slow start", "one", "few"],
)
def test_a_budget_of_minutes_is_kept(
    duration: Callable[[int], float], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch, duration)
    train(small(budget=Budget(minutes=1), eval_every=1000, save_every=1000), tmp_path, "cpu")
    assert len(losses(tmp_path)) == clock.steps and abs(clock.steps - expected) <= 2
    compilation = sum(duration(step) - duration(10) for step in (1, 2, 4, 6)) if expected == 120 else 0.0
    assert clock.now - compilation <= max(61.0, 2 * duration(clock.steps))
    rates = list(learning_rates(tmp_path).values())
    assert rates[-1] < 0.1 * max(rates) or expected < 4, "the schedule has not come to its end"
    assert min(rates) > 0, "a step without a learning rate"


def test_a_budget_of_minutes_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps before the break had losses and rates that the resumed run has again, though it is slower."""
    run = small(budget=Budget(minutes=1), eval_every=1000, save_every=8)
    with monkeypatch.context() as patch:
        FakeClock(patch, lambda step: 0.9 + 0.2 * (step % 2))
        die_at(30, patch)
        with pytest.raises(RuntimeError, match="dies here"):
            train(run, tmp_path, "cpu")
    before = losses(tmp_path), learning_rates(tmp_path)
    assert max(before[0]) == 30 and checkpoint.newest(tmp_path)[1]["step"] == 24  # type: ignore[index]
    with monkeypatch.context() as patch:
        FakeClock(patch, lambda step: 1.5)
        train(run, tmp_path, "cpu")
    after = losses(tmp_path), learning_rates(tmp_path)
    assert before == tuple({step: record[step] for step in before[0]} for record in after)
    plans, _ = pace.read(tmp_path / pace.FILE)
    assert len({plan.step for plan in plans}) == len(plans) and max(after[0]) == plans[-1].steps < 60


def test_without_a_checkpoint_the_plan_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(budget=Budget(minutes=1), eval_every=1000, save_every=1000)
    with monkeypatch.context() as patch:
        FakeClock(patch, lambda step: 1.0)
        die_at(20, patch)
        with pytest.raises(RuntimeError, match="dies here"):
            train(run, tmp_path, "cpu")
    before = learning_rates(tmp_path)
    with monkeypatch.context() as patch:
        FakeClock(patch, lambda step: 2.0)
        train(run, tmp_path, "cpu")
    assert {step: learning_rates(tmp_path)[step] for step in before} == before
    (tmp_path / pace.FILE).write_text("[1]")
    with pytest.raises(allmlp.UserError, match=r"cannot read .*pace\.json"):
        train(run, tmp_path, "cpu")


# --- compilation ------------------------------------------------------------------------------------

# Dynamo hides this warning of its own, but not from pytest, for which warnings are errors.
hides_warning = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.slow
@hides_warning
def test_the_ninth_run_of_a_process_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(compilation, "BACKEND", counter)
    run = small(compile=True, budget=Budget(steps=1), task=Classify())
    for number in range(9):
        before = counter.frame_count
        train(run.replace(model=run.model.replace(width=8 + 4 * number)), tmp_path / str(number), "cpu")
        assert counter.frame_count > before, f"run {number + 1} was not compiled"


def test_the_compiler_is_loaded_while_the_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()
    reading = threading.Event()
    monkeypatch.setattr(compilation, "load_compiler", lambda: (reading.wait(10), order.append("loaded")))
    for enabled in (True, False):
        with compilation.compiler_loading(enabled):
            order.append("reading")
            reading.set()
        order.append("compiling")
    assert order == ["reading", "loaded", "compiling", "reading", "compiling"]
    with pytest.raises(KeyError), compilation.compiler_loading(True):
        raise KeyError
    assert order[-1] == "loaded"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiling_without_a_compiler_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many images of containers; a message in place of Inductor's traceback in the first step."""
    monkeypatch.setattr(compilation, "has_cpp_compiler", lambda: False)
    monkeypatch.setattr(compilation, "HAS_TRITON", False)
    with pytest.raises(allmlp.UserError, match=r"compiler \(g.* --set compile=false"):
        compilation.check_compilers(torch.device(device))
    compilation.check_compilers(torch.device("mps"))


def compiled_graphs(depth: int, region: compilation.Region, checkpointing: bool, patch: pytest.MonkeyPatch) -> int:
    """Graphs that a training step compiles for a stack in which every block has another drop-path rate."""
    torch.compiler.reset()
    patch.setattr(compilation, "BACKEND", counter := CompileCounter())
    spec = small().model.replace(depth=depth, drop_path=DropPath(0.3, "linear"))
    model = allmlp.create(spec, num_classes=4).set_grad_checkpointing(checkpointing)
    task = Classify().build(model, Blobs().load()).train()
    compilation.compile_task(task, region)
    batch = loop.Loader(Blobs().load().train, loop.Sampler(64, 8, 0), torch.device("cpu")).fetch(0)
    inputs = task.prepare_batch(batch, StepContext(0.5, torch.Generator()))
    for _ in range(2):
        task(*inputs).total.backward()
    return counter.frame_count


@pytest.mark.slow
@hides_warning
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_blocks_of_a_stack_are_compiled_once(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shallow, deep = (compiled_graphs(depth, "blocks", checkpointing, monkeypatch) for depth in (2, 5))
    assert shallow == deep > 2
    assert compiled_graphs(2, "step", checkpointing, monkeypatch) == 1


@pytest.mark.parametrize(
    ("shape", "operations", "compiled"), [((4, 8), 1, 0), ((4, 8), 20, 1), ((600, 512), 1, 1)], ids=str
)
def test_a_small_graph_beside_the_blocks_is_not_compiled(
    shape: tuple[int, int], operations: int, compiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", counter := CompileCounter())

    def doubled(x: torch.Tensor) -> torch.Tensor:
        for _ in range(operations):
            x = x * 2
        return x

    doubled_by_graph = torch.compile(doubled, backend=compilation.compile_if_large)
    x = torch.ones(shape, requires_grad=True)
    y = doubled_by_graph(x)
    y.sum().backward()
    assert torch.equal(y, x * 2**operations)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full(shape, 2.0**operations))
    assert counter.frame_count == compiled


@pytest.mark.slow
@hides_warning
def test_a_compiled_run_has_the_same_losses(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    for name, changes in (("plain", {}), ("checkpointing", {"grad_checkpointing": True})):
        train(small(compile=True, **changes), tmp_path / name, "cpu")
        assert losses(tmp_path / name) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked")
def test_a_second_process_leaves_the_folder_alone(tmp_path: Path) -> None:
    folder, refused = tmp_path / "run", list[str]()

    class Second(allmlp.Callback):
        def on_step(self, step: int, values: Any) -> None:
            if step == 6:  # between two checkpoints
                with pytest.raises(allmlp.UserError) as reason:
                    allmlp.train(small(), folder)
                refused.append(str(reason.value))

    allmlp.train(small(), folder, callbacks=[Second()])
    assert refused == [f"another process trains into {folder}: wait until it has ended, or choose another --out"]
    allmlp.train(small(), tmp_path / "alone")
    assert losses(folder) == losses(tmp_path / "alone")
    allmlp.train(small(), folder)  # the lock has ended with the run


# --- starting from another model --------------------------------------------------------------------


def test_start_from_another_model(whole: Path, tmp_path: Path) -> None:
    run = small(init_from=str(whole), budget=Budget(steps=1), optim=AdamW(lr=0.0), ema_decay=None)
    train(run, tmp_path, "cpu")
    before, after = allmlp.load(whole).state_dict(), allmlp.load(tmp_path).state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(allmlp.UserError, match="is another model than that of the run: 22 weights differ"):
        train(run.replace(model=run.model.replace(width=8)), tmp_path / "narrow", "cpu")


class OtherBlobs(Blobs):
    """The same images under other names."""

    names: tuple[str, ...] = ()

    def load(self) -> ImageDataset:
        return replace(super().load(), class_names=self.names)


@pytest.mark.parametrize(
    ("names", "kept"), [(("w", "x", "y", "z"), False), (("b", "a", "c", "d"), False), (("0", "1", "2", "3"), True)]
)
def test_the_scores_of_other_classes_are_new(whole: Path, tmp_path: Path, names: tuple[str, ...], kept: bool) -> None:
    """Also where there are as many; data whose classes are only numbered may be those of the start."""
    run = small(budget=Budget(steps=1), optim=AdamW(lr=0.0), ema_decay=None, data=OtherBlobs(names=names))
    train(run, tmp_path / "fresh", "cpu")
    train(run.replace(init_from=str(whole)), tmp_path / "tuned", "cpu")
    fresh, before, after = (
        allmlp.load(place).state_dict() for place in (tmp_path / "fresh", whole, tmp_path / "tuned")
    )
    for key in after:
        expected = before if kept or not key.startswith("head.proj.") else fresh
        assert torch.equal(after[key], expected[key]), key


# --- errors -----------------------------------------------------------------------------------------


def test_a_changed_run_is_told_field_by_field(whole: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"these fields differ: batch_size, optim\.lr"):
        train(small(batch_size=12, optim=AdamW(lr=1.0)), whole, "cpu")


def test_another_run_does_not_replace_a_finished_one_without_checkpoints(tmp_path: Path) -> None:
    """Its checkpoints may have been removed because they are large."""
    train(small(budget=Budget(steps=1)), tmp_path, "cpu")
    shutil.rmtree(tmp_path / "checkpoints")
    model = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(allmlp.UserError, match="holds another run, these fields differ: seed"):
        train(small(budget=Budget(steps=1), seed=1), tmp_path, "cpu")
    (tmp_path / "run.json").unlink()
    with pytest.raises(allmlp.UserError, match="holds a model"):
        train(small(budget=Budget(steps=1)), tmp_path, "cpu")
    assert (tmp_path / "model.safetensors").read_bytes() == model


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"the loss became nan at step \d+; .*checkpoint"):
        train(small(data=Blobs(spoiled=True), budget=Budget(epochs=2)), tmp_path, "cpu")


def test_the_step_is_that_of_any_process(tmp_path: Path) -> None:
    """The losses of this process are finite, one of another is not."""
    other = torch.tensor([0.0, 0.0, float("nan"), 0.0])
    world: Any = SimpleNamespace(mean=lambda values: values + torch.stack([other, torch.zeros(4)], dim=1))
    window = [Losses(torch.tensor(1.0), {"accuracy": torch.tensor(0.5)})] * 4
    with pytest.raises(allmlp.UserError, match="the loss became nan at step 19"):
        loop.summarize(small(), world, window, 20, tmp_path)
    other[2] = 2.0
    assert loop.summarize(small(), world, window, 20, tmp_path) == {"loss": 1.5, "accuracy": 0.5}


def test_no_checkpoint_is_saved_after_it(tmp_path: Path) -> None:
    """Also between two log records: the checkpoints that are kept are good ones."""
    task = small().task.replace(mix=None)
    run = small(data=Blobs(spoiled=True), task=task, batch_size=8, log_every=100, eval_every=100, save_every=1)
    with pytest.raises(allmlp.UserError, match="the loss became nan"):
        train(run, tmp_path, "cpu")
    kept = checkpoint.complete(tmp_path)
    assert len(kept) == 2
    for folder in kept:
        assert all(weight.isfinite().all() for weight in checkpoint.read_part(folder, "task").values())


def test_or_is_skipped(tmp_path: Path) -> None:
    task = small().task.replace(mix=None)
    run = small(
        data=Blobs(spoiled=True), task=task, nan="skip", batch_size=8, log_every=100, eval_every=100, save_every=100
    )
    with pytest.raises(allmlp.UserError, match="the loss became nan"):
        train(run.replace(nan="stop"), tmp_path / "stop", "cpu")
    train(run, tmp_path / "skip", "cpu")
    assert all(weight.isfinite().all() for weight in allmlp.load(tmp_path / "skip").state_dict().values())


@pytest.mark.parametrize("log_every", [1, 4])
def test_the_log_leaves_out_what_is_not_finite(tmp_path: Path, log_every: int) -> None:
    """A record of skipped steps alone has no loss."""
    task = small().task.replace(mix=None)
    run = small(data=Blobs(spoiled=True), task=task, nan="skip", batch_size=8, log_every=log_every, save_every=100)
    train(run, tmp_path, "cpu")
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    records = [one for one in map(json.loads, text.splitlines()) if one["kind"] == "train"]
    assert len(records) == 12 // log_every
    assert sum("loss" not in one for one in records) == (1 if log_every == 1 else 0)
    assert all("accuracy" in one for one in records)


def test_means_over_processes_are_of_finite_values() -> None:
    """The other process has one finite step; of `mse` there is none at all."""

    class Twice:
        def sum(self, values: torch.Tensor) -> torch.Tensor:
            return values + torch.tensor([[6.0, 0.0], [1.0, 0.0]])

    nan = torch.tensor(math.nan)
    window = [Losses(nan, {"mse": nan}), Losses(torch.tensor(2.0), {"mse": nan + math.inf})]
    assert loop.summarize(small(nan="skip"), Twice(), window, 2, Path()) == {"loss": 4.0}  # type: ignore[arg-type]


def test_a_skipped_step_leaves_the_statistics_of_norms_alone(tmp_path: Path) -> None:
    """BatchNorm takes them in the forward pass, also of images with NaN."""
    model = ResNet(widths=(8, 16), depths=(1, 1), img_size=(8, 8), in_chans=1, num_classes=4)
    run = small(model=model, data=Blobs(spoiled=True), task=Classify(), nan="skip", batch_size=8, ema_decay=None)
    train(run.replace(log_every=100, eval_every=100), tmp_path, "cpu")
    assert all(tensor.isfinite().all() for tensor in allmlp.load(tmp_path).state_dict().values())


def test_a_run_that_starts_anew_has_a_new_record(tmp_path: Path) -> None:
    """As after "remove its checkpoints to start again from step 0"."""
    run = small(budget=Budget(steps=1))
    train(run, tmp_path, "cpu")
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(record | {"result": {"test": {"accuracy": -1.0}}}))
    shutil.rmtree(tmp_path / "checkpoints")
    found = train(run, tmp_path, "cpu")
    assert json.loads((tmp_path / "run.json").read_text())["result"]["test"] == found


def test_a_full_disk_loses_nothing(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = checkpoint.save_file, []

    def full(tensors: Any, file: Any) -> None:
        calls.append(file)
        if len(calls) > 4:
            Path(file).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(tensors, file)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(allmlp.UserError, match="No space left on device; older checkpoints are untouched"):
        train(small(), tmp_path, "cpu")
    monkeypatch.setattr(checkpoint, "save_file", original)
    assert [folder.name for folder in checkpoint.complete(tmp_path)] == ["step-000000004"]
    train(small(), tmp_path, "cpu")
    assert losses(tmp_path) == losses(whole)


def test_a_damaged_checkpoint_is_skipped(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(small(), tmp_path, "cpu")
    newest = checkpoint.complete(tmp_path)[-1]
    file = newest / "task.safetensors"
    file.write_bytes(file.read_bytes()[:-7] + b"garbage")
    found = checkpoint.newest(tmp_path)
    assert found is not None and found[1]["step"] == 8
    with caplog.at_level("WARNING"):
        train(small(), tmp_path, "cpu")
    assert f"{newest} is damaged: renamed to damaged-{newest.name}" in caplog.text
    assert losses(tmp_path) == losses(whole)
    assert len(checkpoint.complete(tmp_path)) == small().keep_checkpoints


def test_only_the_main_process_keeps_copies_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others join every gather, and copy nothing to the CPU."""
    gathered: list[str] = []

    class Sharded:
        def __init__(self, name: str) -> None:
            self.name = name

        def full_tensor(self) -> torch.Tensor:
            gathered.append(self.name)
            return torch.ones(2)

    tensors: Any = {name: Sharded(name) for name in "ab"}
    main, other = (parallel.World(rank, 2, torch.device("cpu")) for rank in (0, 1))
    assert checkpoint.full_state_dict(tensors, main).keys() == tensors.keys()
    assert checkpoint.full_state_dict(tensors, other) == {} and gathered == ["a", "b", "a", "b"]
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    layer: Any = torch.nn.Linear(2, 2)
    layer.device = torch.device("cpu")
    parts = checkpoint.state_parts(layer, torch.optim.SGD(layer.parameters()), ModelEma(layer, 0.9), None)
    checkpoint.save(tmp_path, other, parts, {"step": 1}, 2)
    assert not list(tmp_path.iterdir())


def test_nothing_is_lost_where_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    train(small(), tmp_path, "cpu")
    for folder in checkpoint.complete(tmp_path):
        (folder / "task.safetensors").write_bytes(b"short")
    before = losses(tmp_path)
    with pytest.raises(
        allmlp.UserError, match=r"every checkpoint of .* is damaged; remove .*checkpoints to start again"
    ):
        train(small(), tmp_path, "cpu")
    assert losses(tmp_path) == before


def test_a_run_without_a_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="the run has no budget"):
        train(small(budget=Budget()), tmp_path, "cpu")
    with pytest.raises(allmlp.UserError, match=f"^{re.escape(str(tmp_path / 'nothing'))} is not a run"):
        loop.read_run(tmp_path / "nothing")
    for content in ("[1]", "{}", '{"run": {"kind": "Affine"}}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(allmlp.UserError, match="does not describe a run"):
            loop.read_run(tmp_path)


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="unknown device 'gpu': use cpu, cuda"):
        train(small(), tmp_path, "gpu")
    if not torch.cuda.is_available():
        with pytest.raises(allmlp.UserError, match="torch sees no cuda device"):
            train(small(), tmp_path, "cuda")


# --- the loop knows no task -------------------------------------------------------------------------


def test_the_loop_contains_no_task() -> None:
    source = Path(loop.__file__).read_text(encoding="utf8")
    for word in ("classify", "distill", "dino", "mlm", "glue", "squad", "translate", "augment"):
        assert word not in source.lower()
    assert source.count("\n") <= 380
