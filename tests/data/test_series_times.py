"""Times as people write them: business days, hours and days around a change of the clocks, parts in several columns."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allmlp.data.detect import detect_data
from allmlp.data.frequency import DAY, HOUR, Frequency, read_times
from allmlp.data.series_table import SeriesTable, read_series
from allmlp.errors import UserError

BUSINESS = Frequency(DAY, without=(5, 6))


def table(folder: Path, rows: list[list[Any]], header: str = "date,price") -> str:
    (folder / "t.csv").write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(folder / "t.csv")


def days(count: int, week: str = "1111100", start: str = "2024-01-01") -> list[str]:
    return [str(day) for day in np.busday_offset(start, np.arange(count), weekmask=week)]


# --- days of the week -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("week", "without", "name"),
    [
        ("1111100", (5, 6), "1 business day"),
        ("1111110", (6,), "1 day without Sunday"),
        ("1111001", (4, 5), "1 day without Friday and Saturday"),
        ("1010100", (1, 3, 5, 6), "1 day without Tuesday and Thursday and Saturday and Sunday"),
        ("1111111", (), "1 day"),
    ],
)
def test_days_without_values_every_week(week: str, without: tuple[int, ...], name: str, tmp_path: Path) -> None:
    *moments, second, third = days(61, week)
    frequency = Frequency(DAY, without=without)
    found = read_series(table(tmp_path, [[day, n] for n, day in enumerate(moments)]))
    assert found.frequency == frequency and str(frequency) == name and frequency.season == week.count("1")
    assert found.lengths == [59] and found.notes == () and found.values[:, 0].tolist() == list(range(59))
    assert list(map(frequency.text, frequency.following(int(found.ends[0]), 2))) == [second, third]
    start = int(found.starts[0])
    assert [frequency.text(start), *map(frequency.text, frequency.following(start, 58))] == moments


def test_holidays_are_missing_values(tmp_path: Path) -> None:
    rows = [[day, n] for n, day in enumerate(days(60))]
    del rows[40], rows[10:12]
    found = read_series(table(tmp_path, rows))
    assert found.frequency == BUSINESS and np.flatnonzero(np.isnan(found.values)).tolist() == [10, 11, 40]
    assert found.notes == ("3 of 60 steps of 1 business day have no row: they are missing values",)
    note = SeriesTable(table(tmp_path, rows), horizon=5).load().notes[0]
    assert note == "price, steps of 1 business day by date"


def test_times_of_the_day_and_several_series(tmp_path: Path) -> None:
    """At noon and at the close of the market; one series has other holidays."""
    rows = [[f"{day} {hour}:00", name, n] for name, hour in (("a", 12), ("b", 16)) for n, day in enumerate(days(30))]
    del rows[40]
    found = read_series(table(tmp_path, rows, "time,ticker,price"))
    assert found.frequency == BUSINESS and found.lengths == [30, 30] and np.isnan(found.values[40, 0])
    assert found.frequency.text(found.frequency.following(int(found.ends[1]), 1)[0]) == "2024-02-12 16:00:00"
    noon = read_series(table(tmp_path, [[f"{day} 12:00", n] for n, day in enumerate(days(30, "1111111"))]))
    assert noon.lengths == [30] and noon.notes == ()


def test_few_or_sparse_days_tell_no_week(tmp_path: Path) -> None:
    short = read_series(table(tmp_path, [[day, n] for n, day in enumerate(days(12))]))
    assert short.frequency == Frequency(DAY) and short.lengths == [16]
    rows = [[day, n] for n, day in enumerate(days(60)) if n % 20 < 6]
    assert read_series(table(tmp_path, rows)).frequency == Frequency(DAY)
    once = sorted([*days(60), "2024-02-03"])
    found = read_series(table(tmp_path, [[day, n] for n, day in enumerate(once)]))
    assert str(found.frequency) == "1 day without Sunday", "there was a Saturday"


def test_another_week_is_refused(tmp_path: Path) -> None:
    file = table(tmp_path, [[day, n] for n, day in enumerate(days(20, "1111111"))])
    with pytest.raises(UserError, match="2024-01-06 is a Saturday, but the steps are those of 1 business day"):
        read_series(file, frequency=BUSINESS)


def test_a_week_is_one_of_days() -> None:
    with pytest.raises(UserError, match="only steps of a day"):
        Frequency(HOUR, without=(6,))
    for without in ((6, 5), (5, 5), tuple(range(7))):
        with pytest.raises(UserError, match="some days of the week, in order"):
            Frequency(DAY, without=without)
    with pytest.raises(UserError, match="only steps of months"):
        Frequency(DAY, day=28)
    saturday = int(read_times(["2024-01-06"], "").values[0])
    assert BUSINESS.text(BUSINESS.following(saturday, 1)[0]) == "2024-01-08"
    with pytest.raises(UserError, match="beyond the year 9999"):
        BUSINESS.following(int(read_times(["9999-12-30"], "").values[0]), 3)


# --- order of day and month -----------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M", "%d.%m.%Y %H:%M", "%m-%d-%Y %H:%M"])
def test_a_day_after_the_twelfth_anywhere_shows_the_order(written: str, tmp_path: Path) -> None:
    """Of minutes the first chunks of rows have no such day."""
    start = datetime(2024, 1, 1)
    moments = [start + timedelta(minutes=n) for n in range(13 * 24 * 60)]
    found = read_series(table(tmp_path, [[one.strftime(written), n] for n, one in enumerate(moments)]))
    assert str(found.frequency) == "1 minute" and found.lengths == [len(moments)] and found.notes == ()
    assert found.frequency.text(int(found.ends[0])) == str(moments[-1])


def test_the_order_is_shown_by_any_series(tmp_path: Path) -> None:
    """With a row of many stores for each day, the first rows are of few days."""
    rows = [[f"{day:02}/02/2024", f"s{store}", day] for day in range(1, 14) for store in range(1500)]
    found = read_series(table(tmp_path, rows, "date,store,sales"))
    assert found.frequency == Frequency(DAY) and found.lengths == [13] * 1500


# --- months ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["", " 16:30:00", " 23:59:59"])
@pytest.mark.parametrize("count", [25, 26, 27, 28])
@pytest.mark.parametrize("day", [1, 15, 28, 29, 30, 31])
def test_months_keep_their_day(day: int, count: int, clock: str, tmp_path: Path) -> None:
    """A series on the 28th may end in February, one on the 30th in April: these are no ends of months."""
    months = np.datetime64("2021-01") + np.arange(count + 14)
    lasts = (months + 1).astype("datetime64[D]") - 1
    moments = [f"{one}{clock}" for one in np.minimum(months.astype("datetime64[D]") + day - 1, lasts)]
    file = table(tmp_path, [[time, n] for n, time in enumerate(moments[:count])])
    for found in (read_series(file), read_series(file, frequency=Frequency(1, "month"))):
        following = found.frequency.following(int(found.ends[0]), 14)
        assert list(map(found.frequency.text, following)) == moments[count:]


# --- clocks that are changed ----------------------------------------------------------------------------


def hours(first: str, count: int, zone: int = 0) -> list[np.datetime64]:
    return [np.datetime64(first, "s") + 3600 * n for n in range(zone, zone + count)]


def test_hours_of_local_time(tmp_path: Path) -> None:
    """The hour that does not exist in spring is missing, of the one that occurs twice in autumn the mean is read."""
    spring = hours("2024-03-30T00:00", 60)
    del spring[26]
    found = read_series(table(tmp_path, [[time, n] for n, time in enumerate(spring)]))
    assert found.notes == ("1 of 60 steps of 1 hour have no row: they are missing values",)
    autumn = hours("2024-10-26T00:00", 60)
    autumn.insert(27, autumn[26])
    rows = [[time, store, n] for store in "ab" for n, time in enumerate(autumn)]
    found = read_series(table(tmp_path, rows, "time,store,load"))
    assert found.lengths == [60, 60] and found.values[25:29, 0].tolist() == [25, 26.5, 28, 29]
    assert found.notes == ("2 times occur twice as clocks are set back, such as 2024-10-27 02:00:00: means are read",)
    quarters = [f"2024-10-27 {clock}:{minute:02}" for clock in ("01", "02", "02", "03") for minute in (0, 15, 30, 45)]
    rows = [[time, "" if n == 4 else n] for n, time in enumerate(quarters)]
    found = read_series(table(tmp_path, rows))
    assert found.values[:, 0].tolist() == [0, 1, 2, 3, 8, 7, 8, 9, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("first", "doubled"),
    [("2024-10-26", [37]), ("2024-07-06", [26]), ("2024-10-26", [26, 27]), ("2024-10-26", [26, 26])],
)
def test_other_doubled_hours_are_refused(first: str, doubled: list[int], tmp_path: Path) -> None:
    """By day, in summer, two hours, three rows."""
    times = hours(f"{first}T00:00", 60)
    with pytest.raises(UserError, match=r"rows for .*: keep one"):
        read_series(table(tmp_path, [[time, 1] for time in sorted([*times, *(times[n] for n in doubled)])]))


@pytest.mark.parametrize("notation", ["offset", "Z", "local", "s", "ms"])
@pytest.mark.parametrize(("winter", "week"), [(1, "1111111"), (-5, "1111111"), (0, "1111100"), (12, "1111100")])
def test_days_that_begin_at_local_midnights(winter: int, week: str, notation: str, tmp_path: Path) -> None:
    """In UTC they are 23 or 25 hours apart where clocks are changed."""
    moments = days(60, week, "2024-03-01")
    rows: list[list[Any]] = []
    for n, day in enumerate(moments):
        offset = winter + (day > "2024-03-31")
        time = np.datetime64(day, "s") - 3600 * offset
        seconds = int(time.astype(np.int64))
        written = {"offset": f"{day}T00:00:00{offset:+03}:00", "Z": f"{time}Z", "local": f"{time}"}
        rows.append([{**written, "s": seconds, "ms": 1000 * seconds}[notation], n])
    found = read_series(table(tmp_path, rows))
    assert found.lengths == [60] and found.frequency == (BUSINESS if week == "1111100" else Frequency(DAY))
    assert found.frequency.text(int(found.ends[0])) == moments[-1]
    assert found.notes == ("times are local midnights: their dates are read",)


def test_two_hours_of_every_day_are_no_midnights(tmp_path: Path) -> None:
    rows = [[f"2024-01-{day:02} {hour}:00", day] for day in range(1, 20) for hour in (22, 23)]
    assert read_series(table(tmp_path, rows)).frequency == Frequency(HOUR)
    zoned = [[f"{time}Z", 1] for time in hours("2024-01-01T00:00", 48)]
    assert read_series(table(tmp_path, zoned)).frequency == Frequency(HOUR, notation="zone")


# --- times in several columns ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "rows", "joined", "frequency", "last"),
    [
        ("year,month,x", [[2020 + n // 12, n % 12 + 1] for n in range(30)], 2, Frequency(1, "month"), "2022-06-01"),
        ("Year,Month,x", [[2020, "Jan"], [2020, "February"], [2020, "MAR"]], 2, Frequency(1, "month"), "2020-03-01"),
        ("year,quarter,x", [[2020 + n // 4, n % 4 + 1] for n in range(9)], 2, Frequency(3, "month"), "2022-01-01"),
        (
            "year,quarter,x",
            [[2020 + n // 4, f"Q{n % 4 + 1}"] for n in range(9)],
            2,
            Frequency(3, "month"),
            "2022-01-01",
        ),
        ("year,week,x", [[2020, n + 1] for n in range(53)], 2, Frequency(7 * DAY), "2020-12-28"),
        ("day,month,year,x", [[n + 1, 1, 2024] for n in range(9)], 3, Frequency(DAY), "2024-01-09"),
        ("year,month,day,hour,x", [[2024, 1, 1, n] for n in range(24)], 4, Frequency(HOUR), "2024-01-01 23:00:00"),
        ("year,month,day,hour,x", [[2024, 1, 1, n + 1] for n in range(24)], 4, Frequency(HOUR), "2024-01-01 23:00:00"),
        (
            "year,month,day,hour,minute,x",
            [[2024.0, 1, 1, n // 2, 30 * (n % 2)] for n in range(9)],
            5,
            Frequency(HOUR // 2),
            "2024-01-01 04:00:00",
        ),
        ("date,time,x", [["2024-01-01", f"{n}:30"] for n in range(12)], 2, Frequency(HOUR), "2024-01-01 11:30:00"),
        ("date,time,x", [["2024-01-01", f"{n}.30.00"] for n in range(9)], 2, Frequency(HOUR), "2024-01-01 08:30:00"),
        ("date,hour,x", [["31.01.2024", n] for n in range(12)], 2, Frequency(HOUR), "2024-01-31 11:00:00"),
    ],
)
def test_times_in_several_columns(
    header: str, rows: list[list[Any]], joined: int, frequency: Frequency, last: str, tmp_path: Path
) -> None:
    file = table(tmp_path, [[*row, n] for n, row in enumerate(rows)], header)
    assert detect_data(file) == SeriesTable(file)
    found = read_series(file)
    assert (
        found.frequency == frequency
        and found.roles.values == ("x",)
        and found.lengths == [len(rows)]
        and len(found.roles.joined) == joined
    )
    assert found.frequency.text(int(found.ends[0])) == last
    assert found.notes[0] == f"{' and '.join(found.roles.joined)} are joined as {found.roles.time}"
    again = read_series(file, found.roles.time, (), ("x",), frequency)
    assert again.frequency == frequency and again.roles.joined == found.roles.joined, "as in a prediction"


def test_parts_of_the_time_that_are_something_else(tmp_path: Path) -> None:
    """Beside a whole time they are neither joined nor forecast; and each hour can be a series of its own."""
    rows = [[day, 2024, n % 7, n] for n, day in enumerate(days(30))]
    found = read_series(table(tmp_path, rows, "date,year,weekday,sales"))
    assert found.roles.values == ("sales",) and found.notes == ("not read: year, weekday",)
    assert read_series(table(tmp_path, rows, "date,year,weekday,sales"), columns=("year",)).roles.values == ("year",)
    opening = [[day, 9 + n % 3, n] for n, day in enumerate(days(30))]
    assert read_series(table(tmp_path, opening, "date,hour,sales")).roles[:3] == ("date", (), ("sales",))
    hourly = [[day, f"{hour}:00", hour] for day in days(30) for hour in range(24)]
    assert read_series(table(tmp_path, hourly, "date,time,load"), id_columns=("time",)).lengths == [30] * 24
    years = [[1990 + n, n] for n in range(30)]
    assert read_series(table(tmp_path, years, "year,sales")).roles[:3] == ("year", (), ("sales",))
    with pytest.raises(UserError, match="the time '2024-13-01' is not understood"):
        read_series(table(tmp_path, [[2024, n % 12 + 1, n] for n in range(2400)] + [[2024, 13, 1]], "year,month,sales"))


# --- almost equal steps ---------------------------------------------------------------------------------


def test_the_clock_of_a_sensor(tmp_path: Path) -> None:
    """Times near whole steps, or always some time after them, are rounded; others are refused."""
    random = np.random.default_rng(0)
    for start, step, name in (("00:00:00", 60, "1 minute"), ("08:10:00", 86_400, "1 day")):
        first = np.datetime64(f"2024-01-01T{start}")
        late = random.integers(0, step // 10, 50)
        times = [first + step * n + late[n] for n in range(50) if n not in (20, 21)]
        found = read_series(table(tmp_path, [[time, n] for n, time in enumerate(times)], "time,x"))
        assert found.notes[0] == f"times are rounded to steps of {name}" and found.lengths == [50]
        assert np.flatnonzero(np.isnan(found.values)).tolist() == [20, 21] and str(found.frequency) == name
        again = read_series(str(tmp_path / "t.csv"), frequency=found.frequency)
        assert (
            again.ends == found.ends and abs(int(found.ends[0]) - int(times[-1].astype(np.int64)) * 1000) < 150 * step
        )
    drifting = [first + 61 * n for n in range(50)]
    rows = [[time + int(random.integers(0, 30)), n] for n, time in enumerate(drifting)]
    with pytest.raises(UserError, match="times are not regular"):
        read_series(table(tmp_path, rows, "time,x"))


@pytest.mark.parametrize(
    ("changed", "last"), [({47: -1, 80: 1}, "2021-11-25"), (dict.fromkeys(range(60, 100), 3), "2021-11-28")]
)
def test_weeks_on_other_days(changed: dict[int, int], last: str, tmp_path: Path) -> None:
    """Thursdays but for holidays, and from some week on Sundays."""
    times = [np.datetime64("2020-01-02") + 7 * n + changed.get(n, 0) for n in range(100)]
    del times[30]
    found = read_series(table(tmp_path, [[time, n] for n, time in enumerate(times)]))
    assert found.frequency == Frequency(7 * DAY) and found.lengths == [100] and np.isnan(found.values[30, 0])
    assert found.notes[0].startswith("weeks are on different days") and found.frequency.text(found.ends[0]) == last
    twice = sorted([*times, times[50] + 2])
    with pytest.raises(UserError, match="times are not regular"):
        read_series(table(tmp_path, [[time, n] for n, time in enumerate(twice)]))


def test_minutes_are_forecast_for_an_hour(tmp_path: Path) -> None:
    rows = [[np.datetime64("2024-01-01T00:00") + n, n % 60] for n in range(3000)]
    assert SeriesTable(table(tmp_path, rows)).load().horizon == 60
