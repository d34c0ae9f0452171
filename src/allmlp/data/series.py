"""Time series: rolling windows over one array, without copies, and the dataset of such windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from allmlp.data.dataset import Dataset, InMemory
from allmlp.data.frequency import Frequency
from allmlp.data.preprocessing import PREPROCESSING_FILE, SeriesPreprocessing
from allmlp.device import upload
from allmlp.errors import UserError
from allmlp.spec import to_json

MAX_EVALUATED = 2_000
"""Maximum number of forecasts per evaluation, and per validation during training."""


class SeriesBatch(NamedTuple):
    past: Tensor
    """float32, b l v; NaN where a value is missing."""
    future: Tensor
    """float32, b h v."""
    series: Tensor
    """int64, b: index of the series."""


class Windows(InMemory):
    """Windows of series concatenated in one array; the forecast of window i starts at row `origins[i]`.

    Steps before the start of a series are missing values, NaN.
    """

    def __init__(self, values: Tensor, offsets: Tensor, origins: Tensor, seq_len: int, horizon: int) -> None:
        self.values, self.offsets, self.origins = values, offsets, origins
        self.seq_len, self.horizon = seq_len, horizon

    def __len__(self) -> int:
        return len(self.origins)

    def to(self, device: torch.device | str) -> Windows:
        values, offsets, origins = (part.to(device) for part in (self.values, self.offsets, self.origins))
        return Windows(values, offsets, origins, self.seq_len, self.horizon)

    def take(self, indices: Tensor) -> Windows:
        return Windows(self.values, self.offsets, self.origins[indices], self.seq_len, self.horizon)

    def fetch(self, indices: Tensor, uniforms: Tensor | None = None) -> SeriesBatch:
        origins = self.origins[upload(indices, self.origins.device)]
        series = torch.searchsorted(self.offsets, origins, right=True) - 1
        steps = torch.arange(-self.seq_len, self.horizon, device=origins.device)
        rows = origins[:, None] + steps  # b l+h
        first = self.offsets[series][:, None]
        values = self.values[torch.maximum(rows, first)]
        values = torch.where((rows < first).unsqueeze(-1), torch.nan, values)
        return SeriesBatch(values[:, : self.seq_len], values[:, self.seq_len :], series)

    def has_gaps(self) -> bool:
        series = torch.searchsorted(self.offsets, self.origins, right=True) - 1
        early = self.origins - self.seq_len < self.offsets[series]
        return bool(early.any()) or not bool(self.values.isfinite().all())

    def content(self) -> Iterator[Any]:
        for tensor in (self.values, self.offsets, self.origins):
            yield f"{tensor.dtype} {tuple(tensor.shape)} {self.seq_len} {self.horizon}".encode()
            yield tensor.cpu().contiguous().numpy()


class SplitEnds(NamedTuple):
    """Rows at which the training, validation and test parts of a series end, relative to its first row."""

    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class SeriesDataset(Dataset):
    """Time series: windows, in units of the standard deviation of each series and column."""

    split_by_time: ClassVar[bool] = True
    columns: tuple[str, ...]
    ids: tuple[str, ...]
    mean: Tensor
    std: Tensor
    """float64, series x columns, of the training part."""
    frequency: Frequency
    seasonal_error: Tensor
    """float32, series x columns: the mean |x[t] - x[t - season]| of the training part, the unit of MASE."""
    seq_len: int
    horizon: int
    time_column: str = ""
    id_columns: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    """Time of the first row of each series, in the units of `Frequency`."""
    parts: tuple[SplitEnds, ...] = ()
    """Split ends of each series."""

    @property
    def has_gaps(self) -> bool:
        """Whether values are missing in any window."""
        splits = [split for split in (self.train, self.validation, self.test) if isinstance(split, Windows)]
        return any(split.has_gaps() for split in splits)

    def split_validation(self, examples: int) -> Self:
        if examples:
            raise UserError("series are split by time, not by val_size: set data.val_fraction")
        return self

    def files(self) -> dict[str, str]:
        return {PREPROCESSING_FILE: to_json(self.preprocessing)}

    @property
    def preprocessing(self) -> SeriesPreprocessing:
        return SeriesPreprocessing(
            columns=self.columns,
            frequency=self.frequency,
            ids=self.ids,
            mean=tuple(map(tuple, self.mean.tolist())),
            std=tuple(map(tuple, self.std.tolist())),
            time_column=self.time_column,
            id_columns=self.id_columns,
            seasonal_error=tuple(map(tuple, self.seasonal_error.double().nan_to_num().tolist())),
            learned=tuple((start, part.train, part.validation) for start, part in zip(self.starts, self.parts)),
        )


def build_dataset(
    values: np.ndarray,
    lengths: list[int],
    parts: list[SplitEnds],
    columns: tuple[str, ...],
    frequency: Frequency,
    seq_len: int,
    horizon: int,
    stride: int = 1,
    **options: Any,
) -> SeriesDataset:
    """Build the dataset from `values`, rows x columns, NaN where missing: concatenated series, split by time.

    Values are scaled by the training part. Windows start within their series, unless its training part is too short;
    those of validation and test look back into earlier parts. Every `stride`-th of these is evaluated.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    scaled = torch.empty(values.shape).numpy()
    means, stds, errors = (np.empty((len(lengths), len(columns))) for _ in range(3))
    origins: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for number, (first, length, part) in enumerate(zip(offsets, lengths, parts, strict=True)):
        rows = values[first : first + length]
        means[number], stds[number] = level(rows[: part.train])
        scaled[first : first + length] = (rows - means[number]) / stds[number]
        errors[number] = seasonal_error(scaled[first : first + part.train], frequency.season)
        begin = min(seq_len, max(part.train - horizon, 1))
        bounds = {"train": (begin, part.train), "validation": (part.train, part.validation)}
        bounds["test"] = (part.validation, part.test)
        for name, (low, high) in bounds.items():
            origins[name].append(first + np.arange(low, high - horizon + 1, dtype=np.int64))
    tensors = torch.from_numpy(scaled), torch.from_numpy(offsets)
    splits = {
        name: Windows(*tensors, every(1 if name == "train" else stride, some), seq_len, horizon)
        for name, some in origins.items()
    }
    if not len(splits["train"]) or not len(splits["test"]):
        raise UserError(
            f"the series are too short: the longest has {max(lengths):,} steps, which is not enough to train and test "
            f"a forecast of {horizon} steps; lower the horizon"
        )
    return SeriesDataset(
        splits["train"],
        splits["test"],
        columns=columns,
        mean=torch.from_numpy(means),
        std=torch.from_numpy(stds),
        frequency=frequency,
        seasonal_error=torch.from_numpy(errors).float(),
        seq_len=seq_len,
        horizon=horizon,
        validation=splits["validation"] if len(splits["validation"]) else None,
        parts=tuple(parts),
        **options,
    )


