"""What a run shows: a header, lines in time, an estimate, the result; and its curves."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allmlp
from allmlp import log, messages, pace, parallel
from allmlp import training as loop
from allmlp.accuracy import wilson_interval
from allmlp.data.corpus import TokenBatch
from allmlp.data.dataset import InMemory
from allmlp.data.labeled_text import LabeledTextBatch
from allmlp.errors import plural
from allmlp.optim import Muon
from allmlp.run import Budget
from train.runs import Blobs, small

CPU = parallel.World(0, 1, torch.device("cpu"))


class NotedBlobs(Blobs):
    def load(self) -> Any:
        return dataclasses.replace(super().load(), notes=("3 files are no images",))


def test_a_run_tells_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small(data=NotedBlobs(), val_size=16, keep_best=True)
    result = loop.train(run, tmp_path / "run", "cpu")
    lines = capsys.readouterr().err.splitlines()
    parameters = sum(weight.numel() for weight in allmlp.load(tmp_path / "run").parameters())
    header, rest = lines[:7], "\n".join(lines[7:])
    assert [line.split()[0] for line in header] == ["model", "start", "data", "training", "device", "folder", "note"]
    assert f"ResMLP 2 x 16, {parameters:,} parameters, 8x8 image" in header[0] and "random weights, seed 0" in header[1]
    assert plural(1.002, "epoch", form=".3g") == "1 epoch" and plural(1.02, "epoch", form=".3g") == "1.02 epochs"
    assert "48 train, 16 test" in header[2] and "12 steps (6 epochs), batches of 24" in header[3]
    assert header[4].startswith("device    CPU") and header[5].endswith(str(tmp_path / "run"))
    assert header[6] == "note      3 files are no images"
    low, high = wilson_interval(round(16 * result["accuracy"]), 16)
    assert f"(16 examples: accuracy {low:.1%} to {high:.1%} with 95% confidence)" in rest
    assert f"majority {result['majority']:.2%}  without a model" in rest
    assert re.fullmatch(rf"saved the weights of step \d+, after 12 steps in 0:0\d: {tmp_path / 'run'}", lines[-1])
    assert "mfu" not in rest and "images/s" in rest


def test_only_accuracies_of_independent_examples_have_an_interval() -> None:
    """Not those of tokens; of several test files, the first, whose accuracy it is, counts."""
    zeros = torch.zeros(40, 3, dtype=torch.int32)
    part = torch.arange(40) // 10  # four files
    split = InMemory(zeros, zeros, part, part, batch_type=LabeledTextBatch)
    low, high = wilson_interval(7, 10)
    found = messages.describe_examples({"accuracy": 0.7}, split, True)
    assert found == f"(10 examples: accuracy {low:.1%} to {high:.1%} with 95% confidence)"
    rows = InMemory(zeros[:1], batch_type=TokenBatch)
    assert messages.describe_examples({"accuracy": 0.0}, rows, False) == "(1 example)"


class RenamedBlobs(Blobs):
    def load(self) -> Any:
        dataset = super().load()
        return dataclasses.replace(dataset, class_names=tuple(f"other {name}" for name in dataset.class_names))


def test_new_weights_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.train(small(), tmp_path / "a", "cpu")
    loop.train(small(init_from=str(tmp_path / "a"), data=RenamedBlobs()), tmp_path / "b", "cpu")
    loop.train(small(init_from=str(tmp_path / "a")), tmp_path / "c", "cpu")
    starts = [line for line in capsys.readouterr().err.splitlines() if line.startswith("start ")]
    assert starts[1:] == [f"start     {tmp_path / 'a'}, head.proj new", f"start     {tmp_path / 'a'}"]


def test_the_start_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.train(small(), tmp_path / "a", "cpu")
    loop.train(small(init_from=str(tmp_path / "a"), budget=Budget(minutes=0.001)), tmp_path / "b", "cpu")
    text = capsys.readouterr().err
    assert f"start     {tmp_path / 'a'}" in text and "Classify, 0.001 minutes, batches of 24" in text


def test_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines appear while a step takes long, and where few steps are logged; they are not in the metrics."""
    monkeypatch.setattr(log, "FIRST_SILENCE", 0.1)
    monkeypatch.setattr(log, "LATER_SILENCE", 0.2)
    original = loop.TrainStep.__call__

    def slow(step: loop.TrainStep, batches: Any) -> Any:
        time.sleep(0.6)
        return original(step, batches)

    monkeypatch.setattr(loop.TrainStep, "__call__", slow)
    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *args: time.sleep(0.8) or evaluate(*args))
    loop.train(small(log_every=100, budget=Budget(steps=3)), tmp_path, "cpu")
    text = capsys.readouterr().err
    assert re.search(r"train step 0/3  the first step has taken \d s so far", text)
    assert re.search(r"train step [12]/3  left 0:0\d", text)
    assert re.search(r"train step 3/3  (the last )?evaluation has taken \d s so far", text)
    assert [record["step"] for record in log.read_metrics(tmp_path / log.METRICS) if record["kind"] == "train"] == [3]


