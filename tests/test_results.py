"""The tables in the pages are what the records give, and no result is typed by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from allmlp.plan.time import training_flops
from allmlp.recipes import recipes
from allmlp.studies import studies as all_studies
from allmlp.study.records import make
from results import images, pages, records, series, speed, studies

ROOT = Path(__file__).parents[1]
RESULT = re.compile(
    r"\d+(?:\.\d+)? ?%(?! (?:interval|masking))|(?:BLEU|F1|perplexity|accuracy)(?: of)? \d"
    r"|\d [a-z ]*(?:images|tokens)/s|\d\.\d+ (?:times|ms)\b"
)
"""Numbers that look like a result."""


def test_pages_are_what_the_records_give() -> None:
    """If not: make results."""
    for file, text in pages.texts():
        assert file.read_text(encoding="utf8") == text, f"{file.relative_to(ROOT)} differs from docs/logs: make results"


def test_every_block_is_known_and_used() -> None:
    used = [
        name
        for page in pages.PAGES
        for name in re.findall(r"<!-- results: (.*?) -->", (ROOT / page).read_text(encoding="utf8"))
    ]
    assert sorted(used) == sorted(pages.BLOCKS)


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/results.md", "docs/further_results.md", "docs/guides/properties.md", "benchmarks/README.md"],
)
def test_no_result_is_typed_by_hand(page: str) -> None:
    text = pages.outside((ROOT / page).read_text(encoding="utf8"))
    if page.startswith("benchmarks"):  # before its results are tolerances, after them notes
        text = text.partition("## Results")[2].partition("## What was tried")[0]
        assert text
    assert not RESULT.findall(text)


CARD = "weights/cifar10/README.md"


def test_a_typed_result_is_found() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    for typed in ("gMLP has 95.69 %.", "It reaches BLEU 40.1.", "1.76 times as fast", "35,617 images/s", "F1 12.6"):
        assert RESULT.search(pages.outside(page + typed)), typed


def test_accuracies_of_the_bundled_model_are_those_of_its_records() -> None:
    """As trained, and as stored in 8 bits."""
    trained = records.evaluation("cifar10_gmlp")["accuracy"]
    stored = json.loads((ROOT / "docs" / "logs" / "cifar10_int8.json").read_text(encoding="utf8"))
    found = {page: RESULT.findall((ROOT / page).read_text(encoding="utf8")) for page in (CARD, "CHANGELOG.md")}
    assert found["CHANGELOG.md"] == [f"{trained:.2%}".replace("%", " %")]
    values = trained, stored["accuracy"], stored["accuracy"], stored["calibration_error"]
    assert found[CARD] == [f"{value:.2%}".replace("%", " %") for value in values]


@pytest.mark.parametrize("name", recipes())
def test_results_in_docstrings_are_published_or_generated(name: str) -> None:
    text = recipes()[name].text.partition("Published")[0] + "\n"
    assert not RESULT.findall(pages.MEASURED.sub("", re.sub("^", "    ", text, flags=re.MULTILINE))), text


# --- a study of made-up runs ----------------------------------------------------------------------------------------


def line(row: str, seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    result = {"test": {"accuracy": accuracy, "majority": 0.1}, "steps": 100, "epochs": 12.4, "seconds": 300.2}
    environment = {"device": "NVIDIA H200"}
    return {
        "row": row,
        "seed": seed,
        "environment": environment,
        "result": result | {"parameters": 7_189_514},
        **more,
    }


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = [
        line("gmlp", 0, 0.9),
        line("gmlp", 1, 0.96),
        line("gmlp", 0, 0.95, purpose="final"),  # repeated: the last counts
        line("gmlp", 2, 0.5, purpose="tune"),
        {key: value for key, value in line("gmlp", 3, 0.5).items() if key != "result"} | {"failed": "NaN"},
        line("vit", 0, 0.94),
    ]
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "cifar10.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "cifar10_gmlp.jsonl").write_text(json.dumps({"kind": "eval", "accuracy": 0.9569}))
    monkeypatch.setattr(records, "LOGS", tmp_path)
    records.lines.cache_clear()
    yield tmp_path
    records.lines.cache_clear()


def test_study_table(logs: Path) -> None:
    rows = {line.split(" | ")[0]: line for line in images.cifar10().splitlines()}
    assert rows["| gMLP"].startswith("| gMLP | `cifar10_gmlp` | 7.19 M | 2 | 12 | 95.00, 96.00 % |")
    assert rows["| ViT"].startswith("| ViT | `cifar10_vit` | 7.19 M | 1 | 12 | 94.00 % |")
    assert rows["| ResNet-18"].startswith("| ResNet-18 | `cifar10_resnet18` | - | 0 | - | - |")
    assert "| gMLP, `cifar10_gmlp` | 7.19 M | 2 | 95.00, 96.00 % |" in images.cifar10_short()
    assert rows["| most frequent class"].endswith("| 10.00 % |  |") and "ResNet-18" not in images.cifar10_short()
    assert "Too few seeds" in images.cifar10_short() and "6.5 minutes: 95.69 %" in images.cifar10_short()


def test_staged_models_are_beside_isotropic_ones(logs: Path) -> None:
    staged = [line("staged", seed, 0.95 + seed / 100, candidate="ResMLP") for seed in (0, 1, 2)]
    (logs / "study" / "cifar10_staged.jsonl").write_text("\n".join(map(json.dumps, staged)))
    text = images.staged()
    # Student's t for two degrees of freedom is 4.3027, the standard error of 95, 96 and 97 is 0.5774.
    assert "| ResMLP, three stages | `cifar10_resmlp_staged` | 7.19 M | 3 | 12 | 96.00 ± 2.48 % |" in text
    assert "| gMLP, isotropic | `cifar10_gmlp` | 7.19 M | 2 | 12 | 95.00, 96.00 % |" in text
    assert "plain MLP" not in text, "nothing is said of models that were not evaluated"
    assert "| Caterpillar-Mi, published |  | 5.9 M |  |  | 95.54 % (CIFAR-100: 79.41 %) |" in text


def test_tables_of_studies_from_partial_records(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of sixty: a table with empty cells, and a figure of what is there."""
    pytest.importorskip("matplotlib")
    trial = next(all_studies()["frontier"].make().final_trials("gmlp_3", ""))
    record = make("frontier", trial, 3, 90.0, {"result": line("", 0, 0.6)["result"]})
    (logs / "study" / "frontier.jsonl").write_text(json.dumps(record))
    (logs / "study" / "cifar10.jsonl").unlink()
    text = studies.all_studies().partition("## frontier\n")[2].partition("\n## ")[0]
    assert "| gmlp_3 | 7,189,514 | 1 | 12.4 | 300 | 60.00 | 10.00 |" in text and "| vit_100 |  | 0 |" in text
    assert "logs/study/frontier.jsonl" in text and "images/study/frontier.svg" in text
    assert "`allmlp study glue`: not run yet." in studies.all_studies()
    monkeypatch.setattr(studies, "IMAGES", logs / "images")
    assert [*studies.draw()] == ["frontier.svg"] and (logs / "images" / "frontier.svg").is_file()


