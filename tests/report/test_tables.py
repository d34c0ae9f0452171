"""The papers' tables: figures typed a second time from the papers, stored data against the generator, formats."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from allmlp import UserError
from allmlp.bench.outputs import as_dict
from allmlp.bench.runner import BenchOptions, BenchReport, Measurement
from allmlp.layers import ChannelMlp, PatchEmbed, TokenMlp
from allmlp.models.encoder import Encoder
from allmlp.models.zoo import preset, presets
from allmlp.plan import hardware
from allmlp.plan.hardware import training_speed
from allmlp.recipes import recipes
from allmlp.report import tables as report
from allmlp.report.tables import (
    FILE,
    MEASURED_HERE,
    NO_MODEL,
    NO_RECIPE,
    NOT_MEASURED,
    PaperTable,
    load,
    tables,
)
from command import run
from paper_tables import generate
from paper_tables.generate import DOCS, RECIPES, published
from paper_tables.measurements import benched, measurements
from paper_tables.published import read


@pytest.fixture(scope="module")
def stored() -> dict[str, PaperTable]:
    return load()


def count_a_small_network(patch: pytest.MonkeyPatch) -> None:
    """In place of each of timm, whose import and large networks take seconds."""
    count = generate.cost_of
    patch.setattr(generate, "cost_of", lambda name: count("resnet18_cifar" if name.startswith("timm:") else name))


@pytest.fixture(scope="module")
def unmeasured() -> dict[str, PaperTable]:
    """The papers' tables as they are without a benchmark. Planning recipes takes seconds: each costs 100 GPU-hours."""
    with pytest.MonkeyPatch.context() as patch:
        count_a_small_network(patch)
        patch.setattr(generate, "fastest", lambda cell: None)
        patch.setattr(generate, "failures", dict)
        patch.setattr(generate, "planned", lambda recipe: None)
        patch.setattr(generate, "hours", lambda plan: 100.0)
        measured = tuple(measurements(DOCS))
        return {table.name: generate.complete(table, measured) for table in published().values()}


def figures(table: PaperTable, column: str) -> dict[str, Any]:
    """Label -> our figure."""
    place = [entry.name for entry in table.columns].index(column)
    return {row.label: row.ours[place] for row in table.rows}


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
    ("mixer_finetuning", "CIFAR-10"): "97.7 96.8 98.8 98.9 82.3 98.6 98.2",
    ("mixer_finetuning", "CIFAR-100"): "89.7 91.9 88.5 68.8 89.1 87.8",
    ("mixer_finetuning", "Pets"): "97.4 96.6 79.4 93.1 93.3",
    ("token_mixing_cost", "params M"): "59 73 102 86 110",
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
    ("gmlp_finetuning", "SST-2"): "80.4 88.1 88.6 91.2",
    ("gmlp_finetuning", "MNLI-m"): "65.1 74.6 75.2 77.7",
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
    ("transformer_images", "CIFAR-10"): "93.57 97.60 99.50",
    ("transformer_images", "ImageNet"): "80.62 74.00 88.55",
    ("transformer_complexity", "complexity"): "O(n&d^2) O(k&n&d^2) O(n^2&d)",
    ("transformer_small_data", "CIFAR-10"): "84.19 91.78",
    ("transformer_small_data", "CIFAR-100"): "65.16 72.80",
    ("transformer_small_data", "Flowers102"): "31.73 46.92",
    ("llama3_sizes", "8B"): "32 4096 32 SwiGLU RoPe",
    ("llama3_sizes", "70B"): "80 8192 64 SwiGLU RoPe",
    ("llama3_sizes", "405B"): "126 16384 128 SwiGLU RoPe",
    ("llama3_failures", "category"): "GPU GPU Network Unplanned&Maintenance Host",
    ("llama3_failures", "%"): "30.1 12.9 8.4 7.6 0.5",
    ("llama3_failures", "interruptions"): "148 54 35 32 2",
}


