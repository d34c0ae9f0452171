"""Detection of the columns of a table of time series: times, names of series, values to forecast."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice, pairwise
from typing import NamedTuple

from allmlp.data.columns import SAMPLE_ROWS, ColumnSample, named_column, sample_columns
from allmlp.data.frequency import HINT, begins_with_day, is_time, read_times
from allmlp.data.tables import COMMA_NUMBER, MISSING, Table, TableRow, is_number
from allmlp.errors import UserError

TIME_COLUMNS = (
    *("date", "time", "timestamp", "datetime", "ds", "date_time", "month", "week", "day", "hour", "quarter", "period"),
    *("year", "ts", "epoch", "unix_time", "unixtime", "t"),
)
ID_COLUMNS = (
    *("id", "unique_id", "item_id", "series_id", "series", "store", "store_nbr", "store_id", "item", "product"),
    *("product_id", "sku", "symbol", "ticker", "station", "sensor", "sensor_id", "region", "country", "city"),
)
CALENDAR_COLUMNS = (
    *("year", "quarter", "month", "week", "day", "hour", "minute", "weekday", "day_of_week", "dayofweek", "is_weekend"),
    *("week_of_year", "weekofyear", "day_of_month", "dayofmonth", "day_of_year", "dayofyear", "weekend"),
)
ROW_NUMBERS = re.compile(r"column_\d+|unnamed: \d+|index|no\.?|nr\.?|row|#", re.IGNORECASE)
TIME_OF_DAY = re.compile(r"(?i).*(hour|minute|period|slot|interval|time)")
ID_ENDING = re.compile(r"(?i:.*_(id|nbr|no|num|number|code|key))|.*[a-z]I[dD]")
NEGATIVE = re.compile(r"\((.+)\)")
MARKED_NUMBER = re.compile(r"[+-]?[$€£¥]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?[ \xa0]?[%$€£¥]?")
MARKS = str.maketrans("", "", ",$€£¥% \xa0")
POINTS = str.maketrans(",", ".", ". \xa0\u202f")


class Roles(NamedTuple):
    """Roles of the columns."""

    time: str
    ids: tuple[str, ...]
    values: tuple[str, ...]
    unread: tuple[str, ...] = ()
    """Columns without a role."""
    joined: tuple[str, ...] = ()
    """Columns of the table that were joined into the time column."""


def find_roles(table: Table, time: str, ids: tuple[str, ...], values: tuple[str, ...]) -> Roles:
    rows = list(islice(table, SAMPLE_ROWS))
    samples = {sample.name: sample for sample in plain_samples(table)}
    for name in (*ids, *values):
        named_column(table.columns, name, (), table.file)
    time = named_column(table.columns, time, (), table.file) or find_time(list(samples.values())) or ""
    if not time:
        refuse_times(table.file, list(samples.values()))
        raise UserError(f"{table.file} has no column of times, among {', '.join(table.columns)}: set data.time_column")
    others = [sample for name, sample in samples.items() if name not in (time, *ids, *values)]
    numeric = [sample for sample in others if holds_numbers(sample)]
    finds_values = not values
    if not ids:
        named = [sample.name for sample in others if names_series(sample)]
        moments = read_moments(rows, time, table)
        ids = tuple(name for name in named if not comes_and_goes(name, named, moments, rows))
        if not ids and (values or len(numeric) > 1):  # one must be left to forecast
            ids = numbered_series([sample.name for sample in numeric], moments, rows)
    if finds_values:
        values = tuple(
            sample.name
            for sample in numeric
            if sample.name not in ids
            and sample.values
            and not (table.header and counts_rows(sample))
            and not follows_the_calendar(sample)
        )
    if not values:
        raise UserError(f"{table.file} has no column of numbers besides {', '.join((time, *ids))}: set data.columns")
    unread = [sample.name for sample in others if sample.name not in (*ids, *values)] if finds_values else []
    return Roles(time, ids, values, tuple(unread))


def refuse_times(file: str, samples: list[ColumnSample]) -> None:
    """Raise UserError if times follow several header lines, or if a column named like times cannot be parsed and
    another one has numbers.
    """
    for sample in samples:
        start = next((place for place, cell in enumerate(sample.values[:4]) if is_time(cell)), 0)
        if start and all(map(is_time, sample.values[start:50])):
            raise UserError(f"{file} has {start + 1} lines of names: delete those after the first, before the times")
    name = named_column([sample.name for sample in samples], "", TIME_COLUMNS, "")
    given = next((sample.values[0] for sample in samples if sample.name == name and sample.values), None)
    if given and any(sample.is_numeric for sample in samples if sample.name != name):
        raise UserError(f"{file}: the times in {name!r}, such as {given[:40]!r}, are not understood: write them {HINT}")


def plain_samples(table: Table) -> list[ColumnSample]:
    """First non-empty values of each column, with numbers in plain notation."""
    return [
        ColumnSample(name, [plain_number(cell) for cell in with_points(cells, table)])
        for name, cells in sample_columns(table)
    ]


def plain_number(cell: str) -> str:
    """Convert numbers such as $1,234.56, 5% or (7.50) to 1234.56, 5 or -7.50; other cells are unchanged."""
    plain = NEGATIVE.sub(r"-\1", cell.strip())
    return plain.translate(MARKS) if MARKED_NUMBER.fullmatch(plain) else cell


def with_points(cells: list[str], table: Table) -> list[str]:
    """Convert numbers such as 1.234,56 or 1 234,56 to 1234.56 in a table with decimal commas."""
    if not table.decimal_comma:
        return cells
    return [cell.translate(POINTS) if COMMA_NUMBER.fullmatch(cell) else cell for cell in cells]


def read_moments(rows: list[TableRow], time: str, table: Table) -> list[int | None]:
    """Time of each of the first rows of a table, or None."""
    cells = [row[time].strip() for row in rows]
    distinct = list(dict.fromkeys(filter(None, cells)))
    day_first = begins_with_day(row[time] for row in table)
    moments = dict(zip(distinct, read_times(distinct, table.file, day_first).values.tolist())) if distinct else {}
    return [moments.get(cell) for cell in cells]


def numbered_series(names: list[str], moments: list[int | None], rows: list[TableRow]) -> tuple[str, ...]:
    """The integer column that distinguishes rows with the same time, if some time has a row for each of its values. A
    column whose name is a part of the time, such as the hour, is left to the user.
    """
    most = max(Counter(moments).values(), default=0)
    for name in names if most > 1 else ():
        if TIME_OF_DAY.match(name):
            continue
        cells = [row[name].strip() for row in rows]
        if len(set(cells)) == most and len(set(zip(moments, cells))) == len(rows) and all(map(str.isdecimal, cells)):
            return (name,)
    return ()


def comes_and_goes(column: str, names: list[str], moments: list[int | None], rows: list[TableRow]) -> bool:
    """Whether values recur after others, or most occur only once, within the series given by the other columns: then
    the column is a description such as the weather, not the name of a series. A column needed to distinguish rows with
    the same time is a name.
    """
    if column.casefold().replace(" ", "_") in ID_COLUMNS:
        return False
    others = [name for name in names if name != column]
    series: dict[tuple[str, ...], dict[int, str]] = {}
    for moment, row in zip(moments, rows):
        by_moment = series.setdefault(tuple(row[name] for name in others), {})
        if moment is None or moment in by_moment:
            return False
        by_moment[moment] = row[column]
    ordered = [[by_moment[moment] for moment in sorted(by_moment)] for by_moment in series.values()]
    return any(
        sum(one != other for one, other in pairwise(by_moment)) >= len(set(by_moment))
        or 2 < len(by_moment) < 2 * len(set(by_moment))
        for by_moment in ordered
    )


def follows_the_calendar(sample: ColumnSample) -> bool:
    """Whether the column is a calendar feature, such as the day of the week, which need not be forecast."""
    named = sample.name.casefold().replace(" ", "_").replace("-", "_") in CALENDAR_COLUMNS
    return named and sample.is_numeric and all(float(cell).is_integer() for cell in sample.values)


def counts_rows(sample: ColumnSample) -> bool:
    """Whether the column is the index of a data frame: unnamed, or with a name such as No, and counting from 0 or 1,
    possibly restarting for each series.
    """
    if not ROW_NUMBERS.fullmatch(sample.name) or sample.values[:1] not in (["0"], ["1"]):
        return False
    return all(
        other == str(int(one) + 1) or other == sample.values[0]
        for one, other in pairwise(sample.values)
        if one.isdigit()
    )


def find_time(samples: list[ColumnSample]) -> str | None:
    """The time column: dates by content, else integers by name."""
    dates = [sample.name for sample in samples if sample.values and all(map(is_time, sample.values[:50]))]
    named = named_column(dates, "", TIME_COLUMNS, "") if dates else None
    numbers = [sample.name for sample in samples if sample.is_numeric]
    return named or (dates[0] if dates else named_column(numbers, "", TIME_COLUMNS, ""))


def names_series(sample: ColumnSample) -> bool:
    """Whether the column names series: it contains words, or anything but measurements if it is named like an id."""
    if sample.name.casefold().replace(" ", "_") in ID_COLUMNS or ID_ENDING.fullmatch(sample.name.replace(" ", "_")):
        return bool(sample.values) and (not sample.is_numeric or all(float(one).is_integer() for one in sample.values))
    return not holds_numbers(sample)


def holds_numbers(sample: ColumnSample) -> bool:
    """Whether most cells are numbers or missing; a word among them is then an error to report."""
    given = [value for value in sample.values if value.strip().casefold() not in MISSING]
    return not given or 2 * sum(map(is_number, given)) > len(given)
