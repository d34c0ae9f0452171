"""Labeled texts and pairs of texts: GLUE's TSV files, and others with a header."""

from __future__ import annotations

import hashlib
import io
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.data.dataset import Dataset, InMemory, subset
from allmlp.data.preprocessing import PREPROCESSING_FILE, TextPreprocessing
from allmlp.data.text_files import find_files, open_file
from allmlp.data.tokenizer import TOKENIZER_FILE, TextData, Tokenizer, TokenizerConfig
from allmlp.errors import UserError, did_you_mean
from allmlp.spec import Count, Rate, to_json

TEXT_COLUMNS = ("sentence1", "sentence", "premise", "question1", "question", "text")
TEXT_PAIR_COLUMNS = ("sentence2", "hypothesis", "question2", "sentence")
LABEL_COLUMNS = ("gold_label", "label", "entailment", "quality")
NO_LABEL = ("", "-")
"""Rows on which annotators did not agree (MNLI)."""
UNLABELED = -1
"""Label of texts that only have a teacher's output."""


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
        inputs = TextPreprocessing("classes", self.seq_len, self.class_names)
        return {TOKENIZER_FILE: self.tokenizer.to_json(), PREPROCESSING_FILE: to_json(inputs)}


class LabeledText(TextData):
    """TSV files with a header (plain, .gz, .xz, .zst) for training (`path`), validation (`val`) and testing (`test`),
    separated by commas.

    Without `test`, about `test_fraction` of the training file is for testing, chosen by a hash of the texts; pairs that
    share a text, directly or through other pairs, are in the same split. Columns that are not given are found by GLUE's
    names. Rows without a label are skipped. `unlabeled` files have one text per line, or two separated by a tab, for
    distillation only. The tokenizer is that of `init_from`; without it, one is trained on the texts and kept in
    `cache`.
    """

    path: str
    test: str = ""
    val: str = ""
    test_fraction: Rate = 0.2
    text_column: str = ""
    text_pair_column: str = ""
    label_column: str = ""
    tokenizer: TokenizerConfig = TokenizerConfig()
    seq_len: Count = 128
    cache: str = ""
    unlabeled: str = ""

    def load(self) -> LabeledTextDataset:
        tests, validations = (find_files(paths) if paths else [] for paths in (self.test, self.val))
        train = [row for file in find_files(self.path) for row in read_labeled(file, self)]
        pairs = any(row.second for row in train)
        extra = [
            row
            for file in (find_files(self.unlabeled) if self.unlabeled else [])
            for row in read_unlabeled(file, pairs)
        ]
        if self.unlabeled and not extra:
            raise UserError(f"{self.unlabeled} has no texts")
        if self.test:
            test = [list(read_labeled(file, self)) for file in tests]
        else:
            train, held_out = split_by_text(train, self.test_fraction)
            tests, test = [self.path], [held_out]
        validation = [row for file in validations for row in read_labeled(file, self)]
        evaluated = [*zip(tests, test), *([(self.val, validation)] if self.val else [])]
        for name, found in ((self.path, train), *evaluated):
            if not found:
                raise UserError(f"{name} has no labeled texts")
        tokenizer = self.tokenizer.build_cached([text for row in train for text in row[:2] if text], self.cache)
        classes = tuple(sorted({row.label for row in train}, key=label_order))
        if len(classes) == 1:
            raise UserError(f"{self.path} has only one class, {classes[0]!r}: at least two are needed")
        for file, found in evaluated:
            for row in found:
                if row.label not in classes:
                    raise UserError(f"{file}: unknown label {row.label!r}{did_you_mean(row.label, classes)}")

        def split(*parts: list[TextExample]) -> InMemory:
            return encode(parts, tokenizer, self.seq_len, classes)

        return LabeledTextDataset(
            split([*train, *extra]),
            split(*test),
            tokenizer,
            self.seq_len,
            classes,
            test_names=tuple(Path(file).name.partition(".")[0] for file in tests),
            groups=torch.tensor(text_groups(train)),
            unlabeled=len(extra),
            validation=split(validation) if validation else None,
        )


class TextExample(NamedTuple):
    first: str
    second: str
    label: str


def text_groups(examples: list[TextExample]) -> list[int]:
    """The group of each example. Examples that share a text, directly or through others, are in the same group."""
    parents: dict[str, str] = {}

    def root(text: str) -> str:
        while parents.setdefault(text, text) != text:
            parents[text] = text = parents[parents[text]]
        return text

    for first, second, _ in examples:
        if second:
            parents[root(first.casefold())] = root(second.casefold())
    numbers: dict[str, int] = {}
    return [numbers.setdefault(root(example.first.casefold()), len(numbers)) for example in examples]


