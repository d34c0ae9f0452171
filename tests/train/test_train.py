"""The loop: it learns, it can be stopped anywhere and goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import allmlp
from allmlp import checkpoint, log
from allmlp import train as loop
from allmlp.average import follow, pull_at
from allmlp.data.images import Augment, Translate
from allmlp.data.inputs import read_inputs
from allmlp.optim import AdamW, Lamb, Muon, Sgd
from allmlp.run import Budget, Cadence, Run
from allmlp.spec import to_dict
from train.runs import Blobs, small

train = loop.train


def losses(out: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in log.read(out / log.METRICS) if record["kind"] == "train"}


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(out / "model.safetensors") for out in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def train_with_break(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A run that dies at its seventh step, and is called again."""
    original = loop.backward

    def dies(run: Run, world: Any, wrapped: Any, example: Any, moment: Any) -> Any:
        if example.number == 6:
            raise RuntimeError("the process dies here")
        return original(run, world, wrapped, example, moment)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "backward", dies)
        with pytest.raises(RuntimeError, match="dies here"):
            train(run, out, "cpu")
    return train(run, out, "cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(small(), out, "cpu")
    return out


def test_it_learns(tmp_path: Path) -> None:
    task = small().task.replace(mix=None, augment=Augment((Translate(1),)))
    run = small(task=task, budget=Budget(epochs=120), ema=None, cadence=Cadence(log=20, evaluate=1000, save=1000))
    assert train(run, tmp_path, "cpu")["accuracy"] > 0.9


def test_what_a_run_leaves(whole: Path) -> None:
    assert {"run.json", "metrics.jsonl", "config.json", "model.safetensors", "inputs.json"} <= set(os.listdir(whole))
    assert json.loads((whole / "run.json").read_text())["run"] == to_dict(small())
    assert list(losses(whole)) == list(range(1, 13))
    evaluations = [record for record in log.read(whole / log.METRICS) if record["kind"] == "eval"]
    assert [record["step"] for record in evaluations] == [6, 12]
    model = allmlp.load(whole)
    assert model.spec.head.classes == 4 and read_inputs(whole).classes == ("a", "b", "c", "d")
    assert loop.judge_again(whole, "cpu")["accuracy"] == pytest.approx(evaluations[-1]["accuracy"])
    assert [folder.name for folder in checkpoint.complete(whole)] == ["step-000000008", "step-000000012"]


@pytest.mark.curves
def test_curves_are_drawn(tmp_path: Path) -> None:
    """The lines of training and of judging are in the picture, each in its colour."""
    pytest.importorskip("matplotlib")
    train(small(), tmp_path, "cpu")
    with Image.open(tmp_path / "curves.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(2**24) or []}
    assert {(31, 119, 180), (255, 127, 14)} <= colours
    assert (tmp_path / "curves.svg").read_text().count('<g id="line2d_') > 4


def test_the_same_run_twice_is_the_same(whole: Path, tmp_path: Path) -> None:
    train(small(), tmp_path, "cpu")
    assert losses(tmp_path) == losses(whole) and same_weights(tmp_path, whole)


def test_a_finished_run_is_not_trained_again(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = losses(whole)
    monkeypatch.setattr(loop, "backward", None)
    assert train(small(), whole, "cpu")["accuracy"] >= 0 and losses(whole) == before


@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), Sgd(lr=0.05), Lamb(), Muon(lr=1e-2)], ids=repr)
def test_interrupted_anywhere_it_goes_on_as_if_nothing_had_happened(
    optim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small(optim=optim)
    train(run, tmp_path / "whole", "cpu")
    train_with_break(run, tmp_path / "cut", monkeypatch)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")


def start(out: Path) -> subprocess.Popen[str]:
    code = "import sys; from pathlib import Path; from train.runs import small; from allmlp.train import train; "
    code += f"train(small(), Path({str(out)!r}), 'cpu')"
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_kill_at_random_moments(whole: Path, tmp_path: Path) -> None:
    """kill -9 again and again, also while a checkpoint is written: the losses are those of the quiet run."""
    moments = random.Random(0)
    for _ in range(8):
        process = start(tmp_path)
        while process.poll() is None and not (tmp_path / log.METRICS).exists():
            time.sleep(0.05)
        time.sleep(moments.uniform(0.0, 0.35))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = checkpoint.newest(tmp_path)
        assert found is None or found[0] == checkpoint.complete(tmp_path)[-1], "a checkpoint was left half-written"
        if found is not None and found[1]["step"] == 12:
            break
    train(small(), tmp_path, "cpu")
    # Another process may lie otherwise in memory, and then add in another order.
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path)
    while not losses_so_far(tmp_path):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    if found[1]["step"] < 12:
        assert f"go on with: allmlp train --resume {tmp_path}" in messages


def losses_so_far(out: Path) -> dict[int, float]:
    return losses(out) if (out / log.METRICS).exists() else {}


