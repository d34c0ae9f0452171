"""The scripts of benchmarks/, small."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from allmlp.bench.timing import Timing
from results import records, speed

ROOT = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# --- plain.py ------------------------------------------------------------------------------------------------


def test_the_plain_script_shares_no_code_with_the_benchmark() -> None:
    text = (ROOT / "plain.py").read_text(encoding="utf8")
    assert len(text.splitlines()) <= 60
    modules = {
        name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert {name for name in modules if name.startswith("allmlp")} == {"allmlp"}


@pytest.mark.slow
def test_the_plain_script_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    options = "--models mixer_s32 --batch-size 1 --device cpu --sides eager,fast --calls 1 --rounds 2"
    monkeypatch.setattr(sys, "argv", ["plain.py", *options.split()])
    runpy.run_path(str(ROOT / "plain.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["eager", "fast", "matmul"]
    for line in lines:
        low, median, high = (
            float(re.search(pattern, line)[1].replace(",", ""))
            for pattern in (r"\(([\d.,]+) to", r" +([\d.,]+) \S+/s", r"to ([\d.,]+)\)")
        )
        assert 0 < low <= median <= high
    assert lines[1].endswith("time / fast 1.000 (1.000 to 1.000)") and "time / fast 1.000 (1" not in lines[0]


# --- guard.py ------------------------------------------------------------------------------------------------


def speeds(**shares: float | None) -> dict[str, dict[str, Any]]:
    return {
        name: {"share": share, "rate_per_s": 100.0, "unit": "images", "note": "" if share else "out of memory"}
        for name, share in shares.items()
    }


def test_a_speed_more_than_3_percent_below_its_record_fails() -> None:
    guard = load("guard")
    records = speeds(a=0.5, b=0.5, c=0.5, d=0.5)
    found = list(guard.compare_speeds(speeds(a=0.486, b=0.484, c=0.6, d=None, e=0.5), records))
    assert [good for good, _ in found] == [True, False, True, False, False]
    assert found[1][1] == "b: 48.4% of the matrix peak, -3.2% from 50.0%; 100 images/s"
    assert found[3][1] == "d: out of memory" and found[4][1] == "e: no record"


def test_an_accuracy_more_than_two_standard_errors_below_its_records_fails() -> None:
    """Records 89, 90 and 91 %: standard deviation 1 %, of a fourth run's distance to their mean sqrt(4/3) %."""
    guard = load("guard")
    record = [0.89, 0.90, 0.91]
    assert guard.compare_accuracy("run", 0.878, record) == (True, guard.compare_accuracy("run", 0.878, record)[1])
    good, words = guard.compare_accuracy("run", 0.876, record)
    assert not good and words == "run: accuracy 87.60%, records 90.00% with standard error 1.15%"
    assert guard.compare_accuracy("run", 0.95, record)[0]
    assert guard.compare_accuracy("run", 0.95, None) == (False, "run: no record")


def test_records_are_of_one_kind_of_card(tmp_path: Path) -> None:
    guard = load("guard")
    file = tmp_path / "guard.json"
    with pytest.raises(guard.UserError, match="run this with --update first"):
        guard.read_records(file, "NVIDIA H200")
    file.write_text(json.dumps({"environment": {"device": "NVIDIA H200"}}))
    assert guard.read_records(file, "NVIDIA H200")
    with pytest.raises(guard.UserError, match="is of NVIDIA H200, this is NVIDIA A100"):
        guard.read_records(file, "NVIDIA A100")


