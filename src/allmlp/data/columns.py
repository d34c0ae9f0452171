"""Detection of the text, image, label and split columns of a table, by name, else by content."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from allmlp.data.decode import SUFFIXES
from allmlp.data.frequency import is_time
from allmlp.data.tables import COMPARED_CELLS, Table, TableRow, is_number
from allmlp.errors import UserError, did_you_mean

TEXT_COLUMNS = (
    *("sentence1", "sentence_a", "premise", "question1", "text1", "text_a", "question", "sentence", "text", "review"),
    *("comment", "tweet", "message", "content", "body", "document"),
)
TEXT_PAIR_COLUMNS = (
    *("sentence2", "sentence_b", "hypothesis", "question2", "text2", "text_b", "text_pair", "passage", "sentence"),
)
LABEL_COLUMNS = (
    *("gold_label", "label", "labels", "entailment", "entailment_label", "entailment_judgment", "quality", "class"),
    *("class_name", "category", "sentiment", "target"),
)
IMAGE_COLUMNS = ("image", "image_path", "img", "file", "filename", "file_name", "filepath", "file_path", "path")
SPLIT_COLUMNS = ("split", "subset", "partition", "set", "semeval_set")
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "trial"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Names of splits in folders and tables -> our names."""
SPLITS = ("train", "validation", "test")


class HasSplit(Protocol):
    @property
    def split(self) -> str: ...


Row = TypeVar("Row", bound=HasSplit)
SAMPLE_ROWS = 2000
"""Rows that are read to guess what a column holds."""
NO_LABEL = ("", "-", "nan", "NaN")
"""Labels of rows that have none; "-" where annotators did not agree (MNLI), "nan" as written by numpy and pandas."""
MAX_SCATTER = 20
"""More different labels than this, and than half of the rows, are not classes."""


