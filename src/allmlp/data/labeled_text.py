"""Labeled texts and pairs of texts in tables (CSV, TSV, JSON lines, Parquet; GLUE's files among them), and in folders
of text files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmlp.data.columns import (
    LABEL_COLUMNS,
    NO_LABEL,
    TEXT_COLUMNS,
    TEXT_PAIR_COLUMNS,
    check_classes,
    find_split,
    guess_label,
    guess_note,
    guess_texts,
    label_order,
    named_column,
    sample_columns,
    split_of_row,
    split_rows,
)
from allmlp.data.dataset import Dataset, InMemory, subset
from allmlp.data.preprocessing import TextPreprocessing
from allmlp.data.splits import (
    group_by_keys,
    missing_fractions,
    overlap_notes,
    similar_class_note,
    single_example_note,
    split_by_group,
    untested_note,
)
from allmlp.data.tables import SEPARATORS, Table, is_table, read_separated, read_table, test_names
from allmlp.data.text_files import find_files, open_text
from allmlp.data.text_folder import TextFolder
from allmlp.data.tokenizer import TextData, Tokenizer, TokenizerConfig
from allmlp.errors import UserError, did_you_mean, plural
from allmlp.files import expand_user
from allmlp.spec import Count, Rate, Seed

UNLABELED = -1
"""Label of unlabeled texts, which have only a teacher's output."""
MANY_LONG = 0.05
"""Fraction of truncated texts above which a note is added."""


class LabeledTextBatch(NamedTuple):
    ids: Tensor
    """int32, b s: [CLS] first [SEP] second [SEP], padded on the right."""
    segments: Tensor
    """int32, b s: 1 in the second text."""
    labels: Tensor
    """int64, b; `UNLABELED` if there is none."""
    test_set: Tensor
    """int64, b: index of the test file."""


@dataclass(frozen=True)
class LabeledTextDataset(Dataset):
    """Labeled texts or pairs of texts."""

    tokenizer: Tokenizer
    seq_len: int
    class_names: tuple[str, ...]
    test_names: tuple[str, ...]
    """Names of the test files."""
    groups: Tensor
    """int64: the group of each labeled training example, see `text_groups`."""
    unlabeled: int = 0
    """Number of training texts without a label; they come last."""
    whole_files: bool = False
    """Whether every text was a file."""
    text_columns: tuple[str, ...] = ()
    """The column of texts, and that of second ones, if they came from a table."""
    label_column: str = ""

    def split_validation(self, examples: int) -> LabeledTextDataset:
        """Hold out whole groups of the labeled texts, at most `examples` texts, so that no text is in both splits."""
        if not examples:
            return self
        sizes = self.groups.bincount().tolist()
        held_out, room = torch.zeros(len(sizes), dtype=torch.bool), examples
        for group in torch.randperm(len(sizes), generator=torch.Generator().manual_seed(0)).tolist():
            if sizes[group] <= room:
                held_out[group], room = True, room - sizes[group]
        chosen = held_out[self.groups]
        if not chosen.any() or chosen.all():
            raise UserError(
                f"cannot hold out {examples} of {len(self.groups)} training examples in {len(sizes)} groups of texts: "
                "change val_size"
            )
        train = torch.cat([~chosen, chosen.new_ones(self.unlabeled)]).nonzero().flatten()
        return replace(
            self,
            train=subset(self.train, train),
            test=subset(self.train, chosen.nonzero().flatten()),
            validation=None,
            groups=self.groups[~chosen],
        )

    def files(self) -> dict[str, str]:
        preprocessing = TextPreprocessing("classes", self.seq_len, self.class_names)
        columns = {"text_columns": self.text_columns, "label_column": self.label_column}
        return self.tokenizer.files(preprocessing.replace(whole_files=self.whole_files, **columns))


