"""The papers' tables: figures typed a second time from the papers, measurements against their logs, formats."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allmlp import UserError
from allmlp.bench.contest import Options, Report
from allmlp.bench.contest import Row as Rate
from allmlp.bench.record import as_dict
from allmlp.cli import main
from allmlp.layers import ChannelMlp, Patches, TokenMlp
from allmlp.models.encoder import Encoder
from allmlp.models.zoo import preset, presets
from allmlp.plan import hardware
from allmlp.plan.hardware import training_speed
from allmlp.recipes import recipes
from allmlp.report import measured, tables_text
from allmlp.report.published import read
from allmlp.report.tables import (
    HERE,
    NO_RECIPE,
    NOT_HERE,
    NOT_MEASURED,
    RECIPES,
    Setting,
    Table,
    names,
    published,
    tables,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def everything() -> dict[str, Table]:
    """All tables as they are before a benchmark was run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allmlp.report.tables.speeds", lambda: ())
        return {table.name: table for table in tables()}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


def number(text: str) -> float:
    return float(text.replace(",", ""))


# --- what is published -----------------------------------------------------------------------------------

TYPED = {
    ("mixer_table1", "params M"): "19 18 60 59 206 207 431",
    ("mixer_table1", "S"): "49 196 49 196 49 196 256",
    ("mixer_table2", "ImageNet"): "85.8 84.15 85.30 85.39 89.2 87.94 87.54 88.55 90.0 88.64",
    ("mixer_table2", "ReaL"): "87.86 88.62 90.18 90.54 90.72 91.12",
    ("mixer_table2", "Avg 5"): "93.91 94.39 94.04 95.71 95.33 95.97",
    ("mixer_table2", "VTAB-1k"): "74.95 72.72 70.64 75.33 76.29 77.63 79.99",
    ("mixer_table2", "img/s per core"): "120 105 32 26 46 40 26 15 15",
    ("mixer_table2", "TPUv3 core-days"): "0.10k 0.41k 0.18k 0.94k 1.86k 1.01k 9.90k 2.30k 20.48k 14.82k",
    ("slides_mixer", "CIFAR-10"): "97.7 96.8 98.8 98.9 82.3 98.6 98.2",
    ("slides_mixer", "CIFAR-100"): "89.7 91.9 88.5 68.8 89.1 87.8",
    ("slides_mixer", "Pets"): "97.4 96.6 79.4 93.1 93.3",
    ("slides_cost", "params M"): "59 73 102 86 110",
    ("gmlp_table2", "top-1"): (
        "78.3 81.7 77.1 81.6 84.3 83.6 77.9 76.5 72.2 79.8 81.8 76.4 77.3 71.8 76.6 79.4 79.7 72.3 79.6 81.6"
    ),
    ("gmlp_table2", "params M"): "60 39 5 12 66 72 86 307 5 22 86 59 59 207 15 30 45 6 20 73",
    ("gmlp_table2", "MACs G"): (
        "11.3 8.0 0.39 1.8 37.0 12.4 55.4 190.7 1.3 4.6 17.5 12.7 12.7 44.8 3.0 6.0 8.9 1.4 4.5 15.8"
    ),
    ("gmlp_table3", "ppl"): "4.37 4.26 5.64 5.34 5.14 4.97 4.53 4.35",
    ("gmlp_table3", "params M"): "110 110 96 112 92 92 92 102",
    ("gmlp_table4", "ppl"): "4.91 5.25 4.26 4.35 3.83 3.79 3.47 3.43",
    ("gmlp_table4", "SST-2"): "90.4 91.2 91.3 92.3 92.1 93.5 92.8 95.1",
    ("gmlp_table4", "MNLI-m"): "81.5 77.7 83.3 80.9 85.2 82.8 86.3 84.6",
    ("slides_gmlp", "SST-2"): "80.4 88.1 88.6 91.2",
    ("slides_gmlp", "MNLI-m"): "65.1 74.6 75.2 77.7",
    ("gmlp_table5", "params M"): "110 130 109 336 365 316 941",
    ("gmlp_table5", "FLOPs G"): "100.8 158.0 128.9 341.2 430.1 370.3 1091.3",
    ("gmlp_table6", "ppl"): "4.17 4.28 3.95 3.35 3.32 3.19 2.89",
    ("gmlp_table6", "SST-2"): "92.7 93.8 94.2 93.4 93.7 94.3 94.8 94.8 95.6",
    ("gmlp_table6", "MNLI m/mm"): (
        "84.4/- 85.6/85.7 83.7/84.1 85.9/85.8 86.6/- 87.0/87.4 86.2/86.5 88.4/88.4 87.7/87.7"
    ),
    ("gmlp_table6", "SQuAD 1.1"): "88.5 90.2 86.7 90.7 90.9 92.0 89.5 92.2 90.9",
    ("gmlp_table6", "SQuAD 2.0"): "76.3 78.6 70.1 80.9 81.8 81.0 78.3 85.4 82.1",
    ("resmlp_table1", "images/s"): (
        "5.4 16.0 661.8 349.4 169.1 861.0 534.4 334.7 940.4 292.3 447.6 1415.1 715.4 231.3"
    ),
    ("resmlp_table1", "peak MB"): (
        "5477.8 5519.3 1174.0 1898.9 2734.9 568.4 841.6 1329.6 217.2 573.7 245.5 179.5 235.3 663.0"
    ),
    ("resmlp_table1", "top-1"): "86.5 86.5 81.1 82.6 83.3 80.0 81.7 82.9 79.8 81.8 81.8 76.6 79.4 81.0",
    ("resmlp_table1", "params M"): "356 438 12 19 30 21 39 84 22 86 27 15 30 116",
    ("resmlp_table1", "MACs G"): "329.6 377.3 1.8 4.2 9.9 4.0 8.0 16.0 4.6 17.5 5.4 3.0 6.0 23.0",
    ("resmlp_dino", "linear"): "75.3 77.0 79.7 78.2 67.5 72.8",
    ("resmlp_dino", "k-NN"): "67.5 74.5 78.3 76.1 62.6 69.4",
    ("resmlp_ablations", "params M"): (
        "15.4 30.0 115.7 15.4 17.7 14.9 18.6 30.8 14.9 16.7 15.6 22.1 129.1 15.4 15.4 15.4 30.0 30.0 129.1 129.1"
    ),
    ("resmlp_ablations", "val"): (
        "76.6 79.4 81.0 77.7 77.5 56.5 77.3 77.3 76.3 77.0 76.9 79.1 81.0 69.2 76.5 77.8 79.9 80.8 83.6 84.4"
    ),
    ("resmlp_ablations", "real"): (
        "83.3 85.3 86.1 84.1 84.0 63.4 84.0 84.4 83.4 84.0 83.7 85.2 85.7 76.0 83.6 84.6 85.9 86.6 88.4 88.9"
    ),
    ("resmlp_ablations", "v2"): (
        "64.4 67.9 69.0 65.7 66.1 43.1 65.7 65.7 64.6 65.5 65.0 67.2 68.6 56.1 64.5 66.0 68.6 69.8 73.4 74.2"
    ),
    ("resmlp_translation", "En-De"): "24.6 25.2 27.3 26.4 26.8",
    ("resmlp_translation", "En-Fr"): "39.9 40.5 38.1 40.3 40.6",
    ("course_images", "CIFAR-10"): "93.57 97.60 99.50",
    ("course_images", "ImageNet"): "80.62 74.00 88.55",
    ("course_complexity", "complexity"): "O(n&d^2) O(k&n&d^2) O(n^2&d)",
    ("course_small_data", "CIFAR-10"): "84.19 91.78",
    ("course_small_data", "CIFAR-100"): "65.16 72.80",
    ("course_small_data", "Flowers102"): "31.73 46.92",
    ("llama3_sizes", "8B"): "32 4096 32 SwiGLU RoPe",
    ("llama3_sizes", "70B"): "80 8192 64 SwiGLU RoPe",
    ("llama3_sizes", "405B"): "126 16384 128 SwiGLU RoPe",
    ("llama3_failures", "category"): "GPU GPU Network Unplanned&Maintenance Host",
    ("llama3_failures", "%"): "30.1 12.9 8.4 7.6 0.5",
}