@pytest.mark.slow
def test_the_guard_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records are written, a run agrees with them, and one that is too good for it to reach is named."""
    guard = load("guard")
    file = tmp_path / "records" / "guard.json"
    options = f"--device cpu --models mixer_nano --steps 4 --seconds 0.02 --records {file}".split()

    def run(*more: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["guard.py", *options, *more])
        with pytest.raises(SystemExit) as caught:
            guard.main()
        return int(caught.value.code or 0), capsys.readouterr().out.splitlines()

    code, lines = run("--update")
    records = json.loads(file.read_text(encoding="utf8"))
    assert code == 0 and str(file) in lines[-1] and {"commit", "device", "command"} <= records["environment"].keys()
    assert list(records["speeds"]) == [
        "inference mixer_nano ours fast, batch 2",
        "inference mixer_nano ours fast, batch 1",
        "training mixer_nano ours eager, batch 2",
    ]
    assert all(0 < one["share"] < 1.5 for one in records["speeds"].values())
    ((run_name, accuracies),) = records["accuracies"].items()
    assert len(accuracies) == guard.REPEATS and len(set(accuracies)) > 1, "each with a seed of its own"

    # What was measured is measured again.
    monkeypatch.setattr(guard, "measure_speeds", lambda options, found=copy.deepcopy(records["speeds"]): found)
    monkeypatch.setattr(guard, "measure_accuracy", lambda options, seed: (run_name, accuracies[seed]))
    code, lines = run()
    assert code == 0 and all(line.startswith("ok") for line in lines[-4:]), lines
    records["speeds"]["inference mixer_nano ours fast, batch 1"]["share"] = 100.0
    file.write_text(json.dumps(records), encoding="utf8")
    code, lines = run()
    assert code == 1 and [line.split()[0] for line in lines[-4:]] == ["ok", "BELOW", "ok", "ok"]


# --- growth.py -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_growth_counts_operations_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operations and parameters are those of the layers' docstrings; stored attention weights need H S^2 numbers."""
    script, channels = load("growth"), 8
    monkeypatch.setattr(
        script, "time_interleaved", lambda calls, clock, seconds: dict.fromkeys(calls, Timing((1.0, 1.0), (1.0, 1.0)))
    )
    options = f"--lengths 64,128,256 --channels {channels} --out {tmp_path / 'growth.json'}"
    monkeypatch.setattr(sys, "argv", ["growth.py", *options.split()])
    script.main()
    record = json.loads((tmp_path / "growth.json").read_text())
    printed = capsys.readouterr().out
    assert all(name in printed for name in script.LAYERS)
    for row in record["rows"]:
        s, c = row["length"], channels
        expected = {
            "self-attention": 4 * s * c**2 + 2 * s**2 * c,
            "recurrence (LSTM)": 8 * s * c**2,
            "convolution 3x3": 9 * s * c**2,
            "spatial gate": s**2 * c,
            "token MLP": 2 * s * script.HIDDEN * c,
        }
        assert row["macs"] == expected.get(row["layer"], row["macs"])
        if row["layer"] == "self-attention, weights stored":
            assert script.HEADS * s**2 * 4 <= row["memory_bytes"] < 4 * script.HEADS * s**2 * 4 + 100 * s * c
    slopes = record["exponents"]
    assert slopes["spatial gate"]["parameters"] > 1.9 and 0.9 < slopes["spatial gate, Toeplitz"]["parameters"] < 1.1
    stored, fused = slopes["self-attention, weights stored"], slopes["self-attention"]
    assert stored["memory_bytes"] > 1.8 and fused["memory_bytes"] < 1.1 and fused["seconds"] == 0
    assert (slopes["recurrence (LSTM)"]["macs"], slopes["recurrence (LSTM)"]["parameters"]) == (1.0, 0.0)
    assert script.figure(record).axes


# --- edge.py -------------------------------------------------------------------------------------------------


