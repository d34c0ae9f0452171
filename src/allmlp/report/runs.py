"""Read a run from its folder. Missing or damaged files become problems to report, not errors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from allmlp.checkpoint import complete
from allmlp.errors import UserError, one_line, plural
from allmlp.files import RUN
from allmlp.log import METRICS
from allmlp.models.cost import Cost, measure
from allmlp.models.model import ModelSpec
from allmlp.record import read_run
from allmlp.run import Run
from allmlp.weights.folder import CONFIG, WEIGHTS, read_spec

MAX_BYTES = 2**20
"""Maximum size of a run.json, and of a line of metrics."""
MAX_STEP = 2**53
"""Integers up to this are exact in a browser."""

SOURCES = ("path", "test", "name", "variant")
"""Fields of data that say which ones they are."""

State = Literal["finished", "unfinished", "broken"]


class MetricRecord(NamedTuple):
    """One line of metrics.jsonl."""

    kind: str
    """train or eval."""
    step: int
    time: float
    """Seconds since 1970."""
    values: dict[str, float]
    """Finite ones only."""


class LoggedRun(NamedTuple):
    name: str
    folder: Path
    state: State
    """finished: its model is saved. broken: run.json cannot be read."""
    problems: tuple[str, ...]
    config: dict[str, Any]
    """Contents of run.json; empty if it cannot be read."""
    run: Run | None
    spec: ModelSpec | None
    """Spec of the saved model; else of the run, without the number of classes or vocabulary given by the data."""
    records: list[MetricRecord]

    def of_kind(self, kind: str) -> list[MetricRecord]:
        return [record for record in self.records if record.kind == kind]

    @property
    def group(self) -> tuple[str, str]:
        """Data and task: metrics of runs are comparable if both are the same."""
        return (type(self.run.data).__name__, type(self.run.task).__name__) if self.run else ("", "")

    @property
    def examples(self) -> tuple[Any, ...]:
        """Where the data come from: two folders of images are other data of the same kind."""
        return tuple(str(getattr(self.run and self.run.data, name, "")) for name in SOURCES)

    def is_comparable(self, other: LoggedRun) -> bool:
        """Whether metrics of both are of the same task and the same examples, as far as is known."""
        records = [run.config.get("data") for run in (self, other)]
        digests = {data.get("sha256") for data in records if isinstance(data, dict)} - {None}
        return self.group == other.group != ("", "") and (self.examples == other.examples or len(digests) < 2)

    @property
    def final(self) -> dict[str, float]:
        """Evaluation of the saved weights: the best one if the run keeps its weights, else the last."""
        evaluated, result = self.of_kind("eval"), self.config.get("result")
        best = result.get("best_step") if isinstance(result, dict) else None
        kept = [record for record in evaluated if record.step == best] or evaluated
        return kept[-1].values if kept else {}

    @property
    def proportion(self) -> tuple[str, int, int] | None:
        """The decisive split, and its numbers of correct and of all examples, if the result contains them."""
        result, sizes = self.config.get("result"), self.config.get("data")
        for split in ("test", "validation"):
            values = result.get(split) if isinstance(result, dict) else None
            accuracy = values.get("accuracy") if isinstance(values, dict) else None
            total = sizes.get(split, sizes.get("test")) if isinstance(sizes, dict) else None
            if isinstance(accuracy, float) and isinstance(total, int) and 0 < total < MAX_STEP and 0 <= accuracy <= 1:
                correct = round(accuracy * total)
                # The accuracy on one of several test sets, or on tokens, is not a fraction of these examples.
                return (split, correct, total) if abs(correct / total - accuracy) < 1e-9 else None
        return None

    @property
    def steps(self) -> int | None:
        return max((record.step for record in self.records), default=None)

    @property
    def epochs_per_step(self) -> float | None:
        points = [one for one in self.of_kind("train") if "epoch" in one.values and one.step > 0]
        return points[-1].values["epoch"] / points[-1].step if points else None

    @property
    def seconds(self) -> float | None:
        """Training time without pauses from the last checkpoint, or from the first to the last record."""
        for place in reversed(complete(self.folder)):
            state = read_object(place / "state.json")
            seconds = state.get("seconds")
            if state.get("step") == self.steps and isinstance(seconds, float) and math.isfinite(seconds):
                return seconds
        return self.records[-1].time - self.records[0].time if len(self.records) > 1 else None

    @property
    def speed(self) -> tuple[float, str] | None:
        """Median throughput over the records, and its unit: images/s."""
        train = self.of_kind("train")
        unit = next((name for one in train for name in one.values if name.endswith("/s")), None)
        return None if unit is None else (median(one.values[unit] for one in train if unit in one.values), unit)

    @property
    def cost(self) -> Cost | None:
        return None if self.spec is None else cost_of(self.spec)


@cache
def cost_of(spec: ModelSpec) -> Cost | None:
    try:
        return measure(spec)
    except UserError:  # the package of an external model is not installed
        return None


def find(paths: Sequence[Path]) -> tuple[dict[str, Path], list[str]]:
    """Name -> folder of every run among the paths or one level below; and the skipped paths, with the reason."""
    folders: list[Path] = []
    skipped = []
    for path in paths:
        try:
            runs, reason = runs_in(path), f"has no {RUN} and no {METRICS}" if path.is_dir() else "is not a folder"
        except OSError as error:
            runs, reason = [], f"cannot be read: {one_line(error)}"
        folders += [folder for folder in runs if folder.resolve() not in {one.resolve() for one in folders}]
        if not runs:
            skipped.append(f"{path} {reason}")
    last = [folder.resolve().name for folder in folders]
    return {str(folder) if last.count(name) > 1 else name: folder for folder, name in zip(folders, last)}, skipped


def runs_in(path: Path) -> list[Path]:
    if is_run(path) or not path.is_dir():
        return [path] if is_run(path) else []
    return [folder for folder in sorted(path.iterdir()) if is_run(folder)]


def is_run(folder: Path) -> bool:
    return (folder / RUN).is_file() or (folder / METRICS).is_file()


def read_logged(name: str, folder: Path) -> LoggedRun:
    problems: list[str] = []
    config, run = read_object(folder / RUN), None
    try:
        run = read_run(folder)
    except UserError as reason:
        problems.append(one_line(str(reason).replace(str(folder / RUN), RUN)))
    except RecursionError:
        problems.append(f"{RUN} is nested too deeply")
    records, problem = read_records(folder / METRICS)
    problems += [problem] if problem else []
    saved = (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()
    spec = run.model if run else None
    if saved:
        try:
            spec = read_spec(folder)
        except UserError as reason:
            problems.append(one_line(reason))
    state: State = "broken" if run is None else "finished" if saved else "unfinished"
    return LoggedRun(name, folder, state, tuple(problems), config, run, spec, records)


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf8")) if file.stat().st_size <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_records(file: Path) -> tuple[list[MetricRecord], str | None]:
    """Records of a metrics file in order, and problems found in it."""
    records, damaged = [], 0
    try:
        for line in lines(file):
            record = parse(line)
            records += [record] if record else []
            damaged += record is None
    except FileNotFoundError:
        return [], f"{METRICS} is missing: no curves"
    except OSError as reason:
        return records, f"{METRICS} cannot be read: {one_line(reason)}"
    if damaged:
        lost = plural(damaged, "line")
        return records, f"{METRICS} is damaged: {lost} of {len(records) + damaged:,} skipped"
    return records, None if records else f"{METRICS} is empty: no curves"


def lines(file: Path) -> Iterator[bytes]:
    """Non-empty lines; one longer than MAX_BYTES comes in pieces."""
    with open(file, "rb") as source:
        while line := source.readline(MAX_BYTES):
            if line.strip():
                yield line


def parse(line: bytes) -> MetricRecord | None:
    try:
        record = json.loads(line)
        kind, step, time = record.pop("kind"), record.pop("step"), float(record.pop("time"))
        values = {
            name: float(value)
            for name, value in record.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    valid = isinstance(step, int) and 0 <= step < MAX_STEP
    return (
        MetricRecord(kind, step, time, values) if kind in ("train", "eval") and valid and math.isfinite(time) else None
    )


def settings(config: dict[str, Any]) -> dict[str, str]:
    """The fields of a run by dotted name; a list is one value."""

    def flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            if path and "kind" in value:
                yield path, str(value["kind"])
            for name, part in value.items():
                if name != "kind":
                    yield from flat(part, f"{path}.{name}" if path else str(name))
        else:
            yield path, value if isinstance(value, str) else json.dumps(value)

    try:
        return dict(flat(config.get("run"), ""))
    except RecursionError:
        return {}
