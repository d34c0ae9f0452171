"""MNIST and Fashion-MNIST: idx files, plain or compressed."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from allmlp.data.places import name_places, places
from allmlp.data.source import Data, Dataset, Resident
from allmlp.errors import UserError, one_line

CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion": ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
}
STATISTICS = {"mnist": (0.1307, 0.3081), "fashion": (0.2860, 0.3530)}
LARGEST = 2**32


class Idx(Data):
    """Grey pictures in four idx files: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-..., each may end in .gz.

    Without a `path` they are looked for in $ALLMLP_DATA/mnist or $ALLMLP_DATA/fashion (`names` decides).
    """

    path: str = ""
    names: Literal["mnist", "fashion"] = "mnist"

    def open(self) -> Dataset:
        searched = places(self.path, self.names)
        classes, (mean, std) = CLASSES[self.names], STATISTICS[self.names]
        train, test = (read_split(searched, part, len(classes)) for part in ("train", "t10k"))
        return Dataset(train, test, classes, (mean,), (std,))


def read_split(searched: list[Path], part: str, classes: int) -> Resident:
    image_file, label_file = find(searched, f"{part}-images", 3), find(searched, f"{part}-labels", 1)
    images, labels = read(image_file, 3), read(label_file, 1)
    if len(images) != len(labels):
        raise UserError(f"{image_file} holds {len(images):,} pictures, {label_file} {len(labels):,} labels")
    if labels.max() >= classes:
        raise UserError(
            f"{label_file} holds the label {labels.max()}; the largest of {classes} classes is {classes - 1}"
        )
    return Resident(torch.from_numpy(images)[:, None], torch.from_numpy(labels.astype(np.int64)))


def find(searched: list[Path], stem: str, dimensions: int) -> Path:
    names = [f"{stem}{dot}idx{dimensions}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    for folder in searched:
        for inner in ("", "raw", "MNIST/raw", "FashionMNIST/raw"):
            for name in names:
                if (folder / inner / name).is_file():
                    return folder / inner / name
    raise UserError(f"no {names[0]} or {names[1]} in {name_places(searched)}: set path to the folder that has it")


def read(file: Path, dimensions: int) -> np.ndarray:
    """An array of bytes; what the header announces must be there, no more and no less."""
    start = 4 + 4 * dimensions
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as source:
            header = source.read(start)
            if len(header) < start or header[:4] != bytes((0, 0, 8, dimensions)):
                raise UserError(f"{file} is not an idx file of bytes in {dimensions} dimensions")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            size = math.prod(shape)
            if not 0 < size <= LARGEST:
                raise UserError(f"{file} announces {' x '.join(map(str, shape))} bytes")
            content = source.read(size + 1)
    except (OSError, EOFError, zlib.error) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}; fetch it again") from None
    if len(content) != size:
        found = f"only {len(content):,}" if len(content) < size else "more"
        raise UserError(f"{file} announces {size:,} bytes and holds {found}; fetch it again")
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)