def test_scaling_laws_of_the_study_of_depth() -> None:
    """Losses made by a law give its exponent back; three runs are too few."""
    study, found = all_studies()["depth"].make(), []
    for row in ("gmlp_128_1000", "gmlp_128_3000", "gmlp_128_9000", "gmlp_256_9000", "amlp_128_1000"):
        trial = next(study.final_trials(row, ""))
        flops = trial.run.budget.steps * 256 * training_flops(trial.run.model)
        result = {"test": {"loss": 2 + 3 * (flops / 1e15) ** -0.3}, "parameters": 1, "epochs": trial.run.budget.steps}
        found.append(make("depth", trial, 1, 1.0, {"result": result, "data": {"train": 256}}))
    text = studies.scaling_laws(found)
    _, family, runs, alpha, floor, _ = text.strip().splitlines()[-1].split("|")
    assert (family.strip(), runs.strip()) == ("gmlp", "4") and "amlp" not in text
    assert float(alpha.split()[0]) == pytest.approx(0.3, abs=0.005) and float(floor.split()[0]) == pytest.approx(
        2, abs=0.05
    )


def test_docstrings_get_the_result_of_the_study(logs: Path) -> None:
    source = (ROOT / "src/allmlp/recipes/cifar_classification.py").read_text(encoding="utf8")
    once = pages.annotate(source)
    measured = "    Measured: 95.00, 96.00 % (2 seeds, 300 s alone on one NVIDIA H200).\n"
    assert once.count("Measured:") == 2 and pages.annotate(once) == once
    assert re.search(
        rf"def cifar10_gmlp\(.*?    allmlp train cifar10_gmlp[^\n]*\n{re.escape(measured)}", once, re.DOTALL
    )
    assert "Measured: 94.00 % (one seed, 300 s alone on one NVIDIA H200)." in once


