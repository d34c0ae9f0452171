"""`Data.of`: training on datasets that exist only as Python objects."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import allmlp
from allmlp import checkpoint
from allmlp.data.dataset import Data
from allmlp.data.objects import OBJECTS
from allmlp.errors import UserError
from allmlp.run import Run
from train import runs


class Squares(torch.utils.data.Dataset[Any]):
    """Images whose brightest quarter is their class; `form` is how they are given."""

    def __init__(self, form: str, examples: int = 48, size: int = 8) -> None:
        self.form, self.examples, self.size = form, examples, size

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> Any:
        label = index % 4
        pixels = np.random.default_rng(index).integers(0, 60, (self.size, self.size, 3)).astype(np.uint8)
        half = self.size // 2
        row, column = divmod(label, 2)
        pixels[half * row : half * (row + 1), half * column : half * (column + 1)] += 150
        if self.form == "pil":
            return Image.fromarray(pixels), label
        if self.form == "array":
            return {"image": pixels, "label": label}
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        return (tensor, label) if self.form == "uint8" else ((tensor.float() / 255 - 0.3) / 0.25, torch.tensor(label))


@pytest.fixture(autouse=True)
def forget() -> None:
    OBJECTS.clear()


def run_on(data: Data) -> Run:
    run = runs.small()
    return run.replace(model=run.model.configure(in_chans=3), data=data)


@pytest.mark.parametrize("form", ["pil", "array", "uint8", "float"])
def test_our_loop_on_their_dataset(form: str, tmp_path: Path) -> None:
    """Trained, split without a test set, and saved as a model that predicts."""
    data = Data.of(Squares(form), class_names=["a", "b", "c", "d"])
    dataset = data.load()
    assert len(dataset.train) + len(dataset.validation or ()) + len(dataset.test) == 48
    assert dataset.train.fetch(torch.tensor([0])).images.shape == (1, 3, 8, 8)
    result = allmlp.train(run_on(data), tmp_path / "run")
    assert result["accuracy"] >= 0.0 and allmlp.load(tmp_path / "run").preprocessing.class_names == ("a", "b", "c", "d")


def test_a_run_resumes_with_the_same_objects(tmp_path: Path) -> None:
    """In a new process the objects are passed again; without them, one line says so."""
    out, dataset = tmp_path / "run", Squares("uint8")
    run = run_on(Data.of(dataset))
    expected = allmlp.train(run, out)
    shutil.rmtree(checkpoint.complete(out)[-1])
    OBJECTS.clear()
    with pytest.raises(UserError, match="pass them again"):
        allmlp.train(run, out)
    assert allmlp.train(run_on(Data.of(dataset)), out) == expected


def test_labels_are_read_without_decoding() -> None:
    class Targets(Squares):
        targets = tuple(index % 4 for index in range(48))

        def __getitem__(self, index: int) -> Any:
            assert index == 0, "only the first item is looked at"
            return super().__getitem__(index)

    dataset = Data.of(Targets("uint8"), Squares("uint8")).load()
    assert dataset.class_names == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (iter([]), "no length or cannot be indexed"),
        ([], "is empty"),
        ([1, 2], "item 0 of list is int: expected"),
        ([{"picture": 1}], "has the keys picture: it needs image and label"),
        ([(Image.new("RGB", (8, 8)), "cat")], "has the label 'cat'"),
        ([("path.png", 1)], "not str"),
        ([(torch.zeros(3, 8, 8), 0), (torch.zeros(3, 8, 9), 1)] * 20, r"item 1 of list is a tensor \[3, 8, 9\]"),
        ([(torch.zeros(3, 8, 8), 0)] * 20, "only one class"),
        ([(torch.zeros(3, 8, 8), -1), (torch.zeros(3, 8, 8), 1)] * 20, "the label -1"),
    ],
)
def test_wrong_items_are_named(items: Any, message: str) -> None:
    def read() -> None:
        dataset = Data.of(items, name="list").load()
        dataset.train.fetch(torch.arange(len(dataset.train)))

    with pytest.raises(UserError, match=message):
        read()


def test_an_error_in_their_code_names_the_item() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise KeyError("gone")
            return super().__getitem__(index)

    with pytest.raises(UserError, match=r"item 3 of .*Broken: KeyError: 'gone'"):
        Data.of(Broken("uint8")).load()


def test_two_datasets_of_one_name_are_told_apart() -> None:
    Data.of(Squares("uint8"))
    with pytest.raises(UserError, match="give each a name="):
        Data.of(Squares("uint8"))
    Data.of(Squares("uint8"), name="second")
