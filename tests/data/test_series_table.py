"""Tables of time series: columns, order, gaps, frequency, splits by time, windows; and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allmlp.auto_series import data_settings
from allmlp.backtest import origin_times
from allmlp.data.dataset import subset
from allmlp.data.detect import detect_data
from allmlp.data.ett import ETT
from allmlp.data.frequency import DAY, HOUR, MINUTE, Frequency, read_times
from allmlp.data.series import Windows, build_dataset, eval_stride, level
from allmlp.data.series_table import SeriesTable, read_series, split_name
from allmlp.errors import UserError


def table(folder: Path, rows: list[list[Any]], header: str = "date,sales", name: str = "sales.csv") -> str:
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf8")
    return str(folder / name)


def days(count: int, start: str = "2024-01-01", step: int = 1) -> list[str]:
    first = np.datetime64(start)
    return [str(first + step * number) for number in range(count)]


# --- windows --------------------------------------------------------------------------------------------


def test_windows_read_the_array_without_copies() -> None:
    values = torch.arange(20.0).view(10, 2)
    windows = Windows(values, torch.tensor([0, 6]), torch.tensor([3, 4, 8]), 3, 2)
    past, future, series = windows.fetch(torch.tensor([2, 0]))
    assert series.tolist() == [1, 0]
    assert past[1, :, 0].tolist() == [0, 2, 4] and future[1, :, 0].tolist() == [6, 8]
    # The second series begins at row 6: the step before it is missing.
    assert past[0, 0].isnan().all() and past[0, 1:, 1].tolist() == [13, 15] and future[0, :, 1].tolist() == [17, 19]
    assert windows.has_gaps() and not Windows(values, torch.tensor([0]), torch.tensor([3]), 3, 2).has_gaps()
    some = subset(windows, torch.tensor([1]))
    assert isinstance(some, Windows) and some.values is values and len(some) == 1
    assert list(map(bytes, windows.content())) != list(map(bytes, some.content()))


def test_the_test_part_is_never_seen_in_training(tmp_path: Path) -> None:
    file = table(tmp_path, [[day, n] for n, day in enumerate(days(100))])
    dataset = SeriesTable(file, horizon=5, seq_len=10).load()
    numbers = {"train": (0, 70), "validation": (70, 80), "test": (80, 100)}
    for name, (low, high) in numbers.items():
        split = getattr(dataset, name)
        batch = split.fetch(torch.arange(len(split)))
        future = batch.future * dataset.std[0] + dataset.mean[0]
        assert future.min().round() == max(low, 10) and future.max().round() == high - 1
        assert len(split) == high - max(low, 10) - 5 + 1
    assert dataset.mean.item() == pytest.approx(34.5) and dataset.std.item() == pytest.approx(np.arange(70).std())
    assert dataset.seasonal_error.item() == pytest.approx(7 / np.arange(70).std())  # a week
    every_third = SeriesTable(file, horizon=5, seq_len=10, eval_stride=3).load()
    assert len(every_third.test) == 6 and len(every_third.train) == len(dataset.train)


def test_ett_borders(tmp_path: Path) -> None:
    hours = [f"2016-07-01 {n:02}:00" for n in range(24)]
    rows = [[hours[n % 24], *([n] * 7)] for n in range(14_500)]
    table(tmp_path, rows, "date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT", "ETTh2.csv")
    dataset = ETT("ETTh2", seq_len=96, horizon=192, path=str(tmp_path)).load()
    assert [len(split) for split in (dataset.train, dataset.validation, dataset.test)] == [8353, 2689, 2689]
    assert dataset.mean[0, 0] == pytest.approx(8639 / 2) and dataset.frequency == Frequency(HOUR)
    future = dataset.test.fetch(torch.tensor([0, 2688])).future.double() * dataset.std[0] + dataset.mean[0]
    assert future[0, 0, 0].item() == pytest.approx(11_520, abs=0.01)
    assert future[1, -1, 6].item() == pytest.approx(14_399, abs=0.01)
    with pytest.raises(UserError, match=r"no ETTm1\.csv in .*ETDataset"):
        ETT("ETTm1", path=str(tmp_path)).load()
    table(tmp_path, rows[:100], "date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT", "ETTh1.csv")
    with pytest.raises(UserError, match="has 100 rows, not the 14,400"):
        ETT("ETTh1", path=str(tmp_path)).load()


@pytest.mark.skipif(not os.environ.get("ALLMLP_DATA"), reason="needs ALLMLP_DATA with the ETT files")
def test_ett_itself() -> None:
    try:
        dataset = ETT("ETTh1").load()
    except UserError as missing:
        pytest.skip(str(missing))
    assert [len(split) for split in (dataset.train, dataset.validation, dataset.test)] == [8033, 2785, 2785]
    expected = [7.937742245659508, 2.0210386567335163, 5.079770601157927, 0.7461858799957015]
    assert dataset.mean[0, :4].tolist() == pytest.approx(expected, rel=1e-9)
    assert dataset.std[0, 0].item() == pytest.approx(5.812749409143771, rel=1e-9)


# --- columns and rows -----------------------------------------------------------------------------------


def test_columns_are_found(tmp_path: Path) -> None:
    rows = [[day, store, n, 2 * n] for store in ("north", "south") for n, day in enumerate(days(30))]
    found = read_series(table(tmp_path, rows, "day,shop,sold,returned"))
    assert found.roles[:4] == ("day", ("shop",), ("sold", "returned"), ()) and found.ids == ("north", "south")
    assert found.lengths == [30, 30] and found.frequency == Frequency(DAY) and found.notes == ()
    numbered = [[day, store, item, n] for store in (1, 2) for item in (7, 8) for n, day in enumerate(days(9))]
    found = read_series(table(tmp_path, numbered, "date,store,item,sales"))
    assert found.roles[:4] == ("date", ("store", "item"), ("sales",), ()) and found.ids == ("1/7", "1/8", "2/7", "2/8")
    chosen = SeriesTable(table(tmp_path, rows, "day,shop,sold,returned"), 2, 4, columns=("returned",)).load()
    assert chosen.columns == ("returned",) and chosen.preprocessing.ids == ("north", "south")


def test_words_that_change_within_a_series_are_no_names(tmp_path: Path) -> None:
    """Weather, holidays and days of the week; but a label that stays, or one without which times are not unique."""
    weather = ["sun", "rain", "sun"]
    rows = [[day, shop, weather[n % 3], n] for shop in ("x", "y") for n, day in enumerate(days(30))]
    found = read_series(table(tmp_path, rows, "date,shop,weather,sales"))
    assert found.roles.ids == ("shop",) and found.lengths == [30, 30] and found.notes == ("not read: weather",)
    found = read_series(table(tmp_path, [[day, n % 7 == 0, n] for n, day in enumerate(days(30))], "date,holiday,sales"))
    assert found.roles[:4] == ("date", (), ("sales",), ("holiday",)) and found.lengths == [30]
    regions = [[day, shop, f"of {shop}", n] for n, day in enumerate(days(30)) for shop in ("x", "y")]
    assert read_series(table(tmp_path, regions, "date,shop,area,sales")).roles.ids == ("shop", "area")
    halves = [[day, "old" if n < 15 else "new", n] for n, day in enumerate(days(30))]
    assert read_series(table(tmp_path, halves, "date,model,sales")).lengths == [15, 15]
    note = SeriesTable(table(tmp_path, rows, "date,shop,weather,sales")).load().notes[0]
    assert note == "sales of 2 series named by shop, steps of 1 day by date"


def test_the_index_of_a_data_frame_is_not_forecast(tmp_path: Path) -> None:
    rows = [[n % 15, day, n % 7] for n, day in enumerate(days(30))]
    for header in (",date,sales", "No,date,sales"):
        assert read_series(table(tmp_path, rows, header)).roles.values == ("sales",)
    assert read_series(
        table(tmp_path, [[n, *row] for n, row in enumerate(rows)], "n,steps,date,sales")
    ).roles.values == (
        "n",
        "steps",
        "sales",
    )


def test_decimal_commas(tmp_path: Path) -> None:
    cells = ["1.234,5", "-2,25", "7", "1.000", "", "3"]
    lines = ["Datum;Umsatz", *(f"{n + 1:02}.01.2024;{cell}" for n, cell in enumerate(cells))]
    (tmp_path / "umsatz.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    found = detect_data(str(tmp_path / "umsatz.csv"))
    assert isinstance(found, SeriesTable)
    values = read_series(found.path).values[:, 0]
    assert values[:4].tolist() == [1234.5, -2.25, 7, 1000] and np.isnan(values[4])


@pytest.mark.parametrize(
    ("separator", "cells", "values"),
    [
        ("\t", ["999", "1,234", "2,000"], [999, 1234, 2000]),
        ("\t", ["999", "1,234", "2,5"], [999, 1.234, 2.5]),
        ("\t", ["0,999", "1,234", "2,000"], [0.999, 1.234, 2]),
        ("\t", ["1,234.5", "1,234", "-2,000"], [1234.5, 1234, -2000]),
        (";", ["999", "1,234", "2,000"], [999, 1.234, 2]),
        (";", ["1,234,567", "1,234", "5"], [1234567, 1234, 5]),
        ("\t", ["$1,234", "$999", "$2"], [1234, 999, 2]),
        (";", ["1,234 €", "999", "2"], [1234, 999, 2]),
        (";", ["12,50 €", "1.234,50 €", "3 €"], [12.5, 1234.5, 3]),
        (";", ["1\u202f234,5", "1 234", "€2,25"], [1234.5, 1234, 2.25]),
        (";", ["12,5 %", "1,125%", "-3"], [12.5, 1.125, -3]),
    ],
)
def test_commas_of_thousands_and_of_decimals(
    separator: str, cells: list[str], values: list[float], tmp_path: Path
) -> None:
    lines = [f"date{separator}sales", *(f"2024-01-0{n + 1}{separator}{cell}" for n, cell in enumerate(cells))]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    assert read_series(str(tmp_path / "a.csv")).values[:, 0].tolist() == values


def test_marked_numbers(tmp_path: Path) -> None:
    """Thousands, currencies and percent, also after the first rows; a comma elsewhere is a mistake."""
    cells = ["$1,234.50", "(2.25)", "-$7", "1,000,000", "5 %", "12€", "", "+3"]
    for first in (0, 2_500):
        rows = [[day, 5] for day in days(first)]
        rows += [[day, f'"{cell}"'] for day, cell in zip(days(8, "2024-01-01"), cells)]
        if first:
            rows = [[day, row[1]] for day, row in zip(days(first + 8), rows)]
        found = detect_data(table(tmp_path, rows))
        values = read_series(found.path).values[first:, 0]  # type: ignore[attr-defined]
        assert values[:6].tolist() == [1234.5, -2.25, -7, 1e6, 5, 12] and np.isnan(values[6]) and values[7] == 3
    with pytest.raises(UserError, match=r"row 2: sales is '1,5', not a number"):
        read_series(table(tmp_path, [["2024-01-01", 1], ["2024-01-02", '"1,5"'], ["2024-01-03", 2]]))


def test_numbers_that_name_series(tmp_path: Path) -> None:
    rows = [[day, shop, n % 7 + 0.5] for n, day in enumerate(days(30)) for shop in (7, 8)]
    for name in ("dept_nbr", "Shop ID", "shopId", "branch code"):
        assert read_series(table(tmp_path, rows, f"date,{name},sales")).ids == ("7", "8")
    for given in ((), ("sales",)):  # a number for each row of a day
        assert read_series(table(tmp_path, rows, "date,depot,sales"), columns=given).ids == ("7", "8")
    message = r"2 rows for 2024-01-01: .* if {0} tells .* set data\.id_columns={0}"
    with pytest.raises(UserError, match=message.format("period")):  # perhaps of the day
        read_series(table(tmp_path, rows, "date,period,sales"))
    with pytest.raises(UserError, match="name the column that tells the series apart"):  # the only numbers there are
        read_series(table(tmp_path, [row[:2] for row in rows], "date,sales"))
    some = [[day, shop, n % 7 + 0.5] for n, day in enumerate(days(30)) for shop in (n % 3, 3)]  # each day two of four
    with pytest.raises(UserError, match=message.format("depot")):
        read_series(table(tmp_path, some, "date,depot,sales"))
    assert read_series(table(tmp_path, rows, "date,depot,sales"), id_columns=("depot",)).lengths == [30, 30]


def test_rows_only_where_something_was_sold(tmp_path: Path) -> None:
    """Days are found though other steps are more frequent; a missing day is told not to be 0."""
    places = [0, 3, 6, 8, 11, 14, 17, 21, 22, 25, 28, 31, 39]
    found = read_series(table(tmp_path, [[day, n] for n, day in enumerate(days(40)) if n in places]))
    assert found.frequency == Frequency(DAY) and np.flatnonzero(np.isfinite(found.values)).tolist() == places
    assert found.notes[0].endswith("they are missing values; write 0 where nothing was sold or counted")


def test_further_lines_of_a_header(tmp_path: Path) -> None:
    rows = [["Ticker", "AAPL"], ["Date", ""], *([day, n] for n, day in enumerate(days(30)))]
    for read in (detect_data, read_series):
        with pytest.raises(UserError, match="has 3 lines of names: delete those after the first"):
            read(table(tmp_path, rows, "Price,Close"))


def test_series_in_rows(tmp_path: Path) -> None:
    header = ",".join(["id", *(f"v{n}" for n in range(30))])
    rows = [[f"h{k}", *range(30)] for k in range(5)]
    with pytest.raises(UserError, match=r"v8, \.\.\.: name .* or write a row for each time and name them date"):
        detect_data(table(tmp_path, rows, header))


def test_a_column_without_values_is_not_read(tmp_path: Path) -> None:
    found = read_series(table(tmp_path, [[day, n, ""] for n, day in enumerate(days(30))], "date,sales,"))
    assert found.roles.values == ("sales",) and found.notes == ("not read: column_3",)


def test_levels_of_very_small_and_large_values() -> None:
    """Picoamperes are no constant, and squares do not overflow."""
    rows = np.random.default_rng(0).normal(5, 1, (50, 1))
    for size in (1e-300, 1e-12, 1.0, 1e300):
        mean, std = level(size * rows)
        assert mean[0] / size == pytest.approx(rows.mean()) and std[0] / size == pytest.approx(rows.std())
    assert level(np.full((9, 1), 0.1))[1] == 1 and level(np.zeros((9, 1)))[1] == 1


def test_rows_in_any_order_and_gaps(tmp_path: Path) -> None:
    rows = [[day, n] for n, day in enumerate(days(40))]
    plain = read_series(table(tmp_path, rows))
    shuffled = read_series(table(tmp_path, [rows[n] for n in np.random.default_rng(0).permutation(40)]))
    assert np.array_equal(plain.values, shuffled.values) and "not in the order of time" in shuffled.notes[0]
    del rows[10:13], rows[20]
    gaps = read_series(table(tmp_path, rows))
    assert np.flatnonzero(np.isnan(gaps.values)).tolist() == [10, 11, 12, 23]
    assert gaps.notes == ("4 of 40 steps of 1 day have no row: they are missing values",)
    holes = read_series(table(tmp_path, [[day, "" if n in (3, 4) else n] for n, day in enumerate(days(40))]))
    assert holes.notes == ("2 of 40 values are missing",)
    dataset = SeriesTable(table(tmp_path, rows), horizon=2, seq_len=8).load()
    assert dataset.has_gaps and dataset.mean.isfinite().all() and dataset.seasonal_error.isfinite().all()


def test_interleaved_series_need_no_sorting_note(tmp_path: Path) -> None:
    rows = [[day, store, n] for n, day in enumerate(days(30)) for store in ("a", "b")]
    found = read_series(table(tmp_path, rows, "date,id,sales"))
    assert found.lengths == [30, 30] and found.notes == () and found.values[30:, 0].tolist() == list(range(30))


def test_rows_without_values_at_the_end(tmp_path: Path) -> None:
    """Days to come in the table: the forecast begins after the last value."""
    rows = [
        [day, shop, "" if n > 20 + place or n == 5 else n]
        for place, shop in enumerate("ab")
        for n, day in enumerate(days(30))
    ]
    rows += [[day, "c", ""] for day in days(4)]
    found = read_series(table(tmp_path, rows, "date,shop,sales"))
    assert found.lengths == [21, 22, 4] and np.isnan(found.values[[5, 26], 0]).all()
    assert found.frequency.text(int(found.ends[1])) == "2024-01-22"
    assert found.notes[0] == "17 rows are left out, at the end of series and without values"


def test_names_of_series_in_two_columns(tmp_path: Path) -> None:
    """A slash in a cell is not the one between the columns."""
    stores = (("a/b", "c"), ("a", "b/c"), ("a\\", "c"), ("a", "c"))
    rows = [[day, *names, n] for names in stores for n, day in enumerate(days(5))]
    found = read_series(table(tmp_path, rows, "date,store,item,sales"))
    assert len(set(found.ids)) == len(stores) and found.ids[3] == "a/c"
    assert [tuple(split_name(name, 2)) for name in found.ids] == list(stores)
    assert split_name("a/b", 1) == ["a/b"] and split_name("", 0) == []


def test_short_and_constant_series(tmp_path: Path) -> None:
    rows = [[day, "long", n % 7] for n, day in enumerate(days(60))]
    rows += [[day, "short", n] for n, day in enumerate(days(9))] + [[day, "tiny", 1] for day in days(3)]
    dataset = SeriesTable(table(tmp_path, rows, "date,id,sales"), horizon=4, seq_len=16).load()
    series = [dataset.train.fetch(torch.tensor([n])).series.item() for n in range(len(dataset.train))]
    assert series.count(1) == 1 and 2 not in series, "one window of 5 steps, filled with missing values"
    assert "1 of 3 series are too short to train" in dataset.notes[-1]
    default = SeriesTable(table(tmp_path, rows, "date,id,sales")).load()
    assert default.horizon == 6 and default.notes[-1].endswith("too short to train on a forecast of 6 steps")
    flat = SeriesTable(table(tmp_path, [[day, 3] for day in days(60)]), horizon=4, seq_len=16).load()
    assert flat.std.item() == 1 and flat.notes[1:] == ("constant: sales",) and flat.seasonal_error.isnan().all()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [["2024-01-01", 1], ["2024-01-02", 2], ["2024-01-02", 3], ["2024-01-03", 4], ["2024-01-03", 5]],
            "2 rows for 2024-01-02: keep one",
        ),
        (
            [["2024-01-01", 1], ["2024-02-01", 2], ["2024-03-01", 3], ["2024-03-31", 4], ["2024-05-01", 5]],
            "times are not regular: most are 1 month apart, but 2024-03-31 follows 2024-03-01",
        ),
        ([["2024-01-01", 1], ["2024-01-02", "many"]], r"row 2: sales is 'many', not a number"),
        ([["2024-01-01", 1], ["2024-01-02", "inf"]], r"row 2: sales is infinite"),
        ([["2024-01-01", 1]], "no series of two times or more"),
        (
            [[f"2024-01-01 {h}", 1] for h in ("00:00", "01:00", "02:00", "02:37")],
            "times are not regular: most are 1 hour",
        ),
        ([["2024-01-01", 1], ["2024-01-02", 2], ["2924-01-02", 3]], "only 3 have a row: look for wrong times"),
        (
            [[f"2024-{day}", 1] for day in ("01-01", "02-01", "02-28", "04-01", "05-01", "06-01")],
            "times are not regular: most are 1 month apart, but 2024-02-28 follows 2024-02-01",
        ),
        ([["1 Feb 24", 1], ["2 Feb 24", 2]], "the times in 'date', such as '1 Feb 24', are not understood"),
        ([["01/02/2024", 1], ["02/02/2024", 2]], "'01/02/2024' can be read in two ways: write it as 2024-01-31"),
        ([["2024-01-01 00:00Z", 1], ["2024-01-01 01:00", 2]], "some times have a zone"),
        ([["2024-01-01", 1], ["2024-01-02", 2], ["", 3]], "row 3: no time"),
        ([["2024-01-01", 1], ["NaT", 2], ["2024-01-03", 3]], "row 2: no time"),
        ([[f"{1950 + n}-01-01", 1] for n in range(50)] + [["today", 1]], "the time 'today' is not understood"),
    ],
)
def test_refused_rows(rows: list[list[Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_series(table(tmp_path, rows), columns=("sales",))


def test_a_word_among_numbers_is_named(tmp_path: Path) -> None:
    """It is neither skipped nor taken for the name of a series, wherever it is."""
    for place, header in ((3, "date,sales"), (3, "date,sales,price"), (2_900, "date,sales")):
        rows = [
            [day, "closed" if number == place else 5, 7][: header.count(",") + 1]
            for number, day in enumerate(days(3_000))
        ]
        with pytest.raises(UserError, match=rf"row {place + 1}: sales is 'closed', not a number"):
            detect_data(table(tmp_path, rows, header)).load()
    with pytest.raises(UserError, match=r"no column of numbers, such as 1234\.5, to forecast besides 'date'"):
        detect_data(table(tmp_path, [[day, "closed"] for day in days(30)]))


def test_words_for_missing_values(tmp_path: Path) -> None:
    rows = [
        [day, {3: "NA", 4: ".", 5: "#N/A"}.get(number, 5), "2b" if number % 3 == 0 else 2]
        for number, day in enumerate(days(30))
    ]
    found = read_series(table(tmp_path, rows, "date,sales,store"))
    assert found.roles.values == ("sales",) and found.roles.ids == ("store",) and np.isnan(found.values).any()
    assert np.isnan(read_series(table(tmp_path, [row[:2] for row in rows])).values).sum() == 3


def test_a_table_is_read_once_until_it_changes(tmp_path: Path) -> None:
    file = table(tmp_path, [[day, 5] for day in days(30)])
    first = read_series(file)
    assert read_series(file) is first
    table(tmp_path, [[day, 6] for day in days(31)])
    assert read_series(file).values[0] == 6


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """No more than some numbers of eight bytes remain of each row: ten million rows fit into a laptop."""
    count, moments = 400, days(1_000)
    with open(tmp_path / "large.csv", "w", encoding="utf8") as file:
        file.write("date,store,sales,price\n")
        for store in range(count):
            file.writelines(f"{day},s{store},{number % 7}.5,{number}\n" for number, day in enumerate(moments))
    table(tmp_path, [[day, "s0", 1.5, 2] for day in moments], "date,store,sales,price", "small.csv")
    code = (
        "import resource, sys; from allmlp.data.series_table import SeriesTable\n"
        "peaks = []\n"
        "for name in sys.argv[1:]:\n"
        "    SeriesTable(name, horizon=28).load()\n"
        "    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
        "print(peaks[1] - peaks[0])"
    )
    files = [str(tmp_path / name) for name in ("small.csv", "large.csv")]
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 2**25 + 80 * count * len(moments)


def test_refused_settings(tmp_path: Path) -> None:
    file = table(tmp_path, [[day, n] for n, day in enumerate(days(30))])
    with pytest.raises(UserError, match="too short: the longest has 30 steps"):
        SeriesTable(file, horizon=28).load()
    with pytest.raises(UserError, match="no column 'sale'; did you mean 'sales'"):
        SeriesTable(file, columns=("sale",)).load()
    with pytest.raises(UserError, match=r"set data\.val_fraction"):
        SeriesTable(file, horizon=2, seq_len=4).load().split_validation(5)


@pytest.mark.slow
def test_ten_thousand_series() -> None:
    """Memory and time are those of the rows, not of the windows."""
    lengths = [50] * 10_000
    values = np.random.default_rng(0).normal(size=(500_000, 1))
    parts = [SeriesTable("").split(50, 5)] * 10_000
    sizes, ids = (("x",), Frequency(DAY), 20, 5), tuple(map(str, range(10_000)))
    dataset = build_dataset(values, lengths, parts, *sizes, ids=ids)
    assert len(dataset.train) == 110_000 and dataset.train.values.data_ptr() == dataset.test.values.data_ptr()
    settings = {name: value for name, value, _ in data_settings(dataset, SeriesTable("", 5, 20), None)}
    assert settings == {"data.eval_stride": 8}, "10,000 forecasts of the validation"
    some = build_dataset(values, lengths, parts, *sizes, 8, ids=ids, starts=(0,) * 10_000)
    assert len(some.validation) == 1250 and len(some.test) == 7500
    times, counts = np.unique(origin_times(some, some.test), return_counts=True)
    assert times.tolist() == [DAY * step for step in (40, 42, 44)] and set(counts) == {2500}, "at several origins"
    assert [eval_stride(count) for count in (0, 2000, 2001, 5000, 14_000)] == [1, 1, 2, 4, 8]


# --- times ----------------------------------------------------------------------------------------------

ZONED_HOUR = Frequency(HOUR, notation="zone")


@pytest.mark.parametrize(
    ("times", "expected", "season", "following"),
    [
        (["2024-01-01 00:00", "2024-01-01 00:15"], Frequency(15 * MINUTE), 96, "2024-01-01 00:30:00"),
        (["2024-01-01T00:00:00Z", "2024-01-01T01:00:00Z"], ZONED_HOUR, 24, "2024-01-01 02:00:00Z"),
        (["2024-01-01 01:00+01:00", "2024-01-01 02:00+01:00"], ZONED_HOUR, 24, "2024-01-01 02:00:00Z"),
        (["1704067200", "1704070800"], Frequency(HOUR, notation="s"), 24, "1704074400"),
        (["1704067200.0", "1704070800.0"], Frequency(HOUR, notation="s"), 24, "1704074400"),
        (["1704067200000", "1704070800000"], Frequency(HOUR, notation="ms"), 24, "1704074400000"),
        (["31.01.2024 13:00", "31.01.2024 14:00"], Frequency(HOUR), 24, "2024-01-31 15:00:00"),
        (["1.2.2024", "2.2.2024"], Frequency(DAY), 7, "2024-02-03"),
        (["12/02/2024", "13/02/2024"], Frequency(DAY), 7, "2024-02-14"),
        (["2/12/2024", "2/13/2024"], Frequency(DAY), 7, "2024-02-14"),
        (["2024/1/31", "2024/2/1"], Frequency(DAY), 7, "2024-02-02"),
        (["2024Q1", "2024Q2"], Frequency(3, "month"), 4, "2024-07-01"),
        (["20240101", "20240102"], Frequency(DAY), 7, "2024-01-03"),
        (["202312", "202401"], Frequency(1, "month"), 12, "2024-02-01"),
        (["2023 Q4", "2024 q1"], Frequency(3, "month"), 4, "2024-04-01"),
        (["Q4 2023", "Q1 2024"], Frequency(3, "month"), 4, "2024-04-01"),
        (["2024-W05", "2024-W06"], Frequency(7 * DAY), 52, "2024-02-12"),
        (["1 Feb 2024", "2 February 2024"], Frequency(DAY), 7, "2024-02-03"),
        (["31-Jan-2024 13:00", "31-JAN-2024 14:00"], Frequency(HOUR), 24, "2024-01-31 15:00:00"),
        (["Jan. 1 2024", "January 2 2024"], Frequency(DAY), 7, "2024-01-03"),
        (["Dec 2023", "Jan 2024"], Frequency(1, "month"), 12, "2024-02-01"),
        (["1/31/2024 9:30", "1/31/2024 10:30"], Frequency(HOUR), 24, "2024-01-31 11:30:00"),
        (["2024-01-31 9:30", "2024-01-31 10:30"], Frequency(HOUR), 24, "2024-01-31 11:30:00"),
        (["1/31/2024 12:30 AM", "1/31/2024 1:30 am"], Frequency(HOUR), 24, "2024-01-31 02:30:00"),
        (["2024-01-31 12:00:00 PM", "2024-01-31 1:00:00 PM"], Frequency(HOUR), 24, "2024-01-31 14:00:00"),
        (["2024-01-31 00:00:00 UTC", "2024-01-31 01:00:00 UTC"], ZONED_HOUR, 24, "2024-01-31 02:00:00Z"),
        (["2024-01-01", "2024-01-08"], Frequency(7 * DAY), 52, "2024-01-15"),
        (["2024-01-31", "2024-02-29"], Frequency(1, "month"), 12, "2024-03-31"),
        (["2024-01-15", "2024-02-15", "2024-03-15"], Frequency(1, "month"), 12, "2024-04-15"),
        (["2024-07-01", "2024-08-01", "2024-09-01"], Frequency(1, "month"), 12, "2024-10-01"),
        (["2024-05-31", "2024-06-28", "2024-07-31"], Frequency(1, "month"), 12, "2024-08-31"),
        (days(20, step=28), Frequency(28 * DAY), 1, "2025-07-14"),
        (["2024-01", "2024-04"], Frequency(3, "month"), 4, "2024-07-01"),
        (["2021-06-30", "2022-06-30"], Frequency(12, "month"), 1, "2023-06-30"),
        (["2024-03-31", "2024-06-30"], Frequency(3, "month"), 4, "2024-09-30"),
        (days(14, "2024-01-01", 28), Frequency(28 * DAY), 1, "2025-01-27"),
        (days(5, "2024-01-01", 30), Frequency(30 * DAY), 1, "2024-05-30"),
        (["5", "6", "7"], Frequency(1, "row"), 1, "8"),
        (["1704067200.25", "1704070800.25"], Frequency(HOUR, notation="s"), 24, "1704074400"),
    ],
)
def test_frequencies(times: list[str], expected: Frequency, season: int, following: str, tmp_path: Path) -> None:
    found = read_series(table(tmp_path, [[time, n] for n, time in enumerate(times)], "time,x"))
    assert found.frequency == expected and expected.season == season and found.lengths == [len(times)]
    assert expected.text(expected.following(int(found.ends[0]), 1)[0]) == following


@pytest.mark.parametrize(
    ("last", "frequency", "reason"),
    [
        ("9999-12-31", Frequency(DAY), "9999-12-31 is too late to forecast from: 1 step of 1 day would"),
        ("9999-12-31 23:30", Frequency(HOUR), "9999-12-31 23:30:00 is too late"),
        ("9999-11-30", Frequency(2, "month"), "beyond the year 9999"),
        ("2024-01-31", Frequency(2**53, "month"), "beyond the year 9999"),
        (str(2**63 - 1), Frequency(1, "row"), "beyond row 9223372036854775807"),
    ],
)
def test_no_time_follows_the_last_one(last: str, frequency: Frequency, reason: str) -> None:
    """numpy's times would wrap around to negative years."""
    time = int(read_times([last], "")[0][0])
    with pytest.raises(UserError, match=reason):
        frequency.following(time, 1)


