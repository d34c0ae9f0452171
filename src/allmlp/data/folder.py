"""A folder of pictures, one folder for each class."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from allmlp.data.decode import SUFFIXES, BrokenImage, Decode
from allmlp.data.encoded import Encoded, Workers
from allmlp.data.source import Data, Dataset
from allmlp.errors import UserError, did_you_mean, one_line
from allmlp.spec import Rate, Size

TESTS = ("val", "valid", "validation", "test")


class ImageFolder(Data):
    """PATH/train/CLASS/... and PATH/val/CLASS/... (or valid, validation, test), or PATH/CLASS/... alone.

    Where there is no folder to test on, the hash of its name decides whether a picture belongs to the `held` share,
    so that it stays on its side when others are added. `test` names another folder to test on.
    """

    path: str
    image: Size = (224, 224)
    test: str = ""
    held: Rate = 0.1
    decode: Decode = Decode()
    workers: Workers = 0

    def open(self) -> Dataset:
        root = Path(self.path).expanduser()
        if not root.is_dir():
            raise UserError(f"{root} is not a folder: --set data.path=FOLDER says where the pictures are")
        train = root / "train"
        train = train if train.is_dir() and folders(train) else root  # "train" may be a class, full of locomotives
        names = (self.test,) if self.test else TESTS if train != root else ()
        test = next((root / name for name in names if (root / name).is_dir()), None)
        if self.test and test is None:
            raise UserError(f"{root} has no folder {self.test!r} to test on{did_you_mean(self.test, folders(root))}")
        classes = tuple(name for name in folders(train) if train / name != test)
        if not classes:
            raise UserError(f"{train} has no folders: it needs one for each class, with its pictures inside")
        if len(classes) == 1:
            raise UserError(f"{train} has one class, {classes[0]!r}: there is nothing to tell apart")
        listed = pictures(train, classes)
        if test is not None:
            for name in folders(test):
                if name not in classes:
                    raise UserError(f"{test / name}: class {name!r} is not in {train}{did_you_mean(name, classes)}")
            seen, unseen = listed, pictures(test, classes)
        else:
            seen, unseen = divide(listed, self.held)
        for place, part in ((train, seen), (test or train, unseen)):
            if not part:
                raise UserError(f"{place} has no pictures ({', '.join(sorted(SUFFIXES))})")
        empty = set(range(len(classes))) - {label for _, label in seen}
        if empty:
            raise UserError(f"{train / classes[min(empty)]} has no pictures to train on: add some or remove the folder")
        mean, std = self.decode.statistics()
        return Dataset(self.split(train, seen), self.split(test or train, unseen), classes, mean, std, self.decode.crop)

    def split(self, root: Path, listed: list[tuple[str, int]]) -> Files:
        return Files(root, listed, self.image, self.decode, self.workers)


class Files(Encoded):
    """Pictures that are files below one folder."""

    def __init__(
        self, root: Path, listed: list[tuple[str, int]], image: tuple[int, int], decode: Decode, workers: int = 0
    ) -> None:
        super().__init__(torch.tensor([label for _, label in listed], dtype=torch.int64), image, decode, workers)
        self.root, self.files = root, [file for file, _ in listed]

    def read(self, index: int) -> bytes:
        try:
            return Path(self.name(index)).read_bytes()
        except OSError as reason:
            raise BrokenImage(f"cannot be read ({reason.strerror or one_line(reason)})") from reason

    def name(self, index: int) -> str:
        return os.path.join(self.root, self.files[index])


def folders(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as reason:
        raise UserError(f"cannot read {path}: {one_line(reason)}") from None


def pictures(root: Path, classes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Every picture below the class folders, its path from `root` and its label, in the order of their names."""
    found = []

    def refuse(reason: OSError) -> None:
        raise UserError(f"cannot read {reason.filename}: {one_line(reason)}")

    for label, name in enumerate(classes):
        for place, inner, files in os.walk(root / name, onerror=refuse if (root / name).exists() else None):
            inner[:] = sorted(folder for folder in inner if not folder.startswith("."))
            below = Path(place).relative_to(root).as_posix()
            for file in sorted(files):
                if not file.startswith(".") and os.path.splitext(file)[1].lower() in SUFFIXES:
                    found.append((f"{below}/{file}", label))
    return found


def divide(listed: list[tuple[str, int]], share: float) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Two lists, the second of about `share` of the pictures and of one at least."""
    places = [int.from_bytes(hashlib.sha256(os.fsencode(file)).digest()[:8], "big") / 2**64 for file, _ in listed]
    least = min(places, default=0.0)
    kept = [entry for entry, place in zip(listed, places) if place >= share and place > least]
    return kept, [entry for entry, place in zip(listed, places) if place < share or place == least]
