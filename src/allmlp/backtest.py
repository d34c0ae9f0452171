"""Back-tests: errors of forecasts on values that a model was not trained on, from its own table or another one, by
forecast origin and compared with a naive forecast.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from allmlp.data.dataset import subset
from allmlp.data.preprocessing import SeriesPreprocessing
from allmlp.data.series import SeriesDataset, Windows, eval_stride, every, level, seasonal_error
from allmlp.data.series_table import SeriesRows
from allmlp.device import own_device
from allmlp.errors import UserError
from allmlp.models.model import Model
from allmlp.record import read_run
from allmlp.tasks.forecast import ForecastModule, batches, errors, seasonal_naive, total
from allmlp.weights import folder

MOST = 12
"""Maximum number of rows in the table."""
ALIKE = 0.01
"""Values are the same if means and standard deviations differ by less than this, in standard deviations."""
Overlap = Literal["none", "training values", "other values"]
"""What a series has at the times of the training values: nothing, these, or others."""


class Origin(NamedTuple):
    """The test forecasts that start in one part of the test period."""

    first: str
    """Time of the first value of the earliest forecast."""
    forecasts: int
    mse: float
    mae: float
    mase: float
    naive_mase: float
    """MASE of the seasonal naive forecast."""


def backtest(out: Path, device: str | None = None, most: int = MOST) -> list[Origin]:
    """Errors of a finished run's model in at most `most` equal parts of its test period."""
    run = read_run(out)
    dataset = run.data.for_model(str(out)).load()
    if not isinstance(dataset, SeriesDataset):
        raise UserError(f"{out} is not a run of time series, so it has no forecast origins")
    place = own_device(device)
    model = folder.load(out, device=place)
    module = run.task.build(model, dataset).to(place)
    if not isinstance(module, ForecastModule):
        raise UserError(f"the run in {out} does not forecast")
    return by_origin(module, model, dataset, most)


@torch.no_grad()
def by_origin(module: ForecastModule, model: Model, dataset: SeriesDataset, most: int = MOST) -> list[Origin]:
    """Errors of the forecasts of the test split, by part of the test period."""
    assert isinstance(dataset.test, Windows)
    module.eval()
    times = origin_times(dataset, dataset.test)
    rows = []
    for part in np.array_split(np.unique(times), most):
        chosen = torch.from_numpy(np.flatnonzero(np.isin(times, part)))
        if not len(chosen):
            continue
        split = subset(dataset.test, chosen)
        assert isinstance(split, Windows)
        totals = total(module.evaluate(model, batches(split.to(model.device))))
        naive = total(errors(seasonal_naive(dataset), batches(split), dataset.seasonal_error))
        first = dataset.frequency.text(int(part[0]))
        values = {name: totals.get(name, float("nan")) for name in ("mse", "mae", "mase")}
        rows.append(Origin(first, len(chosen), **values, naive_mase=naive.get("mase", float("nan"))))
    return rows


def origin_times(dataset: SeriesDataset, split: Windows) -> np.ndarray:
    """Time of the first forecast value of each window."""
    series = (torch.searchsorted(split.offsets, split.origins, right=True) - 1).numpy()
    steps = split.origins.numpy() - split.offsets.numpy()[series]
    times = np.empty(len(steps), dtype=np.int64)
    for number in np.unique(series):
        rows, start = series == number, dataset.starts[number]
        times[rows] = np.concatenate([[start], dataset.frequency.following(start, int(steps[rows].max()))])[steps[rows]]
    return times


def as_table(rows: list[Origin]) -> str:
    """Format the rows in aligned columns."""
    width = max(len("first value"), *(len(row.first) for row in rows))
    lines = [f"{'first value':{width}}{'forecasts':>11}{'mse':>9}{'mae':>9}{'mase':>8}{'naive mase':>12}"]
    for row in rows:
        numbers = f"{row.mse:9.4f}{row.mae:9.4f}{row.mase:8.3f}{row.naive_mase:12.3f}"
        lines.append(f"{row.first:{width}}{row.forecasts:11,}{numbers}")
    return "\n".join(lines)


# --- another table ------------------------------------------------------------------------------------------