class LabeledText(TextData):
    """Tables (`data.tables`) for training (`path`), validation (`val`) and testing (`test`), separated by commas; or
    each of them one folder of text files in folders of classes (`data.text_folder.TextFolder`).

    Columns that are not given are found by their names, as in GLUE, else by their content: the label has few different
    values, the text is the longest, and two columns of text are a pair. Rows without a label are skipped.

    If there is no `test`, a column called split assigns the rows; if it has only one of validation and test, that is
    the test split. Without a test split, `test_fraction` of every class is held out for it, and `val_fraction` (by
    default the same) for validation; with one, `val_fraction` is 0 by default. Equal texts, and pairs that share a
    text, directly or through other pairs, are in the same split. Another `split_seed` gives other splits.

    `unlabeled` files have one text per line, or two separated by a tab, for distillation only. The tokenizer is that of
    `init_from`; without it, one is trained on the texts and kept in `cache`.
    """

    path: str
    test: str = ""
    val: str = ""
    test_fraction: Rate = 0.15
    val_fraction: Rate | None = None
    split_seed: Seed = 0
    text_column: str = ""
    text_pair_column: str = ""
    label_column: str = ""
    tokenizer: TokenizerConfig = TokenizerConfig()
    seq_len: Count = 128
    cache: str = ""
    unlabeled: str = ""

    def load(self) -> LabeledTextDataset:
        reader = LabeledTextReader(self)
        train = reader.read(self.path)
        label_column = reader.columns.label
        tests = [(place, reader.read(place)) for place in (find_places(self.test) if self.test else [])]
        validation = reader.read(self.val) if self.val else []
        extra = [
            row
            for file in (find_files(self.unlabeled) if self.unlabeled else [])
            for row in read_unlabeled(file, any(row.second for row in train))
        ]
        if self.unlabeled and not extra:
            raise UserError(f"{self.unlabeled} has no texts")
        for name, examples in ((self.path, train), *tests, *([(self.val, validation)] if self.val else [])):
            if not examples:
                raise UserError(f"{name} has no labeled texts")
        check_classes([row.label for row in train], label_column, self.path, reader.skipped_notes())
        dataset = self.assemble(train, validation, tests, extra, reader.notes())
        if reader.whole_files:
            return replace(dataset, whole_files=True)
        columns = tuple(filter(None, reader.columns[:2]))
        return replace(dataset, text_columns=columns, label_column=label_column)

    def assemble(
        self,
        train: list[TextExample],
        validation: list[TextExample],
        tests: list[tuple[str, list[TextExample]]],
        unlabeled: list[TextExample],
        notes: list[str],
        classes: tuple[str, ...] = (),
    ) -> LabeledTextDataset:
        """Build the dataset from examples; `tests` are pairs of file name and examples, `classes` the class names."""
        notes = [*notes, *conflict_notes(train)]
        test = [row for _, examples in tests for row in examples]
        if not tests:
            train, held_out, test = split_rows(train)
            validation = validation or held_out
        given = {"validation": [*map(text_key, validation)], "test": [*map(text_key, test)]}
        notes += overlap_notes(map(text_key, train), given, "texts")
        train, validation, test = self.split(train, validation, test, notes)
        tests = tests or [(self.path, test)]
        classes = classes or tuple(sorted({row.label for row in train}, key=label_order))
        notes += similar_class_note(classes)
        for file, examples in (*tests, (self.val or self.path, validation)):
            for row in examples:
                if row.label not in classes:
                    hint = did_you_mean(row.label, classes)
                    raise UserError(f"{file}: unknown label {row.label!r}, which no training text has{hint}")
        tokenizer = self.tokenizer.build_cached([text for row in train for text in row[:2] if text], self.cache)
        encoded = encode([[*train, *unlabeled]], tokenizer, self.seq_len, classes)
        full = int((encoded.examples.ids[:, -1] != tokenizer.pad_token_id).sum())
        if full > MANY_LONG * len(encoded):
            share = f"{full:,} of {len(encoded):,} training texts"
            notes.append(f"{share} fill all {self.seq_len} tokens; longer ones are cut")
        return LabeledTextDataset(
            encoded,
            encode([examples for _, examples in tests], tokenizer, self.seq_len, classes),
            tokenizer,
            self.seq_len,
            classes,
            test_names=test_names([file for file, _ in tests]),
            groups=torch.tensor(text_groups(train)),
            unlabeled=len(unlabeled),
            validation=encode([validation], tokenizer, self.seq_len, classes) if validation else None,
            notes=tuple(notes),
        )

    def split(
        self, train: list[TextExample], validation: list[TextExample], test: list[TextExample], notes: list[str]
    ) -> tuple[list[TextExample], list[TextExample], list[TextExample]]:
        """The three splits; empty ones are taken from the training examples."""
        given = [name for name, rows in (("validation", validation), ("test", test)) if rows]
        fractions = missing_fractions(self, given)
        if fractions is None:
            return train, validation, test
        labels, names = [row.label for row in train], [row.first for row in train]
        notes += single_example_note(labels)
        indices_of = split_by_group(labels, text_groups(train), names, *fractions, self.split_seed)
        notes.append(indices_of.note(self.split_seed))
        notes += [] if test else untested_note(labels, {labels[index] for index in indices_of.test})
        made = [[train[index] for index in indices] for indices in indices_of]
        return made[0], made[1] or validation, made[2] or test