def forecast_row(model: str, dataset: str, horizon: int, seed: int, mse: float) -> dict[str, Any]:
    test = {"mse": mse, "last_value_mse": 1.2, "seasonal_naive_mse": 0.5}
    return {"model": model, "dataset": dataset, "horizon": horizon, "seed": seed, "seq_len": 512, "test": test}


def test_table_of_forecasts_with_missing_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    horizons = enumerate(series.HORIZONS)
    rows = [
        forecast_row("patchtsmixer", "ETTh1", h, seed, 0.3 + 0.1 * i + 0.02 * seed)
        for i, h in horizons
        for seed in (0, 1)
    ]
    rows += [forecast_row("dlinear", "ETTh1", h, 0, 0.5) for h in series.HORIZONS]
    rows += [forecast_row("dlinear", "ETTm1", 96, 0, 0.9), {"model": "dlinear", "error": "out of memory"}]
    rows.append(forecast_row("dlinear", "ETTm1", 96, 0, 0.4))  # repeated: the last counts
    rows.append(forecast_row("dlinear", "ETTh2", 96, 0, 0.4) | {"seq_len": 96})
    monkeypatch.setattr(series, "document", lambda name: {"rows": rows})
    text = series.by_horizon()
    pairs = " | ".join(f"0.{mse}000, 0.{mse}200 (n=2)" for mse in (3, 4, 5, 6))
    assert f"| ETTh1 | PatchTSMixer | {pairs} |" in text
    assert "| ETTh1 | PatchTSMixer, published | 0.368 |  |  |  |" in text
    assert "| ETTh1 | last value | 1.2000 | 1.2000 | 1.2000 | 1.2000 |" in text
    assert "| ETTm1 | DLinear | 0.4000 (n=1) | - | - | - |" in text
    assert "| ETTm1 | last day repeated | 0.5000 | - | - | - |" in text
    assert "13 of 72 runs (3 seeds of each cell) were measured." in text
    means = series.forecasting()
    assert "| PatchTSMixer | 0.4500, 0.4700 (n=2) | - | - |" in means and "| last value | 1.2000 | - | - |" in means
    assert means.endswith("| last day repeated | 0.5000 | - | - |"), "nothing is claimed of fewer than three seeds"
    more = [("patchtsmixer", 2), ("dlinear", 1), ("dlinear", 2)]
    rows += [forecast_row(model, "ETTh1", h, seed, 0.5) for model, seed in more for h in series.HORIZONS]
    # Differences -0.05, -0.03 and 0: Student's t for two degrees of freedom is 4.3027, the standard error 0.01453.
    assert series.forecasting().endswith("| DLinear | -0.0267 ± 0.0625 | - | - |")


def test_ratios_are_medians_over_rounds() -> None:
    """With the quartiles of `allmlp bench`."""
    ours, peer = {"calls_s": [1.0, 1.0, 2.0, 1.0]}, {"calls_s": [2.0, 1.5, 8.0, 1.0]}
    assert speed.ratio(ours, peer) == "1.75 (1.38 to 2.50)"
    assert speed.ratio(ours, None) == "-"


def test_the_best_mode_of_the_other_package_is_compared(tmp_path: Path) -> None:
    backends = {"ours fast": 30, "ours fp8": 40, "timm compiled": 10, "timm channels-last": 12, "timm eager": None}
    rows = [
        {"model": "mixer_b16", "batch": 8, "backend": name, "rate_per_s": rate, "calls_s": [1.0]}
        for name, rate in backends.items()
    ]
    rows.append(rows[0] | {"cell": "gmlp_s16", "rate_per_s": 99})  # measured in the rounds of another model
    (tmp_path / "bench.json").write_text(json.dumps({"rows": rows}))
    (cell,) = speed.cells(tmp_path / "bench.json")
    assert (cell.ours["backend"], cell.peer["backend"], cell.ours["rate_per_s"]) == (
        "ours fast",
        "timm channels-last",
        30,
    )
