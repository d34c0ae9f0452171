"""`--track` with the real packages: what they stored is what metrics.jsonl has."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import allmlp
from allmlp import checkpoint
from allmlp.callbacks import trackers
from allmlp.cli import main
from peers.installed import peer
from train import runs

Values = dict[tuple[str, int], float]
"""By name and step."""


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return tmp_path / "mlruns"


def logged(out: Path) -> Values:
    """Of metrics.jsonl."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        (f"{row['kind']}/{name}", row["step"]): value
        for row in rows
        for name, value in row.items()
        if name not in ("kind", "step", "time")
    }


def in_mlflow(out: Path) -> Values:
    client = peer("mlflow").MlflowClient()
    run = client.get_run((out / "mlflow.txt").read_text())
    assert run.info.status == "FINISHED" and run.info.run_name == out.name
    rows = [row for name in run.data.metrics for row in client.get_metric_history(run.info.run_id, name)]
    return {(row.key, row.step): row.value for row in rows}


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: a LevelDB log (blocks of 32 KiB, records in one or more parts) after 7 bytes."""
    data, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def in_wandb(out: Path) -> tuple[Values, dict[str, Any]]:
    """History and summary of all offline runs with the id of this one."""
    proto = peer("wandb.proto.wandb_internal_pb2")
    identity, values, summary = (out / "wandb.txt").read_text(), {}, {}
    for file in sorted((out / "wandb").glob(f"offline-run-*-{identity}/*.wandb")):
        for data in wandb_records(file):
            record = proto.Record.FromString(data)
            row = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            row = {name: json.loads(value) for name, value in row.items()}
            values |= {(name, record.history.step.num): row[name] for name in row if not name.startswith("_")}
            summary |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
    return values, summary


def test_the_command_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B, MLflow and TensorBoard hold every value of metrics.jsonl, of a run that is interrupted and resumed too."""
    peer("wandb"), peer("mlflow")
    out = tmp_path / "run"
    (tmp_path / "experiment.py").write_text("from train import runs\n\n\ndef small():\n    return runs.small()\n")
    with pytest.raises(SystemExit) as ended:
        main(["train", f"{tmp_path}/experiment.py:small", "--out", str(out), "--track", "wandb,mlflow"])
    assert not ended.value.code
    expected = logged(out)
    assert len({step for _, step in expected}) == 12 and ("eval/accuracy", 12) in expected
    assert in_mlflow(out) == expected
    history, summary = in_wandb(out)
    assert history == expected and summary["steps"] == 12
    events = peer("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    scalars = {(name, row.step): row.value for name in events.Tags()["scalars"] for row in events.Scalars(name)}
    assert scalars == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_continues(tmp_path: Path) -> None:
    """Under its old id, with the values that were computed again."""
    peer("wandb"), peer("mlflow")
    out, run = tmp_path / "run", runs.small()
    allmlp.train(run, out, callbacks=trackers("wandb,mlflow"))
    names = [(out / file).read_text() for file in ("wandb.txt", "mlflow.txt")]
    shutil.rmtree(checkpoint.complete(out)[-1])
    allmlp.train(run, out, callbacks=trackers("wandb,mlflow"))
    assert [(out / file).read_text() for file in ("wandb.txt", "mlflow.txt")] == names
    expected = logged(out)
    assert in_mlflow(out).keys() == expected.keys() and in_wandb(out)[0].keys() == expected.keys()
    same = {key: value for key, value in expected.items() if not key[0].endswith("/s")}  # speeds are measured again
    assert same.items() <= in_wandb(out)[0].items() and same.items() <= in_mlflow(out).items()


class Saboteur(allmlp.Callback):
    """Breaks a tracker after step 3."""

    def __init__(self, name: str, store: Path) -> None:
        self.name, self.store = name, store

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        if step == 3 and self.name == "wandb":
            peer("wandb").finish()
        elif step == 3:
            shutil.rmtree(self.store)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_fails_in_mid_run(
    name: str, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on and is complete; one warning tells which tracker is switched off."""
    peer(name)
    with caplog.at_level(logging.WARNING, "allmlp"):
        allmlp.train(runs.small(), tmp_path / "run", callbacks=[*trackers(name), Saboteur(name, store)])
    assert max(step for _, step in logged(tmp_path / "run")) == 12 and allmlp.load(tmp_path / "run")
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("allmlp")]
    kind = type(trackers(name)[0]).__name__
    assert message.startswith(f"{kind}.on_step failed and is disabled: ") and "\n" not in message
    if name == "mlflow":
        with contextlib.suppress(Exception):
            peer("mlflow").end_run()


def test_a_run_inside_an_open_run_of_mlflow(tmp_path: Path) -> None:
    """As in a notebook: ours is a run of its own, and theirs stays open."""
    mlflow = peer("mlflow")
    with mlflow.start_run() as theirs:
        allmlp.train(runs.small(), tmp_path / "run", callbacks=trackers("mlflow"))
        assert mlflow.active_run().info.run_id == theirs.info.run_id
    assert in_mlflow(tmp_path / "run") == logged(tmp_path / "run")
    assert not mlflow.get_run(theirs.info.run_id).data.metrics
