"""`allmlp train TABLE --horizon H`, `allmlp predict RUN TABLE` and their Python counterparts, on series that repeat."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import allmlp
from allmlp.auto import choose_run
from allmlp.backtest import as_table, backtest
from allmlp.cli import main
from allmlp.data.detect import detect_data
from allmlp.data.frequency import Frequency
from allmlp.data.preprocessing import SeriesPreprocessing, write_preprocessing
from allmlp.data.series_table import SeriesTable
from allmlp.evaluation import evaluate_model
from allmlp.export.files import export
from allmlp.layers import ForecastHead, SeriesSteps, SubtractLast
from allmlp.models.forecasting import linear, patchtsmixer
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.prediction.forecast import Forecaster, draw_forecasts
from allmlp.record import read_record
from allmlp.tasks.forecast import Forecast

HORIZON = 7


def write_sales(file: Path, stores: tuple[str, ...] = ("north", "south"), count: int = 200, base: int = 100) -> Path:
    rows = ["date,store,sales"]
    for place, store in enumerate(stores):
        for n in range(count):
            value = base * (place + 1) + 10 * math.sin(2 * math.pi * n / 7) + 0.1 * n
            rows.append(f"{np.datetime64('2024-01-01') + n},{store},{value:.4f}")
    file.write_text("\n".join(rows) + "\n", encoding="utf8")
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sales.csv, and a model of quantiles trained on it."""
    folder = tmp_path_factory.mktemp("sales")
    data = SeriesTable(str(write_sales(folder / "sales.csv")), horizon=HORIZON, seq_len=28)
    run = choose_run(data, device="cpu").run
    model = patchtsmixer(2, 16, 2, 0.0, 0.0, seq_len=28, in_chans=1, horizon=HORIZON, patch_size=7, stride=7)
    changes = {"model": model, "budget.epochs": 8, "budget.minutes": None, "optim.lr": 5e-3}
    allmlp.train(run, folder / "run", overrides=changes, device="cpu")
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        found = capsys.readouterr()
        return int(caught.value.code or 0), found.out, found.err

    return call


def test_a_table_of_times_is_detected(tmp_path: Path) -> None:
    found = detect_data(str(write_sales(tmp_path / "sales.csv")))
    assert found == SeriesTable(str(tmp_path / "sales.csv"))
    (tmp_path / "reviews.csv").write_text(
        "date,text,label\n" + "".join(f"2024-01-{n + 1:02},a fine film number {n},{n % 2}\n" for n in range(20))
    )
    assert type(detect_data(str(tmp_path / "reviews.csv"))).__name__ == "LabeledText"


def test_settings_are_chosen_with_reasons(tmp_path: Path) -> None:
    file = str(write_sales(tmp_path / "sales.csv"))
    choice = choose_run(SeriesTable(file), device="cpu")
    reasons = {reason.field: reason for reason in choice.reasons}
    assert choice.run.data.horizon == 7 and "a season of 7 steps of 1 day" in reasons["data.horizon"].why
    assert choice.run.data.seq_len == 21 and isinstance(choice.run.task, Forecast) and choice.run.keep_best
    assert choice.run.task.quantiles == (0.1, 0.25, 0.5, 0.75, 0.9)
    assert isinstance(choice.run.model, SeriesEncoder)
    head = choice.run.model.head
    assert isinstance(head, ForecastHead) and head.dropout == 0, "its noise would widen the bands"
    assert choose_run(SeriesTable(file, 28), device="cpu", size=56).run.data.seq_len == 56
    named = choose_run(SeriesTable(file, 5, 20), device="cpu", model="dlinear").run
    assert named.model == allmlp.preset("dlinear").spec
    many = choose_run(SeriesTable(str(write_sales(tmp_path / "many.csv", tuple(map(str, range(60)))))), device="cpu")
    assert many.run.data.eval_stride == 1 or len(many.run.data.load().test) <= 4000


