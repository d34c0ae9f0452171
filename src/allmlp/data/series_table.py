"""Time series in a table: a row for each time, columns of numbers, and columns that name the series if there are
several. Rows may be in any order; the step between times is detected, and times without a row are missing values.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from time import monotonic_ns
from typing import Annotated, NamedTuple

import numpy as np

from allmlp.data.clocks import are_local_days, doubled_hours, even_times, join_doubled, local_days
from allmlp.data.dataset import Data
from allmlp.data.frequency import (
    DAY,
    HINT,
    HOUR,
    MINUTE,
    Frequency,
    Notation,
    begins_with_day,
    check_regular,
    day_of_month,
    detect_frequency,
    read_times,
    steps_within,
)
from allmlp.data.series import SeriesDataset, SplitEnds, build_dataset
from allmlp.data.series_columns import Roles, find_roles, plain_number, with_points
from allmlp.data.tables import MISSING, Table, read_table
from allmlp.data.text_files import find_files
from allmlp.data.time_parts import join_time_parts
from allmlp.errors import UserError, plural
from allmlp.spec import Count, Range

MAX_SEQ_LEN = 512
CHUNK = 2**14
"""Rows read at a time."""
MAX_FILLING = 20
"""More missing steps per row than this are treated as an error in the times."""


class SeriesRows(NamedTuple):
    """Series on a grid of equal steps, one after another."""

    values: np.ndarray
    """float64, rows x columns, NaN where missing."""
    lengths: list[int]
    starts: np.ndarray
    """The time of the first row of each."""
    ends: np.ndarray
    ids: tuple[str, ...]
    frequency: Frequency
    roles: Roles
    notes: tuple[str, ...]


class Rows(NamedTuple):
    """Rows of tables, as arrays of equal length."""

    times: np.ndarray
    series: np.ndarray
    """Number of the series of each row."""
    values: np.ndarray
    """float64, rows x columns, NaN where missing."""

    def take(self, chosen: np.ndarray) -> Rows:
        return Rows(*(column[chosen] for column in self))


class TimeKind(NamedTuple):
    """How the times of a table are written, see `ParsedTimes`."""

    counted: bool
    notation: Notation
    midnights: bool


class SeriesTable(Data):
    """Series in a table, split by time: the last `test_fraction` of each is the test split, the `val_fraction` before
    it the validation split; both have at least `horizon` steps where the series is long enough.
    """

    path: str
    horizon: Count | None = None
    """Steps to forecast; by default one season, for example 24 hours."""
    seq_len: Count | None = None
    """Steps to look back; by default three horizons and two seasons, at most half of the longest series."""
    time_column: str = ""
    id_columns: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    """Columns to forecast; by default all other columns of numbers."""
    val_fraction: Annotated[float, Range(0.0, 0.9)] = 0.1
    test_fraction: Annotated[float, Range(0.0, 0.9)] = 0.2
    eval_stride: Count = 1
    """Stride between evaluated forecasts, over all steps of all series."""

    def load(self) -> SeriesDataset:
        series = read_series(self.path, self.time_column, self.id_columns, self.columns)
        horizon = self.horizon or default_horizon(series)
        parts = [self.split(length, horizon) for length in series.lengths]
        short = sum(part.train <= horizon for part in parts)
        notes = (describe(series), *series.notes)
        if short:
            notes += (f"{short:,} of {len(parts):,} series are too short to train on a forecast of {horizon} steps",)
        return build_dataset(
            series.values,
            series.lengths,
            parts,
            series.roles.values,
            series.frequency,
            self.seq_len or default_seq_len(series, horizon),
            horizon,
            self.eval_stride,
            ids=series.ids,
            time_column=series.roles.time,
            id_columns=series.roles.ids,
            starts=tuple(series.starts.tolist()),
            notes=notes,
        )

    def split(self, length: int, horizon: int) -> SplitEnds:
        """Split a series by time; at least a horizon goes to test first, then to training, then to validation."""
        test = min(max(round(self.test_fraction * length), horizon), length)
        left = length - test
        validation = max(round(self.val_fraction * length), horizon) if self.val_fraction else 0
        validation = validation if left - validation > horizon else 0
        return SplitEnds(left - validation, left, length)


def describe(series: SeriesRows) -> str:
    """Describe the detected columns, series and frequency."""
    several = f" of {len(series.ids):,} series named by {shorten(series.roles.ids)}" if series.roles.ids else ""
    return f"{shorten(series.roles.values)}{several}, steps of {series.frequency} by {series.roles.time}"


def default_horizon(series: SeriesRows) -> int:
    season, frequency = series.frequency.season, series.frequency
    if season > MAX_SEQ_LEN:  # an hour of minutes, a minute of seconds
        season = next((size // frequency.step for size in (HOUR, MINUTE) if size <= MAX_SEQ_LEN * frequency.step), 12)
    return min(season if season > 1 else 12, max(max(series.lengths) // 10, 1))


def default_seq_len(series: SeriesRows, horizon: int) -> int:
    usual = min(max(3 * horizon, 2 * series.frequency.season, 16), MAX_SEQ_LEN)
    return max(min(usual, max(series.lengths) // 2), 1)


def read_series(
    path: str | Sequence[str],
    time_column: str = "",
    id_columns: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    frequency: Frequency | None = None,
) -> SeriesRows:
    """Read the series of one or several tables, each as in `find_files`; they must have `frequency`, if given."""
    paths = [path] if isinstance(path, str) else path
    versions = tuple(version(file) for one in paths for file in find_files(one))
    return read_files(versions, ", ".join(paths), time_column, id_columns, columns, frequency)


def version(file: str) -> tuple[str, int, int]:
    """Cache key of a file: name, size and modification time; different at each call for a URL."""
    if "://" in file:
        return file, 0, monotonic_ns()
    status = os.stat(file)
    return file, status.st_size, status.st_mtime_ns


@lru_cache(1)  # a run reads its table several times
def read_files(
    versions: tuple[tuple[str, int, int], ...],
    path: str,
    time_column: str,
    id_columns: tuple[str, ...],
    columns: tuple[str, ...],
    frequency: Frequency | None,
) -> SeriesRows:
    times, series, values, ids = array("q"), array("i"), array("d"), dict[str, int]()
    roles, kinds = None, set[TimeKind]()
    for file, *_ in versions:
        table, joined = join_time_parts(read_table(file), time_column, (*id_columns, *columns))
        roles = roles or find_roles(table, time_column, id_columns, columns)._replace(joined=joined)
        kinds |= read_rows(table, roles, times, series, values, ids)
    assert roles is not None
    if not kinds:
        raise UserError(f"{path} has no rows")
    if len({kind[:2] for kind in kinds}) > 1:
        raise UserError(f"{path}: times are written in several ways: write all of them {HINT}")
    kind = min(kinds)
    if frequency and kind.counted != (frequency.unit == "row"):
        here, in_training = ("numbers", "dates") if kind.counted else ("dates", "numbers")
        raise UserError(f"{path}: the times are {here}; those that the model was trained on were {in_training}")
    rows = Rows(
        np.frombuffer(times, np.int64),
        np.frombuffer(series, np.int32),
        np.frombuffer(values).reshape(-1, len(roles.values)),
    )
    return to_grid(rows, tuple(ids), roles, kind, path, frequency)


# --- rows ---------------------------------------------------------------------------------------------------


def read_rows(
    table: Table, roles: Roles, times: array[int], series: array[int], values: array[float], ids: dict[str, int]
) -> set[TimeKind]:
    """Append the rows of a table to the arrays, and names to `ids`; returns the kinds of its times."""
    kinds, rows, first = set[TimeKind](), iter(table), 1
    day_first = begins_with_day(row.get(roles.time, "") for row in table)
    while chunk := list(islice(rows, CHUNK)):
        try:
            moments = [row[roles.time].strip() for row in chunk]
            names = [join_names([row[name].strip() for name in roles.ids]) for row in chunk]
            columns = [
                read_column(with_points([row[name] for row in chunk], table), table.file, first, name)
                for name in roles.values
            ]
        except KeyError as missing:
            raise UserError(f"{table.file} has no column {missing.args[0]!r}, which other files have") from None
        distinct = list(dict.fromkeys(moments))  # several series share their times
        if missing := [moment for moment in distinct if moment.casefold() in (*MISSING, "nat")]:
            raise UserError(f"{table.file}, row {first + moments.index(missing[0])}: no time")
        series.extend([ids.setdefault(name, len(ids)) for name in names])
        values.frombytes(np.stack(columns, 1).tobytes())
        parsed = read_times(distinct, table.file, day_first)
        kinds.add(TimeKind(*parsed[1:]))
        parsed_moments = dict(zip(distinct, parsed.values.tolist()))
        times.extend([parsed_moments[moment] for moment in moments])
        first += len(chunk)
    return kinds


def join_names(cells: list[str]) -> str:
    """Name of a series: the cells of its id columns, joined by slashes; slashes in several cells are escaped."""
    return "/".join([cell.replace("\\", "\\\\").replace("/", "\\/") for cell in cells] if len(cells) > 1 else cells)


def split_name(name: str, columns: int) -> list[str]:
    """Inverse of `join_names`."""
    if columns < 2:
        return [name] * columns
    cells = [""]
    for letter in re.findall(r"\\.|[^\\]", name, re.DOTALL):
        if letter == "/":
            cells.append("")
        else:
            cells[-1] += letter[-1]
    return cells


def read_column(cells: list[str], file: str, first: int, column: str) -> np.ndarray:
    """The numbers of a column, float64, NaN where missing; `first` is the number of the first row."""
    try:
        numbers = np.array(cells, dtype=np.float64)
    except ValueError:  # a cell is missing, or no number
        numbers = np.array([read_value(cell, file, row, column) for row, cell in enumerate(cells, first)])
    if np.isinf(numbers).any():
        raise UserError(f"{file}, row {first + int(np.isinf(numbers).argmax())}: {column} is infinite")
    return numbers


def read_value(cell: str, file: str, row: int, column: str) -> float:
    try:
        return float(plain_number(cell))
    except ValueError:
        if cell.strip().casefold() in MISSING:
            return np.nan
        raise UserError(f"{file}, row {row}: {column} is {cell[:40]!r}, not a number") from None


# --- series -------------------------------------------------------------------------------------------------


def to_grid(
    rows: Rows, ids: tuple[str, ...], roles: Roles, kind: TimeKind, where: str, given: Frequency | None
) -> SeriesRows:
    notes = [f"{' and '.join(roles.joined)} are joined as {roles.time}"] if roles.joined else []
    notes += [f"not read: {shorten(roles.unread)}"] if roles.unread else []
    rows = in_order(rows, notes)
    if not kind.counted:
        rows, kind = read_clocks(rows, kind, given, notes)
    refuse_repeated(rows, ids, roles, kind, where)
    if given:
        day = day_of_month(rows.times) if given.unit == "month" else 0
        frequency = given.replace(notation=kind.notation, day=day)
    else:
        frequency = detect_frequency(rows.times, rows.series, kind.counted, where, kind.notation)
    check_regular(rows.times, rows.series, frequency, where)
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(rows.series)) + 1, [len(rows.series)]])
    firsts, lasts = bounds[:-1], bounds[1:] - 1
    values, lengths = fill_gaps(rows, bounds, frequency, where, notes)
    constant = [roles.values[column] for column in range(values.shape[1]) if is_constant(values[:, column])]
    if constant:
        notes.append(f"constant: {shorten(constant)}")
    names = tuple(ids[number] for number in rows.series[firsts])
    starts, ends = rows.times[firsts], rows.times[lasts]
    return SeriesRows(values, lengths.tolist(), starts, ends, names, frequency, roles, tuple(notes))


def read_clocks(rows: Rows, kind: TimeKind, given: Frequency | None, notes: list[str]) -> tuple[Rows, TimeKind]:
    """Undo what the clocks of a table do to equal steps: local days, repeated hours, inexact times."""
    if are_local_days(rows.times, rows.series, kind.midnights):
        notes += ["times are local midnights: their dates are read"] if (rows.times % DAY).any() else []
        rows, kind = rows._replace(times=local_days(rows.times)), kind._replace(notation="local")
    if len(doubled := doubled_hours(rows.times, rows.series)):
        first = Frequency(HOUR, notation=kind.notation).text(int(rows.times[doubled[0]]))
        twice = plural(len(doubled), "time occurs", "times occur")
        notes.append(f"{twice} twice as clocks are set back, such as {first}: means are read")
        rows = Rows(*join_doubled(*rows, doubled))
    return rows._replace(times=even_times(rows.times, rows.series, given, notes)), kind


def refuse_repeated(rows: Rows, ids: tuple[str, ...], roles: Roles, kind: TimeKind, where: str) -> None:
    """Raise UserError if a series has several rows for one time."""
    times, series, values = rows
    same = np.flatnonzero((np.diff(times) == 0) & (np.diff(series) == 0))
    if len(same):
        first = same[0]
        name = f" of {ids[series[first]]}" if len(ids) > 1 else ""
        time = Frequency(DAY, "row" if kind.counted else "ms", kind.notation).text(int(times[first]))
        count = int(((times == times[first]) & (series == series[first])).sum())
        several = "" if roles.ids else f", or {how_to_name(times, values, roles)}"
        raise UserError(f"{where} has {count:,} rows{name} for {time}: keep one or their sum{several}")


def fill_gaps(
    rows: Rows, bounds: np.ndarray, frequency: Frequency, where: str, notes: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Values with a row for each step, NaN where the table has none, and the number of steps of each series."""
    sizes, count, values = np.diff(bounds), frequency.count(rows.times), rows.values
    step = np.rint(count - np.repeat(count[bounds[:-1]], sizes)).astype(np.int64)  # of its series
    lengths = step[bounds[1:] - 1] + 1
    total = int(lengths.sum())
    gaps = total - len(count)
    if gaps > MAX_FILLING * len(count) + 1000:
        raise UserError(
            f"{where}: of {total:,} steps of {frequency} only {len(count):,} have a row: look for wrong times, or "
            "resample the series to a longer step"
        )
    if gaps:
        zero = "; write 0 where nothing was sold or counted" if gaps > len(count) else ""
        notes.append(f"{gaps:,} of {total:,} steps of {frequency} have no row: they are missing values{zero}")
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        grid = np.full((total, values.shape[1]), np.nan)
        grid[np.repeat(offsets, sizes) + step] = values
        return grid, lengths
    if np.isnan(values).any():
        notes.append(f"{int(np.isnan(values).sum()):,} of {values.size:,} values are missing")
    return values, lengths


