"""Measuring the models of a paper's table in portions, with a program in place of `allmlp bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from allmlp.bench.backends import parse_backend
from allmlp.cli.app import app
from allmlp.models.zoo import preset
from allmlp.plan import hardware
from allmlp.provenance import cpu_name
from allmlp.report.tables import NOT_MEASURED, as_csv, as_json, markdown, terminal
from paper_tables import bench, generate
from paper_tables.bench import arguments, backend, groups, main
from paper_tables.generate import published
from paper_tables.measurements import attempts, benched
from paper_tables.published import Cell, PublishedColumn, PublishedTable, cells_of, read

FAKE = """
import json, sys, time
from pathlib import Path
words = iter(sys.argv[2:])
given, models = {}, []
for word in words:
    if word == "--train": given[word] = True
    elif word.startswith("--"): given[word] = next(words)
    else: models.append(word)
file, rows = Path(given["--out"], "bench.json"), []
package, _, mode = given["--backends"].partition("-")
for model in models:
    if model in BEHAVIOR.get("crash", ()):
        sys.exit("CUDA error")
    if model in BEHAVIOR.get("wrong", ()):
        print("error: no cuda device"); sys.exit(2)
    if model in BEHAVIOR.get("slow", ()) and mode != "eager":
        time.sleep(60)
    full = model in BEHAVIOR.get("full", ())
    rate = 5.0 if mode == "eager" else 9.0
    task = "training" if "--train" in given else "inference"
    rows.append({"model": model, "backend": f"{package} {mode}", "task": task,
                 "batch": int(given["--batch-size"]), "rate_per_s": None if full else rate, "unit": "images",
                 "note": "out of memory" if full else "", "macs": 10, "flop_per_s": 50.0, "memory_bytes": 2**30})
    options = {"scale": None, "precision": given["--precision"], "img_size": int(given.get("--img-size", 0)) or None,
               "seq_len": int(given.get("--seq-len", 0)) or None}
    log = {"environment": {"device": BEHAVIOR["device"]}, "options": options, "rows": rows}
    file.with_suffix(".tmp").write_text(json.dumps(log))
    file.with_suffix(".tmp").rename(file)
    time.sleep(BEHAVIOR.get("pause", 0))
