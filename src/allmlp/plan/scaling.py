"""A scaling law fitted to runs, which predicts the loss of the next one.

    L(x) = E + A x^-alpha        x: training FLOPs, parameters or examples; E, A >= 0

For a given alpha, E and A are linear least squares of the relative residuals; alpha is the best of a grid. Intervals
come from fits to the fitted losses with resampled residuals, which are widened by sqrt(n / (n - 3)) for the three
fitted numbers. A run is predicted from the smaller ones only, to see how far the law can be trusted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from allmlp.errors import UserError
from allmlp.models.cost import measure
from allmlp.plan.time import training_flops
from allmlp.record import differences, read_record, read_run
from allmlp.run import Run
from allmlp.spec import to_dict
from allmlp.weights.folder import read_spec

Quantity = Literal["flops", "parameters", "examples"]
QUANTITIES: dict[str, Quantity] = {"flops": "flops", "parameters": "parameters", "examples": "examples"}
MIN_RUNS = 4
"""One more than the law has parameters."""
ALPHAS = np.concatenate([np.linspace(0.005, 1, 400), np.linspace(1.01, 3, 100)])
RESAMPLES = 1000
IRRELEVANT = ("data.seq_len", "data.cache", "data.num_workers")
"""Settings of the data that do not choose test examples."""


class Point(NamedTuple):
    """A finished run."""

    name: str
    flops: float
    """6 per multiply-add and example."""
    parameters: int
    examples: float
    """Seen in training, repetitions included."""
    loss: float


class Law(NamedTuple):
    floor: float
    """E."""
    scale: float
    """A, for x in units of `unit`."""
    alpha: float
    unit: float

    def __call__(self, x: Any) -> Any:
        return self.floor + self.scale * (np.asarray(x) / self.unit) ** -self.alpha


class LossForecast(NamedTuple):
    x: float
    loss: float
    low: float
    high: float
    """95 % interval of the loss of one run."""


class Scaling(NamedTuple):
    by: Quantity
    points: list[Point]
    """Runs from the smallest to the largest."""
    law: Law
    alpha_range: tuple[float, float]
    """95 % interval."""
    floor_range: tuple[float, float]
    held_out: dict[str, float]
    """Run -> relative error of its prediction from the smaller runs, where these are enough for a fit."""
    next: LossForecast

    @property
    def held_out_error(self) -> float | None:
        """Mean absolute relative error over the held-out runs."""
        return float(np.mean(np.abs([*self.held_out.values()]))) if self.held_out else None

    def as_json(self) -> dict[str, Any]:
        fields = {"by": self.by, "runs": [point._asdict() for point in self.points], "E": self.law.floor}
        fields |= {"A": self.law.scale * self.law.unit**self.law.alpha, "alpha": self.law.alpha}
        fields |= {"E_interval": self.floor_range, "alpha_interval": self.alpha_range}
        fields |= {"held_out": self.held_out, "held_out_error": self.held_out_error}
        return fields | {"prediction": self.next._asdict()}


def read_point(folder: Path) -> Point:
    """A finished run: its loss on the test split, or on the validation split if that is all it has."""
    record, run, spec = read_record(folder), read_run(folder), read_spec(folder)
    try:
        result, train = record["result"], record["data"]["train"]
        losses = [result[split]["loss"] for split in ("test", "validation") if "loss" in result.get(split, {})]
        examples = float(result["epochs"] * train * run.aug_repeats)
        loss = float(losses[0])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise UserError(f"{folder} has no loss to fit: it is unfinished, or its task reports none") from None
    if not (math.isfinite(loss) and loss > 0 and examples > 0):
        raise UserError(f"the loss of {folder} is {loss}: leave it out")
    return Point(folder.name, examples * training_flops(spec), measure(spec).parameters, examples, loss)


def scaling(folders: Sequence[Path], by: Quantity = "flops", target: float | None = None, seed: int = 0) -> Scaling:
    """Fit the runs and predict the loss at `target`, by default ten times the largest."""
    check_comparable(folders)
    names = Counter(folder.name for folder in folders)  # rows of several tables have equal names
    points = [read_point(one)._replace(name=one.name if names[one.name] == 1 else str(one)) for one in folders]
    return fit_points(points, by, target, seed)


def fit_points(points: list[Point], by: Quantity = "flops", target: float | None = None, seed: int = 0) -> Scaling:
    points = sorted(points, key=lambda point: getattr(point, by))
    x, y = (np.array([getattr(point, name) for point in points], dtype=float) for name in (by, "loss"))
    law = fit(x, y)
    at = 10 * x[-1] if target is None else target
    if not 0 < at < math.inf:
        raise UserError(f"cannot predict the loss at {at:g} {by}")
    laws, noise = resample(law, x, y, np.random.default_rng(seed))
    predicted = np.array([other(at) for other in laws]) * (1 + noise)
    held_out = {}
    for number in range(len(points)):
        smaller = x < x[number]
        if len(np.unique(x[smaller])) >= MIN_RUNS:
            held_out[points[number].name] = float(fit(x[smaller], y[smaller])(x[number]) / y[number] - 1)
    alphas, floors = percentiles([one.alpha for one in laws]), percentiles([one.floor for one in laws])
    return Scaling(by, points, law, alphas, floors, held_out, LossForecast(at, float(law(at)), *percentiles(predicted)))


def check_comparable(folders: Sequence[Path]) -> None:
    """Raise UserError unless all runs have the same task and test split, so that their losses are comparable, or if one
    is named twice.
    """
    if twice := [folder for folder, count in Counter(map(Path.resolve, folders)).items() if count > 1]:
        raise UserError(f"{twice[0]} is named twice: a run is one point of the fit")
    (run, data, first), *others = [(read_run(one), read_record(one).get("data", {}), one) for one in folders]
    for other, other_data, folder in others:
        reason = f"the losses of {folder} and {first} cannot be compared"
        if type(other.task) is not type(run.task) or other_data.get("test") != data.get("test"):
            what = "tasks" if type(other.task) is not type(run.task) else "test splits"
            raise UserError(f"{reason}: their {what} differ")
        if fields := differences(to_dict(run.task), to_dict(other.task)):
            raise UserError(f"{reason}: task.{fields[0]} differs")
        if selection(other) != selection(run):  # so do the checksums: the test examples are those of equal settings
            if fields := [name for name in differences(source(run), source(other)) if name not in IRRELEVANT]:
                raise UserError(f"{reason}: {fields[0]} differs, and so may their test examples")
        elif len({data.get("sha256"), other_data.get("sha256")} - {None}) == 2:
            raise UserError(f"{reason}: their data differ (data.sha256 in run.json)")


def source(run: Run) -> dict[str, Any]:
    """Settings that determine the test examples."""
    return {"data": to_dict(run.data), "val_size": run.val_size}


def selection(run: Run) -> tuple[Any, ...]:
    """Settings of which the checksum of the data depends though the test examples do not."""
    chosen = run.train_per_class, run.seed if run.train_per_class else None
    return run.train_fraction, *chosen, getattr(run.data, "seq_len", None)


def fit(x: np.ndarray, y: np.ndarray) -> Law:
    """The law with the smallest sum of squared relative residuals."""
    if len(np.unique(x)) < MIN_RUNS:
        raise UserError(
            f"a law with three parameters needs runs of at least {MIN_RUNS} sizes, there are {len(np.unique(x))}"
        )
    unit = float(np.exp(np.log(x).mean()))
    power = (x / unit) ** -ALPHAS[:, None]  # a n
    # Relative residuals E / y + A power / y - 1, solved for every alpha at once.
    u, v = np.broadcast_to(1 / y, power.shape), power / y
    uu, uv, vv, su, sv = (
        (p * q).sum(1) for p, q in ((u, u), (u, v), (v, v), (u, np.ones_like(u)), (v, np.ones_like(v)))
    )
    determinant = uu * vv - uv**2
    floor, scale = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
    # Outside of the quadrant the best point is on its border: no floor, or no slope.
    scale = np.where(floor < 0, sv / vv, scale)
    floor = np.where(floor < 0, 0.0, floor)
    floor, scale = np.where(scale < 0, su / uu, floor), np.where(scale < 0, 0.0, scale)
    best = int((((floor[:, None] * u + scale[:, None] * v) - 1) ** 2).sum(1).argmin())
    return Law(float(floor[best]), float(scale[best]), float(ALPHAS[best]), unit)


def resample(
    law: Law, x: np.ndarray, y: np.ndarray, random: np.random.Generator, count: int = RESAMPLES
) -> tuple[list[Law], np.ndarray]:
    """Fits to the law with residuals drawn from its own, and such a residual for each of them."""
    residuals = (y / law(x) - 1) * math.sqrt(len(x) / (len(x) - 3))
    drawn = random.choice(residuals, (count, len(x) + 1))
    return [fit(x, law(x) * (1 + row[1:])) for row in drawn], drawn[:, 0]


def percentiles(values: Any) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
