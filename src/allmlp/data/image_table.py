"""A table of image files and their labels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from allmlp.data.columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    NO_LABEL,
    ColumnSample,
    check_classes,
    find_split,
    guess_label,
    guess_note,
    is_image_name,
    label_order,
    named_column,
    sample_columns,
    split_of_row,
    split_rows,
)
from allmlp.data.dataset import ImageDataset
from allmlp.data.image_files import FileSplit, ImageFileData, LabeledFile
from allmlp.data.splits import listing
from allmlp.data.tables import Table, read_table
from allmlp.data.text_files import find_files
from allmlp.errors import UserError, did_you_mean, plural
from allmlp.files import expand_user

MAX_MISSING = 0.1
"""Fraction of files that may be missing."""
LOOKED_UP = 10
"""Values of a column that are looked up, to see whether it names images."""


class ImageRow(NamedTuple):
    file: str
    """Relative to the folder of the images."""
    label: str
    split: str


class ImageTable(ImageFileData):
    """Tables (`data.tables`) with the columns image and label for training (`path`), validation and testing.

    Files are named relative to `folder`, by default that of the table; their suffix may be missing, and also the
    folders they are in if their names are unique. Columns that are not given are found by their names, else by their
    content. If there is no `test`, a column called split assigns the rows; if it has only one of validation and test,
    that is the test split. Without such a column, splits are created as in `ImageFileData`.
    """

    folder: str = ""
    image_column: str = ""
    label_column: str = ""

    def load(self) -> ImageDataset:
        parts = {"train": self.path, "validation": self.val, "test": self.test}
        reader = ImageTableReader(self)
        splits_of_rows = {name: list(reader.read(paths)) for name, paths in parts.items() if paths or name == "train"}
        if "test" not in splits_of_rows:
            made = dict(zip(parts, split_rows(splits_of_rows["train"])))
            made["validation"] = splits_of_rows.get("validation", made["validation"])
            splits_of_rows = {name: rows for name, rows in made.items() if rows or name in splits_of_rows}
        labels = [row.label for row in splits_of_rows["train"]]
        if not labels:
            raise UserError(f"{self.path} has no labeled images")
        check_classes(labels, reader.columns.label, self.path)
        classes = tuple(sorted(set(labels), key=label_order))
        numbers = {label: number for number, label in enumerate(classes)}
        splits = {}
        for name, rows in splits_of_rows.items():
            for row in rows:
                if row.label not in numbers:
                    hint = did_you_mean(row.label, classes)
                    raise UserError(f"unknown label {row.label!r} in the {name} split{hint}")
            splits[name] = FileSplit(self.root(), [LabeledFile(row.file, numbers[row.label]) for row in rows])
        dataset = self.build(splits, classes, reader.notes)
        return replace(dataset, image_column=reader.columns.image, label_column=reader.columns.label)

    def root(self) -> Path:
        return expand_user(self.folder or Path(find_files(self.path)[0]).parent)


class ImageColumns(NamedTuple):
    """Names of the columns; empty while unknown."""

    image: str = ""
    label: str = ""


class ImageTableReader:
    """Reads the rows of tables. Columns that are not given are those of `columns`, of earlier tables or the training
    data, where a table has them.
    """

    def __init__(self, spec: ImageTable, columns: ImageColumns = ImageColumns()) -> None:
        self.spec, self.columns = spec, columns
        self.notes: list[str] = []

    def read(self, paths: str) -> Iterator[ImageRow]:
        """The rows whose file exists."""
        root, notes = self.spec.root(), self.notes
        for file in find_files(paths):
            table = read_table(file)
            samples = sample_columns(table)
            finder = FileFinder(root if self.spec.folder else Path(file).parent)
            image, label = self.columns = self.find_columns(table, samples, finder)
            split, missing, count = find_split(samples), list[str](), 0
            for row in table:
                if row[label].strip() in NO_LABEL or not row[image].strip():
                    continue
                count += 1
                if path := finder.find(row[image].strip()):
                    yield ImageRow(os.path.relpath(path, root), row[label].strip(), split_of_row(row, split, file))
                else:
                    missing.append(row[image])
            if len(missing) > max(MAX_MISSING * count, 1):
                raise UserError(
                    f"{file}: {len(missing):,} of {count:,} images are not in {finder.root}, such as {missing[0]}: set "
                    "data.folder to the folder of the images"
                )
            if missing:
                notes.append(f"skipped {plural(len(missing), 'image')} not in {finder.root}: {listing(missing)}")

    def find_columns(self, table: Table, samples: Sequence[ColumnSample], finder: FileFinder) -> ImageColumns:
        spec, names, file, guessed = self.spec, table.columns, table.file, dict[str, str]()
        image = named_column(names, spec.image_column, IMAGE_COLUMNS, file, trained_on=self.columns.image)
        if image is None:
            image = next((sample.name for sample in samples if sample.is_image), None)
            image = image or stem_column(samples, finder)
            if image is None:
                raise UserError(f"{file}: none of {', '.join(names)} holds names of images: set data.image_column")
            guessed["image_column"] = image
        label = named_column(names, spec.label_column, LABEL_COLUMNS, file, (image,), self.columns.label)
        if label is None:
            label = guess_label([sample for sample in samples if sample.name != image], table)
            guessed["label_column"] = label
        if guessed:
            self.notes.append(guess_note(guessed))
        return ImageColumns(image, label)


def stem_column(samples: Sequence[ColumnSample], finder: FileFinder) -> str | None:
    """The column whose values are different names of images without their suffix."""
    for sample in samples:
        values = [value.strip() for value in sample.values[:LOOKED_UP]]
        if 1 < len(sample.values) == sample.distinct and all(map(finder.find, values)):
            return sample.name
    return None


class FileFinder:
    """Finds image files by their path below a folder, with or without suffix, or by their name alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders = set[str]()
        """Names of the folders below the root, known after the first look at all files."""

    def find(self, name: str) -> str | None:
        written = dict.fromkeys((name, name.replace("\\", "/")))  # the table may have been made by Windows
        direct = (os.path.join(self.root, path) for path in written)
        if file := next(filter(os.path.isfile, direct), None):
            return file
        plain = [os.path.normpath(path) for path in written]
        return next(filter(None, (*map(self.paths.get, plain), *map(self.find_elsewhere, plain))), None)

    def find_elsewhere(self, path: str) -> str | None:
        """The file of this name, unless its folder is another one, and that of `path` is there without it."""
        folder, name = os.path.split(path)
        file, parent = self.paths.get(name), os.path.basename(folder)
        is_other = file and parent in self.folders and os.path.basename(os.path.dirname(file)) != parent
        return None if is_other else file

    @cached_property
    def paths(self) -> dict[str, str]:
        """Path without suffix, name, and name without suffix -> path; empty for ambiguous names."""
        paths: dict[str, str] = {}
        for folder, inner, names in os.walk(self.root):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            self.folders.update(inner)
            for name in sorted(filter(is_image_name, names)):
                path = os.path.join(folder, name)
                stem = os.path.splitext(name)[0]
                below = os.path.splitext(os.path.relpath(path, self.root))[0]
                for key in {below, name, stem}:
                    paths[key] = path if paths.get(key, path) == path else ""
        return paths