@pytest.mark.parametrize(("table", "column"), TYPED, ids=lambda part: part)
def test_published_figures(stored: dict[str, PaperTable], table: str, column: str) -> None:
    """Each column from top to bottom; where a paper prints a dash there is nothing."""
    entry = stored[table]
    place = [c.name for c in entry.columns if c.published].index(column)
    place = [number for number, c in enumerate(entry.columns) if c.published][place]
    assert [row.published[place] for row in entry.rows if row.published[place]] == [
        text.replace("&", " ") for text in TYPED[table, column].split()
    ]


def test_shares_of_interruptions() -> None:
    """Of the 419 unplanned ones, as printed; but for faulty GPUs, see the note."""
    for row in published()["llama3_failures"].rows[1:]:
        _, percent, count = row.cells
        assert int(count) == round(419 * float(percent) / 100), row.label


def test_every_row_has_a_cell_for_every_published_column() -> None:
    for table in published().values():
        for row in table.rows:
            assert len(row.cells) == sum(column.published for column in table.columns), (table.name, row.label)
            name = re.split("[@/+]", row.model)[0]
            assert not name or name in presets() or name.startswith("timm:"), row
            assert not row.recipe or row.recipe in recipes() or row.recipe == "mixer_h14"


def test_rows_are_parsed() -> None:
    first, second = read("""
    # Section
    a b | model recipe | 1 | -
    c   |              | 2 | x y
    """)
    assert first == ("a b", "model", "recipe", ("1", ""), "Section")
    assert second == ("c", "", "", ("2", "x y"), "Section")


def test_sizes_of_mixer_are_those_of_the_presets() -> None:
    for row in published()["mixer_table1"].rows:
        spec = preset(row.model).spec
        assert isinstance(spec, Encoder) and isinstance(spec.stem, PatchEmbed)
        token, channel = spec.block.token, spec.block.channel
        assert isinstance(token, TokenMlp) and isinstance(channel, ChannelMlp)
        ours = (spec.depth, spec.stem.patch_size[0], spec.width, spec.stem.tokens, channel.hidden, token.hidden)
        assert tuple(map(str, ours)) == row.cells[:6]


def test_sizes_of_llama_are_those_of_the_presets(stored: dict[str, PaperTable]) -> None:
    *rows, parameters = stored["llama3_sizes"].rows
    for row in rows:
        ours = [str(round(value)) if isinstance(value, float) else value for value in row.ours]
        assert [str(text).lower() for text in ours] == [text.lower() for text in row.published]
    assert parameters.ours == pytest.approx([8030.261248, 70553.706496, 405853.388800])


# --- counted and measured ----------------------------------------------------------------------------------


def test_stored_speeds_are_what_the_generator_computes() -> None:
    """If not: make tables."""
    assert hardware.FILE.read_text(encoding="utf8") == generate.speeds_text()


@pytest.mark.slow
def test_stored_tables_are_what_the_generator_computes(stored: dict[str, PaperTable]) -> None:
    """If not: make tables. Planning takes seconds, so a few recipes stand for all."""
    pytest.importorskip("timm")
    some = RECIPES[::5]
    *made, costs = generate.generate(some)
    *stored_text, _ = map(generate.as_json, stored.values())
    assert stored_text == [*map(generate.as_json, made)]
    assert [*stored] == [*(table.name for table in made), costs.name]
    rows = {row["label"]: row for row in json.loads(FILE.read_text(encoding="utf8"))[-1]["rows"]}
    assert [*rows] == [*RECIPES]
    for row in json.loads(generate.as_json(costs))["rows"]:
        assert row == rows[row["label"]]


@pytest.mark.parametrize("column", ["params M", "MACs G", "FLOPs G"])
def test_counts_are_the_published_ones(stored: dict[str, PaperTable], column: str) -> None:
    """As far as the notes say: within 5 % and the last printed digit, parameters within a million."""
    compared = []
    for table in stored.values():
        for place, entry in enumerate(table.columns):
            if entry.name == column and entry.published:
                pairs = [(row.published[place], row.ours[place]) for row in table.rows]
                compared += [(number(text), ours) for text, ours in pairs if text and isinstance(ours, float)]
    assert len(compared) > 5
    for printed, ours in compared:
        assert ours == pytest.approx(printed, abs=0.05 * printed + (1.0 if column == "params M" else 0.05))


