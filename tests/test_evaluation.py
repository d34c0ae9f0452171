"""Evaluation on other data: figures computed by hand from predictions, matched classes, splits, and what is refused."""

from __future__ import annotations

import csv
import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp.accuracy import wilson_interval
from allmlp.cli import main
from allmlp.cli.eval import print_classes
from allmlp.cli.plan import print_scaling
from allmlp.data.class_names import imagenet_classes, match_classes, model_class_names, read_class_table
from allmlp.data.corpus import Corpus
from allmlp.data.detect import detect_data
from allmlp.data.digits import Digits
from allmlp.data.docstrings import Docstrings
from allmlp.data.image_table import ImageTable
from allmlp.data.labeled_text import LabeledText
from allmlp.data.parallel_corpus import ParallelCorpus
from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing, read_preprocessing, write_preprocessing
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.evaluation import ClassResult, Evaluation, classifier_outputs, evaluate_model
from allmlp.labeled_inputs import fit, image_inputs
from allmlp.models.gmlp import gmlp_text
from allmlp.models.seq2seq import resmlp_seq2seq
from allmlp.optim import AdamW
from allmlp.plan.scaling import Point, fit_points
from allmlp.prediction import ImagePredictor, open_predictor
from allmlp.resolve import resolve
from allmlp.run import Budget, Run
from allmlp.spec import from_json, to_dict
from allmlp.tasks.causal_lm import CausalLM
from allmlp.tasks.classify import Classify
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.translate import Translation
from allmlp.training import evaluate_checkpoint, train
from command import run as run_command
from data.sample_images import encode, scene
from folders import CLASSES, image_folder, text_folder
from train.runs import small

METRICS = {
    "plain": lambda logits, labels: (logits.argmax(1) == labels).double().mean(),
    "negative_log": torch.nn.functional.cross_entropy,
    "examples": lambda logits, labels: len(labels),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("model"))


def photos(folder: Path, names: tuple[str, ...], each: int = 4, first: int = 0) -> Path:
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for seed in range(each):
            (folder / name / f"{seed}.png").write_bytes(encode(scene(30, 20, first + 10 * number + seed)))
    return folder


def by_hand(model: Path, files: list[Path], labels: list[str]) -> dict[str, float]:
    """Accuracy and loss from the predictions of every file."""
    rows = allmlp.predict(model, files, top_k=len(CLASSES), device="cpu")
    chances = [{one.label: one.probability or 0.0 for one in row} for row in rows]
    correct = [row[0].label == label for row, label in zip(rows, labels, strict=True)]
    losses = [-math.log(chance[label]) for chance, label in zip(chances, labels, strict=True)]
    return {"accuracy": sum(correct) / len(correct), "loss": sum(losses) / len(losses)}


