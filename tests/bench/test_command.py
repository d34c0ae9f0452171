"""allmlp bench as a user meets it, small."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from allmlp.bench.runner import BenchOptions, BenchReport, Measurement
from allmlp.cli import main
from allmlp.cli.bench import compared, read_batches
from allmlp.errors import UserError

pytest.importorskip("timm")
image = pytest.importorskip("matplotlib.image")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments, "--device", "cpu", "--seconds", "0.02"])
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


def test_inference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    backends = "ours-eager,ours-fast,timm-eager"
    code, out, err = run(capsys, "mixer_nano", "--batch-size", "1,3", "--backends", backends, "--out", str(tmp_path))
    assert code == 0, err
    assert max(map(len, out.splitlines()[:-1])) <= 100 and out.endswith(f"results and figures in {tmp_path}\n")
    assert "mixer_nano, inference: 0.85 M parameters, 0.057 G multiply-adds" in out and "x eager" in out

    with open(tmp_path / "bench.csv", encoding="utf8", newline="") as file:
        table = list(csv.DictReader(file))
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf8"))
    assert len(table) == len(found["rows"]) == 2 * 3
    assert {"device", "torch", "timm", "threads", "command", "commit", "date"} <= found["environment"].keys()
    for row, line in zip(found["rows"], table):
        assert row["backend"] == line["backend"] and float(line["rate_per_s"]) == row["rate_per_s"]
        assert row["rate_per_s"] == pytest.approx(row["batch"] / row["call_s"])
        assert row["mfu"] == pytest.approx(row["flop_per_s"] / row["peak_flop_per_s"])
        assert row["flop_per_s"] == pytest.approx(2 * row["macs"] * row["rate_per_s"])
        assert row["error"] <= row["allowed"] == 1e-4 and not row["note"]
        assert len(row["calls_s"]) >= 3
    for name in ("throughput", "roofline", "batches"):
        assert image.imread(tmp_path / f"{name}.png").std() > 0.05
        assert "mixer_nano" in (tmp_path / f"{name}.svg").read_text(encoding="utf8")
    assert not (tmp_path / "scaling.png").exists()


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
    for wrong in ("0", "1,", "-3", "2-x", "1.5"):
        with pytest.raises(UserError):
            read_batches(wrong)


def test_ratios_are_by_latency_at_batch_1_and_by_rate_above() -> None:
    plain = Measurement("m", None, "inference", "ours fast", 1, "images")
    ours = plain._replace(latencies_s=(1.0, 2.0), calls_s=(1.0, 1.0))
    theirs = plain._replace(backend="timm compiled", latencies_s=(3.0, 6.0), calls_s=(1.5, 1.5))
    assert compared(ours, [ours, theirs], "timm compiled") == "3.00"
    many = [row._replace(batch=8) for row in (ours, theirs)]
    assert compared(many[0], many, "timm compiled") == "1.50"
    assert compared(plain, [plain, theirs], "timm compiled") == "-"
    assert compared(ours, [ours, *many], "timm compiled") == "-"


def test_a_disagreement_ends_with_1() -> None:
    rows = [Measurement("m", None, "inference", "ours fast", 1, "images", note="rejected: output error 1.0e+00")]
    assert BenchReport(BenchOptions(("m",), (1,), "cpu", "float32"), {}, 1.0, rows, {}).rejected == rows
