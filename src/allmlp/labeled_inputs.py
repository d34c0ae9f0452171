"""Labeled images and texts from any data, as inputs of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.columns import label_order, split_for_testing
from allmlp.data.dataset import Data, ImageDataset, labels_of
from allmlp.data.encoded_images import EncodedImages
from allmlp.data.hub_dataset import HubDataset
from allmlp.data.image_files import ImageFiles, LabeledFile
from allmlp.data.image_folder import ImageFolder, folders, only_folder, split_folders, used_folders
from allmlp.data.image_table import ImageColumns, ImageTable, ImageTableReader
from allmlp.data.labeled_text import LabeledText, LabeledTextReader
from allmlp.data.preprocessing import TextPreprocessing
from allmlp.data.shards import Shards, by_name, find, read_class_names
from allmlp.errors import UserError
from allmlp.files import expand_user
from allmlp.prediction import ImagePredictor


class LabeledInputs(NamedTuple):
    """Examples to evaluate."""

    data: str
    class_names: tuple[str, ...]
    labels: Tensor
    """int64, n: index in `class_names`."""
    read: Callable[[range], Any]
    """Indices -> inputs of a predictor: a list of texts, or a tensor of images (uint8)."""
    corrupt: Callable[[], dict[int, str]] = dict
    """Index -> name and fault of each image that `read` could not decode."""
    notes: tuple[str, ...] = ()
    """Notes from reading: guessed columns, skipped rows."""


def image_inputs(data: Data, place: str, predictor: ImagePredictor) -> LabeledInputs:
    """The test split of image data, or all images of data without splits, preprocessed for the model."""
    decode, notes = predictor.decoding.replace(on_corrupt="skip"), list[str]()
    if isinstance(data, ImageFolder | ImageTable):
        columns = ImageColumns(predictor.preprocessing.image_column, predictor.preprocessing.label_column)
        labeled_files = folder_images(data) if isinstance(data, ImageFolder) else table_images(data, columns)
        title, root, files, class_names, notes = labeled_files
        if not files:
            raise UserError(f"{place} has no labeled images: it needs a folder for each class, or a table")
        split = ImageFiles(root, files, predictor.img_size, decode, data.num_workers)
    elif isinstance(data, Shards):
        shards = find(data.test or data.path)
        *_, tests = by_name(shards)
        sized = data.replace(img_size=predictor.img_size, decode=decode)
        split = sized.split(tests or shards)
        count = int(split.labels.max()) + 1
        class_names = (
            read_class_names(data.class_names_file) if data.class_names_file else tuple(map(str, range(count)))
        )
        title = f"the test shards of {place}" if tests and len(tests) < len(shards) else place
    elif isinstance(data, HubDataset):
        (*others, split), class_names = data.replace(img_size=predictor.img_size, decode=decode).read()
        title = f"the test split of {place}" if others else place
    else:
        if hasattr(data, "decode"):
            data = data.replace(img_size=predictor.img_size, decode=decode)
        dataset = data.load()
        if not isinstance(dataset, ImageDataset):
            raise UserError(f"{predictor.name} reads images, but {place} holds none")
        title, split, class_names = f"the test split of {place}", dataset.test, dataset.class_names
    if isinstance(split, EncodedImages):
        split.warns = False  # they are listed at the end

    def read(indices: range) -> Tensor:
        images = split.fetch(torch.tensor(indices)).images
        return fit(images, predictor.img_size, predictor.decoding.crop_pct, predictor.decoding.channels)

    def corrupt() -> dict[int, str]:
        if not isinstance(split, EncodedImages):
            return {}
        reasons = dict(split.corrupt)  # a copy: threads that read ahead add to it
        return {index: f"{split.name(index)}: {reason}" for index, reason in reasons.items()}

    return LabeledInputs(title, class_names, labels_of(split), read, corrupt, tuple(notes))


class LabeledFiles(NamedTuple):
    title: str
    root: Path
    files: list[LabeledFile]
    class_names: tuple[str, ...]
    notes: list[str]


def folder_images(data: ImageFolder) -> LabeledFiles:
    """The images of the test folder, else of the validation folder, else all; one class is enough."""
    root = expand_user(data.path)
    while inner := only_folder(root):
        root = inner
    held_out = split_folders(root)
    test, notes = held_out.get("test") or held_out.get("validation") or root, list[str]()
    classes, files = used_folders(test, folders(test), notes)
    title = data.path if test == root else f"the {test.name} folder of {data.path}"
    return LabeledFiles(title, test, files, classes, notes)


def table_images(data: ImageTable, trained_on: ImageColumns) -> LabeledFiles:
    """The images of the test table, else of the rows of the test split, else all."""
    reader, title = ImageTableReader(data, trained_on), data.test or data.path
    rows = list(reader.read(title))
    last = "" if data.test else split_for_testing({row[2] for row in rows})
    if last:
        rows, title = [row for row in rows if row[2] == last], f"the test split of {title}"
    classes = tuple(sorted({label for _, label, _ in rows}, key=label_order))
    files = [LabeledFile(file, classes.index(label)) for file, label, _ in rows]
    return LabeledFiles(title, data.root(), files, classes, reader.notes)


def fit(images: Tensor, size: tuple[int, int], crop_pct: float, channels: int) -> Tensor:
    """Preprocess images in memory for the model: resize, center-crop, convert channels; uint8, b c h w."""
    height, width = images.shape[2:]
    if (height, width) != size:
        scale = max(size[0] / height, size[1] / width) / crop_pct
        resized = max(round(height * scale), size[0]), max(round(width * scale), size[1])
        large = F.interpolate(images.float(), resized, mode="bicubic", antialias=True)
        top, left = ((whole - part) // 2 for whole, part in zip(resized, size, strict=True))
        images = large[:, :, top : top + size[0], left : left + size[1]].round().clamp(0, 255).byte()
    if channels == 3:
        return images.expand(-1, 3, -1, -1)
    return images if images.shape[1] == 1 else images.float().mean(1, keepdim=True).round().byte()


def text_inputs(data: Data, place: str, trained_on: TextPreprocessing) -> LabeledInputs:
    """The test split of labeled texts, or all texts of data without splits; tables are read by the columns that the
    model was `trained_on` if they have them.
    """
    if not isinstance(data, LabeledText):
        raise UserError(
            f"the model classifies texts, but {place} is neither a table of texts with labels nor a folder of text "
            "files per class"
        )
    reader, title = LabeledTextReader(data, trained_on.text_columns, trained_on.label_column), place
    rows = reader.read(data.test or data.path)
    last = "" if data.test else split_for_testing({row.split for row in rows})
    if data.test or last:
        title = f"the test split of {place}"
    rows = [row for row in rows if row.split == last] if last else rows
    if not rows:
        raise UserError(f"{place} has no labeled texts")
    class_names = tuple(sorted({row.label for row in rows}, key=label_order))
    numbers = {name: number for number, name in enumerate(class_names)}
    labels = torch.tensor([numbers[row.label] for row in rows])
    notes = tuple(reader.notes())
    return LabeledInputs(title, class_names, labels, lambda indices: [rows[i][:2] for i in indices], notes=notes)
