"""The records of a study: one line per finished or failed run, appended so that a crash loses none.

A record is the record of the run (`run.json`, see `allmlp.training`) with the study's `row`, `recipe`, `overrides`,
`seed`, `purpose` ("tune" or "final") and `candidate`; `wall` is the duration of the process in seconds, `jobs` how many
ran side by side. A failed run has `failed`, the reason, in place of `result`. The location of data is not part of it.
`inference` is the measurement of the model by `allmlp bench`, if the study asks for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from allmlp.errors import UserError, writing
from allmlp.files import lock, read_json_lines
from allmlp.record import differences
from allmlp.run import Run
from allmlp.spec import from_dict, to_dict
from allmlp.study.definition import Key, Trial

FILE = "records.jsonl"
Record = dict[str, Any]


def read(file: Path) -> list[Record]:
    """Records of a file; empty if it does not exist."""
    return read_json_lines(file) if file.exists() else []


def measured_model(record: Record) -> str:
    """What the inference rate of a run belongs to: its model, and its data, which decide on classes and text lengths.

    A run without a model of its own gets that of another row or folder: its row stands for it.
    """
    run = record["run"]
    return json.dumps([run["model"] or record["row"], run["data"]], sort_keys=True)


def append(file: Path, record: Record) -> None:
    """Append one line, and return when it is on disk."""
    with writing(f"to {file}"), open(file, "ab+") as target:
        cut_short = target.tell() and not file.read_bytes().endswith(b"\n")
        target.write((b"\n" if cut_short else b"") + json.dumps(record).encode() + b"\n")
        target.flush()
        os.fsync(target.fileno())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process from working on the same study."""
    with ExitStack() as stack:
        with writing(f"to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock(folder / ".lock", wait=False))
            except BlockingIOError:
                reason = f"another `allmlp study` runs in {folder}: wait for it, or choose another --out"
                raise UserError(reason) from None
        yield


def match(records: list[Record], trials: list[Trial]) -> tuple[dict[Key, Record], list[str]]:
    """The last record of each trial with the current configuration, and the reasons why others are stale; records of
    other trials are ignored.
    """
    by_key = {trial.key: trial for trial in trials}
    kept: dict[Key, Record] = {}
    stale: dict[Key, str] = {}
    for record in records:
        key = record.get("purpose", "final"), record.get("row"), record.get("candidate", ""), record.get("seed")
        if key not in by_key:
            continue
        trial = by_key[key]  # type: ignore[index]
        changes = changed_fields(record, trial)
        if changes:
            stale[trial.key] = f"{trial.label}: {', '.join(changes)}"
        elif "result" in record or trial.key not in kept:
            kept[trial.key] = record
    return kept, [text for key, text in stale.items() if key not in kept]


def changed_fields(record: Record, trial: Trial) -> list[str]:
    """Fields in which the recorded run differs from the current one; fields added since then have default values."""
    if record.get("recipe") != trial.recipe:
        return ["recipe"]
    try:
        before = from_dict(record.get("run"), "run")
    except UserError as reason:
        return [str(reason)]
    return differences(to_dict(before), to_dict(trial.run)) if isinstance(before, Run) else ["run"]


def make(study: str, trial: Trial, jobs: int, wall: float, run_record: Record) -> Record:
    """Make the record of a run: `run_record` is its run.json, with `failed` if it has failed."""
    sets = [word for field, value in trial.overrides.items() for word in ("--set", f"{field}={value}")]
    return {
        "study": study,
        "row": trial.row,
        "recipe": trial.recipe,
        "overrides": dict(trial.overrides),
        "seed": trial.seed,
        "purpose": trial.purpose,
        "candidate": trial.candidate,
        "jobs": jobs,
        "wall": round(wall, 1),
        **run_record,
        # Without the folders of this machine.
        "run": to_dict(trial.run),
        "environment": run_record.get("environment", {}) | {"command": ["allmlp", "train", trial.recipe, *sets]},
    }