def test_accumulation_is_the_same_batch(tmp_path: Path) -> None:
    """In pieces or at once; without augmentation, whose draws belong to the pass."""
    task = small().task.replace(mix=None, augment=small().task.augment.replace(transforms=()))
    model = small().model.configure(drop_path=0.0)
    for parts in (1, 3):
        train(small(task=task, model=model, accumulate=parts), tmp_path / str(parts), "cpu")
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "3"), rel=1e-4)


def test_checkpointing_and_time_budget(tmp_path: Path) -> None:
    train(small(checkpointing=True, budget=Budget(minutes=0.02)), tmp_path, "cpu")
    assert len(losses(tmp_path)) > 1


def test_the_average_is_kept(tmp_path: Path) -> None:
    train(small(ema=None), tmp_path / "last", "cpu")
    train(small(ema=0.9), tmp_path / "average", "cpu")
    assert losses(tmp_path / "last") == losses(tmp_path / "average")
    last, average = (allmlp.load(tmp_path / name).state_dict() for name in ("last", "average"))
    assert not torch.equal(last["head.proj.weight"], average["head.proj.weight"])


def test_the_average_forgets_its_start() -> None:
    """Its pull falls as 9 / (10 + t) until the memory is reached: weights of old weigh next to nothing soon."""
    assert [pull_at(0.999, step) for step in (0, 80, 1_000_000)] == pytest.approx([0.9, 0.1, 0.001])
    assert pull_at(0.5, 80) == 0.5
    average, moving = [torch.tensor([100.0])], torch.nn.Parameter(torch.tensor([1.0]))
    for step in range(50):
        follow(average, [moving], torch.tensor(pull_at(0.999, step)) if step % 2 else pull_at(0.999, step))
    assert average[0].item() == pytest.approx(1.0, abs=1e-4)
    follow([], [moving], 0.1)


def test_start_from_another_model(whole: Path, tmp_path: Path) -> None:
    run = small(init_from=str(whole), budget=Budget(steps=1), optim=AdamW(lr=0.0), ema=None)
    train(run, tmp_path, "cpu")
    before, after = allmlp.load(whole).state_dict(), allmlp.load(tmp_path).state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(allmlp.UserError, match="does not hold the weights of this model"):
        train(run.replace(model=run.model.replace(width=8)), tmp_path / "narrow", "cpu")


# --- what can go wrong ------------------------------------------------------------------------------


def test_a_changed_run_is_told_field_by_field(whole: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"these fields differ: batch, optim\.lr"):
        train(small(batch=12, optim=AdamW(lr=1.0)), whole, "cpu")


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"the loss became nan at step \d+; .*checkpoint"):
        train(small(data=Blobs(spoiled=True), budget=Budget(epochs=2)), tmp_path, "cpu")


def test_or_is_skipped(tmp_path: Path) -> None:
    task = small().task.replace(mix=None)
    run = small(
        data=Blobs(spoiled=True), task=task, nan="skip", batch=8, cadence=Cadence(log=100, evaluate=100, save=100)
    )
    with pytest.raises(allmlp.UserError, match="the loss became nan"):
        train(run.replace(nan="stop"), tmp_path / "stop", "cpu")
    train(run, tmp_path / "skip", "cpu")
    assert all(weight.isfinite().all() for weight in allmlp.load(tmp_path / "skip").state_dict().values())


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


def test_a_damaged_checkpoint_is_passed_over(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(small(), tmp_path, "cpu")
    newest = checkpoint.complete(tmp_path)[-1]
    file = newest / "task.safetensors"
    file.write_bytes(file.read_bytes()[:-7] + b"garbage")
    found = checkpoint.newest(tmp_path)
    assert found is not None and found[1]["step"] == 8
    with caplog.at_level("WARNING"):
        train(small(), tmp_path, "cpu")
    assert f"{newest} is damaged: put aside as damaged-{newest.name}" in caplog.text
    assert losses(tmp_path) == losses(whole)
    assert len(checkpoint.complete(tmp_path)) == small().cadence.keep


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


def test_a_run_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="the run has no end"):
        train(small(budget=Budget()), tmp_path, "cpu")
    with pytest.raises(allmlp.UserError, match="is not a run"):
        loop.read_run(tmp_path / "nothing")
    for content in ("[1]", "{}", '{"run": {"kind": "Affine"}}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(allmlp.UserError, match="does not describe a run"):
            loop.read_run(tmp_path)


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="unknown device 'gpu': use cpu or cuda"):
        train(small(), tmp_path, "gpu")
    if not torch.cuda.is_available():
        with pytest.raises(allmlp.UserError, match="torch sees no CUDA device"):
            train(small(), tmp_path, "cuda")


# --- the loop knows no task -------------------------------------------------------------------------


def test_the_loop_contains_no_task() -> None:
    source = Path(loop.__file__).read_text(encoding="utf8")
    for word in ("classify", "distill", "dino", "mlm", "glue", "squad", "translate", "augment"):
        assert word not in source.lower()
    assert source.count("\n") <= 350