class TextExample(NamedTuple):
    first: str
    second: str
    label: str
    split: str = ""
    """"train", "validation" or "test" where the table says so."""


class ExampleColumns(NamedTuple):
    """Names of the columns; empty where there is none."""

    first: str
    second: str
    label: str
    split: str


class LabeledTextReader:
    """Reads examples from tables, using the columns found in the first one, and from folders of text files.

    `trained_on` are the columns of texts, and `label_column` that of labels, which a model was trained on: a table that
    has them is read by these.
    """

    def __init__(self, spec: LabeledText, trained_on: tuple[str, ...] = (), label_column: str = "") -> None:
        self.spec, self.trained_on, self.label_column = spec, trained_on, label_column
        self.columns = ExampleColumns("", "", "", "")
        self.guessed: dict[str, str] = {}
        self.unread: list[str] = []
        self.skipped: Counter[str] = Counter()
        self.folders: dict[str, TextFolder] = {}

    @property
    def whole_files(self) -> bool:
        """Whether every text was a file."""
        return bool(self.folders)

    def notes(self) -> list[str]:
        notes = [note for folder in self.folders.values() for note in folder.notes()]
        if self.guessed:
            notes.append(guess_note(self.guessed))
        if self.unread:
            read = " and ".join(filter(None, self.columns[:2]))
            fields = "data.text_column or data.text_pair_column"
            notes.append(f"texts are read from {read}, not from {', '.join(self.unread)} (set {fields} to change this)")
        return [*notes, *self.skipped_notes()]

    def skipped_notes(self) -> list[str]:
        what = "file" if self.whole_files else "row"
        return [f"skipped {plural(count, what)} without a {part}" for part, count in self.skipped.items()]

    def read(self, paths: str) -> list[TextExample]:
        return [row for place in find_places(paths) for row in self.read_place(place)]

    def open(self, place: str) -> Table:
        if expand_user(place).is_dir():
            self.folders[place] = TextFolder(expand_user(place))
            return self.folders[place].table()
        return read_table(place) if is_table(place) else read_separated(place, SEPARATORS[".tsv"])

    def read_place(self, place: str) -> Iterator[TextExample]:
        table = self.open(place)
        if not self.columns.label or not {*self.columns[:3]} - {""} <= {*table.columns}:
            self.columns = self.find_columns(table)
        first, second, label, split = self.columns
        for row in table:
            if row[label].strip() in NO_LABEL:
                self.skipped["label"] += 1
            elif not row[first].strip():
                self.skipped["text"] += 1
            else:
                texts = row[first].strip(), row.get(second, "").strip()
                yield TextExample(*texts, row[label].strip(), split_of_row(row, split, place))

    def find_columns(self, table: Table) -> ExampleColumns:
        spec, names = self.spec, table.columns
        samples = sample_columns(table)
        is_named = spec.text_column or spec.text_pair_column
        trained_on = () if is_named or not {*self.trained_on} <= {*names} else self.trained_on
        first = trained_on[0] if trained_on else named_column(names, spec.text_column, TEXT_COLUMNS, table.file)
        label = named_column(names, spec.label_column, LABEL_COLUMNS, table.file, (first,), self.label_column)
        if trained_on:
            second = trained_on[1] if len(trained_on) > 1 else None
        else:
            second = named_column(names, spec.text_pair_column, TEXT_PAIR_COLUMNS, table.file, taken=(first, label))
        if label is None:
            label = guess_label([sample for sample in samples if sample.name not in (first, second)], table)
            self.guessed["label_column"] = label
        if first is None:
            left = [sample for sample in samples if sample.name not in (second, label)]
            first, *others = guess_texts(left, 2 - bool(second), table, "data.text_column")
            self.guessed["text_column"] = first
            if others:
                second = self.guessed["text_pair_column"] = others[0]
        if not (is_named or trained_on):
            read = (first, second, label)
            self.unread = [sample.name for sample in samples if sample.is_text and sample.name not in read]
        return ExampleColumns(first, second or "", label, find_split(samples))