"""
TABLE = PublishedTable(
    "small",
    "mixer",
    "Small models",
    "nowhere",
    (PublishedColumn("images/s", "speed inference 2", published=False),),
    read("""
    Mixer      | mixer_micro
    ViT        | vit_nano
    ViT, 64 px | vit_nano@64
    gMLP       | gmlp_nano
    NFNet      |
    """),
)


class Bench:
    """`paper_tables.bench` of TABLE with a fake `allmlp bench`; a call is one portion."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.logs, self.program, self.patch = folder / "docs" / "logs", folder / "fake.py", patch
        patch.setattr(bench, "DOCS", folder / "docs")
        patch.setattr(bench, "COMMAND", [sys.executable, str(self.program)])
        patch.setattr(bench, "POLL", 0.01)
        for module in (bench, generate):
            patch.setattr(module, "published", lambda: {"small": TABLE})
        patch.setattr("signal.signal", lambda *_: None)

    def __call__(self, minutes: float = 1.0, **behavior: Any) -> list[tuple[str, str, float | None, str]]:
        """Everything in the records afterwards: model, mode, rate, note."""
        self.program.write_text(f"BEHAVIOR = {behavior | {'device': cpu_name()}}\n{FAKE}")
        main(["small", "--minutes", str(minutes), "--device", "cpu", "--out", str(self.logs)])
        found = [
            one
            for file in sorted(self.logs.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
            for one in attempts([file])
        ]
        return [(one.cell.model, "eager" if one.eager else "fast", one.rate, one.note) for one in found]


@pytest.fixture
def portion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_eager_rows_come_first_and_cheap_models_before_expensive_ones(portion: Bench) -> None:
    found = portion()
    native = ["vit_nano", "gmlp_nano", "mixer_micro"]
    assert sorted(native, key=lambda name: generate.cost_of(name).macs) == native
    assert [(model, mode) for model, mode, *_ in found] == [
        (model, mode) for mode in ("eager", "fast") for model in (*native, "vit_nano@64")
    ]
    assert [rate for _, _, rate, _ in found] == [*[5.0] * 4, *[9.0] * 4]
    assert portion(crash=native) == found, "nothing is left"


def test_a_portion_goes_on_where_the_last_one_stopped(portion: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    first = portion(0.02, pause=60)
    assert [(model, mode) for model, mode, *_ in first] == [("vit_nano", "eager")]
    assert capsys.readouterr().out.splitlines() == ["vit_nano, ours eager, batch 2: 5 images/s", "4 left"]
    found = portion()
    assert capsys.readouterr().out.splitlines()[-1] == "nothing left"
    assert found[0] == first[0] and len(found) == len(set(found)) == 8
    assert sorted(file.name for file in portion.logs.iterdir())[:2] == ["bench_small.json", "bench_small_2.json"]


def test_what_is_too_slow_to_compile_stays_eager(portion: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LIMIT", 1.2)
    slow = portion(slow=["gmlp_nano"])
    assert ("gmlp_nano", "fast", None, "took more than 0.02 minutes") in slow and len(slow) == 8
    assert ("gmlp_nano", "eager", 5.0, "") in slow and ("mixer_micro", "fast", 9.0, "") in slow, "the others go on"
    assert portion() == slow, "it is not tried again"


def test_a_model_that_fails_costs_itself_only(portion: Bench) -> None:
    found = portion(crash=["vit_nano"], full=["gmlp_nano"])
    assert ("vit_nano", "eager", None, "failed: CUDA error") in found
    assert ("gmlp_nano", "eager", None, "out of memory") in found
    assert {model for model, mode, *_ in found if mode == "fast"} == {"mixer_micro"}, (
        "what fails eagerly is not compiled"
    )


def test_wrong_words_stop_the_program_without_a_record(portion: Bench) -> None:
    with pytest.raises(SystemExit, match="no cuda device"):
        portion(wrong=["vit_nano"])
    assert not list(portion.logs.iterdir())


def test_tables_print_what_is_eager_and_what_failed(portion: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LIMIT", 1.2)
    portion(slow=["gmlp_nano"], full=["mixer_micro"])
    logs = [json.loads(file.read_text()) for file in portion.logs.iterdir()]
    for file, log in zip(portion.logs.iterdir(), logs):
        log["environment"]["device"] = "NVIDIA H200"
        file.write_text(json.dumps(log))
    monkeypatch.setattr(generate, "DOCS", portion.logs.parent)
    generate.failures.cache_clear()
    found = tuple(speed for log in logs for speed in benched(log, "docs/logs/bench.json"))
    monkeypatch.setattr(hardware, "speeds", lambda: found)
    made = generate.complete(TABLE, ())
    assert [row.ours[0] for row in made.rows] == [NOT_MEASURED, 9.0, 9.0, 5.0, "no model"]
    assert made.notes == (
        "Not measured (images/s): Mixer: out of memory.",
        "*: measured in eager mode, slower than compiled and with more memory; gMLP: took more than 0.02 minutes.",
    )
    assert [row.eager for row in made.rows] == [(), (), (), ("images/s",), ()]
    shown = terminal(made).splitlines()
    assert any(line.startswith("gMLP") and line.endswith("5*") for line in shown)
    assert any(line.startswith("ViT") and line.endswith("9") for line in shown)
    assert "| 5* |" in markdown(made) and ",5,eager" in as_csv([made])
    assert as_json(made)["rows"][3]["cells"]["images/s"] == {"published": None, "here": 5.0, "mode": "eager"}
    generate.failures.cache_clear()


def test_every_speed_that_is_missing_can_be_measured(tmp_path: Path) -> None:
    """`allmlp bench` understands every command, in every mode, and what it measures fills the cell."""
    command = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    for table in published().values():
        for cell in cells_of(table):
            for eager in (True, False):
                given = command.make_context("bench", arguments([cell], eager)[1:]).params
                assert given["batch_size"] == str(cell.batch) and given["train"] == (cell.task == "training")
                assert parse_backend(given["backends"]) == tuple(backend(cell, eager).split(" ", 1))
                size = given["img_size"] or given["seq_len"]
                assert given["models"] == [cell.preset] and cell.size == str(size or "") and preset(cell.preset)
    assert Cell("vit_b16@384", "inference", 256) in cells_of(published()["gmlp_table2"])


def test_records_of_other_tables_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ResMLP-24 at batch size 256 is in another record of an H200, and every row of ResMLP's table 1 ran eagerly."""
    monkeypatch.setattr(bench, "environment", lambda device: {"device": "NVIDIA H200"})
    portion = bench.Portion(tmp_path, bench.torch.device("cpu"), 0.0)
    left = {
        eager: [cell.model for group in groups("resmlp_table1", eager, portion) for cell in group]
        for eager in (True, False)
    }
    assert not left[True] and "resmlp_s24" not in left[False]
    assert "resmlp_s24" not in [cell.model for group in groups("gmlp_table2", True, portion) for cell in group]
