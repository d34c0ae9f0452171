"""allmlp bench as a user meets it, small."""

from __future__ import annotations

import csv
import errno
import json
import os
from pathlib import Path

import pytest

import allmlp
import command
from allmlp.bench.runner import BenchOptions, BenchReport, Measurement, Ratio, spec_of
from allmlp.cli.bench import print_report, read_batches
from allmlp.errors import UserError
from allmlp.models.zoo import preset

pytest.importorskip("timm")
image = pytest.importorskip("matplotlib.image")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return command.run(capsys, "bench", *arguments, "--device", "cpu", "--seconds", "0.02")


@pytest.mark.slow
def test_inference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    backends = "ours-eager,ours-fast,timm-eager"
    code, out, err = run(capsys, "mixer_nano", "--batch-size", "1,3", "--backends", backends, "--out", str(tmp_path))
    assert code == 0, err
    assert max(map(len, out.splitlines()[:-1])) <= 100 and out.endswith(f"results and figures in {tmp_path}\n")
    assert "mixer_nano, inference: 0.85 M parameters, 0.057 G multiply-adds" in out and "x timm" in out

    with open(tmp_path / "bench.csv", encoding="utf8", newline="") as file:
        table = list(csv.DictReader(file))
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf8"))
    assert len(table) == len(found["rows"]) == 2 * 3
    assert {"device", "torch", "timm", "threads", "command", "commit", "date"} <= found["environment"].keys()
    for row, line in zip(found["rows"], table):
        assert row["backend"] == line["backend"] and float(line["rate_per_s"]) == row["rate_per_s"]
        times = sorted(row["calls_s"])
        assert row["rate_low"] <= row["rate_per_s"] <= row["rate_high"]
        assert row["batch"] / times[-1] <= row["rate_low"] and row["rate_high"] <= row["batch"] / times[0]
        assert row["latency_ms_low"] <= row["latency_ms"] <= row["latency_ms_high"] and row["device_ms"] is None
        assert row["mfu"] == pytest.approx(row["flop_per_s"] / row["peak_flop_per_s"])
        assert row["flop_per_s"] == pytest.approx(2 * row["macs"] * row["rate_per_s"])
        assert row["error"] <= row["allowed"] == 1e-4 and not row["note"]
        assert len(row["calls_s"]) >= 3
        over = [one for one in row["ratios"] if one["peer"] == "timm best"]
        assert [one["backend"] for one in over] == ([] if row["backend"] == "timm eager" else ["timm eager"])
        for one in over:
            assert one["low"] <= one["median"] <= one["high"]
            assert (line["ratio_over"], float(line["ratio"])) == ("timm eager", one["median"])
    for name in ("throughput", "roofline", "batches"):
        assert image.imread(tmp_path / f"{name}.png").std() > 0.05
        assert "mixer_nano" in (tmp_path / f"{name}.svg").read_text(encoding="utf8")
    assert not (tmp_path / "scaling.png").exists()


@pytest.mark.slow
def test_models_are_compared_in_the_same_rounds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = allmlp.save(allmlp.create("vit_nano"), tmp_path / "vit_nano")
    backends = ["--backends", "ours-fast,timm-eager", "--against", str(folder), "--batch-size", "2"]
    code, out, err = run(capsys, "mixer_nano", str(folder), *backends, "--out", str(tmp_path))
    assert code == 0, err
    rows = json.loads((tmp_path / "bench.json").read_text(encoding="utf8"))["rows"]
    assert [(row["cell"], row["model"]) for row in rows] == [
        *[("mixer_nano", "mixer_nano")] * 2,
        *[("mixer_nano", "vit_nano")] * 2,
        *[("vit_nano", "vit_nano")] * 2,
    ]
    ours, _, vit, timm_vit = rows[:4]
    peers = {one["peer"]: one for one in ours["ratios"]}
    assert peers.keys() == {"timm best", "vit_nano ours best", "vit_nano timm best"}
    for name, other in {"vit_nano ours best": vit, "vit_nano timm best": timm_vit}.items():
        rounds = sorted(b / a for a, b in zip(ours["calls_s"], other["calls_s"]))
        assert rounds[0] <= peers[name]["low"] <= peers[name]["median"] <= peers[name]["high"] <= rounds[-1]
    assert "times as fast as vit_nano ours fast" in out and max(map(len, out.splitlines()[:-1])) <= 100


@pytest.mark.slow
def test_training_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    backends = "ours-eager,timm-eager"
    code, out, err = run(
        capsys, "resmlp_nano", "--train", "--batch-size", "2", "--backends", backends, "--out", str(tmp_path)
    )
    assert code == 0, err
    rows = json.loads((tmp_path / "bench.json").read_text(encoding="utf8"))["rows"]
    assert [row["task"] for row in rows] == ["training"] * 2
    for row in rows:
        assert row["flop_per_s"] == pytest.approx(6 * row["macs"] * row["rate_per_s"])
    assert "resmlp_nano, training" in out