@pytest.mark.parametrize(("table", "column"), TYPED, ids=lambda part: part)
def test_printed_figures(table: str, column: str) -> None:
    """Each column from the top to the bottom; where a paper prints a dash there is nothing."""
    entry = published()[table]
    place = [c.name for c in entry.columns if c.printed].index(column)
    assert [row.cells[place] for row in entry.rows if row.cells[place]] == [
        text.replace("&", " ") for text in TYPED[table, column].split()
    ]


def test_every_row_has_a_cell_for_every_printed_column() -> None:
    for table in published().values():
        for row in table.rows:
            assert len(row.cells) == sum(column.printed for column in table.columns), (table.name, row.label)
            assert not row.model or re.split("[@/]", row.model)[0] in presets(), row
            assert not row.recipe or row.recipe in recipes() or row.recipe == "mixer_h14"


def test_rows_are_read_as_written() -> None:
    first, second = read("""
    # Section
    a b | model recipe | 1 | -
    c   |              | 2 | x y
    """)
    assert first == ("a b", "model", "recipe", ("1", ""), "Section")
    assert second == ("c", "", "", ("2", "x y"), "Section")


def test_mixers_sizes_are_the_presets() -> None:
    for row in published()["mixer_table1"].rows:
        spec = preset(row.model).spec
        assert isinstance(spec, Encoder) and isinstance(spec.stem, Patches)
        token, channel = spec.block.token, spec.block.channel
        assert isinstance(token, TokenMlp) and isinstance(channel, ChannelMlp)
        ours = (spec.depth, spec.stem.patch[0], spec.width, spec.stem.tokens, channel.hidden, token.hidden)
        assert tuple(map(str, ours)) == row.cells[:6]