def test_figures_are_those_of_the_predictions(model: Path, tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", ("DOG", "Sh_ip"))
    files = sorted(folder.rglob("*.png"))
    labels = ["dog" if file.parent.name == "DOG" else "ship" for file in files]
    found = evaluate_model(str(model), str(folder), device="cpu", batch_size=3)
    assert {name: found.metrics[name] for name in ("accuracy", "loss")} == pytest.approx(by_hand(model, files, labels))
    assert (found.examples, found.data) == (8, str(folder)) and "top5_accuracy" not in found.metrics
    correct = sum(row.correct for row in found.class_results)
    interval = (found.metrics["accuracy_low"], found.metrics["accuracy_high"])
    assert interval == wilson_interval(correct, 8) and found.metrics["majority"] == 0.5
    assert [(row.name, row.examples) for row in found.class_results] == [("dog", 4), ("ship", 4)]
    assert sum(row.count for row in found.confusions) == 8 - correct
    predicted = [row[0].label for row in allmlp.predict(model, files, device="cpu")]
    for row in found.confusions:
        pairs = [pair for pair in zip(labels, predicted, strict=True) if pair == (row.name, row.predicted)]
        assert len(pairs) == row.count and row.name != row.predicted and row.examples == 4


def test_the_test_folder_is_evaluated_where_there_is_one(model: Path, tmp_path: Path) -> None:
    photos(tmp_path / "train", CLASSES, each=2)
    photos(tmp_path / "val", CLASSES, each=1, first=50)
    files = sorted(photos(tmp_path / "test", ("cat", "dog"), each=3, first=100).rglob("*.png"))
    found = evaluate_model(str(model), str(tmp_path), device="cpu")
    assert found.data == f"the test folder of {tmp_path}" and found.examples == 6
    assert found.metrics["loss"] == pytest.approx(by_hand(model, files, [file.parent.name for file in files])["loss"])


def test_one_class_is_enough(model: Path, tmp_path: Path) -> None:
    folder = photos(photos(tmp_path / "photos", ("cat", "unlabeled")), ("notes",), each=0)  # as training ignores them
    found = evaluate_model(str(model), str(folder), device="cpu")
    assert found.examples == 4 and found.metrics["majority"] == 1.0


def test_tables_of_images(model: Path, tmp_path: Path) -> None:
    photos(tmp_path / "files", ("a", "b"))
    rows = [
        {"image": f"files/{name}/{n}.png", "label": label, "split": "train" if n else "test"}
        for name, label in (("a", "cat"), ("b", "ship"))
        for n in range(4)
    ]
    with open(tmp_path / "images.csv", "w", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, ["image", "label", "split"])
        writer.writeheader()
        writer.writerows(rows)
    found = evaluate_model(str(model), str(tmp_path / "images.csv"), device="cpu")
    assert found.data == f"the test split of {tmp_path / 'images.csv'}" and found.examples == 2
    only = tmp_path / "dev.csv"
    only.write_text((tmp_path / "images.csv").read_text().replace("test", "dev"))
    assert evaluate_model(str(model), str(only), device="cpu").examples == 2, "validation rows are for testing"
    files = [tmp_path / "files" / name / "0.png" for name in "ab"]
    assert found.metrics["loss"] == pytest.approx(by_hand(model, files, ["cat", "ship"])["loss"])


def test_unreadable_images_are_named_and_do_not_count(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = photos(tmp_path / "photos", ("cat", "dog"), each=10)
    good = evaluate_model(str(model), str(folder), device="cpu")
    (folder / "cat" / "4a.png").write_bytes(b"no image")
    with caplog.at_level("WARNING"):
        found = evaluate_model(str(model), str(folder), device="cpu", batch_size=4)
    assert found.metrics == pytest.approx(good.metrics) and found.examples == 20
    assert len(found.skipped) == 1 and "4a.png: not an image" in found.skipped[0]
    assert not caplog.records, "the same line twice"


def test_images_found_corrupt_meanwhile(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads read ahead while those of a batch are listed."""
    predictor = open_predictor(str(model), device="cpu")
    assert isinstance(predictor, ImagePredictor)
    place = str(photos(tmp_path / "photos", ("cat", "dog")))
    inputs = image_inputs(detect_data(place), place, predictor)
    split: Any = inspect.getclosurevars(inputs.corrupt).nonlocals["split"]
    split.corrupt[0] = "damaged"

    def name(index: int) -> str:
        split.corrupt.setdefault(index + 1, "damaged too")
        return f"photo {index}"

    monkeypatch.setattr(split, "name", name)
    assert inputs.corrupt() == {0: "photo 0: damaged"} and len(split.corrupt) == 2


def test_classes_the_model_does_not_have(model: Path, tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", ("cat", "shipp", "zebra"))
    with pytest.raises(
        allmlp.UserError, match=r"no class 'shipp', 'zebra'; did you mean 'ship'\?: leave it out, or map"
    ):
        evaluate_model(str(model), str(folder), device="cpu")
    table = tmp_path / "classes.csv"
    table.write_text("data,model\nshipp,ship\nzebra,\n", encoding="utf8")
    found = evaluate_model(str(model), str(folder), classes=str(table), device="cpu")
    assert (found.examples, found.left_out) == (8, 4)
    files = [*sorted((folder / "cat").iterdir()), *sorted((folder / "shipp").iterdir())]
    assert found.metrics["loss"] == pytest.approx(by_hand(model, files, ["cat"] * 4 + ["ship"] * 4)["loss"])


def test_several_classes_of_the_model_may_be_one_of_the_data(model: Path, tmp_path: Path) -> None:
    folder, table = photos(tmp_path / "photos", ("animal", "ship")), tmp_path / "classes.csv"
    table.write_text("data,model\nanimal,cat\nanimal,dog\n", encoding="utf8")
    found = evaluate_model(str(model), str(folder), classes=str(table), device="cpu")
    files = sorted((folder / "animal").iterdir())
    rows = allmlp.predict(model, [*files, *sorted((folder / "ship").iterdir())], device="cpu")
    ships = [next(one.probability or 0.0 for one in row if one.label == "ship") for row in rows]
    losses = [-math.log(1 - p) for p in ships[:4]] + [-math.log(p) for p in ships[4:]]
    assert found.metrics["loss"] == pytest.approx(sum(losses) / 8, rel=1e-4)
    assert [row.name for row in found.class_results] == ["animal", "ship"]
    assert found.metrics["accuracy"] == sum([p < 0.5 for p in ships[:4]] + [p > 0.5 for p in ships[4:]]) / 8


def test_data_in_memory_by_name(tmp_path: Path) -> None:
    """A model without class names, on digits of another size: numbers stand for its outputs."""
    pytest.importorskip("sklearn")
    image_folder(tmp_path, channels=1)
    allmlp.save(allmlp.load(tmp_path, num_classes=10), tmp_path)
    write_preprocessing(tmp_path, ImagePreprocessing((0.4,), (0.2,), crop_pct=0.9))
    found = evaluate_model(str(tmp_path), "digits", device="cpu")
    test = Digits().load().test
    images, labels = test.fetch(torch.arange(len(test)))
    pixels = fit(images, (8, 12), 0.9, 1).float() / 255
    with torch.inference_mode():
        logits = allmlp.load(tmp_path)((pixels - 0.4) / 0.2)
    assert found.metrics["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert found.metrics["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    best = logits.topk(5).indices
    assert found.metrics["top5_accuracy"] == pytest.approx(float((best == labels[:, None]).any(1).double().mean()))
    assert found.data == "the test split of digits" and found.examples == len(test)


def test_of_equally_probable_classes_the_first_count() -> None:
    """An untrained classifier, which gives all classes the same probability, does not have all of them in its top 5."""
    labels, equal = torch.arange(12), torch.full((12, 12), 1 / 12)
    match = match_classes(tuple(map(str, range(12))), tuple(map(str, range(12))))
    (_, predicted, _, _, in_top5), _ = classifier_outputs(equal, labels, match)
    assert predicted.tolist() == [0] * 12 and in_top5.tolist() == [True] * 5 + [False] * 7


def test_images_in_memory_are_resized_and_cropped() -> None:
    images = torch.arange(2 * 3 * 6 * 4, dtype=torch.uint8).view(2, 3, 6, 4)
    assert torch.equal(fit(images, (6, 4), 0.5, 3), images)
    assert fit(images, (8, 8), 0.8, 3).shape == (2, 3, 8, 8)
    uniform = torch.full((1, 1, 5, 9), 77, dtype=torch.uint8)
    assert torch.equal(fit(uniform, (4, 4), 0.7, 3), torch.full((1, 3, 4, 4), 77, dtype=torch.uint8))
    assert torch.equal(fit(uniform.expand(-1, 3, -1, -1), (4, 4), 1.0, 1), torch.full((1, 1, 4, 4), 77).byte())
    framed = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    framed[..., 2:6, 2:6] = 200
    assert torch.equal(fit(framed, (4, 4), 0.5, 1), framed[..., 2:6, 2:6])
    # The center is kept.
    wide = torch.zeros(1, 1, 4, 12, dtype=torch.uint8)
    wide[..., 4:8] = 200
    assert fit(wide, (2, 2), 1.0, 1).float().mean() > 180


def test_texts(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = text_folder(tmp_path / "model", "classes")
    table = tmp_path / "texts.csv"
    rows = '"the cat sat, on the mat",CAT\na dog jumped,dog\nthe red ship,ship\none two three,cat\n' * 3
    table.write_text(f"text,label\n{rows}", encoding="utf8")
    found = evaluate_model(str(folder), str(table), device="cpu", batch_size=5)
    texts = ["the cat sat, on the mat", "a dog jumped", "the red ship", "one two three"] * 3
    labels = ["cat", "dog", "ship", "cat"] * 3
    predicted = [row[0].label for row in allmlp.predict(folder, texts, device="cpu")]
    assert found.metrics["accuracy"] == sum(map(str.__eq__, predicted, labels)) / 12
    assert found.examples == 12 and found.data == str(table) and not found.notes
    table.write_text(f"text,mood\n{rows}nothing said,\n", encoding="utf8")
    guessed = evaluate_model(str(folder), str(table), device="cpu")
    assert guessed.metrics["accuracy"] == found.metrics["accuracy"]
    assert "label_column=mood" in guessed.notes[0]
    assert guessed.notes[1] == "skipped 1 row without a label"
    lines = [f"{line},{'dev' if n % 4 < 3 else 'train'}" for n, line in enumerate(rows.splitlines())]
    table.write_text("\n".join(["text,label,split", *lines]), encoding="utf8")
    assert evaluate_model(str(folder), str(table), device="cpu").examples == 9, "validation rows are for testing"


@pytest.mark.parametrize("task", ["text", "causal"])
def test_language_models(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is tokenized once, for testing alone; also of a run on data without files."""
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))
    folder, texts = text_folder(tmp_path / "model", task), tmp_path / "texts"
    texts.mkdir()
    (texts / "text.txt").write_text("the cat sat on the red mat\n\none two three four five\n" * 20, encoding="utf8")
    (texts / "README").write_text("about", encoding="utf8")
    found = evaluate_model(str(folder), str(texts), device="cpu")
    assert 0 < found.metrics["loss"] < 20 and found.examples > 0 and not found.class_results
    assert "README" in found.notes[0]
    assert [file.stat().st_size for file in (tmp_path / "cache").rglob("train.tokens")] == [0]
    run = Run(None, CausalLM() if task == "causal" else MaskedLM(), Docstrings(), precision="float32")
    (folder / "run.json").write_text(json.dumps({"run": to_dict(run)}), encoding="utf8")
    assert evaluate_model(str(folder), str(texts), device="cpu").metrics == pytest.approx(found.metrics)


def test_questions_whose_answers_are_not_in_the_context(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They cannot be trained on, but count in an evaluation; windows are those of a short model."""
    pytest.importorskip("tokenizers")
    answers = [{"text": "purple", "answer_start": 0}]
    questions = [
        {"question": "what sat on the mat", "answers": answers},
        {"question": "who jumped", "answers": answers},
    ]
    paragraph = {"context": "the cat sat on the red mat", "qas": questions}
    file = tmp_path / "dev.json"
    file.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}), encoding="utf8")
    found = evaluate_model(str(text_folder(tmp_path / "model", "span")), str(file), device="cpu")
    assert found.examples == 2 and found.metrics["f1"] == 0 and not caplog.records


def test_translation_of_another_file_where_those_of_the_training_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of pairs that are too long for training."""
    pytest.importorskip("sacrebleu")
    rows = ["de\ten", *(f"eins zwei {number}\tone two {number}" for number in range(8))]
    train_file, val, test, other = (tmp_path / f"{name}.tsv" for name in ("train", "val", "test", "other"))
    for file in (train_file, val, test, other):
        file.write_text("\n".join(rows), encoding="utf8")
    words = TokenizerConfig("bpe", 300, lowercase=False)
    data = ParallelCorpus(str(train_file), str(test), val=str(val), tokenizer=words, seq_len=12, cache=str(tmp_path))
    train(
        Run(resmlp_seq2seq(1, 16, 2), Translation(num_beams=1), data, budget=Budget(steps=1)), tmp_path / "run", "cpu"
    )
    for file in (train_file, val, test):
        file.unlink()
    found = evaluate_model(str(tmp_path / "run"), str(other), device="cpu")
    assert found.examples == 8 and found.metrics["loss"] > 0
    caplog.clear()
    other.write_text("de\ten\n" + "eins zwei " * 9 + "\tone two\n", encoding="utf8")
    longer = evaluate_model(str(tmp_path / "run"), f"{other},{other}", device="cpu")
    assert longer.examples == 2 and "other_bleu" in longer.metrics and not caplog.records


def test_a_translation_model_without_its_run_reads_the_language_of_its_training(tmp_path: Path) -> None:
    """It read German, whatever it was trained on, and the figures were those of the wrong direction."""
    pytest.importorskip("sacrebleu")
    table = tmp_path / "pairs.csv"
    table.write_text("\n".join(["de,en", *(f"eins zwei {number},one two {number}" for number in range(8))]))
    words = TokenizerConfig("bpe", 300, lowercase=False)
    data = ParallelCorpus(str(table), str(table), "en", "de", tokenizer=words, seq_len=12, cache=str(tmp_path))
    run = Run(resmlp_seq2seq(1, 16, 2), Translation(num_beams=1), data, budget=Budget(steps=1))
    train(run, tmp_path / "run", "cpu")
    wanted = evaluate_model(str(tmp_path / "run"), str(table), device="cpu").metrics["loss"]
    (tmp_path / "run" / "run.json").unlink()
    found = evaluate_model(str(tmp_path / "run"), str(table), device="cpu").metrics["loss"]
    assert found == pytest.approx(wanted, rel=1e-5)


def test_columns_of_other_data_are_named_by_their_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing named them, and messages said to set a field that eval had no option for."""
    pytest.importorskip("sacrebleu")
    rows = [f"eins zwei {number},one two {number}" for number in range(8)]
    table, other = tmp_path / "train.csv", tmp_path / "other.csv"
    table.write_text("\n".join(["de,en", *rows]), encoding="utf8")
    other.write_text("\n".join(["german,english", *rows]), encoding="utf8")
    words = TokenizerConfig("bpe", 300, lowercase=False)
    data = ParallelCorpus(str(table), str(table), tokenizer=words, seq_len=12, cache=str(tmp_path))
    model, run = resmlp_seq2seq(1, 16, 2), str(tmp_path / "run")
    train(Run(model, Translation(num_beams=1), data, budget=Budget(steps=1)), tmp_path / "run", "cpu")
    message = r"other\.csv has no column 'de' \(set data\.source_lang to another\), only german, english"
    with pytest.raises(allmlp.UserError, match=message):
        evaluate_model(run, str(other), device="cpu")
    named = {"data.source_lang": "german", "data.target_lang": "english"}
    assert allmlp.evaluate(run, other, overrides=named, device="cpu") == evaluate_model(run, str(table)).metrics
    for settings, place, expected in (
        (
            ("--set", "optim.lr=1"),
            other,
            "an evaluation changes fields of its data, such as data.label_column, not optim",
        ),
        (("--set", "data.sorce_lang=x"), other, "did you mean 'source_lang'"),
        (("--set", "data.source_lang=german"), None, "name other data after the model"),
    ):
        code, _, err = run_command(capsys, "eval", run, *([place] if place else []), *settings)
        assert (code, err.count("\n")) == (2, 1) and expected in err, err


def test_texts_are_those_of_the_columns_in_training(tmp_path: Path) -> None:
    """They were guessed anew: the longest texts, and not those that the run and `predict` read."""
    pytest.importorskip("tokenizers")
    folder, table = text_folder(tmp_path / "model", "classes"), tmp_path / "texts.csv"
    rows = [("the cat", "dog"), ("a dog", "ship"), ("a ship", "cat")] * 3
    lines = [f"{text},one two three four five six seven {text},{label}" for text, label in rows]
    table.write_text("\n".join(["title,body,label", *lines]), encoding="utf8")
    write_preprocessing(folder, TextPreprocessing("classes", 24, CLASSES, text_columns=("title",)))
    plain = tmp_path / "plain.csv"
    plain.write_text("\n".join(["text,label", *(",".join(row) for row in rows)]), encoding="utf8")
    found, expected = (evaluate_model(str(folder), str(place), device="cpu") for place in (table, plain))
    assert found.metrics == expected.metrics and not found.notes
    other = evaluate_model(str(folder), str(table), device="cpu", overrides={"data.text_column": "body"})
    assert other.metrics["loss"] != found.metrics["loss"]
    write_preprocessing(folder, TextPreprocessing("classes", 24, CLASSES, text_columns=("title", "body")))
    pairs = evaluate_model(str(folder), str(table), device="cpu")
    assert pairs.metrics["loss"] not in (found.metrics["loss"], other.metrics["loss"])


def test_labels_are_those_of_the_column_in_training(tmp_path: Path) -> None:
    """The column was guessed anew, and --set had to name it again."""
    pytest.importorskip("tokenizers")
    folder, table = text_folder(tmp_path / "model", "classes"), tmp_path / "texts.csv"
    rows = [f"the {word} sat,{word},{CLASSES[number % 3]}" for number, word in enumerate(("cat", "dog", "mat") * 4)]
    table.write_text("\n".join(["body,word,animal", *rows]), encoding="utf8")
    known = TextPreprocessing("classes", 24, CLASSES, text_columns=("body",))
    write_preprocessing(folder, known)
    with pytest.raises(allmlp.UserError, match="could be the label"):
        evaluate_model(str(folder), str(table), device="cpu")
    write_preprocessing(folder, known.replace(label_column="animal"))
    assert evaluate_model(str(folder), str(table), device="cpu").examples == 12


def test_image_tables_are_read_by_the_columns_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """predict read the images of another column, and eval asked for the label."""
    photos(tmp_path / "shown", CLASSES)
    photos(tmp_path / "wanted", CLASSES, first=50)
    rows = [
        f"shown/{name}/{n}.png,wanted/{name}/{n}.png,{name},{('day', 'night')[n % 2]}"
        for name in CLASSES
        for n in range(4)
    ]
    table, folder = tmp_path / "t.csv", image_folder(tmp_path / "model")
    table.write_text("\n".join(["before,after,animal,time", *rows]), encoding="utf8")
    files = [str(tmp_path / "wanted" / name / f"{n}.png") for name in CLASSES for n in range(4)]
    data = ImageTable(str(table), img_size=(8, 8), image_column="after", label_column="animal")
    known = from_json(data.load().files()["preprocessing.json"])
    assert (known.image_column, known.label_column) == ("after", "animal")
    old = read_preprocessing(folder)
    with pytest.raises(allmlp.UserError, match="could be the label"):
        evaluate_model(str(folder), str(table), device="cpu")
    write_preprocessing(folder, old.replace(image_column="after", label_column="animal"))
    found = evaluate_model(str(folder), str(table), device="cpu")
    labels = [name for name in CLASSES for _ in range(4)]
    assert found.metrics["loss"] == pytest.approx(by_hand(folder, [Path(file) for file in files], labels)["loss"])
    assert not found.notes
    assert allmlp.predict(folder, table, device="cpu") == allmlp.predict(folder, files, device="cpu")
    code, out, _ = run_command(capsys, "predict", folder, table, "--device", "cpu", "--out", tmp_path / "out.csv")
    assert code == 0 and "after" not in out and files[0] in (tmp_path / "out.csv").read_text(encoding="utf8")
    table.write_text("\n".join(["before,later,label", *(row.rsplit(",", 1)[0] for row in rows)]), encoding="utf8")
    other = evaluate_model(str(folder), str(table), device="cpu")
    assert other.metrics["loss"] != found.metrics["loss"] and "image_column=before" in other.notes[0], "not those"


def test_texts_as_short_as_labels(tmp_path: Path) -> None:
    """The table was no table of texts for eval, as these are detected by their length, and predict read it."""
    pytest.importorskip("tokenizers")
    folder, table = text_folder(tmp_path / "model", "classes"), tmp_path / "texts.csv"
    rows = [f"{word}{number},{label}" for number in range(12) for word, label in zip(("red", "mat", "sat"), CLASSES)]
    table.write_text("\n".join(["title,label", *rows]), encoding="utf8")
    write_preprocessing(folder, TextPreprocessing("classes", 24, CLASSES, text_columns=("title",)))
    assert evaluate_model(str(folder), str(table), device="cpu").examples == 36
    write_preprocessing(folder, TextPreprocessing("classes", 24, CLASSES))
    with pytest.raises(allmlp.UserError, match="there is no file or folder"):
        evaluate_model(str(folder), str(tmp_path / "no.csv"), device="cpu")
    (found,) = resolve(str(table), overrides={"data.text_column": "title"}, device="cpu").values()
    assert isinstance(found.run.data, LabeledText) and found.run.data.text_column == "title"


def test_a_label_column_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    folder, table = text_folder(tmp_path / "model", "classes"), tmp_path / "texts.csv"
    table.write_text("text,label,mood\n" + "the cat,dog,cat\na dog,ship,dog\na ship,cat,ship\n" * 3, encoding="utf8")
    found = [
        evaluate_model(str(folder), str(table), device="cpu", overrides=changes)
        for changes in ({}, {"data.label_column": "mood"})
    ]
    assert found[0].metrics["loss"] != found[1].metrics["loss"]
    code, out, err = run_command(capsys, "eval", folder, table, "--set", "data.label_column=mood", "--device", "cpu")
    assert code == 0 and f"{found[1].metrics['loss']:.4g}" in out
    assert err == f"next: allmlp eval {folder} {table} --set data.label_column=mood --per-class\n"


@pytest.mark.parametrize("task", ["text", "translation"])
def test_other_data_are_read_by_the_tokenizer_of_the_model(tmp_path: Path, task: str) -> None:
    """Not by the one that the run began with, which may be another one meanwhile."""
    pytest.importorskip("sacrebleu")
    words = ["one", "two", "three", "four", "five", "six"]
    table, tokens = tmp_path / "pairs.tsv", tmp_path / "tokenizer.json"
    table.write_text("\n".join(["de\ten", *(f"{a} {b}\t{b} {a}" for a in words for b in words)]), encoding="utf8")
    config = TokenizerConfig("bpe", 300, lowercase=False)
    tokens.write_text(config.build(words).to_json(), encoding="utf8")
    options: dict[str, Any] = {"tokenizer": config.replace(path=str(tokens)), "seq_len": 8, "cache": str(tmp_path)}
    run = Run(gmlp_text(1, 8, 8), MaskedLM(), Corpus(str(table), str(table), **options), budget=Budget(steps=1))
    if task == "translation":
        corpus = ParallelCorpus(str(table), str(table), **options)
        run = run.replace(model=resmlp_seq2seq(1, 16, 2), task=Translation(num_beams=1), data=corpus)
    train(run, tmp_path / "run", "cpu")
    before = evaluate_model(str(tmp_path / "run"), str(table), device="cpu").metrics
    tokens.write_text(config.build([word[::-1] for word in words]).to_json(), encoding="utf8")
    assert evaluate_model(str(tmp_path / "run"), str(table), device="cpu").metrics == before
    tokens.unlink()
    assert evaluate_model(str(tmp_path / "run"), str(table), device="cpu").metrics == before


def test_runs_are_evaluated_on_their_own_data(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    steps = {"budget.steps": 2}
    trained = allmlp.train("digits_mixer", tmp_path / "run", device="cpu", overrides=steps, metrics=METRICS)
    found = evaluate_model(str(tmp_path / "run"), device="cpu", metrics=METRICS)
    assert [found.metrics[name] for name in METRICS] == pytest.approx([trained[name] for name in METRICS])
    again = evaluate_checkpoint(tmp_path / "run", "cpu")
    assert {name: found.metrics[name] for name in again} == pytest.approx(again)
    assert found.metrics["accuracy"] == pytest.approx(trained["accuracy"])
    assert sum(row.examples for row in found.class_results) == found.examples == 297
    # The same data by name, read as any other.
    other = evaluate_model(str(tmp_path / "run"), "digits", device="cpu", metrics=METRICS)
    for name in ("accuracy", "loss", "top5_accuracy", *METRICS):
        assert other.metrics[name] == pytest.approx(found.metrics[name], rel=1e-4)


def test_data_that_changed_after_the_training_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another split at random has training images in its test."""

    def pixels(seed: int) -> list[tuple[torch.Tensor, int]]:
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randn(3, 32, 32, generator=generator), number % 2) for number in range(40)]

    steps, data = {"budget.steps": 1}, pixels(0)
    allmlp.train(allmlp.Data.of(data), tmp_path, model="mixer_nano", device="cpu", overrides=steps)
    allmlp.evaluate(tmp_path, device="cpu")
    assert "have changed" not in caplog.text
    allmlp.Data.of(pixels(1))  # of the same sizes
    allmlp.evaluate(tmp_path, device="cpu")
    assert "the data have changed since the run began" in caplog.text and "training may be among" in caplog.text


