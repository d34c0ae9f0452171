"""Reading run folders: finished, unfinished, and damaged in every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmlp.layers import TokenConv
from allmlp.models.zoo import family, kinds, preset, presets, short_name
from allmlp.report.curves import better, charts, metrics, thin
from allmlp.report.runs import MetricRecord, find, parse, read_logged, settings
from report.folders import curve, trained, written
from train.runs import language, small


def test_a_finished_run(tmp_path: Path) -> None:
    entry = read_logged("a", trained(tmp_path / "a"))
    last = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    assert entry.state == "finished" and entry.problems == () and entry.steps == 12
    assert entry.final == {"accuracy": last["accuracy"], "loss": last["loss"]}
    assert entry.epochs_per_step == pytest.approx(24 / 64)
    assert entry.speed is not None and entry.speed[1] == "images/s"
    state = json.loads((tmp_path / "a" / "checkpoints" / "step-000000012" / "state.json").read_text())
    assert entry.seconds == state["seconds"]
    assert entry.spec is not None and entry.cost is not None
    # The head has the four classes of the data, not the thousand of the recipe.
    saved, initial = entry.spec.head.num_classes, small().model.head.num_classes  # type: ignore[union-attr]
    assert (saved, initial) == (4, 1000)
    assert short_name(entry.spec) == "ResMLP 2 x 16"


def test_a_run_that_has_kept_its_best_weights(tmp_path: Path) -> None:
    records = [{"kind": "eval", "step": step, "accuracy": value} for step, value in ((4, 0.7), (8, 0.9), (12, 0.8))]
    folder = written(tmp_path / "a", records)
    assert read_logged("a", folder).final == {"accuracy": 0.8}
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"result": {"best_step": 8}}))
    assert read_logged("a", folder).final == {"accuracy": 0.9}


def test_an_unfinished_run(tmp_path: Path) -> None:
    entry = read_logged("a", written(tmp_path / "a", curve(30)))
    assert entry.state == "unfinished" and entry.problems == () and entry.final == {}
    assert entry.steps == 30 and entry.seconds == 29 and entry.speed is None
    assert entry.epochs_per_step == pytest.approx(0.1)


def test_pauses_of_a_resumed_run_are_not_counted(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", [{"step": 1, "time": 0.0}, {"step": 9, "time": 90_000.0}])
    place = folder / "checkpoints" / "step-000000009"
    place.mkdir(parents=True)
    (place / "state.json").write_text('{"step": 9, "seconds": 12.5}')
    assert read_logged("a", folder).seconds == 12.5
    (place / "state.json").write_text('{"step": 8, "seconds": 12.5}')
    assert read_logged("a", folder).seconds == 90_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "metrics.jsonl is missing: no curves"),
        ("", "metrics.jsonl is empty: no curves"),
        ('{"kind": "train", "step": 1, "time": 1, "loss": 1}\n{"kind": "tra', "damaged: 1 line of 2 skipped"),
        ("\x00\xff\n[]\n3\nnull\n" + "[" * 5000 + "\n", "damaged: 5 lines of 5 skipped"),
    ],
)
def test_damaged_metrics_are_reported(tmp_path: Path, text: str | None, problem: str) -> None:
    folder = written(tmp_path / "a", [])
    if text is None:
        (folder / "metrics.jsonl").unlink()
    else:
        (folder / "metrics.jsonl").write_bytes(text.encode("latin1"))
    entry = read_logged("a", folder)
    assert len(entry.problems) == 1 and problem in entry.problems[0] and entry.state == "unfinished"
    charts([entry])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"run": 3}', '{"run": {"kind": "Nothing"}}', '{"run": {"kind": "Digits"}}', "[" * 5000],
)
def test_a_damaged_run_file_is_reported(tmp_path: Path, text: str) -> None:
    folder = written(tmp_path / "a", curve(3))
    (folder / "run.json").write_text(text)
    entry = read_logged("a", folder)
    assert entry.state == "broken" and len(entry.problems) == 1 and "run" in entry.problems[0]
    assert "\n" not in entry.problems[0] and len(entry.records) == 3
    settings(entry.config)


@pytest.mark.parametrize(
    ("line", "record"),
    [
        ('{"kind": "eval", "step": 3, "time": 2, "loss": 1}', MetricRecord("eval", 3, 2.0, {"loss": 1.0})),
        ('{"kind": "eval", "step": 3, "time": 2, "a": NaN, "b": Infinity, "c": "d", "e": true, "f": [1]}', ...),
        ('{"kind": "other", "step": 3, "time": 2}', None),
        ('{"kind": "eval", "step": 3.5, "time": 2}', None),
        ('{"kind": "eval", "step": -1, "time": 2}', None),
        (f'{{"kind": "eval", "step": {10**20}, "time": 2}}', None),
        ('{"kind": "eval", "step": 3, "time": NaN}', None),
        (f'{{"kind": "eval", "step": 3, "time": 2, "loss": {10**400}}}', None),
        ('{"step": 3, "time": 2}', None),
    ],
)
def test_lines(line: str, record: MetricRecord | None) -> None:
    expected = MetricRecord("eval", 3, 2.0, {}) if record is ... else record
    assert parse(line.encode()) == expected


def test_where_runs_are_found(tmp_path: Path) -> None:
    for place in ("a", "table/one", "table/two", "other/one"):
        written(tmp_path / place, curve(1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    paths = [tmp_path / name for name in ("a", "table", "other", "a", "empty", "notes.txt", "missing")]
    found, skipped = find(paths)
    assert list(found.values()) == [tmp_path / p for p in ("a", "table/one", "table/two", "other/one")]
    assert [Path(name).name for name in found] == ["a", "one", "two", "one"]
    assert list(found)[1] == str(tmp_path / "table" / "one"), "runs of the same name are named by their paths"
    assert [text.partition(" ")[0] for text in skipped] == [str(path) for path in paths[4:]]


def test_short_names_of_models() -> None:
    names = ("mixer_b16", "resmlp_s12", "gmlp_s16", "amlp_s16", "vit_s16", "resmlp_s12_conv", "resmlp_seq2seq_tiny")
    assert [short_name(preset(name).spec) for name in names] == [
        "Mixer 12 x 768",
        "ResMLP 12 x 384",
        "gMLP 30 x 256",
        "aMLP 30 x 256",
        "ViT 12 x 384",
        "ResMLP 12 x 384",
        "ResMLP",
    ]
    assert short_name(preset("hf:resnet50").spec) == "resnet50" and short_name(None) == ""


def test_a_new_mixer_is_named_without_an_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here TokenConv is the new one. A model with other parts around a known mixer keeps its family."""
    known = {name: entry for name, entry in presets().items() if TokenConv not in kinds(entry.spec)}
    del known["resmlp_s12_ln"]
    monkeypatch.setattr("allmlp.models.zoo.presets", lambda: known)
    assert family.__wrapped__(preset("resmlp_s12_conv").spec) == "TokenConv"
    assert family.__wrapped__(preset("resmlp_s12_ln").spec) == "ResMLP"


