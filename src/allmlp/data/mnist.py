"""MNIST and Fashion-MNIST in idx files, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from allmlp.data.dataset import Data, ImageDataset, InMemory
from allmlp.data.paths import join_paths, search_paths
from allmlp.errors import UserError, one_line

CLASS_NAMES = {
    "mnist": tuple("0123456789"),
    "fashion": ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
}
TORCHVISION_FOLDERS = {"mnist": "MNIST", "fashion": "FashionMNIST"}
STATISTICS = {"mnist": (0.1307, 0.3081), "fashion": (0.2860, 0.3530)}
MAX_BYTES = 2**32


class Mnist(Data):
    """Gray images in four idx files: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-..., also with .gz.

    Without `path`, $ALLMLP_DATA/mnist or $ALLMLP_DATA/fashion is searched, depending on `variant`; also folders of
    torchvision, MNIST/raw or FashionMNIST/raw.
    """

    path: str = ""
    variant: Literal["mnist", "fashion"] = "mnist"

    def load(self) -> ImageDataset:
        folders, below = search_paths(self.path, self.variant), ("", "raw", f"{TORCHVISION_FOLDERS[self.variant]}/raw")
        class_names, (mean, std) = CLASS_NAMES[self.variant], STATISTICS[self.variant]
        train, test = (read_split(folders, below, part, len(class_names)) for part in ("train", "t10k"))
        return ImageDataset(train, test, class_names, (mean,), (std,))


def read_split(folders: list[Path], below: tuple[str, ...], part: str, num_classes: int) -> InMemory:
    image_file, label_file = find(folders, below, f"{part}-images", 3), find(folders, below, f"{part}-labels", 1)
    images, labels = read(image_file, 3), read(label_file, 1)
    if len(images) != len(labels):
        raise UserError(f"{image_file} has {len(images):,} images, {label_file} has {len(labels):,} labels")
    if labels.max() >= num_classes:
        raise UserError(
            f"{label_file} has the label {labels.max()}; the largest of {num_classes} classes is {num_classes - 1}"
        )
    return InMemory(torch.from_numpy(images)[:, None], torch.from_numpy(labels.astype(np.int64)))


def find(folders: list[Path], below: tuple[str, ...], stem: str, dimensions: int) -> Path:
    names = [f"{stem}{dot}idx{dimensions}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    places = (folder / inner / name for folder in folders for inner in below for name in names)
    if file := next(filter(Path.is_file, places), None):
        return file
    raise UserError(f"no {names[0]} or {names[1]} in {join_paths(folders)}: set data.path to the folder that has it")


def read(file: Path, dimensions: int) -> np.ndarray:
    """Read an array of bytes; the file must have exactly the size in its header."""
    start = 4 + 4 * dimensions
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as source:
            header = source.read(start)
            if len(header) < start or header[:4] != bytes((0, 0, 8, dimensions)):
                raise UserError(f"{file} is not an idx file of bytes in {dimensions} dimensions")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            size = math.prod(shape)
            if not 0 < size <= MAX_BYTES:
                raise UserError(f"{file} claims {' x '.join(map(str, shape))} bytes")
            content = source.read(size + 1)
    except (OSError, EOFError, zlib.error) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}; download it again") from None
    if len(content) != size:
        actual = f"only {len(content):,}" if len(content) < size else "more"
        raise UserError(f"{file} should have {size:,} bytes and has {actual}; download it again")
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)