def test_a_count_by_hand(stored: dict[str, PaperTable]) -> None:
    ablations = figures(stored["resmlp_ablations"], "params M")
    assert ablations["S12: linear -> conv 3x3"] == pytest.approx(30.817384)
    mixing = figures(stored["token_mixing_cost"], "MACs M of one mixing")
    assert mixing["MLP-Mixer"] == pytest.approx(2 * 384 * 196 * 768 / 1e6)
    assert mixing["gMLP in CV"] == pytest.approx(3072 / 2 * 196**2 / 1e6)
    layers = figures(stored["transformer_complexity"], "MACs M of one mixing")
    assert layers["Convolutional"] == pytest.approx(9 * 196 * 384**2 / 1e6)
    assert layers["Recurrent"] == pytest.approx(8 * 196 * 384**2 / 1e6)
    assert mixing["BERT"] == pytest.approx((4 * 128 * 768**2 + 2 * 128**2 * 768) / 1e6), "as long as gMLP's texts"
    assert layers["Self-Attention"] == pytest.approx((4 * 197 * 384**2 + 2 * 197**2 * 384) / 1e6)


def test_measurements_have_a_cell() -> None:
    for entry in measurements(DOCS):
        assert (DOCS / entry.source).is_file()
        for name in entry.tables:
            (column,) = [column for column in published()[name].columns if column.name == entry.column]
            assert column.source == "measured" or entry.column in ("tokens/s", "GiB")


def bench_log(device: str = "NVIDIA H200", img_size: int | None = None) -> dict[str, Any]:
    """A bench.json of `allmlp bench`."""
    rows = [
        Measurement(model, model, None, task, backend, batch, "images", rate_per_s=rate, flop_per_s=rate and 6e9 * rate)
        for model, task, backend, batch, rate in (
            ("resmlp_s12", "inference", "ours eager", 32, 9_000.0),
            ("resmlp_s12", "inference", "ours fast", 32, 10_000.0),
            ("resmlp_s12", "inference", "ours fast", 256, 12_000.0),
            ("resmlp_s12", "inference", "timm compiled", 256, 20_000.0),
            ("resmlp_s12", "inference", "ours onnx", 8, None),
            ("hf:resnet50", "inference", "hf compiled", 32, 8_000.0),
            ("mixer_b16", "training", "ours cuda-graph", 256, 5_000.0),
        )
    ]
    rows = [row._replace(macs=3_000_000_000, memory_bytes=200_000_000) for row in rows]
    options = BenchOptions(("resmlp_s12",), (32, 256), "cuda", "bfloat16", img_size=img_size)
    return as_dict(BenchReport(options, {"device": device}, 1.0, rows, {}))


