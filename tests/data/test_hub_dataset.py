"""Hugging Face datasets: with the package where it is installed, else with a stand-in for the few calls we make."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sample_images import encode, scene

from allmlp.data.dataset import ImageDataset, labels_of
from allmlp.data.decode import CorruptImage, Decode
from allmlp.data.hub_dataset import HubDataset, HubImages
from allmlp.errors import MissingExtra, UserError
from allmlp.labeled_inputs import image_inputs
from allmlp.prediction import ImagePredictor, open_predictor
from folders import CLASSES, image_folder

REAL = importlib.util.find_spec("datasets") is not None


class Picture:
    def __init__(self, decode: bool = True) -> None:
        self.decode = decode


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class Table:
    """A table; images are bytes only after the cast."""

    def __init__(self, features: dict[str, Any], columns: dict[str, list[Any]]) -> None:
        self.features, self.columns = features, columns

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        assert all(not feature.decode for feature in self.features.values() if isinstance(feature, Picture))
        return {name: cells[key] for name, cells in self.columns.items()}

    def cast_column(self, name: str, feature: Any) -> Table:
        return Table({**self.features, name: feature}, self.columns)

    def select_columns(self, names: list[str]) -> Table:
        return Table({name: self.features[name] for name in names}, {name: self.columns[name] for name in names})


def table(labels: list[Any], feature: Any = None, start: int = 0) -> Table:
    cells = [{"bytes": encode(scene(16, 16, seed=start + n)), "path": None} for n in range(len(labels))]
    return Table({"id": None, "img": Picture(), "label": feature}, {"id": [], "img": cells, "label": labels})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the stand-in answers, by dataset name."""
    known: dict[str, Any] = {}

    def load(name: str, config: str | None = None, revision: str | None = None) -> Any:
        if name not in known:
            raise FileNotFoundError(f"{name}\ndoes not exist on the hub")
        return known[name]

    module = SimpleNamespace(Image=Picture, ClassLabel=ClassLabel, load_dataset=load, load_from_disk=load)
    monkeypatch.setitem(sys.modules, "datasets", module)  # type: ignore[arg-type]
    return known


def read(name: str, **fields: Any) -> ImageDataset:
    return HubDataset(name, img_size=(8, 8), **fields).load()


def test_only_a_training_split(library: dict[str, Any]) -> None:
    library["x"] = {"train": table([0, 1] * 10, ClassLabel(["a", "b"]))}
    data = read("x", test_fraction=0.2)
    assert [labels_of(split).bincount().tolist() for split in (data.train, data.validation, data.test)] == [
        [6, 6],
        [2, 2],
        [2, 2],
    ]
    assert len({image.sum().item() for image in data.train.fetch(torch.arange(12)).images}) == 12


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtra, match="datasets"):
        read("somebody/something")


def test_columns_and_splits_are_found(library: dict[str, Any]) -> None:
    names = ClassLabel(["ant", "bee"])
    library["x/y"] = {"train": table([0, 1, 1], names), "test": table([1, 0], names, start=10)}
    data = read("x/y")
    assert data.class_names == ("ant", "bee") and len(data.train) == 3
    images, labels = data.test.fetch(torch.tensor([1, 0]))
    assert labels.tolist() == [0, 1] and images[:, 2, 7, 7].tolist() == [11 * 37 % 256, 10 * 37 % 256]
    library["x/y"]["validation"] = table([1], names)
    assert len(read("x/y").test) == 1 and len(read("x/y", test_split="test").test) == 2


def test_a_column_called_label_is_that_of_the_labels(library: dict[str, Any]) -> None:
    """Another one, whose classes have names, was taken where the labels are words."""
    train = table(["dog", "cat"] * 10)
    train.features, train.columns = (
        {"view": ClassLabel(["front", "back"]), **train.features},
        {"view": [0] * 20, **train.columns},
    )
    library["x"] = {"train": train}
    assert read("x").class_names == ("cat", "dog")
    assert read("x", label_column="view").class_names == ("front", "back")
    del train.features["label"]
    assert read("x").class_names == ("front", "back")


def test_all_images_are_evaluated_without_a_test_split(library: dict[str, Any], tmp_path: Path) -> None:
    image_folder(tmp_path)
    names = ClassLabel([*CLASSES])
    library["x/y"] = {"train": table([0, 1, 2] * 8, names)}
    predictor = open_predictor(tmp_path, device="cpu")
    assert isinstance(predictor, ImagePredictor)
    whole = image_inputs(HubDataset("x/y"), "hf:x/y", predictor)
    assert whole.data == "hf:x/y" and whole.class_names == CLASSES and whole.labels.tolist() == [0, 1, 2] * 8
    assert whole.read(range(24)).shape == (24, 3, 8, 12)
    library["x/y"]["test"] = table([2, 1], names, start=30)
    tested = image_inputs(HubDataset("x/y"), "hf:x/y", predictor)
    assert tested.data == "the test split of hf:x/y" and tested.labels.tolist() == [2, 1]


