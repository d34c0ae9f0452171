"""Labeled image files: readability, groups of related files, and splits."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from allmlp.data.dataset import Data, ImageDataset
from allmlp.data.decode import CorruptImage, Decode, open_image
from allmlp.data.encoded_images import EncodedImages, NumWorkers, check_corrupt, image_dataset
from allmlp.data.splits import (
    group_by_keys,
    listing,
    missing_fractions,
    overlap_notes,
    similar_class_note,
    single_example_note,
    split_by_group,
    untested_note,
)
from allmlp.errors import UserError, one_line, plural
from allmlp.files import read_regular
from allmlp.spec import Rate, Seed, Size
from allmlp.threads import limit

MAX_INSPECTED = 100_000
"""With more files than this, none is opened or compared before training."""
MANY_GROUPS, LARGEST_SHARE = 5, 1 / 3
FEW_GROUPS, SMALL_GROUP = 3, 5
LAST_PART = re.compile(r"[ _.\-]*[(\[]?[^ _.\-()\[\]]+[)\]]?$")
"""_a, -2 or (3) at the end of a name."""

T = TypeVar("T")


class LabeledFile(NamedTuple):
    file: str
    """Relative to the folder of its split."""
    label: int


class FileSplit(NamedTuple):
    """The files of a split, and the folder they are in."""

    root: Path
    files: list[LabeledFile]

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.files[index].file)

    def take(self, indices: list[int]) -> FileSplit:
        return self._replace(files=[self.files[index] for index in indices])


class ImageFileData(Data, abstract=True):
    """Image files with labels.

    If the data have no test split, `test_fraction` of every class is held out for it, and `val_fraction` (by default
    the same) for validation; if they have, `val_fraction` is 0 by default. Files with the same content are in the same
    split. So are files that belong together by name (cat_001_a.jpg and cat_001_b.jpg), unless `group_by_name` is false.
    Another `split_seed` gives other splits.
    """

    path: str
    img_size: Size = (224, 224)
    test: str = ""
    val: str = ""
    test_fraction: Rate = 0.15
    val_fraction: Rate | None = None
    split_seed: Seed = 0
    group_by_name: bool = True
    decode: Decode = Decode()
    num_workers: NumWorkers = 0

    def build(self, splits: dict[str, FileSplit], classes: tuple[str, ...], notes: list[str]) -> ImageDataset:
        """Build the dataset from the splits "train", "validation" and "test"; the last two are created if missing."""
        notes = [*notes, *similar_class_note(classes)]
        for name, split in splits.items():
            if not split.files:
                raise UserError(f"{split.root} has no {name} images")
        if sum(len(split.files) for split in splits.values()) <= MAX_INSPECTED:
            splits = {name: self.leave_out_corrupt(split, notes) for name, split in splits.items()}
            contents = content_keys(splits)
            notes += duplicate_notes(splits, contents, classes)
        else:
            contents = {name: [str(number) for number in range(len(split.files))] for name, split in splits.items()}
        empty = set(range(len(classes))) - {label for _, label in splits["train"].files}
        if empty:
            raise UserError(f"class {classes[min(empty)]!r} has no training images: add some or remove it")
        given = [name for name in splits if name != "train"]
        if fractions := missing_fractions(self, splits):
            splits |= self.make_splits(splits["train"], contents["train"], fractions, notes)
            if not given:
                labels = [classes[label] for split in splits.values() for _, label in split.files]
                notes += single_example_note(labels)
                notes += untested_note(labels, {classes[label] for _, label in splits["test"].files})
        images = {
            name: ImageFiles(split.root, split.files, self.img_size, self.decode, self.num_workers)
            for name, split in splits.items()
        }
        return image_dataset((images["train"], images.get("validation"), images["test"]), classes, self.decode, notes)

    def leave_out_corrupt(self, split: FileSplit, notes: list[str]) -> FileSplit:
        """Leave out files whose header cannot be read; pixels are only checked when they are decoded."""
        reasons = map_files(lambda file: header_fault(file, self.decode), split)
        corrupt = [index for index, reason in enumerate(reasons) if reason]
        if corrupt:
            check_corrupt(self.decode, split.path(corrupt[0]), reasons[corrupt[0]], len(corrupt), len(split.files))
            if len(corrupt) == len(split.files):
                raise UserError(f"no image in {split.root} can be read, such as {split.path(0)}: {reasons[0]}")
            named = [f"{split.path(index)} ({reasons[index]})" for index in corrupt]
            notes.append(f"skipped {plural(len(corrupt), 'file')} that cannot be read: {listing(named)}")
        return split.take([index for index, reason in enumerate(reasons) if not reason])

    def make_splits(
        self, whole: FileSplit, contents: list[str], fractions: tuple[float, float | None], notes: list[str]
    ) -> dict[str, FileSplit]:
        stems = name_groups(whole.files) if self.group_by_name else [file for file, _ in whole.files]
        sizes = Counter(stems)
        together = [stem for stem, size in sizes.items() if size > 1]
        if together:
            notes.append(
                f"{plural(len(together), 'group')} of files by their names, such as {together[0]} "
                f"({sizes[together[0]]} files), are kept in one split (--set data.group_by_name=false turns this off)"
            )
        keys: list[tuple[Hashable, Hashable]] = [(("name", stem), content) for stem, content in zip(stems, contents)]
        files, labels = [file for file, _ in whole.files], [label for _, label in whole.files]
        indices_of = split_by_group(labels, group_by_keys(keys), files, *fractions, self.split_seed)
        notes.append(indices_of.note(self.split_seed))
        return {name: whole.take(indices) for name, indices in indices_of._asdict().items() if indices}


def map_files(function: Callable[[Path], T], split: FileSplit) -> list[T]:
    with ThreadPoolExecutor(limit()) as pool:
        return list(pool.map(lambda index: function(Path(split.path(index))), range(len(split.files))))


def header_fault(file: Path, decode: Decode) -> str:
    """Reason why the header of an image cannot be read; empty if it can."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if not status.st_size:
            return "the file is empty"
        with open_image(file, decode):
            return ""
    except CorruptImage as reason:
        return str(reason)
    except OSError as reason:
        return reason.strerror or one_line(reason)


