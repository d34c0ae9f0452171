"""Questions about a text, SQuAD v1.1 and v2.0: windows of the text to learn from, whole questions to judge on."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmlp.data.inputs import FILE as INPUTS
from allmlp.data.inputs import TextInputs
from allmlp.data.source import Resident, Splits
from allmlp.data.text import unpack
from allmlp.data.tokenizer import FILE as TOKENIZER
from allmlp.data.tokenizer import TextData, Tokenize, Tokenizer, whole
from allmlp.errors import UserError, one_line
from allmlp.spec import Count, to_json

log = logging.getLogger("allmlp.data")


class Windows(NamedTuple):
    """[CLS] question [SEP] part of the context [SEP], padded on the right."""

    ids: Tensor
    """int32, b s."""
    segments: Tensor
    """uint8, b s: 1 in the context and its [SEP]."""
    start: Tensor
    """int64, b: the position of the answer's first token; 0, [CLS], where the window does not hold the answer."""
    end: Tensor
    """int64, b: of its last token."""


class Asked(NamedTuple):
    """Questions, each with all its windows; empty ones stand where a question has fewer than another."""

    ids: Tensor
    """int32, b w s."""
    segments: Tensor
    """uint8, b w s."""
    starts: Tensor
    """bool, b w s: tokens of the context that have most context in this window. An answer may start there."""
    ends: Tensor
    """bool, b w s: tokens of the context. An answer may end there."""
    number: Tensor
    """int64, b: which of `Questions.asked` it is."""


@dataclass(frozen=True)
class Passage:
    """A context: its tokens, and where each begins and ends in the text."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]


class Gold(NamedTuple):
    """A right answer, and the character of the context at which it starts."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question's tokens, its passage, and every right answer; there is none where it is impossible."""

    ids: list[int]
    passage: Passage
    answers: tuple[Gold, ...] = ()

    @property
    def offset(self) -> int:
        """The position of the first token of the context in each of its windows."""
        return len(self.ids) + 2

    @cached_property
    def answer(self) -> tuple[int, int] | None:
        """The first and the last token of the first answer that stands in the passage."""
        found = (answer_tokens(self.passage, gold) for gold in self.answers)
        return next((tokens for tokens in found if tokens is not None), None)