# --- what is counted and was measured here -----------------------------------------------------------------


@pytest.mark.parametrize("column", ["params M", "MACs G", "FLOPs G"])
def test_counts_are_the_printed_ones(everything: dict[str, Table], column: str) -> None:
    """As far as the notes say: within 5 % and the last printed digit, parameters within a million."""
    pairs = []
    for table in everything.values():
        for place, entry in enumerate(table.columns):
            if entry.name == column and entry.printed:
                pairs += [(line.printed[place], line.here[place]) for line in table.lines if line.printed[place]]
    compared = [(number(printed), here.value) for printed, here in pairs if here and here.value is not None]
    assert len(compared) > 5
    for printed, here in compared:
        assert here == pytest.approx(printed, abs=0.05 * printed + (1.0 if column == "params M" else 0.05))


def test_a_count_by_hand(everything: dict[str, Table]) -> None:
    table = everything["resmlp_ablations"]
    line = next(line for line in table.lines if line.label == "S12: linear -> conv 3x3")
    assert line.here[0] is not None and line.here[0].value == pytest.approx(30.817384)
    mixing = {line.label: line.here[2] for line in everything["slides_cost"].lines}
    assert mixing["MLP-Mixer"].value == pytest.approx(2 * 384 * 196 * 768 / 1e6)  # type: ignore[union-attr]
    layers = {line.label: line.here[1] for line in everything["course_complexity"].lines}
    assert layers["Convolutional"].value == pytest.approx(9 * 196 * 384**2 / 1e6)  # type: ignore[union-attr]
    assert layers["Self-Attention"].value == pytest.approx((4 * 197 * 384**2 + 2 * 197**2 * 384) / 1e6)  # type: ignore
    assert mixing["gMLP in CV"].value == pytest.approx(3072 / 2 * 196**2 / 1e6)  # type: ignore[union-attr]


def test_what_was_measured_is_in_the_logs() -> None:
    """The two files of the package are what the logs give now: python -m allmlp.report.measured writes them."""
    assert measured.FILE.read_text(encoding="utf8") == measured.as_text(list(measured.taken(DOCS)))
    assert hardware.FILE.read_text(encoding="utf8") == measured.as_text(list(measured.speeds(DOCS)))


def test_measurements_have_a_place() -> None:
    for entry in measured.taken(DOCS):
        assert (ROOT / entry.source).is_file()
        for name in entry.tables:
            (column,) = [column for column in published()[name].columns if column.name == entry.column]
            assert column.answer == "measured" or entry.column in ("tokens/s", "GiB")