def every(stride: int, origins: list[np.ndarray]) -> Tensor:
    """Every `stride`-th of the concatenated origins of several series, which may be short."""
    return torch.from_numpy(np.concatenate(origins)[::stride].copy())


def eval_stride(forecasts: int) -> int:
    """Distance between evaluated forecasts: no multiple of 3, 5 or 7, so that they do not all start on the same day of
    the week or at the same hour.
    """
    stride = max(-(-forecasts // MAX_EVALUATED), 1)
    while math.gcd(stride, 3 * 5 * 7) > 1:
        stride += 1
    return stride


def level(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the columns; 0 and 1 without values, 1 for a constant."""
    seen = np.isfinite(rows)
    count = np.maximum(seen.sum(0), 1)
    # Scaled by a power of two, which is exact: squares of very large or small values would be infinite or 0.
    power = np.frexp(np.where(seen, np.abs(rows), 0).max(0, initial=0))[1]
    rows = np.ldexp(rows, -power)
    mean = np.where(seen, rows, 0).sum(0) / count
    std = np.sqrt(np.square(np.where(seen, rows - mean, 0)).sum(0) / count)
    changes = std > 1e-12 * np.abs(mean)
    return np.ldexp(mean, power), np.where(changes, np.ldexp(std, power), 1.0)


def seasonal_error(scaled: np.ndarray, season: int) -> np.ndarray:
    """Mean |x[t] - x[t - season]| of each column, NaN if unknown or 0; the season is 1 for a short series."""
    season = season if len(scaled) > season else 1
    change = np.abs(scaled[season:] - scaled[:-season])
    seen = np.isfinite(change)
    error = np.where(seen, change, 0).sum(0, dtype=np.float64) / np.maximum(seen.sum(0), 1)
    return np.where(error > 0, error, math.nan)
