"""Labelled sentences and pairs of sentences: GLUE's TSV files, and any other with a header."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.data.inputs import FILE as INPUTS
from allmlp.data.inputs import TextInputs
from allmlp.data.source import Resident, Splits
from allmlp.data.text import find, unpack
from allmlp.data.tokenizer import FILE as TOKENIZER
from allmlp.data.tokenizer import TextData, Tokenize, Tokenizer
from allmlp.errors import UserError, did_you_mean
from allmlp.spec import Count, to_json

FIRST = ("sentence1", "sentence", "premise", "question1", "question", "text")
SECOND = ("sentence2", "hypothesis", "question2", "sentence")
LABEL = ("gold_label", "label", "entailment", "quality")
NO_LABEL = ("", "-")
"""What stands where annotators did not agree (MNLI)."""
UNLABELLED = -1
"""The class of a sentence for which there is only a teacher."""


class Labelled(NamedTuple):
    ids: Tensor
    """int32, b s: [CLS] first [SEP] second [SEP], padded on the right."""
    segments: Tensor
    """int32, b s: 1 in the second sentence."""
    labels: Tensor
    """int64, b; `UNLABELLED` where there is none."""
    part: Tensor
    """int64, b: which of several test files."""


@dataclass(frozen=True)
class LabelledSentences(Splits):
    """Labelled sentences: or pairs of them."""

    tokenizer: Tokenizer
    length: int
    classes: tuple[str, ...]
    parts: tuple[str, ...]
    """Names of the test files."""
    unlabelled: int = 0
    """How many of the sentences to train on have no label; they are the last."""

    def files(self) -> dict[str, str]:
        inputs = TextInputs("classes", self.length, self.classes)
        return {TOKENIZER: self.tokenizer.to_json(), INPUTS: to_json(inputs)}


class Sentences(TextData):
    """TSV files with a header (plain, .gz, .xz, .zst): `path` to train on, `test` to judge on, commas join several.

    `first`, `second` and `label` name columns; where they are not given GLUE's own names are looked for. Rows without a
    label are left out. `unlabelled` files have a sentence a line, or two with a tab between them, to learn from a
    teacher alone. The tokenizer is that of the model to start from; without one it is trained on the sentences and kept
    in `cache`.
    """

    path: str
    test: str
    first: str = ""
    second: str = ""
    label: str = ""
    tokenize: Tokenize = Tokenize()
    length: Count = 128
    cache: str = ""
    unlabelled: str = ""

    def open(self) -> LabelledSentences:
        files, tests = find(self.path), find(self.test)
        train = [row for file in files for row in rows(file, self)]
        pairs = any(row.second for row in train)
        more = [row for file in (find(self.unlabelled) if self.unlabelled else []) for row in lines(file, pairs)]
        if self.unlabelled and not more:
            raise UserError(f"{self.unlabelled} has no sentences")
        judged = [list(rows(file, self)) for file in tests]
        for name, found in ((self.path, train), *zip(tests, judged)):
            if not found:
                raise UserError(f"{name} has no labelled sentences")
        tokenizer = self.tokenize.kept([text for row in train for text in row[:2] if text], self.cache)
        classes = tuple(sorted({row.label for row in train}, key=natural))
        if len(classes) == 1:
            raise UserError(f"{self.path} has one class, {classes[0]!r}: there is nothing to tell apart")
        for file, found in zip(tests, judged):
            for row in found:
                if row.label not in classes:
                    raise UserError(f"{file}: unknown label {row.label!r}{did_you_mean(row.label, classes)}")
        parts = torch.tensor([part for part, found in enumerate(judged) for _ in found])
        learnt, whole = [*train, *more], list(chain(*judged))
        splits = [
            encode(found, tokenizer, self.length, classes, part)
            for found, part in ((learnt, torch.zeros(len(learnt), dtype=torch.int64)), (whole, parts))
        ]
        names = tuple(Path(file).name.partition(".")[0] for file in tests)
        return LabelledSentences(splits[0], splits[1], tokenizer, self.length, classes, names, len(more))


class Row(NamedTuple):
    first: str
    second: str
    label: str


def natural(label: str) -> tuple[bool, float, str]:
    """Numbers in their order, before words; "nan", which has no place among numbers, is a word."""
    try:
        number = float(label)
    except ValueError:
        number = math.nan
    return (True, 0.0, label) if math.isnan(number) else (False, number, label)


def rows(file: str, spec: Sentences) -> Iterator[Row]:
    with unpack(file) as binary:
        lines = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline="\n")
        header = lines.readline().rstrip("\r\n").split("\t")
        first = column(header, spec.first, FIRST, file, "a sentence")
        second = column(header, spec.second, [name for name in SECOND if name != header[first]], file, "", needed=False)
        label = column(header, spec.label, LABEL, file, "a label")
        for number, line in enumerate(lines, 2):
            cells = line.rstrip("\r\n").split("\t")
            if not line.strip():
                continue
            if len(cells) < max(first, second, label) + 1:
                raise UserError(f"{file}, line {number}: {len(cells)} columns instead of {len(header)}")
            if cells[label].strip() not in NO_LABEL:
                yield Row(cells[first].strip(), cells[second].strip() if second >= 0 else "", cells[label].strip())


def lines(file: str, pairs: bool) -> Iterator[Row]:
    """Sentences without a label, a line each; pairs where those with a label are pairs."""
    with unpack(file) as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline="\n")
        for number, line in enumerate(text, 1):
            cells = line.strip().split("\t")
            if cells == [""]:
                continue
            if len(cells) != 1 + pairs:
                raise UserError(
                    f"{file}, line {number}: {len(cells)} columns instead of {1 + pairs}: "
                    "unlabelled files have neither a header nor labels"
                )
            yield Row(cells[0], cells[1] if pairs else "", "")


def column(
    header: list[str], wanted: str, known: list[str] | tuple[str, ...], file: str, what: str, needed: bool = True
) -> int:
    """The number of a column by its name, or by GLUE's names; -1 where there is none and none is needed."""
    if wanted:
        if wanted not in header:
            raise UserError(f"{file} has no column {wanted!r}{did_you_mean(wanted, header)}, only {', '.join(header)}")
        return header.index(wanted)
    found = [header.index(name) for name in known if name in header]
    if not found and needed:
        raise UserError(f"{file} has no column for {what} among {', '.join(header)}: name it (first, second, label)")
    return found[0] if found else -1