def content_keys(splits: dict[str, FileSplit]) -> dict[str, list[str]]:
    """A key for each file that is equal for files with the same content. Only files of equal size are read."""
    sizes = {name: map_files(lambda file: file.stat().st_size, split) for name, split in splits.items()}
    shared = Counter(size for split_sizes in sizes.values() for size in split_sizes)

    def key(file: Path) -> str:
        if shared[file.stat().st_size] == 1:
            return str(file)
        with open(file, "rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest()

    return {name: map_files(key, split) for name, split in splits.items()}


def duplicate_notes(
    splits: dict[str, FileSplit], contents: dict[str, list[str]], classes: tuple[str, ...]
) -> list[str]:
    """Notes about files that occur in two splits, in two classes, or twice in one class."""
    others = {name: keys for name, keys in contents.items() if name != "train"}
    notes = overlap_notes(contents["train"], others, "images")
    first: dict[str, LabeledFile] = {}
    repeated, conflicts = 0, list[str]()
    for entry, key in zip(splits["train"].files, contents["train"]):
        same = first.setdefault(key, entry)
        repeated += same != entry
        if same.label != entry.label:
            conflicts.append(f"{same.file} = {entry.file}")
    if repeated:
        notes.append(f"{plural(repeated, 'training image is a copy', 'training images are copies')} of another")
    if conflicts:
        notes.append(f"{plural(len(conflicts), 'image is', 'images are')} in two classes: {listing(conflicts)}")
    return notes


def name_groups(files: list[LabeledFile]) -> list[str]:
    """Group name of each file: the name shared with related files of its class, else its own.

    The names of a group are equal up to the last part, and the equal part contains a digit. If this gives few or large
    groups in a class, its files are not grouped.
    """
    groups: dict[int, dict[str, list[int]]] = {}
    for index, (file, label) in enumerate(files):
        folder, name = os.path.split(os.path.splitext(file)[0])
        head = LAST_PART.sub("", name)
        shared = head if any(map(str.isdigit, head)) else name
        groups.setdefault(label, {}).setdefault(os.path.join(folder, shared), []).append(index)
    stems = [file for file, _ in files]
    for by_stem in groups.values():
        count, largest = sum(map(len, by_stem.values())), max(map(len, by_stem.values()))
        if (len(by_stem) >= MANY_GROUPS and largest <= LARGEST_SHARE * count) or (
            len(by_stem) >= FEW_GROUPS and largest <= SMALL_GROUP
        ):
            for stem, indices in by_stem.items():
                for index in indices:
                    stems[index] = stem
    return stems


class ImageFiles(EncodedImages):
    """Image files under one folder."""

    def __init__(
        self, root: Path, listed: list[LabeledFile], img_size: tuple[int, int], decode: Decode, num_workers: int = 0
    ) -> None:
        super().__init__(torch.tensor([label for _, label in listed], dtype=torch.int64), img_size, decode, num_workers)
        self.root, self.files = root, FileNames(file for file, _ in listed)

    def read(self, index: int) -> bytes:
        try:
            return read_regular(self.name(index))
        except OSError as reason:
            raise CorruptImage(f"cannot be read ({reason.strerror or one_line(reason)})") from reason

    def name(self, index: int) -> str:
        return os.path.join(self.root, self.files[index])

    def content(self) -> Iterator[Any]:
        yield os.fsencode("\n".join(self.files))
        yield from super().content()


class FileNames:
    """Names in one buffer, whose memory forked processes share; that of strings they copy, with reference counts."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [*map(os.fsencode, names)]
        self.ends, self.buffer = np.cumsum([0, *map(len, encoded)]), b"".join(encoded)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.buffer[self.ends[index] : self.ends[index + 1]])