def test_train_a_table_from_the_command_line(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sales(tmp_path / "sales.csv")
    code, out, err = command("train", "sales.csv", "--horizon", 14, "--epochs", 1, "--device", "cpu")
    assert code == 0 and "seasonal_naive_mase" in out and "data.seq_len  42" in err
    assert "next: allmlp predict runs/sales TABLE --out forecast.csv" in err and "first value" in err
    assert allmlp.load("runs/sales").spec.head.horizon == 14
    code, _, err = command("train", "digits_mixer", "--horizon", 14)
    assert code == 2 and "'horizon'" in err


@pytest.mark.slow
def test_forecast_table_and_figure(place: Path, command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    out = tmp_path / "forecast.csv"
    code, printed, _ = command("predict", place / "run", place / "sales.csv", "--out", out)
    assert code == 0 and "7 steps of 1 day after the last of each series" in printed
    rows = list(csv.DictReader(out.read_text(encoding="utf8").splitlines()))
    assert len(rows) == 14 and rows[7]["store"] == "south"
    assert [rows[0]["date"], rows[6]["date"], rows[7]["date"]] == ["2024-07-19", "2024-07-25", "2024-07-19"]
    for n, row in enumerate(rows):
        step = 200 + n % 7
        truth = (100 if n < 7 else 200) + 10 * math.sin(2 * math.pi * step / 7) + 0.1 * step
        quantiles = [float(row[f"sales_{q}"]) for q in ("0.1", "0.25", "0.5", "0.75", "0.9")]
        assert quantiles == sorted(quantiles) and quantiles[2] == float(row["sales"])
        assert float(row["sales"]) == pytest.approx(truth, abs=8), "in the units of the table, near the wave"
    assert (tmp_path / "forecast.png").read_bytes().startswith(b"\x89PNG")
    code, printed, _ = command("predict", place / "run", place / "sales.csv", "--json")
    (north, south) = json.loads(printed)
    assert north["id"] == "north" and north["values"]["sales"] == pytest.approx(
        [float(row["sales"]) for row in rows[:7]], rel=1e-5
    )
    assert list(south["quantiles"]) == ["0.1", "0.25", "0.5", "0.75", "0.9"]


def test_names_of_columns_are_not_formulas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = "".join(f"{np.datetime64('2024-01-01') + n},{n % 7}\n" for n in range(60))
    (tmp_path / "a.csv").write_text(f"day,cost_$_per_$unit\n{rows}", encoding="utf8")
    run = choose_run(SeriesTable(str(tmp_path / "a.csv"), horizon=2, seq_len=8), device="cpu").run
    changes = {"budget.epochs": None, "budget.minutes": None, "budget.steps": 1}
    allmlp.train(run, tmp_path / "run", overrides=changes, device="cpu")
    forecaster = Forecaster(tmp_path / "run", "cpu")
    draw_forecasts(list(forecaster.forecast(str(tmp_path / "a.csv"))), forecaster, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").is_file()


def test_other_series_and_short_ones(place: Path, tmp_path: Path) -> None:
    """A series that was not trained on is forecast at its own level; a short one from what there is."""
    forecaster = Forecaster(place / "run", "cpu")
    (one,) = forecaster.forecast(str(write_sales(tmp_path / "new.csv", ("east",), 60, base=7100)))
    assert one.id == "east" and abs(one.values.mean() - 7100) < 50 and one.past.shape == (28, 1)
    (short,) = forecaster.forecast(str(write_sales(tmp_path / "short.csv", ("north",), 5)))
    assert short.past.shape == (5, 1) and np.isfinite(short.values).all() and len(short.past_times) == 5


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["date,store,sales", *(f"2024-{m:02}-01,north,1" for m in range(1, 9))], "longer steps than the 1 day"),
        (["date,store,sales", "2024-01-01 00:00,north,1", "2024-01-01 01:00,north,2"], "times are not regular"),
        (["date,store,price", "2024-01-01,north,1", "2024-01-02,north,2"], "no column 'sales'"),
        (["date,store,sales", "2024-01-01,north,", "2024-01-02,north,"], "series 'north' has no value"),
        (["date,store,sales"], "rows|columns"),
    ],
)
def test_other_tables_are_refused(
    rows: list[str], message: str, place: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "bad.csv").write_text("\n".join(rows) + "\n")
    code, _, err = command("predict", place / "run", tmp_path / "bad.csv")
    assert code == 2 and len(err.strip().splitlines()) == 1
    with pytest.raises(allmlp.UserError, match=message):
        list(Forecaster(place / "run", "cpu").forecast(str(tmp_path / "bad.csv")))