def test_a_log_of_the_benchmark_fills_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest backend of ours, at batch size 32 where the paper says so, and the MFU of what it trained."""
    found = tuple(benched(bench_log(), "docs/logs/bench.json"))
    assert [(speed.model, speed.batch_size, speed.throughput) for speed in found] == [
        ("resmlp_s12", 32, 10_000),
        ("resmlp_s12", 256, 12_000),
        ("hf:resnet50", 32, 8_000),
        ("mixer_b16", 256, 5_000),
    ]
    count_a_small_network(monkeypatch)
    small = tuple(speed for speed in hardware.speeds() if speed.model == "cifar10_mixer")
    monkeypatch.setattr(hardware, "speeds", lambda: small + found)
    table, wide, other = (
        generate.complete(published()[name], ()) for name in ("resmlp_table1", "gmlp_table2", "mixer_table1")
    )
    assert figures(table, "images/s")["ResMLP-S12"] == 10_000 and figures(table, "peak MB")["ResMLP-S12"] == 200
    assert figures(table, "images/s")["ResMLP-S24"] == NOT_MEASURED
    assert figures(table, "images/s")["NfNet-F6 SAM"] == NOT_MEASURED
    assert figures(wide, "images/s")["ResMLP-12"] == 12_000
    assert "Not measured for the paper's rows: top-1." in report.terminal(table)
    assert "images/s" in report.terminal(wide) and "images/s." in report.terminal(other)
    assert training_speed("Mixer", "image", 121_000_000_000).model == "mixer_b16", "the nearest"
    assert training_speed("Mixer", "image", 400_000_000).model == "cifar10_mixer"
    assert list(benched(bench_log("some CPU"), "")) == []
    assert next(benched(bench_log(img_size=384), "")).model == "resmlp_s12@384"


def test_measurements_are_in_their_cells(unmeasured: dict[str, PaperTable]) -> None:
    found = {
        (table.name, row.label, column.name): table.text(row, number, ours=True)
        for table in unmeasured.values()
        for row in table.rows
        for number, column in enumerate(table.columns)
    }
    assert found["resmlp_ablations", "S12: linear -> none", "CIFAR-10"] == "77.92"
    (logged,) = [entry for entry in measurements(DOCS) if "6.53 M" in entry.row]
    assert found["mixer_finetuning", logged.row, "CIFAR-10"] == f"{logged.value:.2f}"
    assert found["mixer_finetuning", "Mixer-B/16 (slides)", "CIFAR-10"] == NOT_MEASURED
    assert found["resmlp_table1", "ResMLP-S12", "images/s"] == NOT_MEASURED
    assert found["mixer_table2", "HaloNet", "params M"] == NO_MODEL
    assert found["mixer_table2", "ViT-L/16", "GPU-hours"] == NO_RECIPE
    assert found["transformer_positions", "position 1", "i = 0"] == "0.8415"
    assert found["gmlp_table6", "gMLP L12, 44 M, 0.23 G tokens", "SQuAD 1.1"] == NOT_MEASURED


def test_every_figure_that_is_missing_has_a_reason(unmeasured: dict[str, PaperTable]) -> None:
    for table in unmeasured.values():
        for number, column in enumerate(table.columns):
            printed = [row for row in table.rows if row.section != MEASURED_HERE]
            if any(row.ours[number] == NOT_MEASURED for row in printed):
                reasons = [note for note in table.notes if re.match(rf"Not measured \((.*, )?{column.name}[,)]", note)]
                assert len(reasons) == 1 and len(reasons[0].partition("): ")[2]) > 20, (table.name, column.name)
    for table in published().values():  # the recipes that a reason names
        for column in table.columns:
            for word in re.findall(r"\w+_\w+", column.reason):
                assert word in recipes() or any(name.startswith(word) for name in recipes()), word


def test_core_days_as_gpu_hours(stored: dict[str, PaperTable]) -> None:
    """Mixer-L/16, 300 epochs of 14,197,122 images, 44.548 G multiply-adds, at the nearest rate."""
    seconds = 300 * 14_197_122 * 6 * 44.548e9 / training_speed("Mixer", "image", 44_548_000_000).flops
    table = stored["gpu_hours"]
    hours = figures(table, "GPU-hours")
    assert list(hours) == list(RECIPES)
    assert hours["imagenet21k_mixer_l16"] == pytest.approx(seconds / 3600, rel=1e-3)
    row = next(row for row in table.rows if row.label == "imagenet21k_mixer_l16")
    assert row.published[0] == "0.41k"
    assert figures(stored["mixer_table2"], "GPU-hours")["Mixer-L/16"] == hours["imagenet21k_mixer_l16"]


# --- formats -------------------------------------------------------------------------------------------------


def test_a_terminal_is_100_columns_wide(stored: dict[str, PaperTable], unmeasured: dict[str, PaperTable]) -> None:
    assert list(stored) == [*published(), "gpu_hours"] and len(stored) == 22
    for table in (*stored.values(), *unmeasured.values()):
        text = report.terminal(table)
        assert max(map(len, text.splitlines())) <= 100, text
        assert table.title in text and table.source in text
        assert all(row.label in text for row in table.rows)
    text = report.terminal(unmeasured["resmlp_table1"])
    assert "Not measured for the paper's rows: images/s, peak MB, top-1." in text


def test_a_terminal_is_wide_enough_for_every_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the models with large figures, at every batch size and in both tasks."""
    models = sorted({row.model for table in published().values() for row in table.rows if row.model})[::2]
    full = tuple(
        hardware.Speed(name, "", "", task, 1, 32, 123_456.0, 1.0, 98_765_000_000, "h200", "", "")
        for name in models
        for task in ("inference", "training")
    )
    count_a_small_network(monkeypatch)
    monkeypatch.setattr(hardware, "speeds", lambda: full)
    monkeypatch.setattr(generate, "hours_of", lambda row: NO_RECIPE)
    monkeypatch.setitem(generate.SOURCES, "gpu_hours", lambda row: NO_RECIPE)
    texts = {table.name: report.terminal(generate.complete(table, ())) for table in published().values()}
    for text in texts.values():
        assert max(map(len, text.splitlines())) <= 100, text
    assert "98,765.0" in texts["resmlp_table1"]