def test_measurements_are_the_page_of_results() -> None:
    """Figures that a reader finds in docs/results.md, in the words of that page."""
    found = {(entry.row, entry.column): entry.text for entry in measured.taken(DOCS)}
    page = (DOCS / "results.md").read_text(encoding="utf8")
    for row, column, line in (
        ("gMLP, 7.19 M, 32 pixels, 6.5 min", "CIFAR-10", r"\| gMLP \| 7,189,514 .* 6.5 min alone, 223 \| \*\*(.*?) %"),
        ("ResMLP, 6.39 M, 32 pixels, 8.75 min, shared", "CIFAR-10", r"\| ResMLP \| 6,390,794 .*\| \*\*(.*?) %"),
        ("Mixer, 6.53 M, 32 pixels, 8.75 min, shared", "CIFAR-10", r"\| Mixer \| 6,533,642 .*\| \*\*(.*?) %"),
        ("ViT, 7.93 M, 32 pixels, 8.75 min, shared", "CIFAR-10", r"\| ViT \| 7,930,122 .*\| \*\*(.*?) %"),
        ("Mixer, 0.85 M: labels alone", "CIFAR-10", r"from labels alone \| (.*?) %"),
        ("Mixer, 0.85 M: distillation", "CIFAR-10", r"hard distillation \| \*\*(.*?) %"),
        ("gMLP, 7.19 M, 84 epochs of CIFAR-10", "linear", r"linear probe, 20 epochs .*\| \*\*(.*?) %"),
        ("gMLP L12, 44 M, 0.23 G tokens", "ppl", r"held-out perplexity at 15 % masking \| (.*?) \|"),
        ("gMLP L12, 44 M, 0.23 G tokens", "SST-2", r"SST-2 dev, rate 1e-4 .*\| \*\*(.*?) %"),
        ("aMLP L11, 44 M, 0.11 G tokens", "SST-2", r"\| aMLP, 11 blocks, 43.9 M .*?\| .*?\| .*?\| (.*?) %"),
        ("BERT L9, 44 M, 0.17 G tokens", "SST-2", r"\| BERT, 9 blocks, 44.1 M .*?\| .*?\| .*?\| \*\*(.*?) %"),
        ("MiniLM L6, 23 M, published start", "SST-2", r"the teacher, MiniLM .*?\| (.*?) %"),
        ("gMLP L18, 384 wide, MiniLM's help", "SST-2", r"300,000 more .*?\| \*\*(.*?) %"),
        ("Transformer, 4 + 4 blocks, 9.47 M", "Multi30k De-En", r"\| Transformer, .*\| 9.47 M \| \*\*(.*?)\*\*"),
        ("ResMLP, 4 + 4 blocks, 7.40 M", "Multi30k De-En", r"\| ResMLP, .*\| 7.40 M \| \*\*(.*?)\*\*"),
    ):
        assert re.findall(line, page) == [found[row, column]], row
    rows = {  # how the page calls them, and the table
        "linear (the model)": "S12",
        "Affine to LayerNorm": "S12: Aff -> LayerNorm",
        "average pooling to Class-MLP": "S12: average -> Class-MLP",
        "linear to none": "S12: linear -> none",
        "linear to MLP": "S12: linear -> MLP",
        "linear to 3x3 convolution": "S12: linear -> conv 3x3",
        "linear to depth-wise 3x3": "S12: linear -> depth-wise",
        "linear to depth-separable 3x3": "S12: linear -> separable",
        "patch 4 to 2": "S12/8",
    }
    for words, row in rows.items():
        (mean,) = re.findall(rf"^\| {re.escape(words)} \| \S+ M \| \S+ \| \S+ \| (\S+) \|", page, re.MULTILINE)
        assert float(found[row, "CIFAR-10"]) == pytest.approx(float(mean), abs=0.051), row


def bench_log(device: str = "NVIDIA H200", image: int | None = None) -> dict[str, Any]:
    """A bench.json of `allmlp bench`."""
    rows = [
        Rate(model, None, task, side, batch, "images", rate_per_s=rate, flop_per_s=rate and 6e9 * rate)
        for model, task, side, batch, rate in (
            ("resmlp_s12", "inference", "ours eager", 32, 9_000.0),
            ("resmlp_s12", "inference", "ours fast", 32, 10_000.0),
            ("resmlp_s12", "inference", "ours fast", 256, 12_000.0),
            ("resmlp_s12", "inference", "timm compiled", 256, 20_000.0),
            ("resmlp_s12", "inference", "ours onnx", 8, None),
            ("hf:resnet50", "inference", "hf compiled", 32, 8_000.0),
            ("mixer_b16", "training", "ours graphs", 256, 5_000.0),
        )
    ]
    rows = [row._replace(macs=3_000_000_000, memory_bytes=200_000_000) for row in rows]
    options = Options(("resmlp_s12",), (32, 256), "cuda", "bfloat16", image=image)
    return as_dict(Report(options, {"device": device}, 1.0, rows, {}))


