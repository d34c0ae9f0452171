"""Forecasts over HTTP."""

from __future__ import annotations

import json
import math
import shutil
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from allmlp.data.frequency import DAY, Frequency
from allmlp.data.preprocessing import SeriesPreprocessing, read_preprocessing, write_preprocessing
from allmlp.prediction.forecast import Forecaster
from folders import series_folder
from serve.servers import running

HEAT, LOAD = [float(step % 7) for step in range(30)], [1.0, None, 3.0] * 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return series_folder(tmp_path_factory.mktemp("series") / "energy")


def post(port: int, body: Any) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/forecast", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def test_the_steps_after_the_last(folder: Path) -> None:
    """Those of the model called directly, in the units of the table; only the last `seq_len` values are read."""
    forecaster = Forecaster(folder, "cpu")
    past = np.array([HEAT, LOAD], dtype=float).T[-forecaster.seq_len :]
    ((values, quantiles),) = forecaster.predict([past], [""])
    assert quantiles is not None
    with running(folder) as port:
        status, found = post(port, {"columns": {"load": LOAD, "heat": HEAT}, "last_time": "2024-02-27"})
        _, zoned = post(port, {"columns": {"load": LOAD, "heat": HEAT}, "last_time": "2024-02-27 01:00+02:00"})
        untimed, _ = post(port, {"columns": {"heat": HEAT[-5:], "load": LOAD[-5:]}})
    assert status == untimed == 200
    assert found["times"] == ["2024-02-28", "2024-02-29", "2024-03-01", "2024-03-02"]
    assert zoned["times"][0] == "2024-02-27 23:00:00Z"
    for column, name in enumerate(("heat", "load")):
        one = found["columns"][name]
        np.testing.assert_allclose(one["forecast"], values[:, column], rtol=1e-5)
        assert list(one["quantiles"]) == ["0.1", "0.5", "0.9"]
        np.testing.assert_allclose(one["quantiles"]["0.9"], quantiles[:, column, 2], rtol=1e-5)


def test_the_columns_of_a_table(folder: Path, tmp_path: Path) -> None:
    """Which the page reads tables by."""
    known = read_preprocessing(folder)
    assert isinstance(known, SeriesPreprocessing)
    shutil.copytree(folder, tmp_path / "shops")
    write_preprocessing(tmp_path / "shops", known.replace(id_columns=("shop",)))
    with running(tmp_path / "shops") as port, urlopen(f"http://127.0.0.1:{port}/models/shops/model") as answer:
        found = json.load(answer)
    assert [found[name] for name in ("columns", "time_column", "id_columns")] == [["heat", "load"], "day", ["shop"]]


def test_business_days(folder: Path, tmp_path: Path) -> None:
    """A weekend does not count, nor the zone of a midnight."""
    known = read_preprocessing(folder)
    assert isinstance(known, SeriesPreprocessing)
    shutil.copytree(folder, tmp_path / "prices")
    write_preprocessing(tmp_path / "prices", known.replace(frequency=Frequency(DAY, without=(5, 6))))
    with running(tmp_path / "prices") as port:
        for last in ("2024-03-01", "2024-03-02", "2024-03-01T00:00:00+02:00"):
            status, found = post(port, {"columns": {"load": LOAD, "heat": HEAT}, "last_time": last})
            assert status == 200 and found["times"] == ["2024-03-04", "2024-03-05", "2024-03-06", "2024-03-07"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"columns": {"heat": HEAT}}, "columns must be heat, load"),
        ({"columns": {"heat": HEAT, "load": LOAD[1:]}}, "the same number of values"),
        ({"columns": {"heat": [None], "load": [None]}}, "no value to forecast from"),
        ({"last_time": "tomorrow"}, "last_time"),
        ({"last_time": "9" * 30}, "last_time must be a time"),
        ({"last_time": "NaT"}, "last_time must be a time"),
        ({"last_time": "9999-12-29"}, "beyond the year 9999"),
        ({"last_time": "292278994-08-17"}, "last_time must be a time"),
        ({"last_time": "-292275055-05-17"}, "last_time must be a time"),
        ({"columns": {"heat": [1e31], "load": [1.0]}}, "less than or equal to"),
        ({"columns": {"heat": [math.nan], "load": [1.0]}}, "columns.heat.0: Input should be a finite number"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], says: str, folder: Path) -> None:
    with running(folder) as port:
        status, found = post(port, {"columns": {"heat": HEAT, "load": LOAD}} | changes)
    assert status == 422 and says in found["detail"]
