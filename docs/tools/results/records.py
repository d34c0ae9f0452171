"""The records that the pages are built from: docs/logs and benchmarks/results.

Runs of studies are lines of logs/study/NAME.jsonl, one complete record each. Older runs are the metrics of a run
(NAME.jsonl) beside its run.json; they were made before a run's record held commit, data and result.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LOGS = ROOT / "docs" / "logs"
BENCHMARKS = ROOT / "benchmarks" / "results"

Record = dict[str, Any]


@cache
def lines(name: str) -> list[Record]:
    """The lines of a .jsonl file below docs/logs; none where there is no file."""
    file = LOGS / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()] if file.exists() else []


@cache
def document(name: str) -> Record:
    """A .json file below docs/logs; empty where there is no file."""
    file = LOGS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf8")) if file.exists() else {}


def study(name: str, row: str) -> list[Record]:
    """The final runs of a row that have ended, one for each seed: the last, if a run was repeated."""
    found = {
        record["seed"]: record
        for record in lines(f"study/{name}")
        if record["row"] == row and record.get("purpose", "final") == "final" and "result" in record
    }
    return [found[seed] for seed in sorted(found)]


def evaluation(name: str, row: str = "", seed: int | None = None) -> Record:
    """The last evaluation in the metrics of a run, or of one row and seed of a table of runs."""
    kept = [
        record
        for record in lines(name)
        if record["kind"] == "eval" and record.get("row", "") == row and (seed is None or record["seed"] == seed)
    ]
    return kept[-1]


def seeds(name: str, row: str) -> list[int]:
    return sorted({record["seed"] for record in lines(name) if record.get("row") == row})


def epochs(name: str) -> float:
    return [record for record in lines(name) if "epoch" in record][-1]["epoch"]


def run_record(name: str) -> Record:
    """The record of a run: its settings, environment, data and result."""
    return document(f"{name}.run")