def test_a_log_of_the_benchmark_fills_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickest side of ours, at batch 32 where the paper says so, and the share of peak of what it trained."""
    found = tuple(measured.benched(bench_log(), "docs/logs/bench.json"))
    assert [(speed.model, speed.batch, speed.rate) for speed in found] == [
        ("resmlp_s12", 32, 10_000),
        ("resmlp_s12", 256, 12_000),
        ("hf:resnet50", 32, 8_000),
        ("mixer_b16", 256, 5_000),
    ]
    small = tuple(speed for speed in hardware.speeds() if speed.model == "cifar10_mixer")
    monkeypatch.setattr("allmlp.report.tables.speeds", lambda: found)
    monkeypatch.setattr(hardware, "speeds", lambda: small + found)
    table, wide, other = (tables(name)[0] for name in ("resmlp_table1", "gmlp_table2", "mixer_table1"))
    text = {line.label: [here.text if here else "" for here in line.here] for line in table.lines}
    assert text["ResMLP-S12"][1] == "10,000" and text["ResMLP-S12"][3] == "200.0"
    assert text["ResMLP-S24"][1] == NOT_MEASURED and text["CaiT-XS24"][1] == NOT_HERE
    assert next(line.here[-1] for line in wide.lines if line.label == "ResMLP-12").text == "12,000"  # type: ignore
    assert "Not measured for the paper's rows: top-1." in tables_text.terminal(table)
    assert "images/s" in tables_text.terminal(wide) and "images/s." in tables_text.terminal(other)
    assert tables("resmlp_table1", setting=Setting(gpu="a100"))[0].lines[-3].here[1].text == NOT_MEASURED  # type: ignore
    assert training_speed("Mixer", "image", 121_000_000_000).model == "mixer_b16", "the nearest"
    assert training_speed("Mixer", "image", 400_000_000).model == "cifar10_mixer"
    assert list(measured.benched(bench_log("some CPU"), "")) == []
    assert next(measured.benched(bench_log(image=384), "")).model == "resmlp_s12@384"


def test_measurements_stand_beside_what_they_answer(everything: dict[str, Table]) -> None:
    found = {
        (table.name, line.label, column.name): here.text
        for table in everything.values()
        for line in table.lines
        for column, here in zip(table.columns, line.here, strict=True)
        if here is not None
    }
    assert found["resmlp_ablations", "S12: linear -> none", "CIFAR-10"] == "69.39"
    assert found["slides_mixer", "Mixer, 6.53 M, 32 pixels, 8.75 min, shared", "CIFAR-10"] == "93.81"
    assert found["slides_mixer", "my Mixer-B/16", "CIFAR-10"] == NOT_MEASURED
    assert found["resmlp_table1", "ResMLP-S12", "images/s"] == NOT_MEASURED
    assert found["resmlp_table1", "CaiT-XS24", "params M"] == NOT_HERE
    assert found["mixer_table2", "ViT-L/16", "GPU-hours"] == NO_RECIPE
    assert found["course_positions", "position 1", "i = 0"] == "0.8415"
    assert found["llama3_failures", "Faulty GPU", "interruptions"] == "140"


def test_core_days_as_gpu_hours(everything: dict[str, Table]) -> None:
    """Mixer-L/16, 300 epochs of 14,197,122 pictures, 44.548 G multiply-adds, at the nearest rate."""
    seconds = 300 * 14_197_122 * 6 * 44.548e9 / training_speed("Mixer", "image", 44_548_000_000).flops
    table = everything["gpu_hours"]
    lines = {line.label: line for line in table.lines}
    assert list(lines) == list(RECIPES)
    hours = lines["imagenet21k_mixer_l16"].here[4]
    assert hours is not None and hours.value == pytest.approx(seconds / 3600, rel=1e-3)
    assert lines["imagenet21k_mixer_l16"].printed[0] == "0.41k"
    beside = next(line for line in everything["mixer_table2"].lines if line.label == "Mixer-L/16")
    assert beside.here[6] is not None and beside.here[6].value == pytest.approx(hours.value)
    (many,) = tables("gpu_hours", setting=Setting(gpus=64, gpu="a100"))
    assert many.columns[-1].name == "hours on 64"
    slower = next(line for line in many.lines if line.label == "imagenet21k_mixer_l16").here[4]
    assert slower is not None and slower.value == pytest.approx(hours.value * 989.4 / 312)


# --- formats -------------------------------------------------------------------------------------------------


def test_a_terminal_is_100_columns_wide(everything: dict[str, Table]) -> None:
    assert list(everything) == names() and len(everything) == 22
    for table in everything.values():
        text = tables_text.terminal(table)
        assert max(map(len, text.splitlines())) <= 100, table.name
        assert table.title in text and table.source in text
        assert all(line.label in text for line in table.lines)
    assert "Not measured for the paper's rows: images/s, peak MB, top-1." in tables_text.terminal(
        everything["resmlp_table1"]
    )


def test_it_stays_so_when_all_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the models with large figures, at every batch and in both tasks."""
    models = sorted({row.model for table in published().values() for row in table.rows if row.model})[::2]
    full = tuple(
        hardware.Speed(name, "", "", task, 1, 32, 123_456.0, 1.0, 98_765_000_000, "h200", "", "")
        for name in models
        for task in ("inference", "training")
    )
    monkeypatch.setattr("allmlp.report.tables.speeds", lambda: full)
    for name in published():
        text = tables_text.terminal(tables(name)[0])
        assert max(map(len, text.splitlines())) <= 100, text
    assert "98,765.0" in tables_text.terminal(tables("resmlp_table1")[0])


