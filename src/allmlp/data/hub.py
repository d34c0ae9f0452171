"""Datasets of the Hugging Face hub, or in its formats in a local folder, through the `datasets` package."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from allmlp.data.decode import BrokenImage, Decode
from allmlp.data.encoded import Encoded, Workers
from allmlp.data.source import Data, Dataset
from allmlp.errors import UserError, lookup, one_line, require
from allmlp.spec import Size

TESTS = ("validation", "valid", "val", "test")


class HubDataset(Data):
    """A dataset by its name ("uoft-cs/cifar100") or local folder; needs `pip install datasets`.

    Columns and the split to test on are found by their types and names where they are not given.
    """

    name: str
    image: Size = (224, 224)
    config: str = ""
    revision: str = ""
    train: str = "train"
    test: str = ""
    picture: str = ""
    label: str = ""
    decode: Decode = Decode()
    workers: Workers = 0

    def open(self) -> Dataset:
        library = require("datasets", "hub")
        tables = self.load(library)
        train = lookup(self.train, tables, f"split of {self.name}")
        chosen = self.test or next((name for name in TESTS if name in tables), TESTS[0])
        test = lookup(chosen, tables, f"split of {self.name}")
        features = train.features
        images = [name for name, feature in features.items() if isinstance(feature, library.Image)]
        picture = self.picture or next(iter(images), "image")
        labels = [name for name, feature in features.items() if isinstance(feature, library.ClassLabel)]
        label = self.label or next(iter(labels), "label")
        for column in (picture, label):
            lookup(column, features, f"column of {self.name}")
        if picture not in images:
            raise UserError(f"column {picture!r} of {self.name} holds no pictures{listing(images)}")
        classes = class_names(features[label], train[label])
        if len(classes) < 2:
            raise UserError(f"column {label!r} of {self.name} has fewer than two classes")
        mean, std = self.decode.statistics()
        splits = []
        for name, table in ((self.train, train), (chosen, test)):
            numbers = class_numbers(table[label], classes, f"split {name!r} of {self.name}")
            encoded = table.cast_column(picture, library.Image(decode=False))
            where = f"{self.name}, {name}"
            splits.append(Rows(encoded, picture, numbers, where, self.image, self.decode, self.workers))
        return Dataset(splits[0], splits[1], classes, mean, std, self.decode.crop)

    def load(self, library: Any) -> Any:
        """The splits by name. A folder written by `save_to_disk` is read as it is."""
        folder = Path(self.name).expanduser()
        try:
            if (folder / "dataset_dict.json").is_file():
                return library.load_from_disk(str(folder))
            name = str(folder) if folder.is_dir() else self.name
            return library.load_dataset(name, self.config or None, revision=self.revision or None)
        except Exception as reason:  # it reports missing names, networks and files in a dozen types
            raise UserError(
                f"cannot load dataset {self.name!r}: {type(reason).__name__}: {one_line(reason)}; "
                f"offline, give the path of a local copy"
            ) from reason


class Rows(Encoded):
    """Pictures in a column of a table."""

    def __init__(
        self,
        table: Any,
        column: str,
        labels: list[int],
        where: str,
        image: tuple[int, int],
        decode: Decode,
        workers: int = 0,
    ) -> None:
        super().__init__(torch.tensor(labels, dtype=torch.int64), image, decode, workers)
        self.table, self.column, self.where = table.select_columns([column]), column, where

    def read(self, index: int) -> bytes:
        try:
            cell = self.table[index][self.column]
            if cell is None:
                raise BrokenImage("there is no picture")
            return cell["bytes"] if cell["bytes"] is not None else Path(os.fspath(cell["path"])).read_bytes()
        except OSError as reason:
            raise BrokenImage(f"cannot be read ({one_line(reason)})") from reason

    def name(self, index: int) -> str:
        return f"{self.where}, row {index}"


def listing(names: Iterable[str]) -> str:
    return f"; {', '.join(names)} does" if names else ""


def class_names(feature: Any, values: Iterable[Any]) -> tuple[str, ...]:
    """The names a column carries, or its words, or its numbers."""
    if getattr(feature, "names", None):
        return tuple(feature.names)
    seen = set(values)
    if seen and all(isinstance(value, str) for value in seen):
        return tuple(sorted(seen))
    if seen and all(isinstance(value, int) and 0 <= value < 1_000_000 for value in seen):
        return tuple(map(str, range(max(seen) + 1)))
    raise UserError("labels must be words or class numbers, without gaps: set label to another column")


def class_numbers(values: Iterable[Any], classes: tuple[str, ...], where: str) -> list[int]:
    numbers = {name: number for number, name in enumerate(classes)}
    found = [numbers.get(value, -1) if isinstance(value, str) else value for value in values]
    if not found or not all(isinstance(value, int) and 0 <= value < len(classes) for value in found):
        raise UserError(f"{where} is empty or has pictures without a known label: set test to another split")
    return found
