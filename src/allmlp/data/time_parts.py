"""Join times that are split over several columns of a table, such as year and month or date and hour."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from allmlp.data.columns import SAMPLE_ROWS, named_column
from allmlp.data.frequency import MONTHS, is_time
from allmlp.data.tables import Table, TableRow

PARTS: dict[str, tuple[tuple[int, int], tuple[str, ...]]] = {
    "year": ((1000, 9999), ("year", "yr", "yyyy")),
    "quarter": ((1, 4), ("quarter", "qtr")),
    "month": ((1, 12), ("month", "mon", "mm")),
    "week": ((1, 53), ("week", "week_of_year", "weekofyear")),
    "day": ((1, 31), ("day", "dd", "day_of_month")),
    "hour": ((0, 24), ("hour", "hr", "hh")),
    "minute": ((0, 59), ("minute",)),
}
"""Part of a time -> its smallest and largest number, and names of columns."""
CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d)?|\d{1,2}\.\d\d\.\d\d")
DATE_ONLY = re.compile(r"[\d./-]{6,10}")


class TimeColumns(NamedTuple):
    columns: tuple[str, ...]
    name: str
    """Name of the joined column."""
    join: Callable[[list[str]], str]


def join_time_parts(table: Table, time: str, taken: Sequence[str]) -> tuple[Table, tuple[str, ...]]:
    """Replace several columns of a table by one of times, and return their names; unchanged if it has the column
    `time`. Columns `taken` for another purpose are not used.
    """
    if time in table.columns:
        return table, ()
    rows = list(islice(table, SAMPLE_ROWS))
    columns = [name for name in table.columns if name not in taken]
    cells = {name: [row[name].strip() for row in rows if row[name].strip()] for name in columns}
    dates = [name for name in columns if cells[name] and all(map(is_time, cells[name][:50]))]
    parts = clock_parts(dates, rows, cells) if dates else calendar_parts(cells)
    if parts is None or parts.name in cells:
        return table, ()
    others = tuple(name for name in table.columns if name not in parts.columns)

    def joined() -> Iterator[TableRow]:
        for row in table:
            cells = [row[name].strip().removesuffix(".0") for name in parts.columns]
            yield {parts.name: parts.join(cells) if all(cells) else "", **{name: row[name] for name in others}}

    return Table(table.file, (parts.name, *others), joined, table.header, table.decimal_comma), parts.columns


def calendar_parts(cells: dict[str, list[str]]) -> TimeColumns | None:
    """Columns of year and month, optionally day, hour and minute; or of year and quarter, or year and week."""
    named = {part: named_column([*cells], "", names, "") for part, (_, names) in PARTS.items()}
    columns = {part: name for part, name in named.items() if name and fits(part, cells[name])}
    if "year" not in columns:
        return None
    first = first_hour(cells[columns["hour"]]) if "hour" in columns else 0

    def join(time: list[str]) -> str:
        year, month, day, hour, minute = (*time, *("", "", "1", "0", "0")[len(time) :])
        date = f"{year}-{month_number(month):0>2}-{day:0>2}"
        return f"{date} {hour_text(hour, first)}:{minute:0>2}" if len(time) > 3 else date

    whole = [*takewhile(columns.__contains__, ("year", "month", "day", "hour", "minute"))]
    if len(whole) > 1:
        return TimeColumns(tuple(columns[part] for part in whole), "date", join)
    if "quarter" in columns:
        return TimeColumns((columns["year"], columns["quarter"]), "date", lambda time: f"{time[0]}Q{time[1][-1]}")
    if "week" in columns:
        return TimeColumns((columns["year"], columns["week"]), "date", lambda time: f"{time[0]}-W{time[1]:0>2}")
    return None


def clock_parts(dates: list[str], rows: list[TableRow], cells: dict[str, list[str]]) -> TimeColumns | None:
    """Columns of dates and of times or hours of the day, if some date has several."""
    date = next((name for name in dates if all(map(DATE_ONLY.fullmatch, cells[name]))), "")
    clocks = [name for name in cells if cells[name] and all(map(CLOCK.fullmatch, cells[name]))]
    hours = named_column([*cells], "", PARTS["hour"][1], "")
    clock = clocks[0] if clocks else hours if hours and fits("hour", cells[hours]) else None
    if not date or not clock or len({(row[date], row[clock]) for row in rows}) == len({row[date] for row in rows}):
        return None
    first = 0 if clocks else first_hour(cells[clock])

    def join(time: list[str]) -> str:
        return f"{time[0]} {time[1].replace('.', ':')}" if clocks else f"{time[0]} {hour_text(time[1], first)}:00"

    return TimeColumns((date, clock), f"{date}_{clock}", join)


def fits(part: str, cells: list[str]) -> bool:
    """Whether these are valid numbers of a part of the time, or names of months."""
    plain = [cell.upper().removeprefix("Q") if part == "quarter" else cell for cell in cells]
    numbers = [month_number(cell) if part == "month" else cell.removesuffix(".0") for cell in plain]
    low, high = PARTS[part][0]
    return bool(cells) and all(re.fullmatch(r"\d{1,4}", number) and low <= int(number) <= high for number in numbers)


def first_hour(cells: list[str]) -> int:
    """First hour of a day, 0 or 1."""
    return int(max(int(cell.removesuffix(".0")) for cell in cells) == 24)


def hour_text(cell: str, first: int) -> str:
    return f"{int(cell) - first:02}" if re.fullmatch(r"\d{1,2}", cell) else cell


def month_number(cell: str) -> str:
    name = cell[:3].casefold()
    return str(MONTHS.index(name) + 1) if name in MONTHS else cell.removesuffix(".0")
