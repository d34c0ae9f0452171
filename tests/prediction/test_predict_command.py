"""allmlp predict: the same answers on the screen, in files and from Python."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp.cli.app import next_prediction
from allmlp.cli.job import most_frequent
from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing, write_preprocessing
from allmlp.prediction import ImagePredictor
from allmlp.prediction.answers import Prediction
from allmlp.prediction.output import AnswerTable
from data.sample_images import encode, scene
from folders import CLASSES, image_folder, text_folder
from prediction.conftest import Command


def read_csv(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as source:
        return list(csv.DictReader(source, delimiter="\t" if file.suffix == ".tsv" else ","))


def read_parquet(file: Path) -> list[dict[str, Any]]:
    return pytest.importorskip("pyarrow.parquet").read_table(file).to_pylist()


# --- one set of answers in every form -----------------------------------------------------------------------


def test_files_screen_and_python_agree_to_the_bit(images: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    options = ("--batch-size", 3, "--device", "cpu")
    expected = allmlp.predict(images, photos, top_k=2, device="cpu", batch_size=3)
    names = [str(photos / name) for name in ("0.png", "2.png", "4.png", "6.png", "b/1.png", "b/3.png", "b/5.png")]
    for kind in ("csv", "tsv", "jsonl", "parquet"):
        code, out, err = command("predict", images, photos, "--top-k", 2, "--out", tmp_path / f"a.{kind}", *options)
        assert (code, out) == (0, "") and err.endswith(f"written to {tmp_path}/a.{kind}\nnext: allmlp serve {images}\n")
    answers = [((a.label, a.probability), (b.label, b.probability)) for a, b in expected]
    for rows in (read_csv(tmp_path / "a.csv"), read_csv(tmp_path / "a.tsv"), read_parquet(tmp_path / "a.parquet")):
        assert [row["input"] for row in rows] == names and not any(row["error"] for row in rows)
        keys = ("label", "probability"), ("label_2", "probability_2")
        assert [tuple((row[a], float(row[b])) for a, b in keys) for row in rows] == answers
    printed = json.loads(command("predict", images, photos, "--top-k", 2, "--json", *options)[1])
    assert printed == [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [tuple((p["label"], p["probability"]) for p in row["predictions"]) for row in printed] == answers
    code, out, err = command("predict", images, photos, "--top-k", 2, *options)
    assert code == 0 and out == "".join(f"{n}: {a}  {b}\n" for n, (a, b) in zip(names, expected, strict=True))
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")], "no temporary files are left"


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_texts_with_line_ends_of_any_kind_stay_whole(
    texts: Path, suffix: str, tmp_path: Path, command: Command
) -> None:
    ends = ["the cat\rsat", "the cat\r\nsat", "the cat\nsat", "the cat sat"]
    with open(tmp_path / "in.csv", "w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["text", "id"], *zip(ends, ["1\r2", "", "b", "c"])])
    out = tmp_path / f"out.{suffix}"
    assert command("predict", texts, tmp_path / "in.csv", "--keep", "id", "--out", out, "--device", "cpu")[0] == 0
    assert [(row["input"], row["id"]) for row in read_csv(out)] == [*zip(ends, ["1\r2", "", "b", "c"])]


def test_the_summary_counts_every_input() -> None:
    counts = Counter("aaabbccddeefg")
    assert most_frequent(counts) == "3 a, 2 b, 2 c, 2 d, 2 e, 2 with other labels"
    assert most_frequent(Counter("aab")) == "2 a, 1 b"


def test_one_forward_pass_by_hand(images: Path, photos: Path) -> None:
    """The engine computes softmax(model((pixels / 255 - mean) / std))."""
    from allmlp.data.decode import Decode, decode_image

    model = allmlp.load(images)
    pixels = decode_image((photos / "4.png").read_bytes(), (8, 12), Decode(crop_pct=0.9))
    with torch.no_grad():
        expected = model((pixels[None].float() / 255 - 0.4) / 0.2).softmax(1)[0]
    (row,) = allmlp.predict(images, photos / "4.png", device="cpu")
    assert {one.label: one.probability for one in row} == pytest.approx(dict(zip(CLASSES, expected.tolist())))
    assert [one.probability for one in row] == sorted(expected.tolist(), reverse=True)


def test_fast_and_other_dtypes_agree_closely(images: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = allmlp.predict(images, photos, top_k=3, device="cpu")
    for options, tolerance in (({"fast": True}, 1e-5), ({"dtype": torch.bfloat16}, 0.05), ({"batch_size": 2}, 1e-5)):
        found = allmlp.predict(images, photos, top_k=3, device="cpu", **options)
        for row, other in zip(found, expected, strict=True):
            assert {p.label: p.probability for p in row} == pytest.approx(
                {p.label: p.probability for p in other}, abs=tolerance
            )


def test_fast_is_chosen_for_many_images(
    images: Path, photos: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[bool] = []
    outputs = ImagePredictor.outputs

    def watch(self: ImagePredictor, batch: list[torch.Tensor]) -> torch.Tensor:
        result = outputs(self, batch)
        chosen.append(self.fast)
        return result

    monkeypatch.setattr(ImagePredictor, "outputs", watch)
    monkeypatch.setattr("allmlp.cli.job.FAST_FROM", {"cpu": 7, "cuda": 7})
    for arguments in (
        ["predict", images, photos],
        ["predict", images, photos / "b"],
        ["predict", images, photos, "--no-fast"],
    ):
        assert command(*arguments, "--device", "cpu")[0] == 0
    assert chosen == [True, False, False]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_kept_columns_with_names_of_the_answer(texts: Path, suffix: str, tmp_path: Path, command: Command) -> None:
    """As in a file that was written by an earlier call."""
    names = ["label", "input_label", "p(cat)", "predictions", "probabilities", "id"]
    cells = [f"{number}" for number in range(len(names))]
    (tmp_path / "in.csv").write_text(f"text,{','.join(names)}\nthe cat sat,{','.join(cells)}\n")
    options = [*(option for name in names for option in ("--keep", name)), "--probabilities", "--device", "cpu"]
    out = tmp_path / f"out.{suffix}"
    assert command("predict", texts, tmp_path / "in.csv", *options, "--out", out)[0] == 0
    (row,) = read_csv(out) if suffix == "csv" else [json.loads(out.read_text())]
    new = ["input_input_label", "input_label", "input_p(cat)", "input_predictions", "input_probabilities", "id"]
    assert [row[name] for name in new] == cells and row["label"] in CLASSES
    found = row["probabilities"] if suffix == "jsonl" else {name: float(row[f"p({name})"]) for name in CLASSES}
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)


def test_all_values_of_a_regression_beside_kept_columns(photos: Path, tmp_path: Path, command: Command) -> None:
    """A kept column of the name of a value, which is what to compare it with, was once overwritten."""
    model = image_folder(tmp_path / "model")
    write_preprocessing(model, ImagePreprocessing((0.4,) * 3, (0.2,) * 3, ("age", "height", "weight"), task="values"))
    (photos / "ages.csv").write_text("image,age\n0.png,31\n2.png,7\n")
    options = (model, photos / "ages.csv", "--keep", "age", "--device", "cpu")
    assert command("predict", *options, "--out", tmp_path / "answers.csv")[0] == 0
    found = read_csv(tmp_path / "answers.csv")
    expected = allmlp.predict(model, [photos / "0.png", photos / "2.png"], device="cpu")
    assert [row["input_age"] for row in found] == ["31", "7"]
    assert [float(row["age"]) for row in found] == [row[0].value for row in expected]
    objects = json.loads(command("predict", *options, "--json", "--top-k", 1)[1])
    assert [[one["value"] for one in row["predictions"]] for row in objects] == [
        [one.value for one in row] for row in expected
    ]
    assert objects[0]["input_age"] == "31"


# --- what is asked for --------------------------------------------------------------------------------------


def test_a_table_of_texts_is_read(texts: Path, tmp_path: Path, command: Command) -> None:
    """The name of a file was once classified as if it were a text."""
    rows = [("1", "the cat sat"), ("2", "a dog, jumped"), ("3", "one two three")]
    file = tmp_path / "dev.tsv"
    file.write_text("id\tsentence\tlabel\n" + "".join(f"{number}\t{text}\t0\n" for number, text in rows))
    out = tmp_path / "answers.csv"
    options = ("--keep", "id", "--keep", "label", "--probabilities", "--device", "cpu")
    code, _, err = command("predict", texts, file, "--out", out, *options)
    found = read_csv(out)
    assert code == 0 and err.startswith("3 texts: ")
    assert [(row["id"], row["input"]) for row in found] == rows and {row["input_label"] for row in found} == {"0"}
    expected = allmlp.predict(texts, [text for _, text in rows], top_k=3, device="cpu")
    assert [{name: float(row[f"p({name})"]) for name in CLASSES} for row in found] == [
        {one.label: one.probability for one in row} for row in expected
    ]
    assert [row["label"] for row in found] == [row[0].label for row in expected]


def test_a_column_called_context_is_for_questions(texts: Path, tmp_path: Path, command: Command) -> None:
    """A classifier is not trained on it."""
    (tmp_path / "a.csv").write_text("text,context\nthe cat sat,on the red mat\na dog jumped,over the blue fence\n")
    found = json.loads(command("predict", texts, tmp_path / "a.csv", "--json", "--device", "cpu")[1])
    plain = allmlp.predict(texts, ["the cat sat", "a dog jumped"], device="cpu")
    assert [row["predictions"][0]["probability"] for row in found] == [row[0].probability for row in plain]
    assert allmlp.predict(texts, tmp_path / "a.csv", device="cpu") == plain


def test_probabilities_of_classes_with_one_name_are_added(photos: Path, tmp_path: Path, command: Command) -> None:
    folder = image_folder(tmp_path / "model")
    write_preprocessing(folder, ImagePreprocessing((0.4,) * 3, (0.2,) * 3, ("crane", "dog", "crane")))
    arguments = ("predict", folder, photos, "--probabilities", "--top-k", 3, "--device", "cpu")
    for row in json.loads(command(*arguments, "--json")[1]):
        both = [one["probability"] for one in row["predictions"] if one["label"] == "crane"]
        assert len(both) == 2 and row["probabilities"]["crane"] == pytest.approx(sum(both))
        assert sum(row["probabilities"].values()) == pytest.approx(1)
    assert command(*arguments, "--out", tmp_path / "a.csv")[0] == 0
    for line in read_csv(tmp_path / "a.csv"):
        assert float(line["p(crane)"]) + float(line["p(dog)"]) == pytest.approx(1)


def test_json_has_null_for_what_is_not_a_number(photos: Path, tmp_path: Path, command: Command) -> None:
    folder = image_folder(tmp_path / "model")
    model = allmlp.load(folder)
    with torch.no_grad():
        model.head.proj.bias[1] = torch.nan  # type: ignore[union-attr, index, operator]
    allmlp.save(model, folder)
    write_preprocessing(folder, ImagePreprocessing((0.4,) * 3, (0.2,) * 3, ("a", "b", "c"), task="values"))

    def strict(text: str) -> Any:
        def refuse(word: str) -> None:
            raise ValueError(f"{word} is not JSON")

        return json.loads(text, parse_constant=refuse)

    printed = strict(command("predict", folder, photos, "--json")[1])
    assert [one["value"] is None for one in printed[0]["predictions"]] == [False, True, False]
    assert command("predict", folder, photos, "--out", tmp_path / "a.jsonl")[0] == 0
    assert [strict(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == printed
    write_preprocessing(folder, ImagePreprocessing((0.4,) * 3, (0.2,) * 3, CLASSES))
    (photos / "b").rename(photos / CLASSES[0])
    (photos / CLASSES[1]).mkdir()
    (photos / "0.png").rename(photos / CLASSES[1] / "0.png")
    assert strict(command("eval", folder, photos, "--json")[1])["loss"] is None


def test_threshold_leaves_the_label_empty(images: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    best = [row[0].probability for row in allmlp.predict(images, photos, top_k=1, device="cpu")]
    middle = sorted(best)[3]
    options = ("--threshold", middle, "--device", "cpu")
    assert command("predict", images, photos, "--out", tmp_path / "a.csv", *options)[0] == 0
    rows = read_csv(tmp_path / "a.csv")
    assert [bool(row["label"]) for row in rows] == [p >= middle for p in best]
    assert sum(not row["label"] for row in rows) == 3 and all(row["probability"] for row in rows)
    printed = json.loads(command("predict", images, photos, "--json", *options)[1])
    assert [row["label"] is None for row in printed] == [p < middle for p in best]
    _, out, err = command("predict", images, photos, *options)
    assert out.count(": unsure:  ") == 3 and "3 unsure" in err


@pytest.mark.parametrize(("probability", "label"), [(0.0, None), (0.4, None), (0.5, "a"), (None, "a")])
def test_a_probability_of_zero_is_below_the_threshold(probability: float | None, label: str | None) -> None:
    table = AnswerTable(("a",), is_regression=False, top_k=1, threshold=0.5)
    assert table.label([Prediction("a", probability)]) == label


def test_top_k_and_threshold_are_checked(images: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    assert command("predict", images, photos, "--out", tmp_path / "a.csv", "--top-k", 99)[0] == 0
    assert [name for name in read_csv(tmp_path / "a.csv")[0] if name.startswith("label")] == [
        "label",
        "label_2",
        "label_3",
    ]
    masked = text_folder(tmp_path / "masked", "text")
    for arguments, message in (
        (("predict", images, photos, "--threshold", "2"), "--threshold"),
        (("predict", images, photos, "--dtype", "float31"), "unknown dtype 'float31'; did you mean 'float32'"),
        (("predict", images, photos, "--device", "gpu"), "unknown device 'gpu': use cpu, cuda"),
        (("predict", images, photos, "--out", tmp_path / "a.xml"), "must end in .csv, .tsv, .jsonl, .parquet, or in /"),
        (("predict", images), "an image file, a folder, a table or a text"),
        (("predict", "runs/no-model", photos), "runs/no-model is neither a model folder nor an input"),
        (("predict", f"{images}s", photos), f"nor an input; did you mean '{images}'"),
        (("predict", images, tmp_path / "no.png"), "there is no file"),
        (("predict", tmp_path / "model.onnx", "a text"), "is an exported model: name the folder it was exported from"),
        (("predict", masked, "the [MASK]", "--probabilities"), "--probabilities is for classifiers"),
    ):
        code, out, err = command(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1) and message in err, err


def test_a_model_of_pairs_suggests_two_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = text_folder(tmp_path / "pairs", "classes")
    write_preprocessing(folder, TextPreprocessing("classes", 24, CLASSES, text_columns=("premise", "hypothesis")))
    next_prediction(folder)
    assert capsys.readouterr().err == f"next: allmlp predict {folder} TEXT --context TEXT\n"


def test_a_model_of_pairs_warns_once_of_single_texts(
    tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """They were classified without a word."""
    known = TextPreprocessing("classes", 24, CLASSES, text_columns=("premise", "hypothesis"))
    folder = text_folder(tmp_path / "pairs", "classes")
    write_preprocessing(folder, known)
    texts, paired = tmp_path / "texts.csv", tmp_path / "paired.csv"
    labels = "".join(f"{name}\n" for name in ("label", *CLASSES))
    texts.write_text("".join(f"the cat,{label}\n" for label in labels.split()).replace("the cat", "premise", 1))
    paired.write_text(texts.read_text().replace("premise", "premise,hypothesis").replace("the cat", "the cat,a dog"))
    for one in (("predict", folder, "the cat", "--context", "a dog"), ("eval", folder, paired)):
        assert command(*one)[0] == 0
    assert allmlp.predict(folder, [("the cat", "a dog")]) and not caplog.text
    for one in (("predict", folder, "the cat"), ("eval", folder, texts)):
        assert command(*one)[0] == 0
    assert caplog.text.count("trained on pairs, premise with hypothesis, and now reads a text without a second") == 1
    write_preprocessing(folder, known.replace(text_columns=("premise",)))
    caplog.clear()
    assert command("predict", folder, "the cat")[0] == 0 and not caplog.text


def test_tokens_of_every_mask(tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    masked = text_folder(tmp_path / "masked", "text")
    next_prediction(masked)
    assert capsys.readouterr().err == f"next: allmlp predict {masked} 'TEXT WITH [MASK]'\n"
    text = "the [MASK] sat on the [MASK] mat"
    rows = allmlp.predict(masked, text, top_k=2, device="cpu")
    assert command("predict", masked, text, "--top-k", 2, "--out", tmp_path / "a.csv", "--device", "cpu")[0] == 0
    found = read_csv(tmp_path / "a.csv")
    assert [(row["input"], row["label"], row["label_2"]) for row in found] == [
        (text, a.label, b.label) for a, b in rows
    ]
    assert len(rows) == 2


# --- broken inputs ------------------------------------------------------------------------------------------


def test_a_broken_file_is_reported_and_skipped(images: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    (photos / "2.png").write_bytes(b"not an image")
    (photos / "4.png").write_bytes(b"")
    code, _, err = command("predict", images, photos, "--out", tmp_path / "a.csv")
    lines = err.splitlines()
    assert code == 1 and lines[0].startswith(f"skipped {photos}/2.png: not an image")
    assert lines[1] == f"skipped {photos}/4.png: the file is empty" and "; 2 skipped; " in lines[2]
    rows = read_csv(tmp_path / "a.csv")
    assert len(rows) == 7 and [row["error"] for row in rows if row["error"]][1] == "the file is empty"
    assert all(bool(row["label"]) != bool(row["error"]) for row in rows)
    assert [("error" in row) for row in json.loads(command("predict", images, photos, "--json")[1])].count(True) == 2


def test_only_broken_files_are_an_error(images: Path, photos: Path, command: Command) -> None:
    for file in photos.rglob("[0-9].png"):
        file.write_bytes(b"x")
    code, out, err = command("predict", images, photos / "0.png")
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(f"error: {photos}/0.png: not an image")
    code, out, err = command("predict", images, photos)
    assert (code, out) == (2, "") and "none of the 7 inputs could be used" in err.splitlines()[-1]
    with pytest.raises(allmlp.UserError, match=r"0\.png: not an image"):
        allmlp.predict(images, photos)


def test_many_broken_files_are_not_all_listed(images: Path, tmp_path: Path, command: Command) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.png").write_bytes(b"x" if number else encode(scene()))
    code, _, err = command("predict", images, tmp_path)
    assert code == 1 and err.count("skipped /") == 10 and "; 29 skipped" in err


def test_a_file_is_there_completely_or_not_at_all(
    images: Path, photos: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, calls = ImagePredictor.outputs, 0

    def crash(self: ImagePredictor, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise allmlp.UserError("out of luck")
        return outputs(self, *arguments, **options)

    monkeypatch.setattr(ImagePredictor, "outputs", crash)
    out = tmp_path / "out"
    for kind in ("csv", "jsonl", "parquet"):
        calls = 0
        assert command("predict", images, photos, "--batch-size", 2, "--out", out / f"a.{kind}")[0] == 2
        assert not list(out.iterdir())


# --- terminal -----------------------------------------------------------------------------------------------


def test_the_table_on_a_terminal_fits(
    images: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("deep" * 12) / "[bold]er"
    long.mkdir(parents=True)
    for number in range(60):
        (long / f"{number:02}.png").write_bytes(encode(scene(9, 9, number)))
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    code, out, err = command("predict", images, long, "--device", "cpu")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 52 and lines[-1] == "... and 10 more"
    assert all(len(line) <= 90 for line in lines) and lines[0].split() == ["image", "answer", "then"]
    assert all(f"[bold]er/{number:02}.png" in line for number, line in enumerate(lines[1:51]))
    assert all(any(name in line and "%" in line for name in CLASSES) for line in lines[1:51])
    assert err.splitlines()[-1] == f"next: allmlp predict {images} {str(long)!r} --out answers.csv"


def test_reading_standard_input(texts: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat sat\ndev.tsv\n"))
    code, out, _ = command("predict", texts, "-", "--top-k", 1)
    assert code == 0 and [line.partition(":")[0] for line in out.splitlines()] == ["the cat sat", "dev.tsv"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert command("predict", texts, "-") == (2, "", "error: standard input has no texts\n")


def test_one_input_is_counted_in_the_singular(texts: Path, tmp_path: Path, command: Command) -> None:
    code, _, err = command("predict", texts, "the cat sat", "--out", tmp_path / "a.csv")
    assert code == 0 and err.startswith("1 text: ")


def test_the_bundled_model_reads_images(photos: Path, command: Command) -> None:
    code, out, _ = command("predict", photos / "0.png", "--top-k", 1)
    assert code == 0 and out.startswith(f"{photos}/0.png: ")


def test_a_folder_of_runs_is_not_an_input_of_the_bundled_model(photos: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.json").touch()
    code, out, err = command("predict", tmp_path / "runs", photos)
    assert (code, out) == (2, "") and "runs holds 1 run: name one of them, such as " in err


def test_the_bundled_model_reads_a_long_text(command: Command) -> None:
    code, out, _ = command("predict", "a wonderful film " * 300)
    assert code == 0 and "positive" in out


def test_the_error_of_a_long_text_has_its_reason(command: Command) -> None:
    code, _, err = command("predict", "allmlp:text", " " * 999)
    assert code == 2 and err.endswith("...: the text is empty\n")
    assert command("predict", "allmlp:text", "")[2] == "error: input: the text is empty\n"


@pytest.mark.slow
def test_one_image_needs_few_imports(images: Path, photos: Path) -> None:
    """torch._dynamo and torch.distributed.fsdp take longer to import than torch itself; reading a run needs neither."""
    code = f"""