def split_by_text(examples: list[TextExample], fraction: float) -> tuple[list[TextExample], list[TextExample]]:
    """Training and test examples without a common text. The hash of a group's first text decides where it belongs."""
    groups, names = text_groups(examples), dict[int, str]()
    for example, group in zip(examples, groups):
        names[group] = min(names.get(group, example.first), example.first)
    hashes = {group: hashlib.blake2b(name.encode(), digest_size=8).digest() for group, name in names.items()}
    is_test = [int.from_bytes(hashes[group], "big") < fraction * 2**64 for group in groups]
    return list(compress(examples, map(operator.not_, is_test))), list(compress(examples, is_test))


def label_order(label: str) -> tuple[bool, float, str]:
    """Sort key: numbers in numeric order, then other labels; "nan" is not a number."""
    try:
        number = float(label)
    except ValueError:
        number = math.nan
    return (True, 0.0, label) if math.isnan(number) else (False, number, label)


def read_labeled(file: str, spec: LabeledText) -> Iterator[TextExample]:
    with open_file(file) as binary:
        lines = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline="\n")
        header = lines.readline().rstrip("\r\n").split("\t")
        first = column(header, spec.text_column, TEXT_COLUMNS, file, "text_column")
        second = column(
            header,
            spec.text_pair_column,
            [name for name in TEXT_PAIR_COLUMNS if name != header[first]],
            file,
            "text_pair_column",
            required=False,
        )
        label = column(header, spec.label_column, LABEL_COLUMNS, file, "label_column")
        for number, line in enumerate(lines, 2):
            cells = line.rstrip("\r\n").split("\t")
            if not line.strip():
                continue
            if len(cells) < max(first, second, label) + 1:
                raise UserError(f"{file}, line {number}: {len(cells)} columns instead of {len(header)}")
            if cells[label].strip() not in NO_LABEL:
                yield TextExample(
                    cells[first].strip(), cells[second].strip() if second >= 0 else "", cells[label].strip()
                )


def read_unlabeled(file: str, pairs: bool) -> Iterator[TextExample]:
    """Texts without a label, one per line; pairs if the labeled ones are pairs."""
    with open_file(file) as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline="\n")
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


def column(
    header: list[str], wanted: str, known: list[str] | tuple[str, ...], file: str, field: str, required: bool = True
) -> int:
    """Index of a column, by its name or by GLUE's names; -1 if it is optional and missing."""
    if wanted:
        if wanted not in header:
            raise UserError(f"{file} has no column {wanted!r}{did_you_mean(wanted, header)}, only {', '.join(header)}")
        return header.index(wanted)
    found = [header.index(name) for name in known if name in header]
    if not found and required:
        raise UserError(f"{file} has no known column for {field} among {', '.join(header)}: set data.{field}")
    return found[0] if found else -1


def encode(
    parts: Sequence[list[TextExample]], tokenizer: Tokenizer, seq_len: int, classes: tuple[str, ...]
) -> InMemory:
    found = [example for part in parts for example in part]
    firsts, seconds = (tokenizer.encode([row[side] for row in found]) for side in (0, 1))
    encoded = [join_pair(a, b, tokenizer, seq_len) for a, b in zip(firsts, seconds)]
    ids, segments = (torch.tensor([pair[side] for pair in encoded], dtype=torch.int32) for side in (0, 1))
    numbers = {label: number for number, label in enumerate(classes)} | {"": UNLABELED}
    labels = torch.tensor([numbers[row.label] for row in found])
    part = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    return InMemory(ids, segments, labels, part, batch_type=LabeledTextBatch)


def join_pair(first: list[int], second: list[int], tokenizer: Tokenizer, seq_len: int) -> tuple[list[int], list[int]]:
    """Ids and segments of one or two texts; the longer one is truncated until both fit."""
    room = seq_len - (3 if second else 2)
    if room < 1:
        raise UserError(f"rows of {seq_len} tokens have no room for text: raise data.seq_len")
    # Equivalent to removing the last token of the longer text until both fit.
    keep = max(min(len(first), room - room // 2), min(len(first), room - len(second)))
    first, second = first[:keep], second[: room - keep]
    ids = [tokenizer.cls_token_id, *first, tokenizer.sep_token_id]
    segments = [0] * len(ids)
    if second:
        ids += [*second, tokenizer.sep_token_id]
        segments += [1] * (len(second) + 1)
    padding = seq_len - len(ids)
    return ids + [tokenizer.pad_token_id] * padding, segments + [0] * padding