def test_slow_data_are_announced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "SLOW", 0.1)
    with log.announced("reading the data"):
        time.sleep(0.5)
    with log.announced("quick"):
        pass
    with log.announced("another process", enabled=False):
        time.sleep(0.3)
    assert capsys.readouterr().err == "reading the data ...\n"


def test_the_duration_is_estimated_without_the_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = pace.Pace(tmp_path, CPU, 1000, float("inf"), 0, 0.0)
    estimates = []
    for step in range(1, 7):
        now[0] += 100.0 if step < 4 else 2.0
        estimates.append(clock.first_estimate(step, settled=step > 3))
    assert estimates == [None, None, None, None, 2.0 * 995, 2.0 * 994]


def test_the_time_left_is_that_of_what_ends_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    both, steps, minutes = (
        pace.Pace(tmp_path, CPU, limit, seconds, 0, 0.0)
        for limit, seconds in ((100, 180.0), (100, float("inf")), (None, 180.0))
    )
    now[0] = 10.0
    assert [clock.seconds_left(20) for clock in (both, steps, minutes)] == [40.0, 40.0, 170.0]
    assert both.seconds_left(2) == 170.0


def test_a_long_run_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "has_amx", lambda: True)
    assert messages.describe_duration(small(), CPU, 75.0) == "about 1:15 to go"
    run = small(optim=Muon(), compile=True, init_from="somewhere")
    text = messages.describe_duration(run, CPU, 54455.0)
    assert text.startswith("warning: about 15:07:35 to go on this device; quicker with")
    for setting in ("budget.minutes=30", "precision=bfloat16", "compile=false", "optim=AdamW", "freeze_fraction=1"):
        name, _, value = setting.partition("=")
        assert setting in text
        allmlp.spec.override(run, name, value)  # the advice can be followed
    plain = small(precision="float32")
    assert not re.search("compile|bfloat16", messages.describe_duration(plain, CPU, 54455.0))
    monkeypatch.setattr(messages, "has_amx", lambda: False)
    assert "bfloat16" not in messages.describe_duration(run, CPU, 54455.0)


@pytest.mark.curves
def test_curves_name_what_makes_training_harder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Label smoothing and mixing in the legend, rates in percent, every metric on axes of its own."""
    plt = pytest.importorskip("matplotlib.pyplot")
    records = [{"kind": "train", "step": s, "loss": 2.0 - s / 10, "accuracy": s / 10} for s in range(5)]
    records += [{"kind": "eval", "step": s, "loss": 1.0, "accuracy": 0.5, "knn_accuracy": 0.9} for s in (2, 4)]
    (tmp_path / log.METRICS).write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "run.json").write_text(
        json.dumps({"run": {"task": {"label_smoothing": 0.1, "mix": {"kind": "Mixup"}}}})
    )
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    log.draw_curves(tmp_path)
    loss, accuracy, knn = figures[0].axes
    legends = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in (loss, accuracy, knn)]
    assert legends[0] == ["training (label smoothing 0.1, mixed images)", "evaluation"]
    assert legends[1:] == [["training (mixed images)", "evaluation"], ["evaluation"]]
    assert [axis.get_title() for axis in (loss, accuracy, knn)] == ["loss", "accuracy", "knn accuracy"]
    assert accuracy.yaxis.get_major_formatter()(0.5, 0).startswith("50") and len(knn.lines) == 1
    assert len({line.get_color() for line in loss.lines}) == 2
