"""Forecasts of the series in a table by a trained model, as a table and as a figure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from allmlp.data.frequency import Frequency
from allmlp.data.preprocessing import SeriesPreprocessing, read_preprocessing
from allmlp.data.series import level
from allmlp.data.series_table import SeriesRows, read_series, split_name
from allmlp.device import own_device
from allmlp.errors import UserError, command, one_line, require
from allmlp.files import write_csv_atomically
from allmlp.layers.series import ReconstructionHead
from allmlp.models.model import Model
from allmlp.prediction.predictor import model_folder
from allmlp.tasks.forecast import median
from allmlp.weights.folder import load

BATCH = 256
SHOWN = 4
"""Series in a figure."""


class SeriesForecast(NamedTuple):
    """The forecast of one series, in the units of the table."""

    id: str
    past_times: np.ndarray
    past: np.ndarray
    """Input of the model, steps x columns, NaN where missing."""
    times: np.ndarray
    values: np.ndarray
    """steps x columns; the median of a model of quantiles."""
    quantiles: np.ndarray | None
    """steps x columns x quantiles, increasing."""
    frequency: Frequency

    @property
    def stamps(self) -> list[str]:
        """The times, written as in the table."""
        return [self.frequency.text(int(time)) for time in self.times]


def series_folder(model: str | os.PathLike[str]) -> Path | None:
    """The folder of a time-series model; None for other models."""
    folder = model_folder(os.fspath(model))
    return folder if folder and isinstance(read_preprocessing(folder), SeriesPreprocessing) else None


class Forecaster:
    """A trained time-series model, loaded from its folder."""

    def __init__(self, folder: str | os.PathLike[str], device: str | None = None) -> None:
        self.folder = Path(folder)
        preprocessing = read_preprocessing(self.folder)
        if not isinstance(preprocessing, SeriesPreprocessing):
            raise UserError(f"the model in {folder} does not forecast time series")
        self.preprocessing = preprocessing
        self.model: Model = load(self.folder, device=own_device(device))
        spec: Any = self.model.spec
        if isinstance(getattr(spec, "head", None), ReconstructionHead):
            raise UserError(
                f"the model in {folder} restores hidden patches: train it to forecast, "
                + command("train", "TABLE", "--horizon", "STEPS", "--model", folder)
            )
        self.seq_len: int = spec.stem.seq_len if hasattr(spec, "stem") else spec.seq_len
        self.horizon: int = spec.head.horizon if hasattr(spec, "stem") else spec.horizon
        self.levels: tuple[float, ...] = spec.head.quantiles if hasattr(spec, "stem") else ()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def read(self, *tables: str) -> SeriesRows:
        """The series of tables with the columns that the model was trained on."""
        preprocessing = self.preprocessing
        series = read_series(
            tables, preprocessing.time_column, preprocessing.id_columns, preprocessing.columns, preprocessing.frequency
        )
        if any(length > 1 for length in series.lengths) and is_coarser(series):
            raise UserError(
                f"{', '.join(tables)} has longer steps than the {preprocessing.frequency} that the model was trained "
                "on: resample it"
            )
        return series

    def forecast(self, *tables: str) -> Iterator[SeriesForecast]:
        """Forecast the steps after the end of each series in the tables."""
        series = self.read(*tables)
        ends = np.cumsum(series.lengths)
        numbers = iter(range(len(ends)))
        while batch := list(islice(numbers, BATCH)):
            rows = [series.values[ends[n] - min(series.lengths[n], self.seq_len) : ends[n]] for n in batch]
            predictions = self.predict(rows, [series.ids[n] for n in batch])
            for number, past, (values, quantiles) in zip(batch, rows, predictions, strict=True):
                last, frequency = int(series.ends[number]), series.frequency
                first = preceding(frequency, int(series.starts[number]), series.lengths[number], len(past))
                times = frequency.following(last, self.horizon)
                yield SeriesForecast(series.ids[number], first, past, times, values, quantiles, frequency)

    @torch.inference_mode()
    def predict(self, rows: list[np.ndarray], ids: list[str]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Point forecasts and quantiles after these rows, each steps x columns."""
        past = np.full((len(rows), self.seq_len, len(self.preprocessing.columns)), np.nan)
        shift, scale = np.empty((2, len(rows), 1, past.shape[2]))
        places = {name: place for place, name in enumerate(self.preprocessing.ids)}
        for number, (row, name) in enumerate(zip(rows, ids)):
            if not np.isfinite(row).any():
                raise UserError(f"{f'series {name!r}' if name else 'the series'} has no value to forecast from")
            place = places.get(name)
            # A series that the model was not trained on is scaled by its own past.
            mean, std = level(row) if place is None else (self.preprocessing.mean[place], self.preprocessing.std[place])
            past[number, self.seq_len - len(row) :] = row
            shift[number], scale[number] = mean, std
        x = torch.from_numpy((past - shift) / scale).float().to(self.model.device)
        mask = x.isfinite()
        y = (self.model(x) if bool(mask.all()) else self.model(x, mask)).double().cpu().numpy()
        if not self.levels:
            return [(values, None) for values in y * scale + shift]
        y = np.sort(y, axis=-1) * scale[..., None] + shift[..., None]
        return [(quantiles[..., median(self.levels)], quantiles) for quantiles in y]