def test_names_of_tables_with_commas(place: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    """Also where the part before the comma is another file."""
    write_sales(tmp_path / "sales", ("west",), 60)
    names = {"sales,east.csv": "east", "north.csv": "north", "a, b .csv": "south"}
    files = [write_sales(tmp_path / name, (store,), 60) for name, store in names.items()]
    code, out, err = command("predict", place / "run", *files, "--json")
    assert code == 0, err
    assert [one["id"] for one in json.loads(out)] == list(names.values())


def test_other_commands_say_what_to_do(place: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = command("predict", place / "run")
    assert code == 2 and "name the table to forecast" in err
    code, _, err = command("predict", place / "run", place / "sales.csv", "--out", "forecast.xlsx")
    assert code == 2 and "written as .csv, not .xlsx" in err
    for option, value in (("--threshold", "0.5"), ("--part-size", "100")):
        code, _, err = command("predict", place / "run", place / "sales.csv", option, value)
        assert code == 2 and f"{option} is not for forecasts" in err
    code, _, err = command("eval", place / "run", place / "sales.csv", "--classes", "classes.csv")
    assert code == 2 and "--classes is for classifiers" in err
    with pytest.raises(allmlp.UserError, match="forecasts time series: name a table"):
        allmlp.predict(str(place / "run"), "a text")


@pytest.mark.slow
def test_pretraining_by_command(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    """Hidden patches of one table are restored, then another one is forecast, with another look-back too."""
    write_sales(tmp_path / "all.csv", ("east", "north", "south"))
    write_sales(tmp_path / "sales.csv", ("north",))
    pretrained, settings = tmp_path / "pretrained", ("--set", "task=MaskedPatches", "--size", 28)
    small = ("--epochs", 2, "--device", "cpu")
    code, _, err = command("train", tmp_path / "all.csv", *settings, *small, "--out", pretrained)
    assert code == 0 and f"next: allmlp train TABLE --horizon STEPS --model {pretrained}" in err
    body = allmlp.load(pretrained).state_dict()
    for size in (28, 21):
        run = tmp_path / f"run{size}"
        options = ("--horizon", HORIZON, "--size", size, "--model", pretrained, "--set", "optim.lr=0", *small)
        code, _, err = command("train", tmp_path / "sales.csv", *options, "--out", run)
        assert code == 0 and f"start     {pretrained}" in err
        found = allmlp.load(run).state_dict()
        trunk = [name for name in found if not name.startswith("head.")]
        kept = [name for name in trunk if found[name].shape == body[name].shape]
        assert all(torch.equal(found[name], body[name]) for name in kept)
        assert "stem.proj.weight" in kept and (size != 28 or kept == trunk)
        code, out, _ = command("predict", run, tmp_path / "sales.csv", "--json")
        assert code == 0 and len(json.loads(out)[0]["times"]) == HORIZON
    for arguments in (("predict", pretrained, tmp_path / "sales.csv"), ("serve", pretrained, "--port", 0)):
        code, _, err = command(*arguments)
        assert code == 2 and "restores hidden patches" in err and f"--model {pretrained}" in err


def test_point_forecasts_of_a_linear_model(tmp_path: Path) -> None:
    """With zero weights NLinear repeats the last value, whatever the scale of the series."""
    model = linear(SeriesSteps(10, 1, separate=True), SubtractLast()).configure(horizon=3).build()
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    allmlp.save(model, tmp_path / "model")
    known = SeriesPreprocessing(("x",), Frequency(1, "row"), ("",), ((5.0,),), ((2.0,),), "t")
    write_preprocessing(tmp_path / "model", known)
    (tmp_path / "x.csv").write_text("t,x\n" + "".join(f"{n},{n * n}\n" for n in range(12)))
    (one,) = Forecaster(tmp_path / "model", "cpu").forecast(str(tmp_path / "x.csv"))
    assert one.values[:, 0] == pytest.approx([121] * 3) and one.times.tolist() == [12, 13, 14] and one.quantiles is None


@pytest.mark.parametrize(
    ("times", "following"),
    [
        (["2024-03-31 01:30+01:00", "2024-03-31 03:30+02:00"], "2024-03-31 02:30:00Z"),  # summer begins
        (["2024-03-31 01:30", "2024-03-31 02:30"], "2024-03-31 03:30:00"),
        (["1711845000", "1711848600"], "1711852200"),
    ],
)
def test_times_of_a_forecast_are_written_as_those_before(
    times: list[str], following: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    """UTC is marked where times have a zone. Digits of a large value are kept."""
    model = linear(SeriesSteps(10, 1, separate=True), SubtractLast()).configure(horizon=1).build()
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    allmlp.save(model, tmp_path / "model")
    known = SeriesPreprocessing(("x",), Frequency(3_600_000), ("",), ((12345678.0,),), ((1.0,),), "t")
    write_preprocessing(tmp_path / "model", known)
    (tmp_path / "x.csv").write_text("t,x\n" + "".join(f"{time},12345678.5\n" for time in times))
    code, _, _ = command("predict", tmp_path / "model", tmp_path / "x.csv", "--out", tmp_path / "y.csv")
    assert code == 0 and (tmp_path / "y.csv").read_text().splitlines() == ["t,x", f"{following},12345678.5"]
    (tmp_path / "x.csv").write_text("t,x\n1,5\n2,5\n")
    code, _, err = command("predict", tmp_path / "model", tmp_path / "x.csv")
    assert code == 2 and "the times are numbers; those that the model was trained on were dates" in err


def test_business_days(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    """Trained, forecast, drawn and evaluated without weekends; holidays are missing."""
    dates = np.busday_offset("2024-01-01", np.arange(120))
    rows = [f"{day},{n * n % 7 + n % 5}" for n, day in enumerate(dates) if n not in (30, 31, 100)]
    (tmp_path / "prices.csv").write_text("\n".join(["date,close", *rows]) + "\n")
    small = ("--epochs", 1, "--device", "cpu", "--out", tmp_path / "run")
    code, _, err = command("train", tmp_path / "prices.csv", *small)
    assert code == 0 and "data.horizon  5                       a season of 5 steps of 1 business day" in err
    assert "3 of 120 steps of 1 business day have no row" in err
    code, _, _ = command("predict", tmp_path / "run", tmp_path / "prices.csv", "--out", tmp_path / "new/forecast.csv")
    found = [row["date"] for row in csv.DictReader((tmp_path / "new/forecast.csv").read_text().splitlines())]
    assert code == 0 and found == [str(np.busday_offset("2024-01-01", n)) for n in range(120, 125)]
    origins = evaluate_model(str(tmp_path / "run"), str(tmp_path / "prices.csv"), device="cpu").origins
    assert origins == backtest(tmp_path / "run", "cpu") and origins[0].first == str(dates[96])
    assert all(np.is_busday(row.first) for row in origins) and sum(row.forecasts for row in origins) == 20


def test_a_horizon_asks_for_a_forecast(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    """Remarks make no labeled texts of a table, and what is wrong with its times is said."""
    rows = [f"{np.datetime64('2024-01-01') + n},{n % 7},a remark on day {n}" for n in range(60)]
    (tmp_path / "remarks.csv").write_text("\n".join(["date,sales,remark", *rows]) + "\n")
    small = ("--epochs", 1, "--device", "cpu", "--out", tmp_path / "run")
    code, _, err = command("train", tmp_path / "remarks.csv", "--horizon", 7, *small, "--set", "task.quantiles=[]")
    assert "Forecast of quantiles" not in err
    assert code == 0 and "note      sales, steps of 1 day by date\nnote      not read: remark" in err
    (tmp_path / "words.csv").write_text("\n".join(["date,sales", *(f"{n} May '24,{n}" for n in range(1, 30))]) + "\n")
    code, _, err = command("train", tmp_path / "words.csv", "--horizon", 7)
    assert code == 2 and "the times in 'date', such as \"1 May '24\", are not understood" in err


def test_backtest_by_origin(place: Path, tmp_path: Path) -> None:
    """The means over the origins, weighted by their forecasts, are the test metrics."""
    rows = backtest(place / "run", "cpu", most=5)
    test = read_record(place / "run")["result"]["test"]
    count = sum(row.forecasts for row in rows)
    assert len(rows) == 5 and count == 68 and rows[0].first == "2024-06-09"
    for name in ("mse", "mae", "mase"):
        mean = sum(row.forecasts * getattr(row, name) for row in rows) / count
        assert mean == pytest.approx(test[name], rel=1e-4)
    assert sum(row.forecasts * row.naive_mase for row in rows) / count == pytest.approx(test["seasonal_naive_mase"])
    assert as_table(rows).splitlines()[1].split()[:2] == ["2024-06-09", "14"]
    allmlp.train("digits_mixer", tmp_path, overrides={"budget.steps": 1, "budget.epochs": None}, device="cpu")
    with pytest.raises(allmlp.UserError, match="is not a run of time series"):
        backtest(tmp_path, "cpu")


def test_evaluation_of_another_table(place: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    """Its own table as the test of the run; of a longer one what follows the training; of new series everything."""
    own = json.loads(command("eval", place / "run", "--json")[1])
    again = json.loads(command("eval", place / "run", place / "sales.csv", "--json")[1])
    assert again.pop("data").endswith("sales.csv") and own.pop("data") == "its test split"
    assert again.pop("notes") == ["2 of 2 series hold training values, which do not count"] and not own["notes"]
    assert again == {name: value for name, value in own.items() if name != "notes"} and len(own["origins"]) == 12
    mean = sum(row["forecasts"] * row["mase"] for row in own["origins"]) / 68
    assert mean == pytest.approx(own["mase"], rel=1e-4)
    code, out, err = command("eval", place / "run", write_sales(tmp_path / "longer.csv", count=230))
    assert code == 0 and "longer.csv: 128 forecasts" in out and "seasonal_naive_mase" in out and "2024-06-09" in out
    assert err.startswith("note: 2 of 2 series hold training values")
    for name, options, count in (
        ("new", {"stores": ("east",)}, 200 - 28 - 7 + 1),
        ("same names", {"base": 150}, 2 * (200 - 28 - 7 + 1)),
    ):
        found = evaluate_model(str(place / "run"), str(write_sales(tmp_path / f"{name}.csv", **options)), device="cpu")
        assert found.examples == count and 0 < found.metrics["quantile_loss"] < found.metrics["last_value_mae"]
    assert "2 of 2 series differ from the training values" in found.notes[-1]


def test_tables_that_cannot_be_evaluated(place: Path, tmp_path: Path) -> None:
    trained = (place / "sales.csv").read_text().splitlines()[:101]
    (tmp_path / "trained.csv").write_text("\n".join(trained) + "\n")
    with pytest.raises(allmlp.UserError, match=r"no forecast of 7 steps to evaluate: .* short without the values"):
        evaluate_model(str(place / "run"), str(tmp_path / "trained.csv"))
    flat = [f"{np.datetime64('2024-01-01') + n},east,5" for n in range(40)]
    (tmp_path / "flat.csv").write_text("\n".join(["date,store,sales", *flat]) + "\n")
    found = evaluate_model(str(place / "run"), str(tmp_path / "flat.csv"))
    assert "mase" not in found.metrics and found.to_json()["origins"][0]["mase"] is None, "its unit is not known"
    with pytest.raises(allmlp.UserError, match=r"no forecast of 7 steps to evaluate: its series are too short$"):
        evaluate_model(str(place / "run"), str(write_sales(tmp_path / "short.csv", ("east",), 7)))
    (tmp_path / "price.csv").write_text((place / "sales.csv").read_text().replace("sales", "price"))
    with pytest.raises(allmlp.UserError, match="has no column 'sales', only date, store, price"):
        evaluate_model(str(place / "run"), str(tmp_path / "price.csv"))


@pytest.mark.slow
def test_onnx(place: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "sales.onnx"
    export(place / "run", file)
    session, model = runtime.InferenceSession(str(file)), allmlp.load(place / "run")
    x, mask = torch.randn(3, 28, 1), torch.rand(3, 28, 1) > 0.2
    assert [one.name for one in session.get_inputs()] == ["series", "mask"]
    (found,) = session.run(None, {"series": x.numpy(), "mask": mask.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x, mask).detach(), rtol=1e-4, atol=1e-4)