def test_markdown_tables_are_square(everything: dict[str, Table]) -> None:
    for table in everything.values():
        rows = [line for line in tables_text.markdown(table).splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) == 1, table.name
    assert "| ResMLP-S12 | 15 | 15.35 | 1415.1 | not measured | 3.0 | 3.01 |" in tables_text.markdown(
        everything["resmlp_table1"]
    )


def test_csv_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "tables", "resmlp", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    _, out, _ = run(capsys, "tables", "resmlp", "--json")
    found = {table["name"]: table for table in json.loads(out)}
    assert set(found) == {row["table"] for row in rows} == {name for name in names() if "resmlp" in name}
    for row in rows:
        line = next(
            line
            for line in found[row["table"]]["rows"]
            if (line["row"], line["section"]) == (row["row"], row["section"])
        )
        cell = line["cells"][row["column"]]
        assert (cell["published"] or "") == row["published"]
        here = cell.get("here", "")
        assert here == row["here"] if isinstance(here, str) else here == pytest.approx(number(row["here"]), abs=0.01)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "tables", "gmlp_table3")
    assert code == 0 and "Additive gMLP" in out and "92.17" in out and "14.89" in out
    code, out, _ = run(capsys, "tables", "--paper", "003", "--markdown")
    assert code == 0 and out.count("### ") == 4 and out.count("`resmlp_") == 4
    code, out, _ = run(capsys, "tables", "slides_*", "--markdown")
    assert code == 0 and out.count("### ") == 3 and f"**{HERE}**" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["gmpl_table3"], "no table matches 'gmpl_table3'; did you mean 'gmlp_table3'"),
        (["gmlp", "--csv", "--json"], "choose one of"),
        (["--paper", "005"], "no table is of paper '005'"),
        (["gmlp", "--paper", "001"], "there are mixer_table2"),
        (["gpu_hours", "--gpus", "0"], "gpus must be a whole number"),
        (["gpu_hours", "--gpu", "v100"], "'h200' or 'h100' or 'a100'"),
    ],
)
def test_one_line_for_what_is_wrong(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    code, out, err = run(capsys, "tables", *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and reason in err


def test_python_raises_what_the_command_prints() -> None:
    with pytest.raises(UserError, match="no table matches"):
        tables("nothing of the kind")


def test_help_needs_no_torch() -> None:
    code = """
import sys
from allmlp.cli import main
try: main(["tables", "--help"])
except SystemExit as end: assert not end.code
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
