"""Callbacks and trackers of a run: every event, a resumed run, and code that fails."""

from __future__ import annotations

import logging
import shutil
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import allmlp
from allmlp import checkpoint
from allmlp.callbacks import Callbacks, trackers
from train import runs


class Listener(allmlp.Callback):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, out: Path, config: Mapping[str, Any], step: int) -> None:
        self.events.append(("start", out.name, config["batch_size"], step))

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self.events.append(("step", step, values["loss"] > 0))

    def on_eval(self, step: int, values: Mapping[str, float]) -> None:
        self.events.append(("eval", step, 0 <= values["accuracy"] <= 1))

    def on_save(self, step: int, folder: Path) -> None:
        self.events.append(("save", step, (folder / "state.json").is_file()))

    def on_end(self, result: Mapping[str, Any]) -> None:
        self.events.append(("end", result.get("steps")))


def test_every_event_is_told(tmp_path: Path) -> None:
    """With log_every=1, eval_every=6 and save_every=4 of 12 steps; a resumed run begins where it was."""
    listener, run = Listener(), runs.small()
    allmlp.train(run, tmp_path / "run", callbacks=[listener])
    kinds = [event[0] for event in listener.events]
    assert listener.events[0] == ("start", "run", 24, 0) and listener.events[-1] == ("end", 12)
    assert kinds.count("step") == 12 and all(event[2] for event in listener.events if event[0] in ("step", "eval"))
    assert [event[1:] for event in listener.events if event[0] == "save"] == [(4, True), (8, True), (12, True)]
    assert [event[1] for event in listener.events if event[0] == "eval"] == [6, 12]
    shutil.rmtree(checkpoint.complete(tmp_path / "run")[-1])
    again = Listener()
    allmlp.train(run, tmp_path / "run", callbacks=[again])
    assert again.events[0] == ("start", "run", 24, 8) and [e[0] for e in again.events].count("step") == 4


def test_a_callback_that_fails_is_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Listener):
        def on_step(self, step: int, values: Mapping[str, float]) -> None:
            super().on_step(step, values)
            if step == 3:
                raise ConnectionError("server gone")

    broken, listener = Broken(), Listener()
    with caplog.at_level(logging.WARNING, "allmlp.callbacks"):
        allmlp.train(runs.small(), tmp_path / "run", callbacks=[broken, listener])
    assert [event[0] for event in broken.events].count("step") == 3 and listener.events[-1] == ("end", 12)
    assert [record.getMessage() for record in caplog.records] == [
        "Broken.on_step failed and is disabled: ConnectionError: server gone"
    ]


class FakeWandB(types.ModuleType):
    """What the tracker uses of wandb: init, and a run with log, summary, finish and id."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[Any, ...]] = []
        self.summary = self
        self.id = "abc"

    def init(self, **options: Any) -> FakeWandB:
        self.calls.append(("init", options["name"], options["id"]))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", step, sorted(values)))

    def update(self, values: dict[str, Any]) -> None:
        self.calls.append(("summary", values["steps"]))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_wandb_continues_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, run = FakeWandB(), runs.small()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    allmlp.train(run, tmp_path / "run", callbacks=trackers("wandb"))
    assert fake.calls[0] == ("init", "run", None) and fake.calls[-2:] == [("summary", 12), ("finish",)]
    assert ("log", 6, ["eval/accuracy", "eval/loss"]) in fake.calls
    shutil.rmtree(checkpoint.complete(tmp_path / "run")[-1])
    fake.calls.clear()
    allmlp.train(run, tmp_path / "run", callbacks=trackers("wandb"))
    assert fake.calls[0] == ("init", "run", "abc")


def test_the_id_of_a_tracker_is_not_lost_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: Path, content: bytes) -> None:
        file.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(sys.modules, "wandb", FakeWandB())
    (tmp_path / "wandb.txt").write_text("abc")
    monkeypatch.setattr(Path, "write_bytes", full)
    Callbacks(trackers("wandb")).call("on_start", tmp_path, {}, 4)
    assert (tmp_path / "wandb.txt").read_text() == "abc" and "No space left" in caplog.text


def test_names_of_trackers() -> None:
    assert trackers("") == []
    with pytest.raises(allmlp.UserError, match=r"unknown tracker 'wandbb'; did you mean 'wandb'\?"):
        trackers("wandbb")


def test_a_tracker_that_is_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(allmlp.UserError, match="this needs wandb"), caplog.at_level("WARNING", "allmlp"):
        allmlp.train(runs.small(), tmp_path / "run", callbacks=trackers("wandb"))
    assert not caplog.records