def test_years_have_four_digits() -> None:
    frequency, time = Frequency(DAY), int(read_times(["9999-12-30"], "")[0][0])
    assert frequency.text(frequency.following(time, 1)[0]) == "9999-12-31"
    with pytest.raises(UserError, match="the time '292278994-08-17' is not understood"):
        read_times(["2024-01-01", "292278994-08-17"], "t.csv")


def test_names_of_frequencies() -> None:
    names = [str(Frequency(step)) for step in (15 * MINUTE, HOUR, DAY, 7 * DAY, 1000, 90 * MINUTE)]
    assert names == ["15 minutes", "1 hour", "1 day", "1 week", "1 second", "90 minutes"]
    assert str(Frequency(3, "month")) == "3 months" and read_times(["3", "4"], "")[1]


def test_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    stamps = np.array(days(20), dtype="datetime64[us]")
    parquet.write_table(arrow.table({"ds": stamps, "y": np.arange(20.0)}), tmp_path / "a.parquet")
    found = read_series(str(tmp_path / "a.parquet"))
    assert found.roles[:4] == ("ds", (), ("y",), ()) and found.frequency == Frequency(DAY) and found.values[5, 0] == 5


@pytest.mark.parametrize(
    ("cells", "message"),
    [(["9" * 30, "9" * 29], "9 is too large"), (["9" * 5000, "1"], "9 is too large"), (["1²", "2²"], "not underst")],
)
def test_numbers_that_are_no_times(cells: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_times(cells, "a.csv")
