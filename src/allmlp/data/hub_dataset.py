"""Image datasets on the Hugging Face Hub, or local ones in its formats, through the `datasets` package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from allmlp.data.dataset import Data, ImageDataset
from allmlp.data.decode import CorruptImage, Decode, is_image
from allmlp.data.encoded_images import EncodedImages, NumWorkers, image_dataset
from allmlp.data.splits import divide
from allmlp.data.tables import table_suffix
from allmlp.data.text_files import open_parquet
from allmlp.errors import UserError, lookup, one_line, require
from allmlp.files import expand_user, read_regular
from allmlp.spec import Rate, Seed, Size

TEST_SPLITS = ("validation", "valid", "val", "test")
PEEKED_ROWS = 16
"""Rows whose cells are looked at to find the images."""


class HubDataset(Data):
    """A dataset by its name ("uoft-cs/cifar100") or local folder; needs `pip install datasets`.

    Columns and test split (validation, else test) are found by type and name if they are not given. If the dataset has
    only the training split, `test_fraction` of every class is for testing and as much for validation.
    """

    name: str
    img_size: Size = (224, 224)
    config: str = ""
    revision: str = ""
    train_split: str = "train"
    test_split: str = ""
    image_column: str = ""
    label_column: str = ""
    test_fraction: Rate = 0.15
    split_seed: Seed = 0
    decode: Decode = Decode()
    num_workers: NumWorkers = 0

    def load(self) -> ImageDataset:
        (train, *tested), classes = self.read()
        if tested:
            return image_dataset((train, None, tested[0]), classes, self.decode)
        made = divide(train, self.test_fraction, self.test_fraction, self.split_seed)
        return image_dataset(made, classes, self.decode)

    def read(self) -> tuple[list[HubImages], tuple[str, ...]]:
        """The training split and, if the dataset has one, the test split; and the names of the classes."""
        library = require("datasets", "hub")
        tables = self.load_splits(library)
        train = lookup(self.train_split, tables, f"split of {self.name}")
        chosen = self.test_split or next((name for name in TEST_SPLITS if name in tables), "")
        tested = {chosen: lookup(chosen, tables, f"split of {self.name}")} if chosen else {}
        features = train.features
        images = [name for name, feature in features.items() if isinstance(feature, library.Image)]
        images = images or [name for name, cells in train[:PEEKED_ROWS].items() if any(map(is_image, cells))]
        image = self.image_column or next(iter(images), "image")
        labels = [name for name, feature in features.items() if isinstance(feature, library.ClassLabel)]
        label = self.label_column or ("label" if "label" in features else next(iter(labels), "label"))
        for column in (image, label):
            lookup(column, features, f"column of {self.name}")
        if image not in images:
            does = f"; {', '.join(images)} does" if images else ""
            raise UserError(f"column {image!r} of {self.name} holds no images{does}")
        classes = class_names(features[label], train[label])
        if len(classes) < 2:
            raise UserError(f"column {label!r} of {self.name} has fewer than two classes")
        splits = list[HubImages]()
        for name, table in ((self.train_split, train), *tested.items()):
            numbers = class_indices(table[label], classes, f"split {name!r} of {self.name}")
            encoded = table.cast_column(image, library.Image(decode=False))
            source = f"{self.name}, {name}"
            splits.append(HubImages(encoded, image, numbers, source, self.img_size, self.decode, self.num_workers))
        return splits, classes

    def load_splits(self, library: Any) -> Any:
        """The splits by name, from the Hub, a local dataset or a folder written by `save_to_disk`."""
        folder = expand_user(self.name)
        try:
            if (folder / "dataset_dict.json").is_file():
                return library.load_from_disk(str(folder))
            name = str(folder) if folder.is_dir() else self.name
            return library.load_dataset(name, self.config or None, revision=self.revision or None)
        except Exception as reason:  # `datasets` raises many types
            raise UserError(
                f"cannot load dataset {self.name!r}: {type(reason).__name__}: {one_line(reason)}; "
                f"if offline, give the path of a local copy"
            ) from reason


class HubImages(EncodedImages):
    """Images in a column of a table."""

    def __init__(
        self,
        table: Any,
        column: str,
        labels: list[int],
        source: str,
        img_size: tuple[int, int],
        decode: Decode,
        num_workers: int = 0,
    ) -> None:
        super().__init__(torch.tensor(labels, dtype=torch.int64), img_size, decode, num_workers)
        self.table, self.column, self.source = table.select_columns([column]), column, source

    def read(self, index: int) -> bytes:
        try:
            cell = self.table[index][self.column]
            if cell is None:
                raise CorruptImage("the cell is empty")
            return cell["bytes"] if cell["bytes"] is not None else read_regular(cell["path"])
        except OSError as reason:
            raise CorruptImage(f"cannot be read ({one_line(reason)})") from reason

    def name(self, index: int) -> str:
        return f"{self.source}, row {index}"


def class_names(feature: Any, values: Iterable[Any]) -> tuple[str, ...]:
    """Class names from the feature, else from the strings or integers of the column."""
    if getattr(feature, "names", None):
        return tuple(feature.names)
    seen = set(values)
    if seen and all(isinstance(value, str) for value in seen):
        return tuple(sorted(seen))
    if seen and all(isinstance(value, int) and 0 <= value < 1_000_000 for value in seen):
        return tuple(map(str, range(max(seen) + 1)))
    raise UserError("labels must be strings or class indices: set label_column to another column")


def class_indices(values: Iterable[Any], classes: tuple[str, ...], source: str) -> list[int]:
    numbers = {name: number for number, name in enumerate(classes)}
    indices = [numbers.get(value, -1) if isinstance(value, str) else value for value in values]
    if not indices or not all(isinstance(value, int) and 0 <= value < len(classes) for value in indices):
        raise UserError(f"{source} is empty or has images without a known label: set test_split to another split")
    return indices


def embeds_images(file: str) -> bool:
    """Whether a Parquet file has a column with the images themselves, by its metadata or its first rows."""
    if table_suffix(file) != ".parquet":
        return False
    with open_parquet(file) as parquet:
        if b'"_type": "Image"' in (parquet.schema_arrow.metadata or {}).get(b"huggingface", b""):
            return True
        rows = next(parquet.iter_batches(PEEKED_ROWS), None)
        return rows is not None and any(is_image(cell) for row in rows.to_pylist() for cell in row.values())
