"""Wrong labels are found by classifiers that have not seen them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allmlp.cli import main
from allmlp.data.dataset import Data, ImageDataset, InMemory
from allmlp.errors import UserError
from allmlp.head_init import Features
from allmlp.report.page import write
from allmlp.report.suspects import FOLDS, find_suspects, folds, out_of_fold, suspects
from allmlp.run import Budget
from allmlp.tasks.classify import Classify
from allmlp.training import read_run
from report.folders import trained
from train.runs import Blobs, quiet, small

pytest.importorskip("PIL.Image")
WRONG = {2: 3, 17: 0, 40: 1}
"""Index in the training split -> its wrong label; the true one is the index modulo 4."""


class MislabeledBlobs(Data):
    def load(self) -> ImageDataset:
        blobs = Blobs().load()
        assert isinstance(blobs.train, InMemory)
        images, labels = blobs.train.examples
        labels = labels.clone()
        for index, label in WRONG.items():
            labels[index] = label
        return ImageDataset(InMemory(images, labels), blobs.test, blobs.class_names, blobs.mean, blobs.std)


@pytest.mark.slow
def test_wrong_labels_of_a_run_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = trained(tmp_path / "start", quiet().replace(task=Classify(), budget=Budget(steps=60), eval_every=60))
    folder = trained(tmp_path / "run", small(data=MislabeledBlobs(), init_from=str(start)))
    found = find_suspects(read_run(folder), folder, torch.device("cpu"))
    assert found.examples == 64 + 32 and f"{start}, the frozen model" in found.about
    assert found.count == len(found.found) == len(WRONG)
    assert {one.index: (one.split, one.label, one.suggested) for one in found.found} == {
        index: ("train", label, index % 4) for index, label in WRONG.items()
    }
    probabilities = [one.probability for one in found.found]
    assert probabilities == sorted(probabilities) and all(one.image is not None for one in found.found)
    pytest.importorskip("jinja2")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder), "--suspect-labels", "--out", str(tmp_path / "report.html")])
    assert ended.value.code == 0
    assert "3 of 96 examples" in (tmp_path / "report.html").read_text()
    with pytest.raises(SystemExit):
        main(["report", str(folder), "--out", str(tmp_path / "report.html")])
    assert "Suspected wrong labels" not in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_without_a_start_the_trained_model_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allmlp.report.suspects.RATIO", 1)
    folder = trained(tmp_path / "a")
    found = find_suspects(read_run(folder), folder, torch.device("cpu"))
    # After twelve steps its features are close to random.
    assert "by heart" in found.about and "do not tell the classes apart" in found.about and found.count == 0
    gone = read_run(folder).replace(init_from=str(tmp_path / "gone"))
    assert "by heart" in find_suspects(gone, folder, torch.device("cpu")).about


def test_a_search_that_fails_leaves_the_rest_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    folder, out = trained(tmp_path / "a"), tmp_path / "report.html"
    monkeypatch.setattr("allmlp.report.suspects.FOLDS", 100)
    write([folder], out, suspect_labels=True, device="cpu")
    assert "Not searched: --suspect-labels needs at least 200 different examples" in out.read_text()
    assert "Confusion matrix, calibration and mistakes:" not in out.read_text()
    with pytest.raises(UserError, match="--examples 0"):
        write([folder], out, examples=0, suspect_labels=True, device="cpu")


def gaussians(count: int, classes: int = 3) -> Features:
    labels = torch.arange(count) % classes
    noise = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return Features(noise + 6 * torch.nn.functional.one_hot(labels, 4), labels)


def task(classes: int) -> Any:
    return SimpleNamespace(class_weights=torch.ones(classes))


def test_correct_labels_are_not_suspected() -> None:
    features = gaussians(150)
    assert (suspects(out_of_fold(features, task(3)), features.labels) == -1).all()


def test_copies_of_an_example_do_not_vouch_for_it() -> None:
    """A wrong label that occurs five times is found: no copy is in the training part of another."""
    features = gaussians(150)
    values = torch.cat([features.values, features.values[:1].repeat(5, 1)])
    labels = torch.cat([features.labels[1:], torch.full((5,), 2)])
    features = Features(values[1:], labels)
    fold = folds(features)
    assert len(fold[-5:].unique()) == 1
    assert suspects(out_of_fold(features, task(3)), labels)[-5:].tolist() == [0] * 5


def test_every_class_is_in_every_fold() -> None:
    features = gaussians(60)
    counts = torch.bincount(3 * folds(features) + features.labels)
    assert counts.tolist() == [60 // 3 // FOLDS] * (3 * FOLDS)


def test_small_classes_are_not_judged() -> None:
    features = gaussians(60)
    labels = features.labels.clone()
    labels[0] = 3
    assert (suspects(out_of_fold(Features(features.values, labels), task(4)), labels) == -1).all()
    with pytest.raises(UserError, match="at least 10 different examples, not 6"):
        folds(gaussians(6))
