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

from allmlp.data.clock_changes import are_local_days, doubled_hours, join_doubled, local_days
from allmlp.data.dataset import Data
from allmlp.data.frequency import (
    DAY,
    HINT,
    HOUR,
    MINUTE,
    Frequency,
    Notation,
    check_regular,
    detect_frequency,
    read_times,
)
from allmlp.data.series import SeriesDataset, SplitEnds, build_dataset
from allmlp.data.series_columns import Roles, find_roles, plain_number, with_points
from allmlp.data.tables import MISSING, Table, read_table
from allmlp.data.text_files import find_files
from allmlp.data.time_parts import join_time_parts
from allmlp.data.uneven_times import even_times
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
        found = read_series(self.path, self.time_column, self.id_columns, self.columns)
        horizon = self.horizon or default_horizon(found)
        parts = [self.split(length, horizon) for length in found.lengths]
        short = sum(part.train <= horizon for part in parts)
        notes = (describe(found), *found.notes)
        if short:
            notes += (f"{short:,} of {len(parts):,} series are too short to train on a forecast of {horizon} steps",)
        return build_dataset(
            found.values,
            found.lengths,
            parts,
            found.roles.values,
            found.frequency,
            self.seq_len or default_seq_len(found, horizon),
            horizon,
            self.eval_stride,
            ids=found.ids,
            time_column=found.roles.time,
            id_columns=found.roles.ids,
            starts=tuple(found.starts.tolist()),
            notes=notes,
        )

    def split(self, length: int, horizon: int) -> SplitEnds:
        """Split a series by time; at least a horizon goes to test first, then to training, then to validation."""
        test = min(max(round(self.test_fraction * length), horizon), length)
        left = length - test
        validation = max(round(self.val_fraction * length), horizon) if self.val_fraction else 0
        validation = validation if left - validation > horizon else 0
        return SplitEnds(left - validation, left, length)


def describe(found: SeriesRows) -> str:
    """Describe the detected columns, series and frequency."""
    several = f" of {len(found.ids):,} series named by {shorten(found.roles.ids)}" if found.roles.ids else ""
    return f"{shorten(found.roles.values)}{several}, steps of {found.frequency} by {found.roles.time}"