def is_coarser(series: SeriesRows) -> bool:
    """Whether values are observed only at a multiple of the step, so that the rows between are all missing."""
    observed = np.flatnonzero(np.isfinite(series.values).any(1))
    steps = np.diff(observed[:10_000])
    return len(steps) > 2 and int(np.median(steps)) > 1


def preceding(frequency: Frequency, start: int, length: int, count: int) -> np.ndarray:
    """Times of the last `count` of `length` steps starting at `start`."""
    return np.concatenate([[start], frequency.following(start, length - 1)])[-count:]


# --- output -------------------------------------------------------------------------------------------------


def write_forecasts(forecasts: Iterable[SeriesForecast], forecaster: Forecaster, out: Path) -> list[SeriesForecast]:
    """Write a table, a row for each step; returns the first forecasts."""
    preprocessing, shown, suffixes = (
        forecaster.preprocessing,
        list[SeriesForecast](),
        [f"_{q:g}" for q in forecaster.levels],
    )
    header = [preprocessing.time_column or "time", *preprocessing.id_columns]
    header += [f"{name}{suffix}" for name in preprocessing.columns for suffix in ("", *suffixes)]

    def rows() -> Iterator[list[str]]:
        for forecast in forecasts:
            shown.extend([forecast] if len(shown) < SHOWN else [])
            ids = split_name(forecast.id, len(preprocessing.id_columns))
            for step, stamp in enumerate(forecast.stamps):
                parts = forecast.values[step, :, None] if forecast.quantiles is None else forecast.quantiles[step]
                points = [[point, *others] for point, others in zip(forecast.values[step], parts)]
                yield [stamp, *ids, *(f"{value:.10g}" for row in points for value in row[: 1 + len(suffixes)])]

    if out.suffix != ".csv":
        raise UserError(f"forecasts are written as .csv, not {out.suffix or 'without a suffix'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_csv_atomically(out, header, rows())
    except OSError as reason:
        raise UserError(f"cannot write {out}: {one_line(reason)}") from None
    return shown


def draw_forecasts(forecasts: list[SeriesForecast], forecaster: Forecaster, file: Path) -> None:
    """Past, forecast and the bands between quantiles, for the first series and columns."""
    pyplot = require("matplotlib.pyplot", "analysis")
    panels = [(one, column) for one in forecasts for column in range(len(forecaster.preprocessing.columns))][:SHOWN]
    figure, axes = pyplot.subplots(len(panels), figsize=(9, 2.4 * len(panels)), squeeze=False, layout="constrained")
    for axis, (one, column) in zip(axes[:, 0], panels):
        counted = forecaster.preprocessing.frequency.unit == "row"
        past_times, times = (part if counted else part.astype("datetime64[ms]") for part in (one.past_times, one.times))
        kept = slice(-4 * forecaster.horizon, None)
        axis.plot(past_times[kept], one.past[kept, column], color="0.3", linewidth=1, label="past")
        axis.plot(times, one.values[:, column], color="C0", linewidth=1.5, label="forecast")
        if one.quantiles is not None:
            bands = one.quantiles.shape[2] // 2
            for low in range(bands):
                high = one.quantiles.shape[2] - 1 - low
                name = f"{forecaster.levels[low]:g} to {forecaster.levels[high]:g}"
                edges = one.quantiles[:, column, low], one.quantiles[:, column, high]
                shade = 0.5 * (low + 1) / (bands + 1)
                axis.fill_between(times, *edges, color="C0", alpha=shade, linewidth=0, label=name)
        title = " ".join(filter(None, (one.id, forecaster.preprocessing.columns[column])))
        axis.set_title(title, loc="left", fontsize=9, parse_math=False)  # names may have dollar signs
        axis.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=8, frameon=False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