def encode(found: list[Row], tokenizer: Tokenizer, length: int, classes: tuple[str, ...], part: Tensor) -> Resident:
    firsts, seconds = (tokenizer.encode([row[side] for row in found]) for side in (0, 1))
    encoded = [join(a, b, tokenizer, length) for a, b in zip(firsts, seconds)]
    ids, segments = (torch.tensor([pair[side] for pair in encoded], dtype=torch.int32) for side in (0, 1))
    numbers = {label: number for number, label in enumerate(classes)} | {"": UNLABELLED}
    labels = torch.tensor([numbers[row.label] for row in found])
    return Resident(ids, segments, labels, part, kind=Labelled)


def join(first: list[int], second: list[int], tokenizer: Tokenizer, length: int) -> tuple[list[int], list[int]]:
    """Ids and segments of one or two sentences; the longer one is cut until both fit."""
    room = length - (3 if second else 2)
    if room < 1:
        raise UserError(f"rows of {length} tokens have no room for sentences")
    # As if the last token of the longer one were dropped again and again.
    keep = max(min(len(first), room - room // 2), min(len(first), room - len(second)))
    first, second = first[:keep], second[: room - keep]
    ids = [tokenizer.first, *first, tokenizer.last]
    segments = [0] * len(ids)
    if second:
        ids += [*second, tokenizer.last]
        segments += [1] * (len(second) + 1)
    padding = length - len(ids)
    return ids + [tokenizer.pad] * padding, segments + [0] * padding