def test_markdown_tables_are_square(stored: dict[str, PaperTable], unmeasured: dict[str, PaperTable]) -> None:
    for table in stored.values():
        rows = [line for line in report.markdown(table).splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) == 1, table.name
    text = report.markdown(unmeasured["resmlp_table1"])
    assert "| ResMLP-S12 | 15 | 15.35 | 1415.1 | not measured | 3.0 | 3.01 |" in text


def test_csv_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "tables", "resmlp", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    _, out, _ = run(capsys, "tables", "resmlp", "--json")
    found = {table["name"]: table for table in json.loads(out)}
    assert set(found) == {row["table"] for row in rows} == {name for name in load() if "resmlp" in name}
    for row in rows:
        line = next(
            line
            for line in found[row["table"]]["rows"]
            if (line["row"], line["section"]) == (row["row"], row["section"])
        )
        cell = line["cells"][row["column"]]
        assert (cell["published"] or "") == row["published"]
        here = cell.get("here", "")
        assert (
            here == row["here"]
            if isinstance(here, str)
            else here == pytest.approx(number(row["here"]), abs=0.01, rel=0.01)
        )


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "tables", "gmlp_table3")
    assert code == 0 and "Additive gMLP" in out and "92.17" in out and "14.89" in out
    code, out, _ = run(capsys, "tables", "--paper", "resmlp", "--markdown")
    assert code == 0 and out.count("### ") == 4 and out.count("`resmlp_") == 4
    code, out, _ = run(capsys, "tables", "*_finetuning", "--markdown")
    assert code == 0 and out.count("### ") == 2 and f"**{MEASURED_HERE}**" in out


@pytest.mark.parametrize("paper", ["mixer", "gmlp", "resmlp", "transformer"])
def test_papers_are_called_by_their_subject(paper: str) -> None:
    names = [table.name for table in tables(paper=paper)]
    assert len(names) > 2 and "gpu_hours" not in names
    assert all(paper in load()[name].papers for name in names)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["gmpl_table3"], "no table matches 'gmpl_table3'; did you mean 'gmlp_table3'"),
        (["gmlp", "--csv", "--json"], "choose one of"),
        (["--paper", "005"], "unknown paper '005': choose one of mixer, gmlp, resmlp, transformer"),
        (["resmlp", "--paper", "mixer"], "there are mixer_table1"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    code, out, err = run(capsys, "tables", *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and reason in err


def test_python_raises_what_the_command_prints() -> None:
    with pytest.raises(UserError, match="no table matches"):
        tables("nothing of the kind")


@pytest.mark.parametrize("arguments", [["tables", "--help"], ["tables", "gmlp_table3"]])
def test_tables_need_no_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from allmlp.cli import main
try: main({arguments})
except SystemExit as end: assert not end.code
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
