"""A folder of images with one subfolder per class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from allmlp.data.dataset import Data, ImageDataset
from allmlp.data.decode import SUFFIXES, CorruptImage, Decode
from allmlp.data.encoded_images import EncodedImages, NumWorkers
from allmlp.errors import UserError, did_you_mean, one_line
from allmlp.spec import Rate, Size

TEST_FOLDERS = ("val", "valid", "validation", "test")


class ImageFolder(Data):
    """PATH/train/CLASS/... and PATH/val/CLASS/... (or valid, validation, test), or PATH/CLASS/... alone.

    Without a test folder, the hash of its name decides whether an image belongs to the `test_fraction`, so that it
    stays in its split when others are added. `test` is the name of another test folder.
    """

    path: str
    img_size: Size = (224, 224)
    test: str = ""
    test_fraction: Rate = 0.1
    decode: Decode = Decode()
    num_workers: NumWorkers = 0

    def load(self) -> ImageDataset:
        root = Path(self.path).expanduser()
        if not root.is_dir():
            raise UserError(f"{root} is not a folder: set data.path to the folder of images")
        train = root / "train"
        train = train if train.is_dir() and folders(train) else root  # "train" may be the name of a class
        names = (self.test,) if self.test else TEST_FOLDERS if train != root else ()
        test = next((root / name for name in names if (root / name).is_dir()), None)
        if self.test and test is None:
            raise UserError(f"{root} has no test folder {self.test!r}{did_you_mean(self.test, folders(root))}")
        classes = tuple(name for name in folders(train) if train / name != test)
        if not classes:
            raise UserError(f"{train} has no subfolders: it needs one per class")
        if len(classes) == 1:
            raise UserError(f"{train} has only one class, {classes[0]!r}: at least two are needed")
        listed = list_images(train, classes)
        if test is not None:
            for name in folders(test):
                if name not in classes:
                    raise UserError(f"{test / name}: class {name!r} is not in {train}{did_you_mean(name, classes)}")
            train_files, test_files = listed, list_images(test, classes)
        else:
            train_files, test_files = split_by_hash(listed, self.test_fraction)
        for folder, part in ((train, train_files), (test or train, test_files)):
            if not part:
                raise UserError(f"{folder} has no images ({', '.join(sorted(SUFFIXES))})")
        empty = set(range(len(classes))) - {label for _, label in train_files}
        if empty:
            raise UserError(f"{train / classes[min(empty)]} has no training images: add some or remove the folder")
        mean, std = self.decode.statistics()
        return ImageDataset(
            self.split(train, train_files),
            self.split(test or train, test_files),
            classes,
            mean,
            std,
            self.decode.crop_pct,
        )

    def split(self, root: Path, listed: list[tuple[str, int]]) -> ImageFiles:
        return ImageFiles(root, listed, self.img_size, self.decode, self.num_workers)


class ImageFiles(EncodedImages):
    """Image files under one folder."""

    def __init__(
        self, root: Path, listed: list[tuple[str, int]], img_size: tuple[int, int], decode: Decode, num_workers: int = 0
    ) -> None:
        super().__init__(torch.tensor([label for _, label in listed], dtype=torch.int64), img_size, decode, num_workers)
        self.root, self.files = root, [file for file, _ in listed]

    def read(self, index: int) -> bytes:
        try:
            return Path(self.name(index)).read_bytes()
        except OSError as reason:
            raise CorruptImage(f"cannot be read ({reason.strerror or one_line(reason)})") from reason

    def name(self, index: int) -> str:
        return os.path.join(self.root, self.files[index])

    def content(self) -> Iterator[Any]:
        yield os.fsencode("\n".join(self.files))
        yield from super().content()


def folders(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as reason:
        raise UserError(f"cannot read {path}: {one_line(reason)}") from None


def list_images(root: Path, classes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Path relative to `root` and label of every image in the class folders, sorted by name."""
    found = []

    def refuse(reason: OSError) -> None:
        raise UserError(f"cannot read {reason.filename}: {one_line(reason)}")

    for label, name in enumerate(classes):
        for folder, inner, files in os.walk(root / name, onerror=refuse if (root / name).exists() else None):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            below = Path(folder).relative_to(root).as_posix()
            for file in sorted(files):
                if not file.startswith(".") and os.path.splitext(file)[1].lower() in SUFFIXES:
                    found.append((f"{below}/{file}", label))
    return found


def split_by_hash(
    listed: list[tuple[str, int]], fraction: float
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Split by a hash of the file name; the second list has about `fraction` of the images, and at least one."""
    hashes = [int.from_bytes(hashlib.sha256(os.fsencode(file)).digest()[:8], "big") / 2**64 for file, _ in listed]
    least = min(hashes, default=0.0)
    kept = [entry for entry, value in zip(listed, hashes) if value >= fraction and value > least]
    return kept, [entry for entry, value in zip(listed, hashes) if value < fraction or value == least]
