"""The run that is chosen for data: by kind, number and balance of the examples, device, and what is asked for."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp.auto import Choice, TrainOptions, choose_run, show_budget
from allmlp.auto_start import probe_accuracy
from allmlp.cli import main
from allmlp.data.augment import Translate
from allmlp.data.corpus import Corpus
from allmlp.data.dataset import Data, ImageDataset, InMemory
from allmlp.data.detect import detect_data
from allmlp.data.digits import Digits
from allmlp.data.parallel_corpus import ParallelCorpus
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.data.squad import Squad
from allmlp.head_init import HeadInit
from allmlp.models.encoder import Encoder
from allmlp.models.external import PretrainedExternal
from allmlp.models.resmlp import resmlp
from allmlp.optim import AdamW, Muon
from allmlp.record import read_record, read_run
from allmlp.resolve import resolve
from allmlp.run import Budget, Run
from allmlp.spec import from_json, to_json
from allmlp.tasks.causal_lm import CausalLM
from allmlp.tasks.classify import Classify
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.translate import Translation
from allmlp.weights.start import open_start

TINY = resmlp(2, 16, 0.1, patch_size=4, img_size=16)
MOODS = {"good": ("wonderful", "lovely", "great"), "bad": ("awful", "boring", "poor")}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def photos(folder: Path, counts: dict[str, int]) -> str:
    """Noise around a color per class."""
    pil = pytest.importorskip("PIL.Image")
    generator = torch.Generator().manual_seed(0)
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        base = torch.randint(40, 200, (3,), generator=torch.Generator().manual_seed(number))
        for index in range(count):
            pixels = (base + torch.randint(-40, 40, (20, 18, 3), generator=generator)).clamp(0, 255).byte()
            pil.fromarray(pixels.numpy()).save(folder / name / f"{name}{index * 7919}.png")
    return str(folder)


def reviews(file: Path, count: int = 60, pairs: bool = False) -> str:
    rows = []
    for index in range(count):
        mood = ("good", "bad")[index % 2]
        text = f"a {MOODS[mood][index % 3]} film, number {index}, and it was seen {'twice ' * (index % 5)}"
        rows.append([text, *([f"the film {index} was liked"] if pairs else []), mood])
    with open(file, "w", newline="", encoding="utf8") as target:
        header = ["premise", "hypothesis", "label"] if pairs else ["text", "label"]
        csv.writer(target).writerows([header, *rows])
    return str(file)


def trained(folder: Path, seed: int = 0, zero: bool = False) -> str:
    """A model folder as training leaves it; with `zero` its features are the same for every image."""
    model = allmlp.create(TINY, seed=seed)
    if zero:
        with torch.no_grad():
            model.stem.proj.weight.zero_()
    allmlp.save(model, folder)
    write_preprocessing(folder, ImagePreprocessing((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), crop_pct=0.9))
    return str(folder)


def choose(data: Data | str, **options: object) -> Choice:
    made = choose_run(detect_data(data) if isinstance(data, str) else data, device="cpu", **options)  # type: ignore[arg-type]
    assert from_json(to_json(made.run)) == made.run
    assert not isinstance(made.run.optim, Muon) and not made.run.compile  # on a CPU
    assert all(field and value and why for field, value, why in made.reasons)
    assert made.table().count("\n") == len(made.reasons) - 1
    return made


def fields(choice: Choice) -> dict[str, str]:
    return {reason.field: reason.value for reason in choice.reasons}


@pytest.mark.slow
def test_images_start_from_a_bundled_model(here: Path) -> None:
    run = choose(photos(here / "photos", {"cat": 12, "dog": 12, "emu": 14})).run
    assert run.init_from in ("allmlp:cifar10", "allmlp:image")
    assert run.head_init == HeadInit(max_examples=2000) and run.keep_best and run.patience
    start = allmlp.load(run.init_from)
    assert run.data.img_size == start.spec.input_size and run.data.decode.mean == start.preprocessing.mean  # type: ignore[attr-defined]
    assert isinstance(run.task, Classify) and run.task.class_balance == 0 and run.task.augment.transforms
    assert isinstance(run.optim, AdamW) and run.optim.layer_decay < 1 and run.budget.minutes == 3


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 42), ({"data.fraction": "0.5"}, 20), ({"train_fraction": 0.5}, 20), ({"data.per_class": "3"}, 6)],
)
def test_settings_are_chosen_for_the_selected_examples(changes: dict[str, Any], count: int, here: Path) -> None:
    data, model = photos(here / "photos", {"cat": 30, "dog": 30}), trained(here / "model")
    (found,) = resolve(data, TrainOptions(model), changes, device="cpu").values()
    assert len(found.run.select(found.run.data.load()).train) == count
    reasons = {reason.field: reason.why for reason in found.reasons}
    assert reasons["budget"].startswith(f"for {count} examples")
    with pytest.raises(allmlp.UserError, match="train_fraction must be a number between"):
        resolve(data, TrainOptions(model), {"data.fraction": "2"}, device="cpu")


def test_settings_are_chosen_for_the_start_that_is_set(here: Path) -> None:
    """Image size and normalization are those of this model, as with --model."""
    place, model = photos(here / "photos", {"cat": 30, "dog": 30}), trained(here / "model")
    (wanted,) = resolve(place, TrainOptions(model), {}, "cpu").values()
    (found,) = resolve(place, TrainOptions(), {"init_from": model}, "cpu").values()
    assert found == wanted and found.run.init_from == model and found.run.data.img_size == (16, 16)  # type: ignore[attr-defined]


def test_a_run_without_validation_examples_keeps_its_last_weights(here: Path) -> None:
    (run,) = (
        found.run
        for found in resolve(reviews(here / "a.csv"), TrainOptions(), {"data.val_fraction": "0"}, "cpu").values()
    )
    assert run.select(run.data.load()).validation is None and not run.keep_best and run.patience is None
    assert run.start_margin == 0


def test_a_given_batch_size_is_evaluated_every_epoch_too(here: Path) -> None:
    """Patience counts evaluations, and the best of them is kept."""
    place = photos(here / "photos", {"cat": 30, "dog": 30})
    (chosen,), (given,) = (
        resolve(place, TrainOptions(), fields, "cpu").values() for fields in ({}, {"batch_size": "4"})
    )
    assert len(given.run.select(given.run.data.load()).train) == 42
    assert (chosen.run.batch_size, chosen.run.eval_every) == (16, 5)
    assert (given.run.batch_size, given.run.eval_every, given.run.save_every) == (4, 11, 11)
    assert not any(reason.field == "batch_size" for reason in given.reasons)


def test_starts_are_compared_on_the_selected_examples(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(self: HeadInit, model: object, task: object, dataset: ImageDataset, **options: int) -> float:
        return float(len(dataset.train))

    monkeypatch.setattr(HeadInit, "cross_validate", count)
    run = Run(None, Classify(), detect_data(photos(here / "photos", {"cat": 30, "dog": 30})), train_per_class=3)
    start = open_start(trained(here / "model"))
    assert probe_accuracy(run, start, torch.device("cpu")) == 6


def test_what_is_asked_for_is_taken(here: Path) -> None:
    data, model = photos(here / "photos", {"cat": 12, "dog": 12}), trained(here / "model")
    run = choose(data, model=model, epochs=7, size=24).run
    assert run.init_from == model and run.budget == Budget(epochs=7) and run.data.img_size == (24, 24)  # type: ignore[attr-defined]
    assert run.model == TINY.configure(img_size=24) and run.data.decode.crop_pct == 0.9  # type: ignore[attr-defined]
    scratch = choose(data, model="mixer_nano", minutes=2)
    assert scratch.run.init_from is None and scratch.run.head_init is None and scratch.run.budget == Budget(minutes=2)
    assert fields(scratch)["model"] == "mixer_nano" and scratch.run.optim.lr > run.optim.lr
    with pytest.raises(allmlp.UserError, match="model does not read these data: it is a model for images"):
        choose(reviews(here / "reviews.csv"), model=model)
    with pytest.raises(
        allmlp.UserError, match="images with 3 channels; a model of `allmlp list` is trained from random"
    ):
        choose(Digits(), model=model)


def test_a_model_that_is_set_is_chosen(here: Path) -> None:
    """The settings were those of a trained model, whose weights did not fit the one that was set."""
    data = photos(here / "photos", {"cat": 12, "dog": 12})
    changes = {"model": "mixer_nano", "model.depth": "2", "optim.lr": "0.5"}
    named, found = (
        next(iter(resolve(data, *given, device="cpu").values())).run
        for given in ((TrainOptions("mixer_nano"), changes), (TrainOptions(), changes))
    )
    assert found.init_from is None and found.head_init is None and found.optim.lr == 0.5
    assert isinstance(found.model, Encoder) and found.model.depth == 2
    assert found.optim.weight_decay == named.optim.weight_decay and found.budget == named.budget


@pytest.mark.slow
def test_the_start_with_the_better_features_is_taken(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = photos(here / "photos", {"cat": 20, "dog": 20, "emu": 20})
    folders = {"allmlp:blind": trained(here / "blind", zero=True), "allmlp:seeing": trained(here / "seeing")}
    monkeypatch.setattr("allmlp.auto.bundled_models", lambda: {name: Path(path) for name, path in folders.items()})
    monkeypatch.setattr("allmlp.weights.start.model_path", lambda name: Path(folders.get(str(name), name)))
    for _ in range(2):
        made = choose(data)
        assert made.run.init_from == "allmlp:seeing"
        (why,) = (reason.why for reason in made.reasons if reason.field == "init_from")
        assert "best linear probe in cross-validation" in why and "others: allmlp:blind" in why
        folders = dict(reversed(folders.items()))  # not because it is the last one
    monkeypatch.setattr("allmlp.auto_start.SMALL_VALIDATION", 9)
    (why,) = (reason.why for reason in choose(data).reasons if reason.field == "init_from")
    assert "best linear probe on the validation split" in why and "allmlp:blind 33.3%" in why


def test_uneven_classes_are_balanced(here: Path) -> None:
    made = choose(photos(here / "photos", {"cat": 70, "dog": 5}), model=trained(here / "model"))
    assert isinstance(made.run.task, Classify) and made.run.task.class_balance == 0.5
    assert fields(made)["task.class_balance"] == "0.5"
    even = choose(photos(here / "even", {"cat": 30, "dog": 6}), model=trained(here / "model"))
    assert isinstance(even.run.task, Classify) and even.run.task.class_balance == 0


def test_one_epoch_and_several() -> None:
    assert [show_budget(Budget(epochs=epochs)) for epochs in (0.5, 1, 2)] == ["0.5 epochs", "1 epoch", "2 epochs"]


def test_images_that_no_bundled_model_reads() -> None:
    run = choose(Digits()).run
    assert isinstance(run.model, Encoder) and run.model.input_size == (8, 8) and run.init_from is None
    assert isinstance(run.task, Classify)
    assert "HorizontalFlip" not in str(run.task.augment)  # a mirrored digit is no digit
    assert not run.keep_best  # there is no validation split, and the test split must not choose


class Strips(Data):
    """Images of any size with two channels, which no trained model reads."""

    height: int = 8
    width: int = 8

    def load(self) -> ImageDataset:
        def split(count: int) -> InMemory:
            return InMemory(torch.zeros(count, 2, self.height, self.width, dtype=torch.uint8), torch.arange(count) % 2)

        return ImageDataset(split(40), split(8), ("a", "b"), (0.5, 0.5), (0.2, 0.2))


@pytest.mark.parametrize(
    ("size", "wanted", "patch"),
    [((28, 28), (28, 28), 2), ((37, 37), (38, 38), 2), ((62, 62), (63, 63), 7), ((48, 12), (48, 12), 2)],
)
def test_images_of_any_size_have_many_patches(size: tuple[int, int], wanted: tuple[int, int], patch: int) -> None:
    """Also where no patch of a good size divides them, and where they are not square."""
    run = choose_run(Strips(*size), device="cpu").run
    assert isinstance(run.model, Encoder) and run.model.input_size == wanted
    assert run.model.stem.patch_size == (patch, patch) and run.model.stem.tokens >= 16
    (shift,) = [one for one in run.task.augment.transforms if isinstance(one, Translate)]  # type: ignore[attr-defined]
    assert shift.pixels < min(size)


def test_own_splits_without_validation_get_one(here: Path) -> None:
    photos(here / "data" / "train", {"cat": 20, "dog": 20})
    photos(here / "data" / "test", {"cat": 4, "dog": 4})
    made = choose(str(here / "data"), model=trained(here / "model"))
    assert fields(made)["data.val_fraction"] == "0.15" and made.run.keep_best
    found = made.run.data.load()
    assert len(found.test) == 8 and found.validation is not None and len(found.validation) == 6


def test_texts_pairs_and_their_length(here: Path) -> None:
    run = choose(reviews(here / "reviews.csv")).run
    assert isinstance(run.task, ClassifyText) and run.task.tfidf and run.keep_best
    assert run.data.seq_len == 32  # type: ignore[attr-defined]
    assert choose(reviews(here / "reviews.csv"), size=48).run.data.seq_len == 48  # type: ignore[attr-defined]
    rows = [f"{'film ' * long}{number},{long}" for number in range(20) for long in (0, 999)]
    (here / "long.csv").write_text("\n".join(["text,label", *rows]))
    (why,) = (reason.why for reason in choose(str(here / "long.csv")).reasons if reason.field == "data.seq_len")
    assert why == "the maximum of the model; 50% of the texts reach it"
    pairs = choose(reviews(here / "pairs.csv", pairs=True)).run
    assert isinstance(pairs.task, ClassifyText) and pairs.data.load().train.examples.segments.any()  # type: ignore[attr-defined]


def test_plain_text_and_translation(here: Path) -> None:
    text = "\n\n".join(f"This is paragraph {i}, which tells of {MOODS['good'][i % 3]} things." for i in range(300))
    (here / "book.txt").write_text(text)
    data = Corpus(str(here / "book.txt"), seq_len=16, test_fraction=0.2)
    masked = choose(data).run
    assert isinstance(masked.task, MaskedLM) and isinstance(masked.model, Encoder)
    assert isinstance(choose(data, model="gmlp_causal_tiny").run.task, CausalLM)
    lines = [f"ein Haus {i}\ta house {i}" for i in range(80)]
    (here / "train.tsv").write_text("\n".join(["de\ten", *lines]))
    (here / "test.tsv").write_text("\n".join(["de\ten", *lines[:9]]))
    run = choose(ParallelCorpus(str(here / "train.tsv"), str(here / "test.tsv"))).run
    assert isinstance(run.task, Translation) and run.model is not None


def test_which_columns_are_translated_is_said(here: Path) -> None:
    """Of a table of four languages two were chosen without a word."""
    rows = [f"a house {i},ein Haus {i},une maison {i}" for i in range(80)]
    (here / "flats.csv").write_text("\n".join(["en,de,fr", *rows]))
    assert fields(choose(detect_data(str(here / "flats.csv"))))["data"] == "de to en"
    for language in ("fr", "en"):
        (here / f"x.{language}").write_text("\n".join(rows))
    pair = detect_data(f"{here}/x.fr+{here}/x.en")
    assert isinstance(pair, ParallelCorpus) and (pair.source_lang, pair.target_lang) == ("fr", "en")
    assert "data" not in fields(choose(pair))  # the files say it


def test_questions_need_a_trained_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"text": "Paris", "answer_start": 0}
    paragraph = {"context": "Paris is large.", "qas": [{"id": "1", "question": "What is large?", "answers": [answer]}]}
    (here / "squad.json").write_text(json.dumps({"data": [{"title": "a", "paragraphs": [paragraph]}]}))
    monkeypatch.setattr("allmlp.auto.bundled_models", dict)
    with pytest.raises(allmlp.UserError, match="need a trained text model to start from: --model FOLDER"):
        choose_run(Squad(str(here / "squad.json"), str(here / "squad.json")), device="cpu")


@pytest.mark.slow
def test_networks_of_timm_are_a_start_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("allmlp.models.timm")
    published = allmlp.create("timm:resnet10t", img_size=32, seed=1)
    monkeypatch.setattr(
        timm.Timm, "pretrained", lambda spec: PretrainedExternal(published, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 0.8)
    )
    photos(here / "photos", {"cat": 8, "dog": 8})
    train(
        "photos", "--model", "timm:resnet10t", "--size", "32", "--set", "budget.epochs=none", "--set", "budget.steps=1"
    )
    run, model = read_run(Path("runs/photos")), allmlp.load("runs/photos")
    assert run.init_from == "timm:resnet10t" and run.data.decode.mean == (0.1, 0.2, 0.3)  # type: ignore[attr-defined]
    assert model.spec.num_classes == 2  # type: ignore[attr-defined]
    trunk, old = (found.state_dict()["network.conv1.0.weight"] for found in (model, published))
    assert not torch.equal(trunk, allmlp.create(model.spec, seed=0).state_dict()["network.conv1.0.weight"])
    assert (trunk - old).abs().max() < 1e-2


# --- whole runs --------------------------------------------------------------------------------------------------


def train(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments, "--device", "cpu"])
    assert not caught.value.code


@pytest.mark.slow
def test_from_a_folder_of_images_to_a_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(here / "photos", {"cat": 20, "dog": 20, "emu": 20})
    train("photos", "--model", trained(here / "model"), "--epochs", "2")
    out, err = capsys.readouterr()
    assert out.startswith("photos accuracy") and err.splitlines()[-1] == "next: allmlp predict runs/photos IMAGE"
    assert "settings for these data" in err and "as given" in err
    result = read_record(Path("runs/photos"))["result"]
    steps = [json.loads(line) for line in Path("runs/photos/metrics.jsonl").read_text().splitlines()]
    first = next(record for record in steps if record["kind"] == "eval")
    assert first["step"] == 0 and result["validation"]["accuracy"] >= first["accuracy"]
    assert result["test"]["accuracy"] > 0.8
    # run.json repeats it exactly
    again = allmlp.train("runs/photos/run.json", "runs/again", device="cpu")
    assert again == pytest.approx(result["test"]) and read_run(Path("runs/again")) == read_run(Path("runs/photos"))


def test_a_better_baseline_is_told(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr("allmlp.auto.bundled_models", dict)  # from random weights
    reviews(here / "reviews.csv", 120)
    train("reviews.csv", "--epochs", "0.05")
    err = capsys.readouterr().err
    assert "tfidf_accuracy 100.00%" in err
    assert "TF-IDF with logistic regression is better on the validation split: 100.0% against" in err
    assert err.splitlines()[-1] == "next: allmlp predict runs/reviews TEXT"


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts",
    [{"cat": 3, "dog": 3}, {"cat": 12, "dog": 1}, {f"c{number:03}": 3 for number in range(60)}],
    ids=["fewer than a batch", "one example", "many classes"],
)
def test_few_examples(here: Path, counts: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    photos(here / "photos", counts)
    train("photos", "--model", trained(here / "model"), "--epochs", "1")
    result = read_record(Path("runs/photos"))["result"]
    assert 0 <= result["test"]["accuracy"] <= 1 and torch.tensor(result["test"]["loss"]).isfinite()