class ColumnSample(NamedTuple):
    """The first values of a column that are not empty."""

    name: str
    values: list[str]

    @property
    def distinct(self) -> int:
        return len(set(self.values))

    @property
    def mean_length(self) -> float:
        return sum(map(len, self.values)) / max(len(self.values), 1)

    @property
    def is_numeric(self) -> bool:
        return bool(self.values) and all(map(is_number, self.values))

    @property
    def is_text(self) -> bool:
        """Most values are different, and have more than one word, or letters of scripts that may not divide words."""
        several = sum(
            (" " in value.strip() and any(map(str.isalpha, value))) or not value.isascii() for value in self.values
        )
        return not self.is_numeric and 2 * several > len(self.values) and 2 * self.distinct > len(self.values)

    @property
    def is_image(self) -> bool:
        """All values are names of image files."""
        return bool(self.values) and all(is_image_name(value) for value in self.values)

    @property
    def is_label(self) -> bool:
        """Few different values, each more than once on average, and none of them long."""
        few = 2 <= self.distinct <= max(len(self.values) // 2, 2)
        return few and not self.is_text and not self.is_image and max(map(len, self.values)) <= 100

    @property
    def split_share(self) -> float:
        """Fraction of the values that are names of splits."""
        return sum(value.strip().casefold() in SPLIT_NAMES for value in self.values) / max(len(self.values), 1)


def is_image_name(value: str) -> bool:
    return os.path.splitext(value)[1].lower() in SUFFIXES


def sample_columns(table: Table) -> list[ColumnSample]:
    rows = list(islice(table, SAMPLE_ROWS))
    return [ColumnSample(name, [row[name] for row in rows if row[name].strip()]) for name in table.columns]


def named_column(
    columns: Sequence[str],
    requested: str,
    common_names: Iterable[str],
    file: str,
    taken: Sequence[str | None] = (),
    trained_on: str = "",
) -> str | None:
    """The `requested` column, else that of the training data, else the first of the `common_names`, ignoring case, that
    is not taken; or None.
    """
    if requested:
        if requested not in columns:
            hint = did_you_mean(requested, columns) or f", only {', '.join(columns)}"
            raise UserError(f"{file} has no column {requested!r}{hint}")
        return requested
    if trained_on in columns and trained_on not in taken:
        return trained_on
    folded = {name.casefold().replace(" ", "_"): name for name in reversed(columns) if name not in taken}
    return next((folded[name] for name in common_names if name in folded), None)


def guess_label(samples: Sequence[ColumnSample], table: Table) -> str:
    """The only column that can be the label; dates only if there is no other."""
    usable = [sample for sample in samples if sample.is_label and sample.split_share < 1]
    candidates = [sample.name for sample in usable if not all(map(is_time, sample.values[:COMPARED_CELLS]))]
    candidates = candidates or [sample.name for sample in usable]
    if len(candidates) != 1:
        named = ", ".join(candidates or table.columns)
        which = f"{named} all could be" if candidates else f"none of {named} is known or could be"
        raise UserError(f"{table.file}: {which} the label: set data.label_column")
    return candidates[0]


def guess_texts(samples: Sequence[ColumnSample], most: int, table: Table, option: str) -> list[str]:
    """The text columns, at least one and at most `most`; if none looks like text, the one with the longest values."""
    words = [sample for sample in samples if sample.values and not sample.is_numeric]
    longest = sorted(words, key=lambda sample: -sample.mean_length)[:1]
    candidates = [sample.name for sample in [sample for sample in words if sample.is_text] or longest]
    if not 0 < len(candidates) <= most:
        which = (
            f"{', '.join(candidates)} all could be" if candidates else f"none of {', '.join(table.columns)} is known as"
        )
        raise UserError(f"{table.file}: {which} the text: set {option}")
    return candidates


def find_split(samples: Sequence[ColumnSample]) -> str:
    """The column that assigns rows to splits; empty if there is none. Values that name no split are reported later."""
    named = (sample for sample in samples if sample.name.casefold() in SPLIT_COLUMNS)
    return next((sample.name for sample in named if sample.split_share > 0.5), "")


def split_of_row(row: TableRow, column: str, file: str) -> str:
    """The split of a row: "train", "validation" or "test"; empty if the cell is, or if there is no such column."""
    name = row.get(column, "").strip()
    if name and name.casefold() not in SPLIT_NAMES:
        raise UserError(
            f"{file}: the column {column!r} has {name[:40]!r}, which names no split: leave such rows out, or call them "
            "train, val or test"
        )
    return SPLIT_NAMES[name.casefold()] if name else ""


def split_for_testing(splits: Collection[str]) -> str:
    """The split to test on: "test", else "validation"; empty if there is neither."""
    return next((name for name in ("test", "validation") if name in splits), "")


def split_rows(rows: list[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows for training, validation and testing as a table assigns them; if it has only one of validation and test,
    that is the test split. All are for training unless some are for training and some for testing.
    """
    train, validation, test = ([row for row in rows if (row.split or "train") == name] for name in SPLITS)
    if not train or not (validation or test):
        return rows, [], []
    return (train, validation, test) if test else (train, [], validation)


def check_classes(labels: Sequence[str], column: str, source: str, notes: Sequence[str] = ()) -> None:
    """Raise UserError unless the labels are classes: more than one, and not different in almost every row. `notes` may
    explain a missing class.
    """
    distinct = len(set(labels))
    if distinct == 1:
        why = "".join(f" ({note})" for note in notes)
        raise UserError(f"{source} has only one class, {labels[0]!r}{why}: at least two are needed")
    numbers = all(map(is_number, set(labels))) and not all(float(label).is_integer() for label in set(labels))
    if distinct > MAX_SCATTER and (numbers or 2 * distinct > len(labels)):
        raise UserError(
            f"{source}: column {column!r} has {distinct:,} different values in {len(labels):,} rows, so they are not "
            f"classes{' (scores cannot be learned)' if numbers else ''}: set data.label_column"
        )


def guess_note(roles: dict[str, str]) -> str:
    """A note on the detected columns, field=column, and how to change them."""
    taken = ", ".join(f"{field}={column}" for field, column in roles.items())
    return f"columns found by their content: {taken} (set data.{next(iter(roles))} to change this)"


def label_order(label: str) -> tuple[bool, float, str]:
    """Sort key: numbers in numeric order, then other labels; "nan" is not a number."""
    try:
        number = float(label)
    except ValueError:
        number = math.nan
    return (True, 0.0, label) if math.isnan(number) else (False, number, label)
