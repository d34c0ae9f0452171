"""A folder of text files with one subfolder per class, as a table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from allmlp.data.columns import SPLIT_NAMES
from allmlp.data.image_folder import UNLABELED_FOLDERS, folders, only_folder, split_folders
from allmlp.data.splits import listing
from allmlp.data.tables import COMPRESSED, Table, TableRow
from allmlp.data.text_files import ABOUT_DATA, REPLACED, read_documents
from allmlp.errors import UserError, one_line, plural

CLASS_SUFFIXES = (".txt", *(f".txt{suffix}" for suffix in COMPRESSED))
MAX_STRAY = 0.1
"""Fraction of the text files that may be outside of class folders, in a folder without splits."""
MIN_TEXTS = 2
"""Texts per class, on average."""


class ClassFolder(NamedTuple):
    folder: Path
    split: str
    files: list[str]


class TextFolder:
    """PATH/CLASS/*.txt, or PATH/train/CLASS/*.txt with PATH/val/CLASS/*.txt or PATH/test/CLASS/*.txt or both.

    Every file is one text. The names of the split folders are those of `ImageFolder`. Text files outside of class
    folders, and in folders called unlabeled or unsup, are left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = root = path
        self.not_utf8 = set[str]()
        """Files that have been read and are not UTF-8."""
        while inner := only_folder(root):
            root = inner
        splits = split_folders(root)
        self.classes = [
            ClassFolder(place / name, split, files)
            for split, place in (splits or {"": root}).items()
            for name in folders(place)
            if name.casefold() not in UNLABELED_FOLDERS and (files := text_files(place / name))
        ]

    @cached_property
    def strays(self) -> list[str]:
        """Text files that are not in a class folder."""
        used, files = {one.folder for one in self.classes}, list[Path]()
        for place, inner, _ in os.walk(self.path):
            inner[:] = [name for name in inner if not name.startswith(".") and Path(place, name) not in used]
            files += [Path(place, name) for name in text_files(Path(place))]
        return sorted(str(file.relative_to(self.path)) for file in files)

    def has_classes(self) -> bool:
        """Whether the folders seem to be classes, and not parts of a corpus."""
        training = [one for one in self.classes if one.split in ("train", "")]
        count = sum(len(one.files) for one in training)
        if len(training) < 2 or count < MIN_TEXTS * len(training):
            return False
        if any(one.split for one in training):
            return True
        mixed = [name for name in self.strays if Path(name).parent.name.casefold() not in UNLABELED_FOLDERS]
        are_splits = any(one.folder.name.casefold() in SPLIT_NAMES for one in training)
        return not are_splits and len(mixed) <= max(MAX_STRAY * count, 1)

    def table(self) -> Table:
        """A row with text, label and split for each file."""

        def rows() -> Iterator[TableRow]:
            for folder, split, files in self.classes:
                for name in files:
                    text = next(read_documents([str(folder / name)], "document"), "")
                    if REPLACED in text:
                        self.not_utf8.add(str((folder / name).relative_to(self.path)))
                    yield {"text": text, "label": folder.name, "split": split}

        return Table(str(self.path), ("text", "label", "split"), rows)

    def notes(self) -> list[str]:
        labels = sorted({one.folder.name for one in self.classes})
        notes = [
            f"every folder of text files is a class, every file a text: {listing(labels)}; for a language model, name "
            f"the files: '{self.path}/**/*.txt'"
        ]
        if self.strays:
            are = plural(len(self.strays), "text file is", "text files are")
            notes.append(f"{are} outside of class folders and not used: {listing(self.strays)}")
        if self.not_utf8:
            are = plural(len(self.not_utf8), "file is", "files are")
            notes.append(f"{are} not UTF-8, so that letters are missing: {listing(sorted(self.not_utf8))}")
        return notes


def text_files(folder: Path) -> list[str]:
    """Names of the text files directly in a folder, but for README and LICENSE."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_file()]
    except OSError as reason:
        raise UserError(f"cannot read {folder}: {one_line(reason)}") from None
    return sorted(
        entry.name
        for entry in entries
        if entry.name.lower().endswith(CLASS_SUFFIXES)
        and not entry.name.startswith(".")
        and not ABOUT_DATA.fullmatch(entry.name)
    )