@pytest.mark.parametrize(("labels", "classes"), [(["dog", "cat", "dog"], ("cat", "dog")), ([2, 0, 1], ("0", "1", "2"))])
def test_words_and_numbers_as_labels(labels: list[Any], classes: tuple[str, ...], library: dict[str, Any]) -> None:
    library["x"] = {"train": table(labels), "test": table(labels[:1])}
    data = read("x")
    assert data.class_names == classes and data.train.fetch(torch.arange(3)).labels.tolist() == [
        classes.index(str(label)) for label in labels
    ]


def test_mistakes(library: dict[str, Any]) -> None:
    names = ClassLabel(["ant", "bee"])
    library["x"] = {"train": table([0, 1], names), "test": table([-1, -1], names)}
    for fields, message in (
        ({}, "split 'test' of x is empty or has images without a known label: set test_split"),
        ({"train_split": "trian"}, "unknown split of x 'trian'; did you mean 'train'"),
        ({"test_split": "val"}, "unknown split of x 'val'"),
        ({"image_column": "image"}, "unknown column of x 'image'"),
        ({"image_column": "id"}, "column 'id' of x holds no images; img does"),
        ({"label_column": "labels"}, "unknown column of x 'labels'; did you mean 'label'"),
    ):
        with pytest.raises(UserError, match=message):
            read("x", **fields)
    with pytest.raises(
        UserError, match=r"cannot load dataset 'y': FileNotFoundError: y does not .*; if offline, give the path"
    ):
        read("y")
    library["z"] = {"train": table([0, 0]), "test": table([0])}
    with pytest.raises(UserError, match="fewer than two classes"):
        read("z")
    library["w"] = {"train": table([0.5, None]), "test": table([0])}
    with pytest.raises(UserError, match="labels must be strings or class indices"):
        read("w")


def test_a_column_of_bytes_without_a_type(library: dict[str, Any]) -> None:
    images = {"train": table([0, 1] * 4), "test": table([0, 1])}
    library["x"] = {name: Table({"img": None, "label": None}, split.columns) for name, split in images.items()}
    for split in library["x"].values():
        del split.columns["id"]
    found = read("x")
    assert len(found.train) == 8 and len(found.test) == 2
    assert found.train.fetch(torch.arange(8)).images[:, 2, 7, 7].tolist() == [n * 37 % 256 for n in range(8)]


def test_images_are_looked_for_beyond_the_first_row(library: dict[str, Any]) -> None:
    columns = table([0, 1] * 4).columns
    library["x"] = {
        "train": Table({"img": None, "label": None}, {"img": [None, *columns["img"][1:]]} | {"label": [0, 1] * 4})
    }
    assert len(read("x").train) > 0
    library["none"] = {"train": Table({"img": None, "label": None}, {"img": [], "label": []})}
    with pytest.raises(UserError, match="unknown column of none 'image'"):
        read("none")


def test_corrupt_cells(library: dict[str, Any], tmp_path: Path) -> None:
    train = table([0, 1] * 10)
    file = tmp_path / "a.png"
    file.write_bytes(encode(scene(16, 16, seed=5)))
    train.columns["img"][:3] = [None, {"bytes": b"?", "path": None}, {"bytes": None, "path": str(file)}]
    library["x"] = {"train": train, "test": table([0])}
    with pytest.raises(CorruptImage, match="x, train, row 0: the cell is empty"):
        read("x", decode=Decode(on_corrupt="error")).train.fetch(torch.tensor([0]))
    split = read("x").train
    assert isinstance(split, HubImages)
    images, labels = split.fetch(torch.arange(4))
    assert labels.tolist() == [0, 0, 0, 1] and split.skipped == 2 and images[0, 2, 7, 7] == 5 * 37 % 256


@pytest.mark.skipif(not REAL, reason="datasets is not installed")
@pytest.mark.parametrize("form", ["disk", "parquet", "folder"])
def test_the_real_package_offline(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "local"
    for split, count in (("train", 4), ("test", 2)):
        for number in range(count):
            target = folder / split / ("ant", "bee")[number % 2] / f"{number}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(encode(scene(16, 16, seed=number)))
    if form != "folder":
        tables, folder = datasets.load_dataset(str(folder)), tmp_path / "written"
        folder.mkdir()
        if form == "disk":
            tables.save_to_disk(str(folder))
        else:
            for split, content in tables.items():
                content.to_parquet(str(folder / f"{split}-0.parquet"))
    data = read(str(folder))
    assert data.class_names == ("ant", "bee") and len(data.train) == 4 and len(data.test) == 2
    images, labels = data.train.fetch(torch.arange(4))
    assert images.shape == (4, 3, 8, 8) and sorted(labels.tolist()) == [0, 0, 1, 1]
    assert sorted(images[:, 2, 7, 7].tolist()) == sorted(number * 37 % 256 for number in range(4))