class Frame(NamedTuple):
    """How a question and its context share the positions of a model.

    A question keeps its first `question` tokens. Its context is cut into windows that begin `stride` tokens apart, each
    as long as there is room.
    """

    length: int = 384
    stride: int = 128
    question: int = 64

    @classmethod
    def of(cls, length: int) -> Frame:
        """For a model that reads `length` tokens: the usual proportions."""
        return cls(length, max(min(128, length // 3), 1), min(64, length // 6))

    def check(self) -> None:
        if self.length - self.question - 3 < self.stride:
            raise UserError(
                f"rows of {self.length} tokens have no room for a question of {self.question}, three special tokens "
                f"and {self.stride} tokens of context: raise length, or lower question or stride"
            )

    def parts(self, question: Question) -> list[range]:
        """The tokens of the context that each window holds."""
        tokens, room = len(question.passage.ids), self.length - len(question.ids) - 3
        starts = range(0, max(tokens - room, 0) + self.stride, self.stride)
        return [range(start, min(start + room, tokens)) for start in starts]


@dataclass(frozen=True)
class Questions(Splits):
    """Questions: each with a text in which the answer stands, or does not."""

    tokenizer: Tokenizer
    frame: Frame
    known: list[Question] = field(repr=False)
    """Those of the training split."""
    asked: list[Question] = field(repr=False)
    """Those of the test split, by their number."""

    @property
    def length(self) -> int:
        return self.frame.length

    def hold_out(self, examples: int) -> Questions:
        """Whole questions, about as few texts as can be: hardly a text is then learnt from and judged on."""
        if not examples:
            return self
        if not 0 < examples < len(self.known):
            raise UserError(f"cannot hold {examples} of {len(self.known)} training questions out")
        passages: dict[int, list[Question]] = {}
        for question in self.known:
            passages.setdefault(id(question.passage), []).append(question)
        groups = list(passages.values())
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0)).tolist()
        shuffled = [question for number in order for question in groups[number]]
        return lay_out(shuffled[examples:], shuffled[:examples], self.tokenizer, self.frame)

    def files(self) -> dict[str, str]:
        return {TOKENIZER: self.tokenizer.to_json(), INPUTS: to_json(TextInputs("span", self.length))}


class Squad(TextData):
    """SQuAD's JSON files (plain, .gz, .xz): `train` to learn from, `test` to judge on.

        [CLS] question [SEP] context[k stride : k stride + room] [SEP],   k = 0, 1, ...

    `question` is the longest question in tokens; longer ones are cut. The tokenizer is that of the model to start from;
    without one it is trained on the contexts and questions and kept in `cache` ($ALLMLP_CACHE, ~/.cache/allmlp).
    Sources: Rajpurkar et al., 2016 and 2018; the windows are those of Devlin et al., BERT, 2018.
    """

    train: str
    test: str
    tokenize: Tokenize = Tokenize()
    length: Count = 384
    stride: Count = 128
    question: Count = 64
    cache: str = ""

    @property
    def frame(self) -> Frame:
        return Frame(self.length, self.stride, self.question)

    def check(self) -> None:
        self.frame.check()

    def open(self) -> Questions:
        learnt, judged = read(self.train), read(self.test)
        texts = [*dict.fromkeys(entry.context for entry in learnt), *(entry.question for entry in learnt)]
        tokenizer = self.tokenize.kept(texts, self.cache)
        known, asked = (encode(entries, tokenizer, self.question) for entries in (learnt, judged))
        kept = [question for question, entry in zip(known, learnt) if entry.impossible or question.answer is not None]
        if len(kept) < len(known):
            count = len(known) - len(kept)
            log.warning(
                "%s: %d of %d questions left out, their answer is not in the text", self.train, count, len(known)
            )
        if not kept:
            raise UserError(f"{self.train} has no question to learn from: none has an answer that is in its text")
        return lay_out(kept, asked, tokenizer, self.frame)


# --- from the file ------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A question as it stands in a file."""

    question: str
    context: str
    answers: tuple[Gold, ...]
    impossible: bool


def read(file: str) -> list[Entry]:
    if not file:
        raise UserError("no questions to read: set data.train and data.test to SQuAD's JSON files")
    place = file if "://" in file else str(Path(file).expanduser())
    try:
        with unpack(place) as binary:
            content = binary.read()
    except OSError as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None
    try:
        found = list(parse(json.loads(content)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        what = f"{reason} is missing" if isinstance(reason, KeyError) else one_line(reason)
        raise UserError(f"{file} is not SQuAD's JSON (data, paragraphs, context and qas): {what}") from None
    if not found:
        raise UserError(f"{file} has no questions")
    return found


def parse(record: Any) -> Iterator[Entry]:
    for article in record["data"]:
        for paragraph in article["paragraphs"]:
            context = clean(paragraph["context"])
            for entry in paragraph["qas"]:
                impossible = bool(entry.get("is_impossible", False))
                given = [] if impossible else entry.get("answers") or []
                answers = tuple(Gold(clean(one["text"]), int(one.get("answer_start", 0))) for one in given)
                yield Entry(clean(entry["question"]), context, answers, impossible)


def clean(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError("a context, question or answer is not text")
    return whole(text)


def encode(entries: list[Entry], tokenizer: Tokenizer, longest: int) -> list[Question]:
    """Questions about the same context share its passage."""
    passages = {context: passage(context, tokenizer) for context in dict.fromkeys(entry.context for entry in entries)}
    tokens = tokenizer.encode([entry.question for entry in entries])
    return [
        Question(readable(ids[:longest], tokenizer), passages[entry.context], entry.answers)
        for ids, entry in zip(tokens, entries)
    ]


def passage(text: str, tokenizer: Tokenizer) -> Passage:
    ids, spans = tokenizer.spans(text)
    return Passage(text, readable(ids, tokenizer), spans)


def readable(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """A text that spells [PAD] must not look like the end of the row."""
    return [tokenizer.unknown if number == tokenizer.pad else number for number in ids]


def answer_tokens(passage: Passage, gold: Gold) -> tuple[int, int] | None:
    """The first and the last token that share a character with an answer; None where the answer is not there."""
    start = locate(passage.text, gold)
    if start is None:
        return None
    stop = start + len(gold.text)
    touched = [number for number, (left, right) in enumerate(passage.spans) if left < stop and right > start]
    return (touched[0], touched[-1]) if touched else None


def locate(text: str, gold: Gold) -> int | None:
    """Where an answer stands: where it says, or the nearest place with the same words."""
    places = [match.start() for match in re.finditer(f"(?={re.escape(gold.text)})", text)] if gold.text else []
    return min(places, key=lambda place: abs(place - gold.start), default=None)


# --- to tensors ------------------------------------------------------------------------------------------------


def lay_out(known: list[Question], asked: list[Question], tokenizer: Tokenizer, frame: Frame) -> Questions:
    train = Resident(*windows(known, tokenizer, frame), kind=Windows)
    return Questions(train, Resident(*ask(asked, tokenizer, frame), kind=Asked), tokenizer, frame, known, asked)


def windows(questions: Sequence[Question], tokenizer: Tokenizer, frame: Frame) -> Windows:
    """All windows of all questions, with the place of the answer."""
    cut = [(question, part) for question in questions for part in frame.parts(question)]
    ids, segments = rows(cut, tokenizer, frame.length)
    places = torch.tensor([target(question, part) for question, part in cut])
    return Windows(torch.from_numpy(ids), torch.from_numpy(segments), places[:, 0].clone(), places[:, 1].clone())


def target(question: Question, part: range) -> tuple[int, int]:
    """The positions of the answer's first and last token; those of [CLS] unless the window holds all of it."""
    if question.answer is None or question.answer[0] not in part or question.answer[1] not in part:
        return 0, 0
    first, last = question.answer
    return question.offset + first - part.start, question.offset + last - part.start


def ask(questions: Sequence[Question], tokenizer: Tokenizer, frame: Frame) -> Asked:
    """Every question with its windows, numbered from 0."""
    parts = [frame.parts(question) for question in questions]
    most = max(map(len, parts))
    shape = len(questions), most, frame.length
    ids, segments = np.full(shape, tokenizer.pad, np.int32), np.zeros(shape, np.uint8)
    starts, ends = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for number, question in enumerate(questions):
        own = parts[number]
        ids[number, : len(own)], segments[number, : len(own)] = rows(
            [(question, part) for part in own], tokenizer, frame.length
        )
        for window, part in enumerate(own):
            ends[number, window, question.offset : question.offset + len(part)] = True
        for token, window in enumerate(homes(own, len(question.passage.ids))):
            starts[number, window, question.offset + token - own[window].start] = True
    tensors = [torch.from_numpy(array) for array in (ids, segments, starts, ends)]
    return Asked(*tensors, number=torch.arange(len(questions)))


def rows(cut: list[tuple[Question, range]], tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and segments of windows, n s."""
    ids, segments = np.full((len(cut), length), tokenizer.pad, np.int32), np.zeros((len(cut), length), np.uint8)
    for row, (question, part) in enumerate(cut):
        context = question.passage.ids[part.start : part.stop]
        tokens = [tokenizer.first, *question.ids, tokenizer.last, *context, tokenizer.last]
        ids[row, : len(tokens)] = tokens
        segments[row, question.offset : len(tokens)] = 1
    return ids, segments


def homes(parts: list[range], tokens: int) -> list[int]:
    """The window in which each token has most context, BERT's rule: the shorter side counts, then the longer window.

    home(i) = argmax_w min(i - start_w, end_w - i) + 0.01 length_w,   the first of equals
    """
    if len(parts) == 1:
        return [0] * tokens

    def most(token: int) -> int:
        return max(
            (window for window, part in enumerate(parts) if token in part),
            key=lambda window: (
                min(token - parts[window].start, parts[window].stop - 1 - token) + 0.01 * len(parts[window])
            ),
        )

    return [most(token) for token in range(tokens)]
