"""Confusions, calibration and mistakes against hand computations and scikit-learn."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch

import allmlp
from allmlp.data.digits import Digits
from allmlp.data.sentences import Sentences
from allmlp.data.tokenizer import Tokenize
from allmlp.errors import UserError
from allmlp.models.gmlp import gmlp_text
from allmlp.optim import AdamW
from allmlp.report.filters import filters
from allmlp.report.judged import Confused, Judged, calibration, confused, confusion, judge, mistakes
from allmlp.report.pictures import Picture, thumbnail, weights_picture
from allmlp.run import Budget, Cadence, Run
from allmlp.tasks.glue import ClassifyText
from allmlp.train import judge_again, read_run
from report.folders import trained
from tiny import SENTENCES, tiny_model
from train.runs import language, selfsupervised

Image = pytest.importorskip("PIL.Image")


def judged(chances: list[list[float]], labels: list[int]) -> Judged:
    classes = tuple("abcdefgh"[: len(chances[0])])
    rows = torch.tensor(chances, dtype=torch.float64)
    return Judged(classes, rows, torch.tensor(labels), [10 * n for n in range(len(labels))], 999, lambda n: f"text {n}")


def test_calibration_by_hand() -> None:
    # Two bins of (1/2, 1]: .9 and .7 right once of twice; (0, 1/2]: .4 right.
    found = calibration(judged([[0.9, 0.1, 0], [0.7, 0.2, 0.1], [0.3, 0.4, 0.3]], [0, 1, 1]), bins=2)
    low, high = found.bins
    assert (low.low, low.high, low.count, low.accuracy) == (0, 0.5, 1, 1) and low.confidence == pytest.approx(0.4)
    assert (high.low, high.high, high.count, high.accuracy) == (0.5, 1, 2, 0.5)
    assert high.confidence == pytest.approx(0.8)
    assert found.error == pytest.approx((1 * 0.6 + 2 * 0.3) / 3)


def test_a_bin_holds_its_upper_edge() -> None:
    found = calibration(judged([[0.5, 0.5], [1.0, 0.0]], [0, 0]), bins=2)
    assert [(one.low, one.count) for one in found.bins] == [(0, 1), (0.5, 1)]


def test_who_says_the_truth_about_itself_has_no_error() -> None:
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(40_000, 3, generator=generator, dtype=torch.float64)
    chances /= chances.sum(1, keepdim=True)
    labels = torch.multinomial(chances, 1, generator=generator)[:, 0]
    honest = Judged(("a", "b", "c"), chances, labels, list(range(40_000)), 40_000, str)
    assert calibration(honest).error < 0.01
    sure = honest._replace(chances=torch.nn.functional.one_hot(chances.argmax(1), 3).double())
    assert calibration(sure).error == pytest.approx(1 - honest.accuracy)


def test_confusion_is_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(1)
    chances, labels = torch.rand(500, 5, generator=generator), torch.randint(0, 4, (500,), generator=generator)
    one = Judged(tuple("abcde"), chances, labels, list(range(500)), 500, str)
    expected = metrics.confusion_matrix(labels, chances.argmax(1), labels=range(5))
    assert np.array_equal(confusion(one).numpy(), expected)
    assert one.accuracy == pytest.approx(metrics.accuracy_score(labels, chances.argmax(1)))


def test_what_is_confused_most() -> None:
    matrix = torch.tensor([[5, 3, 0], [0, 7, 1], [0, 0, 2]])
    assert confused(matrix) == [Confused(0, 1, 3, 8), Confused(1, 2, 1, 8)]
    assert confused(matrix, most=1) == [Confused(0, 1, 3, 8)]


def test_mistakes_are_those_it_is_surest_of() -> None:
    found = mistakes(judged([[0.6, 0.4], [0.2, 0.8], [0.9, 0.1], [0.3, 0.7]], [1, 1, 1, 0]), most=2)
    assert [(one.number, one.truth, one.said, one.text) for one in found] == [
        (20, 1, 0, "text 20"),
        (30, 0, 1, "text 30"),
    ]
    assert found[0].confidence == pytest.approx(0.9) and found[0].chance == pytest.approx(0.1)


# --- runs -------------------------------------------------------------------------------------------------


def test_a_run_is_judged_as_when_it_was_trained(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a")
    model, run = allmlp.load(folder), read_run(folder)
    found = judge(model, run, str(folder), 1000)
    assert found.total == 32 and found.classes == ("a", "b", "c", "d")
    assert found.accuracy == judge_again(folder, "cpu")["accuracy"]
    some = judge(model, run, str(folder), 5)
    assert some.numbers == [0, 8, 16, 23, 31]
    assert torch.allclose(some.chances, found.chances[some.numbers], atol=1e-6)
    test = run.data.open().test.examples  # type: ignore[attr-defined]
    picture = found.show(3)
    assert isinstance(picture, Picture) and np.array_equal(opened(picture, "L"), test.images[3, 0].numpy())


@pytest.mark.parametrize(("run", "reason"), [(selfsupervised, "Dino names no classes"), (language, "MaskedLm names")])
def test_what_does_not_classify_is_said(tmp_path: Path, run: object, reason: str) -> None:
    pytest.importorskip("tokenizers")
    made = run()  # type: ignore[operator]
    folder = trained(tmp_path / "a", made.replace(budget=Budget(steps=1)))
    with pytest.raises(UserError, match=reason):
        judge(allmlp.load(folder), made, str(folder), 10)


def test_a_model_that_has_diverged_is_said(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a")
    model = allmlp.load(folder)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="diverged"):
        judge(model, read_run(folder), str(folder), 10)


def test_data_of_other_classes_are_said(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    folder = trained(tmp_path / "a")
    run = read_run(folder).replace(data=Digits())
    with pytest.raises(UserError, match="the model knows 4 classes, the data have 10"):
        judge(allmlp.load(folder), run, str(folder), 10)


def test_sentences(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    file = tmp_path / "reviews.tsv"
    things = ["film", "book", "play", "song"]
    rows = [f"the {thing} was {word}\t{label}" for thing in things for word, label in (("good", 1), ("awful", 0))]
    # The first sentence has both labels: one of them is sure to be a mistake.
    file.write_text("sentence\tlabel\n" + "\n".join([*rows, *rows, *rows, "the film was good\t0"]))
    run = Run(
        model=gmlp_text(2, 32, 64),
        task=ClassifyText(dropout=0.0),
        data=Sentences(str(file), str(file), tokenize=Tokenize(vocabulary=80), length=16, cache=str(tmp_path)),
        batch=24,
        budget=Budget(steps=60),
        optim=AdamW(lr=5e-3),
        cadence=Cadence(log=60, evaluate=60, save=60),
    )
    folder = trained(tmp_path / "run", run)
    found = judge(allmlp.load(folder), run, str(folder), 100)
    assert found.accuracy == judge_again(folder, "cpu")["accuracy"]
    assert "the film was good" in [one.text for one in mistakes(found)]
    assert confusion(found).sum() == 25


# --- pictures ---------------------------------------------------------------------------------------------


def opened(picture: Picture, mode: str = "RGB") -> np.ndarray:
    kind, _, data = picture.uri.partition(";base64,")
    assert kind.startswith("data:image/")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.size == (picture.width, picture.height)
    return np.asarray(image.convert(mode))


def test_weights_are_orange_and_blue_on_what_lies_below() -> None:
    pixels = opened(weights_picture(np.array([[1.0, -1.0, 0.0], [0.5, np.nan, -2.0]])), "RGBA")
    assert pixels[0].tolist() == [[217, 99, 10, 255], [22, 104, 199, 255], [217, 99, 10, 0]]
    assert pixels[1, 0].tolist() == [217, 99, 10, 129] and pixels[1, 2].tolist() == [22, 104, 199, 255]
    assert pixels[1, 1].tolist() == [128, 128, 128, 40]


def test_thumbnails() -> None:
    small = torch.randint(0, 256, (3, 32, 20), dtype=torch.uint8)
    assert np.array_equal(opened(thumbnail(small)), small.permute(1, 2, 0).numpy())
    assert (found := thumbnail(torch.rand(3, 300, 150))).height == 64 and found.width == 32


@pytest.mark.parametrize(
    ("name", "pictures", "about"),
    [
        ("mixer_nano", True, "hidden unit of the token MLP"),
        ("resmlp_nano", True, "row of the token matrix"),
        ("resmlp_s12_conv", True, "kernel of the convolution"),
        ("resmlp_s12_class", True, "class token reads"),
        ("gmlp_l18", False, "mean weight by distance"),
        ("mixer_mlm", True, "a row is a hidden unit"),
        ("resmlp_seq2seq_tiny", False, "mean weight by distance"),
        ("vit_nano", None, "no fixed weights over tokens"),
    ],
)
def test_filters_of_every_family(name: str, pictures: bool | None, about: str) -> None:
    found = filters(tiny_model(name, torch.float32) if name in SENTENCES else allmlp.create(name))
    assert about in found.about and bool(found.layers) == (pictures is not None)
    for layer in found.layers:
        assert (layer.picture is not None) == bool(pictures) and bool(layer.line) != bool(pictures)
        if layer.line:
            assert max(map(abs, layer.line)) == pytest.approx(1) and len(layer.line) % 2
