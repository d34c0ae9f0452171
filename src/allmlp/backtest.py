"""The test forecasts of a run by their origin: when a model was good, and when a naive forecast was better."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from allmlp.data.dataset import subset
from allmlp.data.series import SeriesDataset, Windows
from allmlp.device import own_device
from allmlp.errors import UserError
from allmlp.record import read_run
from allmlp.tasks.forecast import ForecastModule, batches, errors, seasonal_naive, total
from allmlp.weights import folder

MOST = 12
"""Rows of the table."""


class Origin(NamedTuple):
    """The test forecasts that begin in one part of the time."""

    first: str
    """The time of the first forecast value of the earliest."""
    forecasts: int
    mse: float
    mae: float
    mase: float
    naive_mase: float
    """Of the seasonal naive forecast."""


@torch.no_grad()
def backtest(out: Path, device: str | None = None, most: int = MOST) -> list[Origin]:
    """Errors of the model of a finished run in at most `most` equal parts of the time of its test split."""
    run = read_run(out)
    dataset = run.data.for_model(str(out)).load()
    if not isinstance(dataset, SeriesDataset) or not isinstance(dataset.test, Windows):
        raise UserError(f"{out} is no run of time series: it has no origins")
    place = own_device(device)
    model = folder.load(out, device=place)
    module = run.task.build(model, dataset).to(place).eval()
    if not isinstance(module, ForecastModule):
        raise UserError(f"the run in {out} does not forecast")
    times = origin_times(dataset, dataset.test)
    rows = []
    for part in np.array_split(np.unique(times), most):
        chosen = torch.from_numpy(np.flatnonzero(np.isin(times, part)))
        if not len(chosen):
            continue
        split = subset(dataset.test, chosen)
        assert isinstance(split, Windows)
        found = total(module.evaluate(model, batches(split.to(place))))
        naive = total(errors(seasonal_naive(dataset), batches(split), dataset.seasonal_error))
        first = dataset.frequency.text(int(part[0]))
        known = {name: found.get(name, float("nan")) for name in ("mse", "mae", "mase")}
        rows.append(Origin(first, len(chosen), **known, naive_mase=naive.get("mase", float("nan"))))
    return rows


def origin_times(dataset: SeriesDataset, split: Windows) -> np.ndarray:
    """The time of the first forecast value of each window."""
    series = (torch.searchsorted(split.offsets, split.origins, right=True) - 1).numpy()
    steps = split.origins.numpy() - split.offsets.numpy()[series]
    longest = int(steps.max()) if len(steps) else 0
    grids = {
        number: np.concatenate([[start], dataset.frequency.following(start, longest)])
        for number, start in enumerate(dataset.starts)
    }
    return np.array([grids[number][step] for number, step in zip(series.tolist(), steps.tolist())], dtype=np.int64)


def as_table(rows: list[Origin]) -> str:
    """In aligned columns."""
    width = max(len("first value"), *(len(row.first) for row in rows))
    lines = [f"{'first value':{width}}{'forecasts':>11}{'mse':>9}{'mae':>9}{'mase':>8}{'naive mase':>12}"]
    for row in rows:
        numbers = f"{row.mse:9.4f}{row.mae:9.4f}{row.mase:8.3f}{row.naive_mase:12.3f}"
        lines.append(f"{row.first:{width}}{row.forecasts:11,}{numbers}")
    return "\n".join(lines)