@pytest.mark.slow
def test_growth(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "batches.png").write_bytes(b"of an earlier run")
    code, out, err = run(
        capsys, "gmlp_nano", "--scale", "depth", "--batch-size", "1", "--backends", "ours-eager", "--out", str(tmp_path)
    )
    assert code == 0, err
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf8"))
    assert [row["size"] for row in found["rows"]] == [5, 10, 20]
    (scaling,) = found["scaling"]
    assert scaling["macs"] == pytest.approx(1, abs=0.01) and scaling["time"] > 0
    assert "time scales as depth^" in out
    assert image.imread(tmp_path / "scaling.png").std() > 0.05
    assert not (tmp_path / "batches.png").exists()


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in [
        (["mixer_nanno"], "did you mean 'mixer_nano'"),
        (["mixer_nano", "--batch-size", "many"], "--batch-size takes sizes such as 1,8,256"),
        (["mixer_nano", "--scale", "token"], "did you mean 'tokens'"),
        (["mixer_nano", "--precision", "bfloat"], "did you mean 'bfloat16'"),
    ]:
        code, _, err = run(capsys, *arguments)
        assert code == 2 and words in err and err.count("\n") == 1


def test_batches() -> None:
    assert read_batches("1-1024") == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert read_batches("8, 3,1-4") == (8, 3, 1, 2, 4)
    for wrong in ("0", "1,", "-3", "2-x", "1.5", "8-1"):
        with pytest.raises(UserError):
            read_batches(wrong)


def test_a_table_of_a_gpu_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """With the longest names, all columns, and a timm backend marked that others are compared with."""
    times = {"latency_ms": 1234.5, "device_ms": 1234.5, "rate_per_s": 1e6, "rate_low": 9e5, "rate_high": 1.1e6}
    rows = []
    for model, backend in [
        ("mixer_b16", "ours fast"),
        ("mixer_b16", "timm channels-last"),
        ("vit_b16", "timm reduce-overhead"),
    ]:
        ratios = [Ratio("timm best", "mixer_b16", "timm channels-last", "rate", 1.5, 1.4, 1.6)]
        ratios += [Ratio("vit_b16 timm best", "vit_b16", "timm reduce-overhead", "rate", 1.7, 1.6, 1.8)]
        row = Measurement("mixer_b16", model, None, "inference", backend, 1024, "images", **times, mfu=0.63)
        row = row._replace(memory_bytes=10 * 2**30, ratios=tuple(ratios) if backend == "ours fast" else ())
        rows.append(row)
    print_report(BenchReport(BenchOptions(("mixer_b16",), (1024,), "cuda", "bfloat16"), {}, 4e12, rows, {}))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    first, best, other = (line.split() for line in out.splitlines()[2:5])
    assert first[-2:] == ["1.50", "(1.40-1.60)"] and best[-1] == "best" and other[-1] == "10.00"
    assert "ours fast: 1.70 (1.60-1.80) times as fast as vit_b16 timm reduce-overhead" in out
    assert "with quartiles over rounds\n" in out, "device times are compared at batch 1 only"


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, out, err = run(capsys, "mixer_nano", "--out", str(tmp_path / "file" / "bench"))
    assert code == 2 and not out and err.startswith("error: cannot write to") and "timing" not in err


@pytest.mark.parametrize("name", ["", "a.json"])
def test_a_read_only_folder_is_refused_before_anything_is_measured(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(dir: Path) -> None:  # of a user who is not root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr("allmlp.files.tempfile.TemporaryFile", refuse)
    code, out, err = run(capsys, "mixer_nano", "--backends", "ours-eager", "--out", str(tmp_path / name))
    assert code == 2 and not out and err.startswith("error: cannot write to") and "timing" not in err


def test_a_path_without_a_model_is_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a folder of other files may have the name of a preset."""
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    code, _, err = run(capsys, str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    assert code == 2 and "runs holds 2 runs: name one of them" in err
    (tmp_path / "mixer_nano").mkdir()
    monkeypatch.chdir(tmp_path)
    assert spec_of("mixer_nano") == preset("mixer_nano").spec


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_one_file_of_numbers(
    suffix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The name of a file makes no folder with figures."""
    rows = [Measurement("mixer_nano", "mixer_nano", None, "inference", "ours eager", 1, "images")]
    report = BenchReport(BenchOptions(("mixer_nano",), (1,), "cpu", "float32"), {}, 1.0, rows, {})
    monkeypatch.setattr("allmlp.bench.runner.bench", lambda options, log, keep: report)
    file = tmp_path / "new" / f"speeds{suffix}"
    code, out, err = run(capsys, "mixer_nano", "--out", str(file))
    assert code == 0 and f"results in {file}\n" in out, err
    assert [*file.parent.iterdir()] == [file]
    text = file.read_text(encoding="utf8")
    found = json.loads(text)["rows"] if suffix == ".json" else [*csv.DictReader(text.splitlines())]
    assert [row["backend"] for row in found] == ["ours eager"]


def test_without_a_backend_that_runs_it_ends_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "mixer_nano", "--batch-size", "1", "--backends", "ours-fp8", "--out", str(tmp_path))
    assert code == 1 and "fp8 needs a GPU" in out


def test_a_disagreement_ends_with_1() -> None:
    rows = [Measurement("m", "m", None, "inference", "ours fast", 1, "images", note="rejected: output error 1.0e+00")]
    assert BenchReport(BenchOptions(("m",), (1,), "cpu", "float32"), {}, 1.0, rows, {}).rejected == rows