def test_baselines_have_the_training_examples_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on few examples is not compared with a baseline, or neighbors, of all."""
    monkeypatch.setattr(Classify, "floors", lambda task, dataset, split: {"examples": len(dataset.train)})
    result = train(small(budget=Budget(steps=1), train_per_class=3, val_size=8), tmp_path, "cpu")
    found = evaluate_model(str(tmp_path), device="cpu"), evaluate_model(str(tmp_path), knn=1, device="cpu")
    assert result["examples"] == evaluate_checkpoint(tmp_path, "cpu")["examples"] == 12
    assert [one.metrics["examples"] for one in found] == [12, 12]


def test_metrics_of_merged_classes(model: Path, tmp_path: Path) -> None:
    """They are told about those that count: not of classes that are left out, nor of images that cannot be read."""
    folder, table = photos(tmp_path / "photos", ("animal", "ship", "zebra")), tmp_path / "classes.csv"
    table.write_text("data,model\nanimal,cat\nanimal,dog\nzebra,\n", encoding="utf8")
    (folder / "ship" / "1.png").write_bytes(b"no image")
    found = allmlp.evaluate(model, folder, classes=table, device="cpu", batch_size=3, metrics=METRICS)
    assert found["negative_log"] == pytest.approx(found["loss"], rel=1e-5) and found["examples"] == 7
    with pytest.raises(allmlp.UserError, match="majority is part of every evaluation"):
        allmlp.evaluate(model, folder, metrics={"majority": METRICS["examples"]})


def test_metrics_of_files_and_modules(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    photos(tmp_path / "photos", CLASSES)
    Path("figures.py").write_text(
        "def half(logits, labels):\n    return len(labels) / 2 / logits.shape[1] * 3\nsize = 3\n"
    )
    Path("wrong.py").write_text("import nothing_of_that_name\n")

    def run(*metrics: str) -> tuple[Any, str, str]:
        options = [word for metric in metrics for word in ("--metric", metric)]
        with pytest.raises(SystemExit) as caught:
            main(["eval", str(model), "photos", "--device", "cpu", "--json", *options])
        return caught.value.code, *capsys.readouterr()

    for metric in ("figures.py:half", "figures:half"):
        code, out, _ = run(metric)
        assert code == 0 and json.loads(out)["half"] == 6.0
    for metrics, words in (
        (["figures.py"], "'figures.py' does not name a function: write MODULE:NAME or FILE.py:NAME"),
        (["figures.py:hlf"], "unknown name in figures.py, 'hlf'; did you mean 'half'?"),
        (["figures.py:size"], "the metric 'size' is int, not a function of logits and labels"),
        (["figures.py:half", "figures:half"], "two metrics are called half"),
        (["wrong.py:f1"], "cannot import wrong.py: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        (["nowhere:f1"], "cannot import 'nowhere': ModuleNotFoundError"),
    ):
        code, _, err = run(*metrics)
        assert code == 2 and words in err and err.count("\n") == 1, err


def test_foreign_tokenizers_are_noticed(tmp_path: Path) -> None:
    """Neither another one in the folder of the run, nor one that has changed where the data has it from."""
    pytest.importorskip("tokenizers")
    table, words = tmp_path / "texts.csv", ["one", "two", "three", "four", "five", "six"]
    rows = [f"{a} {b} {c},{a}" for a in words[:2] for b in words for c in words]
    table.write_text("\n".join(["text,label", *rows]), encoding="utf8")
    tokens = tmp_path / "tokenizer.json"
    tokens.write_text(TokenizerConfig(vocab_size=60).build(words).to_json(), encoding="utf8")
    data = LabeledText(str(table), tokenizer=TokenizerConfig(path=str(tokens)), seq_len=8)
    run = Run(gmlp_text(1, 8, 8), ClassifyText(), data, batch_size=8, budget=Budget(steps=1), optim=AdamW(lr=1e-3))
    train(run, tmp_path / "run", "cpu")
    assert evaluate_model(str(tmp_path / "run"), device="cpu").examples > 0
    other = TokenizerConfig(vocab_size=60).build([word[::-1] for word in words]).to_json()
    tokens.write_text(other, encoding="utf8")
    with pytest.raises(allmlp.UserError, match="is no longer the one in"):
        evaluate_model(str(tmp_path / "run"), device="cpu")
    (tmp_path / "run" / "tokenizer.json").write_text(TokenizerConfig(vocab_size=31).build(words).to_json())
    with pytest.raises(allmlp.UserError, match="they do not match"):
        evaluate_model(str(tmp_path / "run"), device="cpu")


def test_user_errors(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = photos(tmp_path / "photos", CLASSES, each=1)
    for arguments, words in (
        ([model], f"is a model without a run, so it has no data of its own: allmlp eval {model} DATA"),
        (["timm:resnet18"], "is a model without a run, so it has no data of its own"),
        ([model, folder, "--knn", "3"], "leave out the data"),
        ([model, tmp_path / "none"], "there is no file or folder"),
        ([model, folder, "--dtype", "int8"], "unknown dtype 'int8'"),
        ([tmp_path / "nothing", folder], "is not a folder"),
        ([model, "--classes", "x.csv"], "--classes is for other data"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["eval", *map(str, arguments), "--device", "cpu"])
        message = capsys.readouterr().err
        assert caught.value.code == 2 and words in message and message.count("\n") == 1, message


def test_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = photos(tmp_path / "photos", CLASSES)

    def run(*options: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["eval", str(model), str(folder), "--device", "cpu", *options])
        assert caught.value.code == 0
        return capsys.readouterr().out

    found: dict[str, Any] = json.loads(run("--json"))
    lines = run("--per-class").splitlines()
    assert lines[0] == f"{model} on {folder}: 12 examples"
    low, high = found["accuracy_low"], found["accuracy_high"]
    assert lines[1].split() == f"accuracy {found['accuracy']:.2%} (95% interval {low:.1%} to {high:.1%})".split()
    assert found["examples"] == 12 and len(found["class_results"]) == 3
    for row, line in zip(found["class_results"], lines[-3:], strict=True):
        assert line.split()[:3] == [row["name"], "4", f"{row['correct'] / 4:.1%}"]


# --- class names ------------------------------------------------------------------------------------------------------


def test_imagenet_names_and_identifiers() -> None:
    assert len(imagenet_classes()) == 1000
    names = model_class_names((), 1000)
    data = ["n01440764", "English springer", "cassette_player", "GOLF BALL", "n03126707"]
    assert match_classes(data, names).labels == [0, 217, 482, 574, 517]
    assert match_classes(["n01440764"], ("goldfish", "tench")).labels == [1]
    assert match_classes(["tench"], ("n01443537", "n01440764")).labels == [1]
    with pytest.raises(allmlp.UserError, match="class 'crane' may be any of n02012849, n03126707"):
        match_classes(["crane"], names)


def test_numbers_are_outputs_only_where_all_classes_are_numbers() -> None:
    assert match_classes(["0", "1"], ("cat", "dog")).labels == [0, 1]
    with pytest.raises(allmlp.UserError, match="no class '0', '1'"):
        match_classes(["0", "1"], ("cat", "dog", "ship"))
    assert match_classes(["x", "y"], ("cat", "dog", "ship"), {"x": ["2"], "y": ["dog"]}).labels == [2, 1]


def test_class_tables(tmp_path: Path) -> None:
    table = tmp_path / "classes.tsv"
    table.write_text("data\tmodel\na\tcat\na\tdog\nb\t\n", encoding="utf8")
    assert read_class_table(str(table)) == {"a": ["cat", "dog"], "b": [""]}
    found = match_classes(["a", "b"], ("cat", "ship", "dog"), {"a": ["cat", "dog"], "b": [""]})
    assert (found.names, found.columns, found.labels) == (("a", "ship"), [0, 1, 0], [0, -1])
    with pytest.raises(allmlp.UserError, match="'dog' of the model stands for 'b' and for another class"):
        match_classes(["a", "b"], ("cat", "dog"), {"a": ["cat", "dog"], "b": ["dog"]})


def test_a_table_of_classes_without_names_of_its_columns(model: Path, tmp_path: Path) -> None:
    """Its first line was lost, and the class evaluated by its own name."""
    data, table = photos(tmp_path / "photos", ("cat", "dog")), tmp_path / "classes.csv"
    table.write_text("cat,ship\ndog,dog\n")
    with pytest.raises(allmlp.UserError, match=r"classes\.csv begins with the class 'cat': name the columns"):
        evaluate_model(str(model), str(data), classes=str(table), device="cpu")
    table.write_text("data,model\ncat,ship\ndog,dog\n")
    found = evaluate_model(str(model), str(data), classes=str(table), device="cpu")
    assert [row.name for row in found.class_results] == ["dog", "ship"]


def test_classes_that_differ_by_case_or_sign_alone_are_different() -> None:
    for names in (["-1", "0", "1"], ["A", "B", "a", "b"], ["C", "C-"]):
        assert match_classes(names, names).labels == list(range(len(names)))
    assert match_classes(["bad", "good"], ["-1", "1"], {"bad": ["-1"], "good": ["1"]}).labels == [0, 1]
    assert match_classes(["-1", "1"], ["bad", "good"], {"-1": ["bad"], "1": ["good"]}).labels == [0, 1]
    assert match_classes(["A", "a"], ["A", "small"], {"a": ["small"]}).labels == [0, 1]
    assert match_classes(["Sea Lion"], ["dog", "sea_lion"]).labels == [1]
    with pytest.raises(allmlp.UserError, match="may be any of ab, AB"):
        match_classes(["a b"], ["ab", "AB"])
    with pytest.raises(allmlp.UserError, match="no class '-1'"):
        match_classes(["-1", "1"], ["1", "2"])


def test_names_in_tables_are_not_styles(capsys: pytest.CaptureFixture[str]) -> None:
    names = "cat [old]", "[red]", "[/x]"
    print_classes(Evaluation("m", "d", 3, {}, [ClassResult(name, 1, 1, 1) for name in names]))
    print_scaling(fit_points([Point(f"lr[big{n}]", 10.0**n, 10**n, 10.0**n, 1 + 2.0**-n) for n in range(1, 6)]))
    out = capsys.readouterr().out
    assert all(name in out for name in (*names, "lr[big5]"))
