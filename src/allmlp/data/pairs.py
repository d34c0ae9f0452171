"""Sentences and their translations: TSV files with a header, or two files whose lines belong together."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
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
from allmlp.errors import UserError, one_line
from allmlp.spec import Count, NonNegative, to_json

log = logging.getLogger("allmlp.data")

AT_ONCE = 8192
"""Pairs that are tokenised together."""


class Translated(NamedTuple):
    source: Tensor
    """int32, b s: x1 ... xn [SEP], padded on the right."""
    target: Tensor
    """int32, b t: [CLS] y1 ... yn [SEP], padded on the right."""
    number: Tensor
    """int32, b: which of `SentencePairs.references` is the target."""


@dataclass(frozen=True)
class SentencePairs(Splits):
    """Pairs of sentences: each with its translation."""

    tokenizer: Tokenizer
    length: int
    references: tuple[str, ...]
    """The targets as they were written."""
    tokens: int
    """Of a training pair on average, both sides together and without padding."""

    def files(self) -> dict[str, str]:
        return {TOKENIZER: self.tokenizer.to_json(), INPUTS: to_json(TextInputs("translation", self.length))}


class Pairs(TextData):
    """Sentence pairs, `path` to train on and `test` to judge on: files as in `data.text.find`.

    `source` and `target` name columns of TSV files with a header (plain, .gz, .xz, .zst). A plus sign joins two files
    of lines instead: train.de+train.en. Pairs with an empty side are left out; so are training pairs that are longer
    than `length` tokens with [CLS] and [SEP], or of which one side has more than `ratio` times the tokens of the other.
    Long test sources are cut. One tokenizer serves both languages; it is kept in `cache` ($ALLMLP_CACHE,
    ~/.cache/allmlp), because training it again need not give the same one.
    """

    path: str
    test: str
    source: str = "de"
    target: str = "en"
    tokenize: Tokenize = Tokenize("bpe", 8192, lowercase=False)
    length: Count = 64
    ratio: NonNegative | None = None
    cache: str = ""

    def check(self) -> None:
        if self.length < 3:
            raise UserError(
                "a target needs at least three tokens: [CLS], one of the sentence, [SEP]; raise data.length"
            )
        if self.source == self.target:
            raise UserError(f"source and target are the same column, {self.source!r}: name two")
        if self.ratio is not None and self.ratio < 1:
            raise UserError(f"a ratio of {self.ratio:g} would leave every pair out: it must be at least 1, or none")

    def open(self) -> SentencePairs:
        seen, judged = self.complete(self.path), self.complete(self.test)
        tokenizer = self.tokenize.kept([text for pair in seen for text in pair], self.cache)
        kept, train = self.fitting(seen, tokenizer)
        test = torch.cat([rows(sides, tokenizer, self.length) for sides in encode(judged, tokenizer)], dim=1)
        references = tuple(target for _, target in kept + judged)
        numbers = torch.arange(len(references), dtype=torch.int32)
        real = int((train != tokenizer.pad).sum())
        return SentencePairs(
            Resident(*train, numbers[: len(kept)], kind=Translated),
            Resident(*test, numbers[len(kept) :], kind=Translated),
            tokenizer,
            self.length,
            references,
            max(round(real / len(kept)), 1),
        )

    def complete(self, places: str) -> list[tuple[str, str]]:
        """The pairs of which neither side is empty."""
        found: list[tuple[str, str]] = []
        half = 0
        for source, target in read(places, self.source, self.target):
            if source and target:
                found.append((source, target))
            half += bool(source) != bool(target)
        if not found:
            raise UserError(f"{places} has no pairs of sentences" if places else "set data.path and data.test to files")
        if half:
            log.warning("%s: left out %d pairs with an empty side", places, half)
        return found

    def fitting(self, pairs: list[tuple[str, str]], tokenizer: Tokenizer) -> tuple[list[tuple[str, str]], Tensor]:
        """The training pairs that are not left out, and their rows, 2 b s."""
        faults: Counter[str] = Counter()
        kept, pieces = [], []
        for start, sides in zip(range(0, len(pairs), AT_ONCE), encode(pairs, tokenizer)):
            found = [self.fault(*side) for side in sides]
            faults.update(filter(None, found))
            kept += [pair for pair, fault in zip(pairs[start : start + AT_ONCE], found) if not fault]
            pieces.append(rows([side for side, fault in zip(sides, found) if not fault], tokenizer, self.length))
        reasons = ", ".join(f"{count} {fault}" for fault, count in faults.items())
        if not kept:
            raise UserError(f"{self.path}: no pair is left to train on, {reasons}; change data.length or data.ratio")
        if faults:
            log.warning("%s: left out %d of %d pairs, %s", self.path, len(pairs) - len(kept), len(pairs), reasons)
        return kept, torch.cat(pieces, dim=1)

    def fault(self, source: list[int], target: list[int]) -> str:
        """Why a training pair is left out; nothing where it is not."""
        shorter, longer = sorted((len(source), len(target)))
        if not shorter:
            return "without tokens"
        if len(source) + 1 > self.length or len(target) + 2 > self.length:
            return f"longer than {self.length} tokens"
        if self.ratio is not None and longer > self.ratio * shorter:
            return f"of lengths that differ more than {self.ratio:g} times"
        return ""


def read(places: str, source: str, target: str) -> Iterator[tuple[str, str]]:
    """Every pair of the places, in their order; a side may be empty."""
    for place in filter(None, (part.strip() for part in places.split(","))):
        if "+" in place and not Path(place).expanduser().exists():
            yield from parallel(*place.split("+", 1))
        else:
            for file in find(place):
                yield from table(file, source, target)


def table(file: str, source: str, target: str) -> Iterator[tuple[str, str]]:
    """Two columns of a TSV file; a row that ends early has empty cells."""
    rows = lines(file)
    header = [name.strip() for name in next(rows, "").split("\t")]
    if not any(header):
        raise UserError(f"{file} has no pairs of sentences: its first line must name the columns")
    for name in (source, target):
        if name not in header:
            raise UserError(f"{file} has no column {name!r}, only {', '.join(header)}")
    left, right = header.index(source), header.index(target)
    for number, row in enumerate(rows, 2):
        cells = row.split("\t")
        if len(cells) > len(header):
            raise UserError(f"{file}, line {number}: {len(cells)} columns instead of {len(header)}")
        cells += [""] * (len(header) - len(cells))
        yield cells[left].strip(), cells[right].strip()


def parallel(source: str, target: str) -> Iterator[tuple[str, str]]:
    """The lines of two files, or of as many files on both sides."""
    sources, targets = find(source), find(target)
    if len(sources) != len(targets):
        raise UserError(
            f"{source} names {len(sources)} files and {target} {len(targets)}: every file needs its partner"
        )
    for left, right in zip(sources, targets):
        for number, (a, b) in enumerate(zip_longest(lines(left), lines(right))):
            if a is None or b is None:
                ended = left if a is None else right
                raise UserError(f"{left} and {right} are not parallel: {ended} ends after line {number}")
            yield a.strip(), b.strip()


def lines(file: str) -> Iterator[str]:
    """Lines without their ends; bytes that are not UTF-8 become U+FFFD."""
    try:
        with unpack(file) as binary:
            # Other line ends may stand inside a sentence, and would bring parallel files out of step.
            text = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline="\n")
            for line in text:
                yield line.rstrip("\r\n")
    except OSError as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from reason


Sides = list[tuple[list[int], list[int]]]


def encode(pairs: list[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[Sides]:
    """Ids of both sides, without [CLS] and [SEP], some pairs at a time."""
    for start in range(0, len(pairs), AT_ONCE):
        sources, targets = zip(*pairs[start : start + AT_ONCE])
        yield list(zip(tokenizer.encode(list(sources)), tokenizer.encode(list(targets))))


def rows(sides: Sides, tokenizer: Tokenizer, length: int) -> Tensor:
    """Sources and targets as rows of equal length, 2 b s."""
    sources = [source_row(source, tokenizer, length) for source, _ in sides]
    # A target that is cut does not end there: it has no [SEP].
    targets = [[tokenizer.first, *target, tokenizer.last][:length] for _, target in sides]
    padded = [[row + [tokenizer.pad] * (length - len(row)) for row in side] for side in (sources, targets)]
    return torch.tensor(padded, dtype=torch.int32).view(2, len(sides), length)


def source_row(ids: list[int], tokenizer: Tokenizer, length: int) -> list[int]:
    """A source as the encoder reads it, cut where it is too long."""
    return [*ids[: length - 1], tokenizer.last]
