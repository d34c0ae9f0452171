"""A run as its folder tells it. What is missing or damaged is said, never an error: one bad run spoils no report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from allmlp.checkpoint import complete
from allmlp.errors import UserError, one_line
from allmlp.files import RUN
from allmlp.log import METRICS
from allmlp.models.cost import Cost, measure
from allmlp.models.encoder import Encoder
from allmlp.models.foreign import Foreign
from allmlp.models.model import ModelSpec
from allmlp.run import Run
from allmlp.train import read_run
from allmlp.weights.folder import CONFIG, WEIGHTS, read_spec

LONGEST = 2**20
"""Bytes of a run.json, and of a line of metrics."""
LARGEST = 2**53
"""Whole numbers up to here are exact in a browser."""
FAMILIES = {
    "TinyAttention": "aMLP",
    "SpatialGate": "gMLP",
    "TokenMlp": "Mixer",
    "TokenLinear": "ResMLP",
    "TokenConv": "ResMLP with convolutions",
    "Attention": "Transformer",
}
"""What mixes the tokens -> whose model it is; the first kind that a model holds decides."""

State = Literal["finished", "unfinished", "broken"]


class Point(NamedTuple):
    """One line of metrics.jsonl."""

    kind: str
    """train or eval."""
    step: int
    time: float
    """Seconds since 1970."""
    values: dict[str, float]
    """Finite ones only."""


class Entry(NamedTuple):
    name: str
    folder: Path
    state: State
    """finished: its model is there. broken: what it was is not known."""
    faults: tuple[str, ...]
    record: dict[str, Any]
    """run.json as it is, empty where it cannot be read."""
    run: Run | None
    spec: ModelSpec | None
    """Of the model it has kept; else of the one it was to train, before the data had set its classes or words."""
    points: list[Point]

    def of_kind(self, kind: str) -> list[Point]:
        return [point for point in self.points if point.kind == kind]

    @property
    def final(self) -> dict[str, float]:
        """The last evaluation."""
        judged = self.of_kind("eval")
        return judged[-1].values if judged else {}

    @property
    def steps(self) -> int | None:
        return max((point.step for point in self.points), default=None)

    @property
    def epochs_per_step(self) -> float | None:
        known = [point for point in self.of_kind("train") if "epoch" in point.values and point.step > 0]
        return known[-1].values["epoch"] / known[-1].step if known else None

    @property
    def seconds(self) -> float | None:
        """Of training, pauses left out, as the last checkpoint says; else from the first record to the last."""
        for place in reversed(complete(self.folder)):
            state = read_object(place / "state.json")
            seconds = state.get("seconds")
            if state.get("step") == self.steps and isinstance(seconds, float) and math.isfinite(seconds):
                return seconds
        return self.points[-1].time - self.points[0].time if len(self.points) > 1 else None

    @property
    def speed(self) -> tuple[float, str] | None:
        """The median over the records, and its unit: images/s."""
        train = self.of_kind("train")
        unit = next((name for point in train for name in point.values if name.endswith("/s")), None)
        return None if unit is None else (median(p.values[unit] for p in train if unit in p.values), unit)

    @property
    def cost(self) -> Cost | None:
        return None if self.spec is None else cost_of(self.spec)


@cache
def cost_of(spec: ModelSpec) -> Cost | None:
    try:
        return measure(spec)
    except UserError:  # the package of a foreign network is not here
        return None


def find(paths: Sequence[Path]) -> tuple[dict[str, Path], list[str]]:
    """Name -> folder of every run among the paths and one level below them; and what was left out, with the reason."""
    found: list[Path] = []
    left_out = []
    for path in paths:
        try:
            runs, reason = runs_in(path), f"has no {RUN} and no {METRICS}" if path.is_dir() else "is not a folder"
        except OSError as trouble:
            runs, reason = [], f"cannot be read: {one_line(trouble)}"
        found += [folder for folder in runs if folder.resolve() not in {one.resolve() for one in found}]
        if not runs:
            left_out.append(f"{path} {reason}")
    last = [folder.resolve().name for folder in found]
    return {str(folder) if last.count(name) > 1 else name: folder for folder, name in zip(found, last)}, left_out


def runs_in(path: Path) -> list[Path]:
    if is_run(path) or not path.is_dir():
        return [path] if is_run(path) else []
    return [folder for folder in sorted(path.iterdir()) if is_run(folder)]


def is_run(folder: Path) -> bool:
    return (folder / RUN).is_file() or (folder / METRICS).is_file()


def read_entry(name: str, folder: Path) -> Entry:
    faults: list[str] = []
    record, run = read_object(folder / RUN), None
    try:
        run = read_run(folder)
    except UserError as reason:
        faults.append(one_line(str(reason).replace(str(folder / RUN), RUN)))
    except RecursionError:
        faults.append(f"{RUN} is nested too deeply")
    points, problem = read_points(folder / METRICS)
    faults += [problem] if problem else []
    kept = (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()
    spec = run.model if run else None
    if kept:
        try:
            spec = read_spec(folder)
        except UserError as reason:
            faults.append(one_line(reason))
    state: State = "broken" if run is None else "finished" if kept else "unfinished"
    return Entry(name, folder, state, tuple(faults), record, run, spec, points)


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf8")) if file.stat().st_size <= LONGEST else None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_points(file: Path) -> tuple[list[Point], str | None]:
    """The records of a metrics file in their order, and what is wrong with it."""
    points, damaged = [], 0
    try:
        for line in lines(file):
            point = parse(line)
            points += [point] if point else []
            damaged += point is None
    except FileNotFoundError:
        return [], f"{METRICS} is missing: there are no curves"
    except OSError as reason:
        return points, f"{METRICS} cannot be read: {one_line(reason)}"
    if damaged:
        lost = "1 line" if damaged == 1 else f"{damaged:,} lines"
        return points, f"{METRICS} is damaged: {lost} of {len(points) + damaged:,} left out"
    return points, None if points else f"{METRICS} is empty: there are no curves"


def lines(file: Path) -> Iterator[bytes]:
    """Those that are not empty; one that does not end within LONGEST bytes comes in pieces."""
    with open(file, "rb") as source:
        while line := source.readline(LONGEST):
            if line.strip():
                yield line


def parse(line: bytes) -> Point | None:
    try:
        found = json.loads(line)
        kind, step, time = found.pop("kind"), found.pop("step"), float(found.pop("time"))
        values = {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    whole = isinstance(step, int) and 0 <= step < LARGEST
    return Point(kind, step, time, values) if kind in ("train", "eval") and whole and math.isfinite(time) else None


def describe(spec: ModelSpec | None) -> str:
    """A model in a few words: gMLP 12 x 256."""
    if spec is None:
        return ""
    if isinstance(spec, Foreign):
        return spec.name
    kinds = {type(part).__name__ for part in spec.children()}
    family = next((name for kind, name in FAMILIES.items() if kind in kinds), type(spec).__name__)
    return f"{family} {spec.depth} x {spec.width}" if isinstance(spec, Encoder) else family


def settings(record: dict[str, Any]) -> dict[str, str]:
    """The fields of a run by their dotted names; a list is one value."""

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
        return dict(flat(record.get("run"), ""))
    except RecursionError:
        return {}