def default_horizon(found: SeriesRows) -> int:
    season, frequency = found.frequency.season, found.frequency
    if season > MAX_SEQ_LEN:  # an hour of minutes, a minute of seconds
        season = next((size // frequency.step for size in (HOUR, MINUTE) if size <= MAX_SEQ_LEN * frequency.step), 12)
    return min(season if season > 1 else 12, max(max(found.lengths) // 10, 1))


def default_seq_len(found: SeriesRows, horizon: int) -> int:
    wanted = min(max(3 * horizon, 2 * found.frequency.season, 16), MAX_SEQ_LEN)
    return max(min(wanted, max(found.lengths) // 2), 1)


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
    found = os.stat(file)
    return file, found.st_size, found.st_mtime_ns


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
    roles, kinds = None, set[tuple[bool, Notation, bool]]()
    for file, *_ in versions:
        table, joined = join_time_parts(read_table(file), time_column, (*id_columns, *columns))
        roles = roles or find_roles(table, time_column, id_columns, columns)._replace(joined=joined)
        kinds |= read_rows(table, roles, times, series, values, ids)
    assert roles is not None
    if not kinds:
        raise UserError(f"{path} has no rows")
    if len({kind[:2] for kind in kinds}) > 1:
        raise UserError(f"{path}: times are written in several ways: write all of them {HINT}")
    counted, notation, midnights = min(kinds)
    if frequency and counted != (frequency.unit == "row"):
        found, known = ("numbers", "dates") if counted else ("dates", "numbers")
        raise UserError(f"{path}: the times are {found}; those that the model was trained on were {known}")
    return to_grid(
        np.frombuffer(times, np.int64),
        np.frombuffer(series, np.int32),
        np.frombuffer(values).reshape(-1, len(roles.values)),
        tuple(ids),
        counted,
        roles,
        path,
        frequency,
        notation,
        midnights,
    )


# --- rows ---------------------------------------------------------------------------------------------------


def read_rows(
    table: Table,
    roles: Roles,
    times: array[int],
    series: array[int],
    values: array[float],
    ids: dict[str, int],
) -> set[tuple[bool, Notation, bool]]:
    """Append the rows of a table to the arrays, and names to `ids`; returns the notation of its times."""
    kinds, rows, first = set[tuple[bool, Notation, bool]](), iter(table), 1
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
        found = read_times(distinct, table.file)
        kinds.add(found[1:])
        known = dict(zip(distinct, found.values.tolist()))
        times.extend([known[moment] for moment in moments])
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
        found = np.array(cells, dtype=np.float64)
    except ValueError:  # a cell is missing, or no number
        found = np.array([read_value(cell, file, row, column) for row, cell in enumerate(cells, first)])
    if np.isinf(found).any():
        raise UserError(f"{file}, row {first + int(np.isinf(found).argmax())}: {column} is infinite")
    return found


def read_value(cell: str, file: str, row: int, column: str) -> float:
    try:
        return float(plain_number(cell))
    except ValueError:
        if cell.strip().casefold() in MISSING:
            return np.nan
        raise UserError(f"{file}, row {row}: {column} is {cell[:40]!r}, not a number") from None


def to_grid(
    times: np.ndarray,
    series: np.ndarray,
    values: np.ndarray,
    ids: tuple[str, ...],
    counted: bool,
    roles: Roles,
    where: str,
    wanted: Frequency | None,
    notation: Notation,
    midnights: bool,
) -> SeriesRows:
    notes = [f"{' and '.join(roles.joined)} are joined as {roles.time}"] if roles.joined else []
    notes += [f"not read: {shorten(roles.unread)}"] if roles.unread else []
    times, series, values = in_order(times, series, values, notes)
    if not counted and are_local_days(times, series, midnights):
        notes += ["times are local midnights: their dates are read"] if (times % DAY).any() else []
        times, notation = local_days(times), "local"
    if not counted and len(doubled := doubled_hours(times, series)):
        first = Frequency(HOUR, notation=notation).text(int(times[doubled[0]]))
        twice = plural(len(doubled), "time occurs", "times occur")
        notes.append(f"{twice} twice as clocks are set back, such as {first}: means are read")
        times, series, values = join_doubled(times, series, values, doubled)
    times = times if counted else even_times(times, series, wanted, notes)
    same = np.flatnonzero((np.diff(times) == 0) & (np.diff(series) == 0))
    if len(same):
        first = same[0]
        name = f" of {ids[series[first]]}" if len(ids) > 1 else ""
        time = Frequency(DAY, "row" if counted else "ms", notation).text(int(times[first]))
        count = int(((times == times[first]) & (series == series[first])).sum())
        several = "" if roles.ids else f", or {how_to_name(times, values, roles)}"
        raise UserError(f"{where} has {count:,} rows{name} for {time}: keep one or their sum{several}")
    frequency = (
        wanted.replace(notation=notation) if wanted else detect_frequency(times, series, counted, where, notation)
    )
    check_regular(times, series, frequency, where)
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(series)) + 1, [len(series)]])
    firsts, lasts, sizes = bounds[:-1], bounds[1:] - 1, np.diff(bounds)
    count = frequency.count(times)
    step = np.rint(count - np.repeat(count[firsts], sizes)).astype(np.int64)  # of its series
    lengths = step[lasts] + 1
    gaps = int(lengths.sum()) - len(times)
    if gaps > MAX_FILLING * len(times) + 1000:
        raise UserError(
            f"{where}: of {int(lengths.sum()):,} steps of {frequency} only {len(times):,} have a row: look for wrong "
            "times, or resample the series to a longer step"
        )
    if gaps:
        zero = "; write 0 where nothing was sold or counted" if gaps > len(times) else ""
        total = int(lengths.sum())
        notes.append(f"{gaps:,} of {total:,} steps of {frequency} have no row: they are missing values{zero}")
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        grid = np.full((int(lengths.sum()), values.shape[1]), np.nan)
        grid[np.repeat(offsets, sizes) + step] = values
        values = grid
    elif np.isnan(values).any():
        notes.append(f"{int(np.isnan(values).sum()):,} of {values.size:,} values are missing")
    found = [roles.values[column] for column in range(values.shape[1]) if is_constant(values[:, column])]
    if found:
        notes.append(f"constant: {shorten(found)}")
    names = tuple(ids[number] for number in series[firsts])
    return SeriesRows(values, lengths.tolist(), times[firsts], times[lasts], names, frequency, roles, tuple(notes))


def how_to_name(times: np.ndarray, values: np.ndarray, roles: Roles) -> str:
    """Advice for several rows with the same time; it suggests the first integer column that distinguishes them."""
    for column, name in enumerate(roles.values if len(roles.values) > 1 else ()):
        numbers = values[:, column]
        whole = bool((np.isfinite(numbers) & (numbers == np.rint(numbers))).all())
        if whole and len(np.unique(np.stack([times.astype(float), numbers]), axis=1).T) == len(times):
            return f"if {name} tells the series apart, set data.id_columns={name}"
    return "name the column that tells the series apart, data.id_columns"


def in_order(
    times: np.ndarray, series: np.ndarray, values: np.ndarray, notes: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort the rows by series and time, and drop rows without values at the end of a series."""
    grouped = bool((np.diff(times)[np.diff(series) == 0] >= 0).all())
    if not grouped:
        notes.append("the rows were not in the order of time: they are sorted")
    if not grouped or (np.diff(series) < 0).any():
        order = np.lexsort((times, series))
        times, series, values = times[order], series[order], values[order]
    lasts = np.append(np.flatnonzero(np.diff(series)), len(series) - 1)
    if np.isnan(values[lasts]).all(1).any():
        kept = before_the_end(series, values)
        empty = int((~kept).sum())
        are = plural(empty, "row is", "rows are")
        notes += [f"{are} left out, at the end of series and without values"] if empty else []
        times, series, values = times[kept], series[kept], values[kept]
    return times, series, values


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