def test_edge_records_every_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record, without ONNX files, and the table that is made of it."""
    script = load("edge")
    calls: list[str] = []

    def onnx(model: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
        calls.extend(kinds)
        return dict.fromkeys(kinds, model)

    monkeypatch.setattr(script, "onnx", onnx)
    monkeypatch.setattr(script, "ROWS", {"tiny": [("resmlp_nano", {"depth": "1"}), ("vit_nano", {"depth": "1"})]})
    logs = tmp_path / "new"
    options = f"--rows tiny --seconds 0.01 --out {logs / 'edge.json'}"
    monkeypatch.setattr(sys, "argv", ["edge.py", *options.split()])
    script.main()
    rows = json.loads((logs / "edge.json").read_text())["rows"]
    assert [(row["model"], row["side"]) for row in rows] == [
        (model, side) for model in ("resmlp_nano", "vit_nano") for side in ("eager", "onnx", "int8", "fused")
    ]
    assert calls == ["onnx", "int8"] * 2 and len({len(row["calls_s"]) for row in rows}) == 1
    assert rows[0]["macs"] == 64 * (64 * 96 + 8 * 96**2) + 64 * 48 * 96 + 96 * 10
    monkeypatch.setattr(records, "LOGS", logs)
    records.document.cache_clear()
    lines = speed.edge().splitlines()
    records.document.cache_clear()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| resmlp_nano, depth 1", "| vit_nano, depth 1"]
    assert f"| {rows[0]['macs'] / 1e6:,.0f} M | 0.1 M |" in lines[2]


# --- own_data.py ---------------------------------------------------------------------------------------------


def test_own_data_has_the_most_frequent_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the training examples, on those for testing."""
    script = load("own_data")
    for name, labels in {"train": "aaaaabbb" * 5, "test": "abbb" * 5}.items():
        rows = [f"this is text {number},{label}" for number, label in enumerate(labels)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["sentence,label", *rows]), encoding="utf8")
    tiny = script.Texts(("train.csv",), "test.csv", ("sentence", "label"), 100)
    monkeypatch.setattr(script, "DATASETS", {"tiny": tiny})
    options = f"{tmp_path} --out {tmp_path / 'own.json'} --seeds 1 --methods".split()
    monkeypatch.setattr(sys, "argv", ["own_data.py", *options])
    script.main()
    assert json.loads((tmp_path / "own.json").read_text())["majority"] == {"tiny": 0.25}


# --- feeding.py ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_feeding_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every source and use has its rates beside those on tensors; the cores are what the rates say."""
    script = load("feeding")
    for name, value in {"HEIGHT": 60, "WIDTH": 80, "DISTINCT": 4, "SHORT_SIDE": 40, "TURNS": 1, "WARMUP": 1}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "text", lambda seconds: {"tokenized_per_s": 1.0})
    monkeypatch.setattr(script.direct, "simplejpeg", cache(lambda: None))
    out = tmp_path / "feeding.json"
    options = f"--device cpu --model mixer_nano --batch-size 4 --images 12 --workers 2 --seconds 0.01 --out {out}"
    monkeypatch.setattr(sys, "argv", ["feeding.py", *options.split()])
    script.main()
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    rows = {row["source"]: row for row in record["rows"]}
    assert list(rows) == ["JPEG, Pillow", "JPEG 40", "raw 40"] and record["text"] == {"tokenized_per_s": 1.0}
    for row in rows.values():
        assert list(row["stages_ms"]) == ["read", "decode", "resize", "store", "transfer"]
        assert all(value >= 0 for value in row["stages_ms"].values()) and list(row["workers"]) == ["1", "2"]
        assert all(row[use][side] > 0 for use in ("train", "eval", "predict") for side in ("tensors", "fed"))
    assert rows["raw 40"]["bytes"] == 3 * 40 * 53 + len("P6\n53 40\n255\n") and record["environment"]["commit"]
    row = {"source": "x", "bytes": 1e3, "stages_ms": {"read": 1.0}, "workers": {1: 50.0, 4: 100.0}}
    assert "500 of      1,000 images/s,  50%; 0 MB/s; 40.0 cores" in script.describe(
        row | {"train": {"tensors": 1000.0, "fed": 500.0}}, 4
    )
    assert "nvJPEG: {'note': 'needs a GPU'}" in printed