def how_to_name(times: np.ndarray, values: np.ndarray, roles: Roles) -> str:
    """Advice for several rows with the same time; it suggests the first integer column that distinguishes them."""
    for column, name in enumerate(roles.values if len(roles.values) > 1 else ()):
        numbers = values[:, column]
        whole = bool((np.isfinite(numbers) & (numbers == np.rint(numbers))).all())
        if whole and len(np.unique(np.stack([times.astype(float), numbers]), axis=1).T) == len(times):
            return f"if {name} tells the series apart, set data.id_columns={name}"
    return "name the column that tells the series apart, data.id_columns"


def in_order(rows: Rows, notes: list[str]) -> Rows:
    """Sort the rows by series and time, and drop rows without values at the end of a series."""
    grouped = bool((steps_within(rows.times, rows.series) >= 0).all())
    if not grouped:
        notes.append("the rows were not in the order of time: they are sorted")
    if not grouped or (np.diff(rows.series) < 0).any():
        rows = rows.take(np.lexsort((rows.times, rows.series)))
    lasts = np.append(np.flatnonzero(np.diff(rows.series)), len(rows.series) - 1)
    if np.isnan(rows.values[lasts]).all(1).any():
        kept = before_the_end(rows.series, rows.values)
        empty = int((~kept).sum())
        are = plural(empty, "row is", "rows are")
        notes += [f"{are} left out, at the end of series and without values"] if empty else []
        rows = rows.take(kept)
    return rows


def before_the_end(series: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each sorted row is at or before the last row with a value in its series; True if there is none."""
    rows = np.arange(len(series))
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(series)) + 1])
    last = np.maximum.reduceat(np.where(np.isfinite(values).any(1), rows, -1), firsts)
    sizes = np.diff([*firsts, len(series)])
    return np.repeat(np.where(last < 0, len(series), last), sizes) >= rows


def shorten(names: Sequence[str]) -> str:
    return ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])


def is_constant(column: np.ndarray) -> bool:
    seen = column[np.isfinite(column)]
    return not len(seen) or bool((seen == seen[0]).all())