import subprocess
import sys
from allmlp.prediction import open_predictor
predictor = open_predictor({str(images)!r}, device="cpu")
assert predictor.predict([predictor.decode({str(photos / "0.png")!r})])
print([name for name in ("torch._dynamo", "torch.distributed.fsdp", "allmlp.tasks.classify") if name in sys.modules])
import allmlp.auto, allmlp.training
print([name for name in ("torch._dynamo", "torch.distributed.fsdp", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n[]\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--context", "a"), "--context is for models that read texts"),
        (("--pair-column", "b"), "--pair-column is for models that read texts"),
        (("--column", "a"), "--column, --pair-column and --keep are for tables"),
        (("--keep", "id"), "--column, --pair-column and --keep are for tables"),
        (("--part-size", 5), "--part-size is for parts: --out FOLDER/"),
        (("--json", "--out", "a.csv"), "--json prints the answers, --out writes them"),
    ],
)
def test_options_without_effect_are_refused(
    images: Path, photos: Path, command: Command, options: tuple[Any, ...], reason: str
) -> None:
    code, _, err = command("predict", images, photos / "0.png", *options, "--device", "cpu")
    assert code == 2 and reason in err


def test_fast_is_not_for_texts(tmp_path: Path, command: Command) -> None:
    texts = text_folder(tmp_path / "texts", "classes")
    code, _, err = command("predict", texts, "a wonderful film", "--fast", "--device", "cpu")
    assert code == 2 and "--fast is for image models" in err
