"""Times of series: parsing, the constant step between them, and future times."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, NamedTuple

import numpy as np

from allmlp.errors import UserError, plural
from allmlp.spec import Range, Spec

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
"""In milliseconds, the unit of times here."""
LATEST = {"ms": 253_402_300_799_999, "month": 12 * (9999 - 1970) + 11, "row": 2**63 - 1}
"""The last time of each unit, for years of four digits."""
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WEEKEND = (5, 6)
MIN_WEEKS = 3
"""Minimum length in weeks to detect days of the week that never have values."""
NOT_FOR_NUMPY = re.compile(r"\s*([+-]?\d{5,}-|now|today)", re.IGNORECASE)
"""Long years, and words that numpy takes for the time at which it reads them."""
ZONE = re.compile(r":\d\d.*(Z|[+-]\d\d(:?\d\d)?)$")
MIDNIGHT = re.compile(r"[T ]00:00(:00(\.0+)?)?(Z|[+-]\d\d(:?\d\d)?)$")
YEAR_FIRST = re.compile(r"(\d{4})/(\d{1,2})(?:/(\d{1,2}))?(?=\D|$)")
YEAR_LAST = re.compile(r"(\d{1,2})([./-])(\d{1,2})\2(\d{4})(?=\D|$)")
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTH = rf"(?P<month>{'|'.join(MONTHS)})[a-z]*\.?"
WORDED = tuple(
    re.compile(pattern + r"(?=\D|$)", re.IGNORECASE)
    for pattern in (
        rf"(?P<day>\d{{1,2}})[ -]{MONTH}[ -](?P<year>\d{{4}})",
        rf"{MONTH} (?P<day>\d{{1,2}}),? (?P<year>\d{{4}})",
        rf"{MONTH}[ -](?P<year>\d{{4}})",
    )
)
SHORT_HOUR = re.compile(r"(?<=[ T])(\d)(?=:)")
HALF_DAY = re.compile(r"(\d{1,2})(:\d\d(?::\d\d)?) ?([ap])\.?m\.?$", re.IGNORECASE)
SECONDS = re.compile(r"1\d{9}\.\d+")
YEAR_MONTH = re.compile(r"(19|20)\d\d(0[1-9]|1[0-2])")
QUARTER = re.compile(r"(?=.*(?P<year>\d{4}))(?:\d{4}[ -]?)?Q(?P<quarter>[1-4])(?:[ -]?\d{4})?", re.IGNORECASE)
MAX_CELL = 64
"""A longer cell is no time; to search it for one takes time that grows with the square of its length."""
HINT = "as 2024-01-31 or 2024-01-31 13:00"
NAMES = ((7 * DAY, "week"), (DAY, "day"), (HOUR, "hour"), (MINUTE, "minute"), (1000, "second"), (1, "millisecond"))


Notation = Literal["local", "zone", "s", "ms"]
"""Notation of times: without a time zone, with one, or as seconds or milliseconds since 1970."""


class Frequency(Spec):
    """A constant step between times: in milliseconds, calendar months, or rows if times are plain integers."""

    step: Annotated[int, Range(1, 2**53)]
    unit: Literal["ms", "month", "row"] = "ms"
    notation: Notation = "local"
    without: tuple[Annotated[int, Range(0, 6)], ...] = ()
    """Days of the week that daily steps skip, in order; 0 is Monday."""
    day: Annotated[int, Range(0, 30)] = 0
    """Day of the month of monthly steps, if it is the last one of some months but not of all; otherwise 0."""

    def check(self) -> None:
        if self.day and self.unit != "month":
            raise UserError("only steps of months have a day of the month")
        if self.without and (self.step, self.unit) != (DAY, "ms"):
            raise UserError("only steps of a day can be without some days of the week")
        if self.without != tuple(sorted(set(self.without))) or len(self.without) == len(WEEKDAYS):
            raise UserError("Frequency.without has some days of the week, in order")

    def __str__(self) -> str:
        if self.without:
            names = " and ".join(WEEKDAYS[day] for day in self.without)
            return "1 business day" if self.without == WEEKEND else f"1 day without {names}"
        if self.unit != "ms":
            return plural(self.step, self.unit)
        size, name = next((size, name) for size, name in NAMES if self.step % size == 0)
        return plural(self.step // size, name)

    @property
    def season(self) -> int:
        """Steps after which a series is expected to repeat: a day, a week for days, a year for weeks and months."""
        if self.unit == "month":
            return 12 // self.step if 12 % self.step == 0 else 1
        if self.unit == "row":
            return 1
        if self.step < DAY:
            return DAY // self.step if DAY % self.step == 0 else 1
        return {DAY: 7 - len(self.without), 7 * DAY: 52}.get(self.step, 1)

    @property
    def week(self) -> list[bool]:
        """Whether there are steps on each day of the week, from Monday."""
        return [day not in self.without for day in range(7)]

    def count(self, times: np.ndarray) -> np.ndarray:
        """Step number of each time, relative to a fixed origin; fractional between steps."""
        if self.unit == "month":
            return times.astype("datetime64[ms]").astype("datetime64[M]").astype(np.int64) / self.step
        if self.without:
            days = np.busday_count(np.datetime64(0, "D"), (times // DAY).astype("datetime64[D]"), self.week)
            return days + times % DAY / DAY
        return times / self.step

    def following(self, last: int, steps: int) -> np.ndarray:
        """The `steps` times after `last`."""
        month = np.datetime64(int(last), "ms").astype("datetime64[M]")
        start = int(month.astype(np.int64)) if self.unit == "month" else int(last)
        # In Python integers, since numpy's overflow.
        weeks = -(-steps // self.season) if self.without else 0
        if start + self.step * max(steps, 7 * weeks) > LATEST[self.unit]:
            beyond = f"row {LATEST['row']}" if self.unit == "row" else "the year 9999"
            size = f"{plural(steps, 'step')} of {self}"
            raise UserError(f"{self.text(int(last))} is too late to forecast from: {size} would go beyond {beyond}")
        ahead = np.arange(1, steps + 1)
        if self.without:
            day = np.datetime64(int(last) // DAY, "D")
            days = np.busday_offset(day, ahead, "backward", self.week).astype(np.int64)
            return days * DAY + int(last) % DAY
        if self.unit != "month":
            return last + self.step * ahead
        months = month + self.step * ahead
        starts, ends = ((months + more).astype("datetime64[ms]").astype(np.int64) for more in (0, 1))
        day, clock = divmod(last - int(month.astype("datetime64[ms]").astype(np.int64)), DAY)  # day from 0
        if is_last_day(np.array(last)):
            day = self.day - 1 if self.day > day else 30
        return starts + np.minimum(day, (ends - starts) // DAY - 1) * DAY + clock

    def text(self, time: int) -> str:
        """The time as written in a table; in UTC if times have a zone."""
        if self.unit == "row" or self.notation in ("s", "ms"):
            return str(int(time) // (1000 if self.notation == "s" else 1))
        moment = np.datetime64(int(time), "ms")
        if time % DAY == 0 and (self.unit == "month" or self.step % DAY == 0):
            return str(moment.astype("datetime64[D]"))
        text = str(moment.astype("datetime64[s]") if time % 1000 == 0 else moment).replace("T", " ")
        return text + "Z" * (self.notation == "zone")


class ParsedTimes(NamedTuple):
    values: np.ndarray
    """int64, milliseconds since 1970 (UTC where a zone is given), or whole numbers."""
    counted: bool
    """Whether the times are plain integers."""
    notation: Notation = "local"
    midnights: bool = False
    """Whether all times have a zone and are midnights in it."""


def read_times(cells: Sequence[str], where: str, day_first: bool | None = None) -> ParsedTimes:
    """Read times that are written in one way; for `day_first` see `begins_with_day`."""
    digits = [cell.removesuffix(".0") for cell in cells]
    if all(cell.removeprefix("-").isdecimal() for cell in digits):
        sizes = {len(cell) for cell in digits}
        if sizes == {8} and all(cell[:2] in ("19", "20") for cell in digits):
            cells = [f"{cell[:4]}-{cell[4:6]}-{cell[6:]}" for cell in digits]
        elif match_all(YEAR_MONTH.fullmatch, digits):
            cells = [f"{cell[:4]}-{cell[4:]}" for cell in digits]
        else:
            try:
                numbers = np.array(digits, dtype=np.int64)
            except (OverflowError, ValueError):  # Python reads no more than some thousand digits
                raise UserError(f"{where}: the time {max(digits, key=len)[:40]} is too large") from None
            if sizes == {10} and (numbers > 0).all():  # 2001 to 2286
                return ParsedTimes(1000 * numbers, False, "s")
            milliseconds = sizes == {13} and bool((numbers > 0).all())
            return ParsedTimes(numbers, not milliseconds, "ms" if milliseconds else "local")
    elif match_all(SECONDS.fullmatch, cells):
        return ParsedTimes(np.array([round(1000 * float(cell)) for cell in cells], dtype=np.int64), False, "s")
    else:
        cells = to_iso(cells, where, day_first)
        if any(cell.endswith(" UTC") for cell in cells[:1]):
            cells = [cell.removesuffix(" UTC") + "Z" * cell.endswith(" UTC") for cell in cells]
    zoned = sum(bool(ZONE.search(cell)) for cell in cells)
    if zoned and zoned < len(cells):
        raise UserError(f"{where}: some times have a zone, such as +01:00, and others do not")
    try:
        if not zoned and not any(map(NOT_FOR_NUMPY.match, cells)):
            return ParsedTimes(np.array(cells, dtype="datetime64[ms]").astype(np.int64), False)
    except ValueError:  # another notation of ISO 8601
        pass
    moments = np.array([read_time(cell, where) for cell in cells], dtype=np.int64)
    midnights = bool(zoned) and all(map(MIDNIGHT.search, cells))
    return ParsedTimes(moments, False, "zone" if zoned else "local", midnights)


def read_time(cell: str, where: str) -> int:
    try:
        moment = datetime.fromisoformat(cell.strip())
    except ValueError:
        raise UserError(f"{where}: the time {cell[:40]!r} is not understood: write it {HINT}") from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return round(moment.timestamp() * 1000)


def begins_with_day(cells: Iterable[str]) -> bool | None:
    """Whether dates such as 01/02/2024 begin with the day, which the first one after the twelfth shows; None if there
    is none, or if dates are written in another way.
    """
    for cell in cells:
        date = YEAR_LAST.match(cell.strip())
        if date is None:
            return None
        if max(int(date[1]), int(date[3])) > 12:
            return int(date[1]) > 12
    return None


def to_iso(cells: Sequence[str], where: str, day_first: bool | None) -> Sequence[str]:
    """Convert times to ISO 8601 that are all written as 31.01.2024, 31/01/2024, 01/31/2024, 2024/01/31, 31 Jan 2024 or
    2024Q1, optionally with 1:00 or 1:00 PM.
    """
    text = "\n".join(cells).rstrip()
    if text.endswith(("m", "M", ".")) or SHORT_HOUR.search(text):
        cells = [SHORT_HOUR.sub(r"0\1", HALF_DAY.sub(whole_day, cell.strip())) for cell in cells]
    if quarters := match_all(QUARTER.fullmatch, cells):
        return [f"{match['year']}-{3 * int(match['quarter']) - 2:02}" for match in quarters]
    if dates := match_all(YEAR_FIRST.match, cells):
        parts = [tuple(filter(None, match.groups())) for match in dates]
    elif dates := match_all(YEAR_LAST.match, cells):
        if day_first is None:
            day_first = begins_with_day(cells)
        if day_first is None and any(match[2] != "." for match in dates):
            raise UserError(f"{where}: the time {cells[0][:40]!r} can be read in two ways: write it {HINT}")
        month, day = (1, 3) if day_first is False else (3, 1)
        parts = [(match[4], match[month], match[day]) for match in dates]
    elif dates := next(filter(None, (match_all(pattern.match, cells) for pattern in WORDED)), []):
        named = [(match["year"], str(MONTHS.index(match["month"].casefold()) + 1)) for match in dates]
        parts = [(*part, *match.groupdict().get("day", "").split()) for part, match in zip(named, dates)]
    else:
        return cells
    return [
        "-".join([year, *(part.zfill(2) for part in others)]) + cell.strip()[match.end() :]
        for cell, match, (year, *others) in zip(cells, dates, parts)
    ]


def whole_day(clock: re.Match[str]) -> str:
    """Convert to 24 hours: 13:00 for 1:00 PM, 00:00 for 12:00 AM."""
    return f"{int(clock[1]) % 12 + 12 * (clock[3] in 'pP'):02}{clock[2]}"


def match_all(match: Callable[[str], re.Match[str] | None], cells: Sequence[str]) -> list[re.Match[str]]:
    """The matches, if there is one for every cell."""
    matches = list[re.Match[str]]()
    for cell in cells:
        cell_match = match(cell.strip())
        if cell_match is None:
            return []
        matches.append(cell_match)
    return matches


def is_time(cell: str) -> bool:
    """Whether a cell is a date or a time, and not a number."""
    if len(cell) > MAX_CELL:
        return False
    if date := YEAR_LAST.match(cell.strip()):  # a single one may be ambiguous
        return max(int(date[1]), int(date[3])) <= 31
    try:
        times = read_times([cell], "") if cell.strip() else None
        return times is not None and not times.counted and times.notation not in ("s", "ms")
    except UserError:
        return False


def detect_frequency(
    times: np.ndarray, series: np.ndarray, counted: bool, where: str, notation: Notation = "local"
) -> Frequency:
    """Detect the step of times sorted within each series: the most frequent difference, which must divide all."""
    steps = steps_within(times, series)
    if not len(steps):
        raise UserError(f"{where} has no series of two times or more")
    step = most_frequent(steps)
    if counted:
        frequency = Frequency(step, "row")
    elif step >= 28 * DAY and not (bool((steps % step == 0).all()) and leaves_its_day(times)):
        months = steps_within(Frequency(1, "month").count(times), series)
        count = max(most_frequent(months.astype(np.int64)), 1)
        frequency = Frequency(count, "month", notation, day=day_of_month(times))
    elif closed := closed_days(times, steps):
        frequency = Frequency(DAY, notation=notation, without=closed)
    elif DAY <= step < 7 * DAY and not (steps % DAY).any():
        # With skipped days the most frequent step is not informative.
        frequency = Frequency(int(np.gcd.reduce(steps)), notation=notation)
    else:
        frequency = Frequency(step, notation=notation)
    check_regular(times, series, frequency, where)
    return frequency


def steps_within(times: np.ndarray, series: np.ndarray) -> np.ndarray:
    """Differences between the consecutive times of each series."""
    return np.diff(times)[np.diff(series) == 0]


def most_frequent(numbers: np.ndarray) -> int:
    values, counts = np.unique(numbers, return_counts=True)
    return int(values[counts.argmax()])


def closed_days(times: np.ndarray, steps: np.ndarray) -> tuple[int, ...]:
    """Days of the week that never have values, such as weekends, if most of the other days do."""
    weeks = (int(times.max()) - int(times.min())) // (7 * DAY)
    if (steps % DAY).any() or not DAY <= np.median(steps) < 7 * DAY or weeks < MIN_WEEKS:
        return ()
    open_days = np.unique(day_of_week(times))
    return tuple(day for day in range(7) if day not in open_days) if np.mean(steps) < 14 * DAY / len(open_days) else ()


def day_of_week(times: np.ndarray) -> np.ndarray:
    """Day of the week; 0 is Monday."""
    return (times // DAY + 3) % 7  # 1970 began on a Thursday


def leaves_its_day(times: np.ndarray) -> bool:
    """Whether times fall on different days of the month, and not all on the last one: every 28 days, for example."""
    return len(np.unique(days_before(times))) > 1 and not bool(is_last_day(times).all())


def days_before(times: np.ndarray) -> np.ndarray:
    """Number of days of its month before each time."""
    days = (times // DAY).astype("datetime64[D]")
    return (days - days.astype("datetime64[M]")).astype(np.int64)


def is_last_day(times: np.ndarray) -> np.ndarray:
    """Whether each time is on the last day of its month."""
    return days_before(times + DAY) == 0


def day_of_month(times: np.ndarray) -> int:
    """The day of the month of all times, or the last one of shorter months, as in `Frequency.day`."""
    days, last = days_before(times) + 1, is_last_day(times)
    day = int(days.max())
    return day if last.any() and not last.all() and bool((last | (days == day)).all()) else 0


def check_regular(times: np.ndarray, series: np.ndarray, frequency: Frequency, where: str) -> None:
    """Raise UserError for times that are not a positive whole number of steps apart, or on days without steps."""
    closed = times[np.isin(day_of_week(times), frequency.without)] if frequency.without else times[:0]
    if len(closed):
        day, name = frequency.text(int(closed[0])), WEEKDAYS[int(day_of_week(closed[:1])[0])]
        raise UserError(f"{where}: {day} is a {name}, but the steps are those of {frequency}: leave such rows out")
    steps = np.diff(frequency.count(times))
    apart = (np.abs(steps - np.rint(steps)) < 1e-6) & (np.rint(steps) > 0)
    wrong = np.flatnonzero(~apart & (np.diff(series) == 0))
    if len(wrong):
        first, second = (frequency.text(int(time)) for time in times[wrong[0] : wrong[0] + 2])
        raise UserError(
            f"{where}: times are not regular: most are {frequency} apart, but {second} follows {first}; resample "
            "the series to equal steps"
        )