def find_places(paths: str) -> list[str]:
    """The files at `paths`, or `paths` itself if it is a folder of text files in folders of classes."""
    path = expand_user(paths)
    return [paths] if path.is_dir() and TextFolder(path).classes else find_files(paths)


def text_key(example: TextExample) -> tuple[str, str]:
    """Key of equal examples: their texts, ignoring case and white space."""
    return " ".join(example.first.casefold().split()), " ".join(example.second.casefold().split())


def text_groups(examples: list[TextExample]) -> list[int]:
    """The group of each example. Examples that share a text, directly or through others, are in the same group."""
    return group_by_keys([text for text in text_key(example) if text] for example in examples)


def conflict_notes(examples: list[TextExample]) -> list[str]:
    """A note about equal texts with different labels."""
    labels: dict[tuple[str, str], set[str]] = {}
    for example in examples:
        labels.setdefault(text_key(example), set()).add(example.label)
    count = sum(len(text_labels) > 1 for text_labels in labels.values())
    return [f"{plural(count, 'text has', 'texts have')} different labels in different rows"] if count else []


def read_unlabeled(file: str, pairs: bool) -> Iterator[TextExample]:
    """Texts without a label, one per line; pairs if the labeled ones are pairs."""
    with open_text(file) as text:
        for number, line in enumerate(text, 1):
            cells = line.strip().split("\t")
            if cells == [""]:
                continue
            if len(cells) != 1 + pairs:
                raise UserError(
                    f"{file}, line {number}: {len(cells)} columns instead of {1 + pairs}: "
                    "unlabeled files have neither a header nor labels"
                )
            yield TextExample(cells[0], cells[1] if pairs else "", "")


def encode(
    parts: Sequence[list[TextExample]], tokenizer: Tokenizer, seq_len: int, classes: tuple[str, ...]
) -> InMemory:
    examples = [example for part in parts for example in part]
    ids, segments = join_pairs([row[:2] for row in examples], tokenizer, seq_len)
    numbers = {label: number for number, label in enumerate(classes)} | {"": UNLABELED}
    labels = torch.tensor([numbers[row.label] for row in examples])
    part = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    return InMemory(ids, segments, labels, part, batch_type=LabeledTextBatch)


def join_pairs(texts: list[tuple[str, str]], tokenizer: Tokenizer, seq_len: int) -> tuple[Tensor, Tensor]:
    """Ids and segments of texts and pairs of texts, int32, n s; the second one may be empty."""
    first, second = ([pair[side] for pair in texts] for side in (0, 1))
    encoded = zip(tokenizer.encode(first), tokenizer.encode(second) if any(second) else repeat([]))
    ids = np.full((len(texts), seq_len), tokenizer.pad_token_id, np.int32)
    segments = np.zeros_like(ids)
    for row, (a, b) in enumerate(encoded):
        joined, start = join_pair(a, b, tokenizer, seq_len)
        ids[row, : len(joined)] = joined
        segments[row, start : len(joined)] = 1
    return torch.from_numpy(ids), torch.from_numpy(segments)


def join_pair(first: list[int], second: list[int], tokenizer: Tokenizer, seq_len: int) -> tuple[list[int], int]:
    """Ids of one or two texts, and where the second segment begins; the longer one is truncated until both fit."""
    room = seq_len - (3 if second else 2)
    if room < 1:
        raise UserError(f"rows of {seq_len} tokens have no room for text: raise data.seq_len")
    # Equivalent to removing the last token of the longer text until both fit.
    keep = max(min(len(first), room - room // 2), min(len(first), room - len(second)))
    first, second = first[:keep], second[: room - keep]
    ids = [tokenizer.cls_token_id, *first, tokenizer.sep_token_id]
    start = len(ids)
    return ids + ([*second, tokenizer.sep_token_id] if second else []), start