def test_settings_are_dotted_names() -> None:
    config = {"run": {"kind": "Run", "optim": {"kind": "AdamW", "lr": 0.1}, "seed": 0, "list": [{"a": 1}]}}
    assert settings(config) == {"optim": "AdamW", "optim.lr": "0.1", "seed": "0", "list": '[{"a": 1}]'}


# --- curves -----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=500), st.integers(6, 40))
def test_thinning_keeps_ends_and_extremes(values: list[float], most: int) -> None:
    kept = thin(values, most)
    assert len(kept) <= max(most, min(len(values), most)) and kept == sorted(set(kept))
    assert kept[0] == 0 and kept[-1] == len(values) - 1
    seen = [values[index] for index in kept]
    assert min(seen) == min(values) and max(seen) == max(values)


def test_a_spike_survives_thinning() -> None:
    values = [1.0] * 10_000
    values[7_777] = 50.0
    kept = thin(values, 300)
    assert 7_777 in kept and len(kept) <= 300


def test_charts(tmp_path: Path) -> None:
    long, short = written(tmp_path / "a", curve(1000)), written(tmp_path / "b", curve(5, "bleu"))
    drawn = charts([read_logged("a", long), read_logged("b", short)])
    assert [(chart["title"], chart["group"]) for chart in drawn] == [("loss", ""), ("bleu", "")]
    (first,), (second,) = (chart["curves"] for chart in drawn)
    assert first["of"] == 1000 and len(first["values"]) <= 300 and first["steps"][-1] == 1000
    assert first["seconds"][-1] == 999 and first["values"][-1] == 0.001 and first["run"] == 0
    assert second == {
        "run": 1,
        "kind": "train",
        "of": 5,
        "steps": [1, 2, 3, 4, 5],
        "seconds": [0.0, 1.0, 2.0, 3.0, 4.0],
        "values": [1.0, 0.5, 0.33333, 0.25, 0.2],
    }


def test_tasks_do_not_share_axes(tmp_path: Path) -> None:
    """Accuracies of an image classifier and of a masked language model are two charts; their speeds are one."""
    evaluated: dict[str, object] = {"kind": "eval", "step": 9, "accuracy": 0.5}
    trained_at: dict[str, object] = {"step": 9, "lr": 0.1}
    images = [written(tmp_path / name, [trained_at, evaluated]) for name in ("a", "b")]
    text = written(tmp_path / "c", [trained_at, evaluated], language())
    drawn = charts([read_logged(folder.name, folder) for folder in (*images, text)])
    found = [(chart["title"], chart["group"], [curve["run"] for curve in chart["curves"]]) for chart in drawn]
    assert found == [
        ("accuracy", "Blobs · Classify", [0, 1]),
        ("accuracy", f"{type(language().data).__name__} · MaskedLM", [2]),
        ("learning rate", "", [0, 1, 2]),
    ]


def test_the_number_of_charts_is_bounded(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", [{f"metric {number}": 1 for number in range(500)}])
    assert len(metrics([read_logged("a", folder)])) == 12


def test_which_way_is_better() -> None:
    assert [better(name) for name in ("accuracy", "knn_accuracy", "bleu", "f1")] == [1, 1, 1, 1]
    assert [better(name) for name in ("loss", "en_perplexity", "mse", "mae", "mase")] == [-1] * 5
    assert [better(name) for name in ("mfu", "images/s", "entropy")] == [0, 0, 0]