def unseen_windows(
    series: SeriesRows, preprocessing: SeriesPreprocessing, seq_len: int, horizon: int, where: str
) -> SeriesDataset:
    """The series of a table as the test split of a model: all forecasts except of values that it was trained on.

    Values are scaled as in training; those of a series new to the model, by their own mean and standard deviation.
    """
    places = {name: place for place, name in enumerate(preprocessing.ids)}
    offsets = np.concatenate([[0], np.cumsum(series.lengths)[:-1]]).astype(np.int64)
    scaled = torch.empty(series.values.shape).numpy()
    means, stds, units = (np.empty((len(series.ids), len(preprocessing.columns))) for _ in range(3))
    origins, overlaps = list[np.ndarray](), Counter[Overlap]()
    for number, (name, offset, length) in enumerate(zip(series.ids, offsets, series.lengths)):
        rows, place = series.values[offset : offset + length], places.get(name)
        mean, std = level(rows) if place is None else (preprocessing.mean[place], preprocessing.std[place])
        means[number], stds[number] = mean, std
        scaled[offset : offset + length] = (rows - means[number]) / stds[number]
        units[number] = seasonal_error(scaled[offset : offset + length], preprocessing.frequency.season)
        candidates = np.arange(min(seq_len, max(length - horizon, 1)), length - horizon + 1)
        if place is not None and preprocessing.seasonal_error:
            unit = np.array(preprocessing.seasonal_error[place])
            units[number] = np.where(unit > 0, unit, np.nan)
        if place is not None and preprocessing.learned:
            learned = learned_rows(series, number, preprocessing.learned[place])
            overlap = overlap_of(rows, learned, means[number], stds[number])
            overlaps[overlap] += 1
            if overlap == "training values":
                candidates = unseen_origins(candidates, learned, length, horizon)
        origins.append(offset + candidates)
    count = sum(map(len, origins))
    if not count:
        why = " without the values that the model was trained on" if overlaps["training values"] else ""
        raise UserError(f"{where} has no forecast of {horizon} steps to evaluate: its series are too short{why}")
    notes = list(series.notes)
    if seen := overlaps["training values"]:
        notes.append(f"{seen:,} of {len(series.ids):,} series hold training values, which do not count")
    if differing := overlaps["other values"]:
        notes.append(f"{differing:,} of {len(series.ids):,} series differ from the training values at the same times")
    stride = eval_stride(count)
    if stride > 1:
        notes.append(f"{count:,} forecasts are more than an evaluation needs: one of {stride} is evaluated")
    tensors = torch.from_numpy(scaled), torch.from_numpy(offsets)
    chosen = every(stride, origins)
    return SeriesDataset(
        Windows(*tensors, chosen[:0], seq_len, horizon),
        Windows(*tensors, chosen, seq_len, horizon),
        columns=preprocessing.columns,
        ids=series.ids,
        mean=torch.from_numpy(means),
        std=torch.from_numpy(stds),
        frequency=series.frequency,
        seasonal_error=torch.from_numpy(units).float(),
        seq_len=seq_len,
        horizon=horizon,
        starts=tuple(series.starts.tolist()),
        notes=tuple(notes),
    )


def overlap_of(rows: np.ndarray, learned: tuple[int, int, int], mean: np.ndarray, std: np.ndarray) -> Overlap:
    """What a series has in the `learned_rows`: the training values have this mean and standard deviation."""
    begin, trained, end = learned
    if begin >= 0 and trained <= len(rows) and not alike(level(rows[begin:trained]), mean, std):
        return "other values"
    return "training values" if begin < len(rows) and end > 0 else "none"


def unseen_origins(origins: np.ndarray, learned: tuple[int, int, int], length: int, horizon: int) -> np.ndarray:
    """The origins whose forecasts end before the `learned_rows`, and all of those after them."""
    begin, _, end = learned
    return np.concatenate([origins[origins + horizon <= begin], np.arange(max(end, 1), length - horizon + 1)])


def learned_rows(series: SeriesRows, number: int, learned: tuple[int, int, int]) -> tuple[int, int, int]:
    """Rows of a series at which training started (negative if before the first), training ended, validation ended."""
    first, trained, validated = learned
    begin = round(float(np.diff(series.frequency.count(np.array([series.starts[number], first])))[0]))
    return begin, begin + trained, begin + validated


def alike(stats: tuple[np.ndarray, np.ndarray], mean: np.ndarray, std: np.ndarray) -> bool:
    """Whether values with this mean and standard deviation are those of training, up to a few corrections."""
    return bool((np.abs(stats[0] - mean) <= ALIKE * std).all() and (np.abs(stats[1] - std) <= ALIKE * std).all())
