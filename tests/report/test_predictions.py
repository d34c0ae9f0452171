"""Confusion matrices, calibration and mistakes against hand computations and scikit-learn."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch

import allmlp
from allmlp.data.digits import Digits
from allmlp.data.labeled_text import LabeledText
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.errors import UserError
from allmlp.models.gmlp import gmlp_text
from allmlp.optim import AdamW
from allmlp.record import read_run
from allmlp.report.filters import filters
from allmlp.report.images import EmbeddedImage, thumbnail, weights_image
from allmlp.report.page import inspect, render
from allmlp.report.predictions import (
    ConfusedPair,
    Predictions,
    calibration,
    collect_predictions,
    confusion,
    evaluator,
    mistakes,
    most_confused,
)
from allmlp.report.runs import read_logged
from allmlp.run import Budget, Run
from allmlp.tasks.classify_text import ClassifyText
from allmlp.training import evaluate_checkpoint
from report.folders import trained
from tiny import TINY_SPECS, tiny_model
from train.runs import language, selfsupervised, small

Image = pytest.importorskip("PIL.Image")


def predictions(probabilities: list[list[float]], labels: list[int]) -> Predictions:
    names = tuple("abcdefgh"[: len(probabilities[0])])
    rows = torch.tensor(probabilities, dtype=torch.float64)
    indices = [10 * n for n in range(len(labels))]
    return Predictions(names, rows, torch.tensor(labels), indices, 999, lambda index: f"text {index}")


def test_calibration_by_hand() -> None:
    # Two bins of (1/2, 1]: .9 and .7 right once of twice; (0, 1/2]: .4 right.
    found = calibration(predictions([[0.9, 0.1, 0], [0.7, 0.2, 0.1], [0.3, 0.4, 0.3]], [0, 1, 1]), bins=2)
    low, high = found.bins
    assert (low.low, low.high, low.count, low.accuracy) == (0, 0.5, 1, 1) and low.confidence == pytest.approx(0.4)
    assert (high.low, high.high, high.count, high.accuracy) == (0.5, 1, 2, 0.5)
    assert high.confidence == pytest.approx(0.8)
    assert found.error == pytest.approx((1 * 0.6 + 2 * 0.3) / 3)


def test_a_bin_includes_its_upper_edge() -> None:
    found = calibration(predictions([[0.5, 0.5], [1.0, 0.0]], [0, 0]), bins=2)
    assert [(one.low, one.count) for one in found.bins] == [(0, 1), (0.5, 1)]


def test_a_calibrated_model_has_no_error() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(40_000, 3, generator=generator, dtype=torch.float64)
    probabilities /= probabilities.sum(1, keepdim=True)
    labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    calibrated = Predictions(("a", "b", "c"), probabilities, labels, list(range(40_000)), 40_000, str)
    assert calibration(calibrated).error < 0.01
    sure = calibrated._replace(probabilities=torch.nn.functional.one_hot(probabilities.argmax(1), 3).double())
    assert calibration(sure).error == pytest.approx(1 - calibrated.accuracy)


def test_confusion_is_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(1)
    probabilities, labels = torch.rand(500, 5, generator=generator), torch.randint(0, 4, (500,), generator=generator)
    one = Predictions(tuple("abcde"), probabilities, labels, list(range(500)), 500, str)
    expected = metrics.confusion_matrix(labels, probabilities.argmax(1), labels=range(5))
    assert np.array_equal(confusion(one).numpy(), expected)
    assert one.accuracy == pytest.approx(metrics.accuracy_score(labels, probabilities.argmax(1)))


def test_most_confused() -> None:
    matrix = torch.tensor([[5, 3, 0], [0, 7, 1], [0, 0, 2]])
    assert most_confused(matrix) == [ConfusedPair(0, 1, 3, 8), ConfusedPair(1, 2, 1, 8)]
    assert most_confused(matrix, most=1) == [ConfusedPair(0, 1, 3, 8)]


def test_the_most_confident_mistakes_come_first() -> None:
    found = mistakes(predictions([[0.6, 0.4], [0.2, 0.8], [0.9, 0.1], [0.3, 0.7]], [1, 1, 1, 0]), most=2)
    assert [(one.index, one.label, one.predicted, one.text) for one in found] == [
        (20, 1, 0, "text 20"),
        (30, 0, 1, "text 30"),
    ]
    assert found[0].confidence == pytest.approx(0.9) and found[0].label_probability == pytest.approx(0.1)


# --- runs -------------------------------------------------------------------------------------------------


def test_accuracy_is_that_of_eval(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a")
    model, run = allmlp.load(folder), read_run(folder)
    found = collect_predictions(model, run, str(folder), 1000)
    assert found.total == 32 and found.class_names == ("a", "b", "c", "d")
    assert found.accuracy == evaluate_checkpoint(folder, "cpu")["accuracy"]
    some = collect_predictions(model, run, str(folder), 5)
    assert some.indices == [0, 8, 16, 23, 31]
    assert torch.allclose(some.probabilities, found.probabilities[some.indices], atol=1e-6)
    test = run.data.load().test.examples  # type: ignore[attr-defined]
    image = found.show(3)
    assert isinstance(image, EmbeddedImage) and np.array_equal(opened(image, "L"), test.images[3, 0].numpy())


def test_the_task_is_on_the_device_of_the_model(tmp_path: Path) -> None:
    """Mean and standard deviation too, or images on a GPU cannot be normalized."""
    run = small(budget=Budget(steps=1))
    folder = trained(tmp_path / "a", run)
    _, module = evaluator(allmlp.load(folder).to("meta"), run, str(folder))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert {name: str(tensor.device) for name, tensor in tensors.items()} == dict.fromkeys(tensors, "meta")
    assert "normalize.mean" in tensors


@pytest.mark.parametrize(("run", "reason"), [(selfsupervised, "Dino has no classes"), (language, "MaskedLM has")])
def test_tasks_without_classes_are_refused(tmp_path: Path, run: object, reason: str) -> None:
    pytest.importorskip("tokenizers")
    made = run()  # type: ignore[operator]
    folder = trained(tmp_path / "a", made.replace(budget=Budget(steps=1)))
    with pytest.raises(UserError, match=reason):
        collect_predictions(allmlp.load(folder), made, str(folder), 10)


def test_a_diverged_model_is_refused(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a")
    model = allmlp.load(folder)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="diverged"):
        collect_predictions(model, read_run(folder), str(folder), 10)


def test_another_number_of_classes_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    folder = trained(tmp_path / "a")
    run = read_run(folder).replace(data=Digits())
    with pytest.raises(UserError, match="the model has 4 classes, the dataset has 10"):
        collect_predictions(allmlp.load(folder), run, str(folder), 10)


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
        data=LabeledText(
            str(file), str(file), tokenizer=TokenizerConfig(vocab_size=80), seq_len=16, cache=str(tmp_path)
        ),
        batch_size=24,
        budget=Budget(steps=60),
        optim=AdamW(lr=5e-3),
        log_every=60,
        eval_every=60,
        save_every=60,
    )
    folder = trained(tmp_path / "run", run)
    found = collect_predictions(allmlp.load(folder), run, str(folder), 100)
    assert found.accuracy == evaluate_checkpoint(folder, "cpu")["accuracy"]
    assert "the film was good" in [one.text for one in mistakes(found)]
    assert confusion(found).sum() == 25


def test_of_several_test_files_the_first_is_shown(tmp_path: Path) -> None:
    """As in MNLI, matched and mismatched: the accuracy and the confusion matrix are about the same examples."""
    pytest.importorskip("tokenizers")
    rows = [f"the {thing} was {word}" for thing in ("film", "book", "play") for word in ("good", "awful")]
    for name, count in (("train", 6), ("first", 4), ("second", 6)):
        lines = [f"{row}\t{'good' in row}" for row in rows[:count]]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]))
    places = [str(tmp_path / f"{name}.tsv") for name in ("train", "first", "second")]
    data = LabeledText(places[0], ",".join(places[1:]), tokenizer=TokenizerConfig(vocab_size=60), seq_len=12)
    run = Run(
        model=gmlp_text(1, 16, 32),
        task=ClassifyText(dropout=0.0),
        data=data.replace(cache=str(tmp_path)),
        batch_size=4,
        budget=Budget(steps=2),
    )
    folder = trained(tmp_path / "run", run)
    found = collect_predictions(allmlp.load(folder), run, str(folder), 100)
    assert found.accuracy == evaluate_checkpoint(folder, "cpu")["accuracy"]
    assert (len(found.labels), found.total, found.test_name) == (4, 4, "first")
    assert confusion(found).sum() == 4
    assert found.show(3) == rows[3]
    page = render([inspect(read_logged("run", folder), torch.device("cpu"), 100)])
    assert "4 test examples of first, the first of several test files;" in page


# --- images -----------------------------------------------------------------------------------------------


def opened(embedded: EmbeddedImage, mode: str = "RGB") -> np.ndarray:
    kind, _, data = embedded.uri.partition(";base64,")
    assert kind.startswith("data:image/")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.size == (embedded.width, embedded.height)
    return np.asarray(image.convert(mode))


def test_weights_are_orange_and_blue_with_alpha() -> None:
    pixels = opened(weights_image(np.array([[1.0, -1.0, 0.0], [0.5, np.nan, -2.0]])), "RGBA")
    assert pixels[0].tolist() == [[217, 99, 10, 255], [22, 104, 199, 255], [217, 99, 10, 0]]
    assert pixels[1, 0].tolist() == [217, 99, 10, 129] and pixels[1, 2].tolist() == [22, 104, 199, 255]
    assert pixels[1, 1].tolist() == [128, 128, 128, 40]


def test_thumbnails() -> None:
    small = torch.randint(0, 256, (3, 32, 20), dtype=torch.uint8)
    assert np.array_equal(opened(thumbnail(small)), small.permute(1, 2, 0).numpy())
    assert (found := thumbnail(torch.rand(3, 300, 150))).height == 64 and found.width == 32


@pytest.mark.parametrize(
    ("name", "images", "about"),
    [
        ("mixer_nano", True, "hidden unit of the token MLP"),
        ("resmlp_nano", True, "row of the token matrix"),
        ("resmlp_s12_conv", True, "kernel of the convolution"),
        ("resmlp_s12_class", True, "weights of the class token"),
        ("gmlp_l18", False, "mean weight by offset"),
        ("mixer_mlm", True, "rows are hidden units"),
        ("resmlp_seq2seq_tiny", False, "mean weight by offset"),
        ("vit_nano", None, "no fixed weights over tokens"),
    ],
)
def test_filters_of_every_family(name: str, images: bool | None, about: str) -> None:
    found = filters(tiny_model(name, torch.float32) if name in TINY_SPECS else allmlp.create(name))
    assert about in found.about and bool(found.panels) == (images is not None)
    for panel in found.panels:
        assert (panel.image is not None) == bool(images) and bool(panel.weights) != bool(images)
        if panel.weights:
            assert max(map(abs, panel.weights)) == pytest.approx(1) and len(panel.weights) % 2
