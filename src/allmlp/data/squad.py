"""SQuAD v1.1 and v2.0, and tables of questions: windows of the context for training, all of them for evaluation."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from allmlp.data.dataset import Dataset, InMemory
from allmlp.data.preprocessing import TextPreprocessing
from allmlp.data.tables import Table, TableRow, is_table, read_table, table_suffix
from allmlp.data.text_files import PEEKED_BYTES, open_file, split_commas
from allmlp.data.tokenizer import TextData, Tokenizer, TokenizerConfig, replace_surrogates
from allmlp.errors import UserError, one_line
from allmlp.files import expand_user
from allmlp.spec import Count

log = logging.getLogger("allmlp.data")


class SquadTrainBatch(NamedTuple):
    """[CLS] question [SEP] part of the context [SEP], padded on the right."""

    ids: Tensor
    """int32, b s."""
    segments: Tensor
    """uint8, b s: 1 in the context and its [SEP]."""
    start: Tensor
    """int64, b: position of the first token of the answer; 0, [CLS], if the answer is not in the window."""
    end: Tensor
    """int64, b: position of the last token of the answer."""


class SquadEvalBatch(NamedTuple):
    """Questions, each with all its windows, padded with empty windows."""

    ids: Tensor
    """int32, b w s."""
    segments: Tensor
    """uint8, b w s."""
    starts: Tensor
    """bool, b w s: where an answer may start: context tokens for which this is the window of maximum context."""
    ends: Tensor
    """bool, b w s: where an answer may end: all context tokens."""
    question_index: Tensor
    """int64, b: index in `SquadDataset.test_questions`."""


@dataclass(frozen=True)
class TokenizedContext:
    """A context, its token ids, and the (start, end) characters of each token."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]


class ReferenceAnswer(NamedTuple):
    """A correct answer, and the character of the context at which it starts."""

    text: str
    start: int


@dataclass(frozen=True)
class TokenizedQuestion:
    """Token ids of a question, its context and all correct answers (none if it cannot be answered), and its text."""

    ids: list[int]
    context: TokenizedContext
    answers: tuple[ReferenceAnswer, ...] = ()
    text: str = ""

    @property
    def offset(self) -> int:
        """Position of the first context token in a window."""
        return len(self.ids) + 2

    @cached_property
    def answer(self) -> tuple[int, int] | None:
        """First and last token of the first answer that is found in the context."""
        spans = (answer_tokens(self.context, answer) for answer in self.answers)
        return next((tokens for tokens in spans if tokens is not None), None)


class WindowConfig(NamedTuple):
    """Splitting of question and context into windows of `seq_len` tokens.

    Questions are truncated to `max_query_length` tokens. Windows of the context start `doc_stride` tokens apart and are
    as long as possible.
    """

    seq_len: int = 384
    doc_stride: int = 128
    max_query_length: int = 64

    @classmethod
    def for_seq_len(cls, seq_len: int) -> WindowConfig:
        """The usual proportions for another sequence length."""
        return cls(seq_len, max(min(128, seq_len // 3), 1), min(64, seq_len // 6))

    def check(self) -> None:
        if self.seq_len - self.max_query_length - 3 < self.doc_stride:
            raise UserError(
                f"seq_len={self.seq_len} has no room for max_query_length={self.max_query_length}, 3 special tokens "
                f"and doc_stride={self.doc_stride}: raise seq_len, or lower max_query_length or doc_stride"
            )

    def split(self, question: TokenizedQuestion) -> list[range]:
        """The range of context tokens in each window."""
        tokens, room = len(question.context.ids), self.seq_len - len(question.ids) - 3
        starts = range(0, max(tokens - room, 0) + self.doc_stride, self.doc_stride)
        return [range(start, min(start + room, tokens)) for start in starts]


@dataclass(frozen=True)
class SquadDataset(Dataset):
    """Questions about contexts that may contain the answer."""

    tokenizer: Tokenizer
    windows: WindowConfig
    train_questions: list[TokenizedQuestion] = field(repr=False)
    """Questions of the training split."""
    test_questions: list[TokenizedQuestion] = field(repr=False)
    """Questions of the test split."""

    @property
    def seq_len(self) -> int:
        return self.windows.seq_len

    def split_validation(self, examples: int) -> SquadDataset:
        """Hold out whole questions, grouped by context, so that hardly any context is in both splits."""
        if not examples:
            return self
        if not 0 < examples < (count := len(self.train_questions)):
            raise UserError(f"cannot hold out {examples} of {count} training questions: lower val_size")
        contexts: dict[int, list[TokenizedQuestion]] = {}
        for question in self.train_questions:
            contexts.setdefault(id(question.context), []).append(question)
        groups = list(contexts.values())
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0)).tolist()
        shuffled = [question for number in order for question in groups[number]]
        return build_dataset(shuffled[examples:], shuffled[:examples], self.tokenizer, self.windows)

    def content(self) -> Iterator[Any]:
        yield from super().content()
        yield "\n".join(answer.text for question in self.test_questions for answer in question.answers).encode()

    def files(self) -> dict[str, str]:
        return self.tokenizer.files(TextPreprocessing("span", self.seq_len))


class Squad(TextData):
    """SQuAD's JSON files (plain, .gz, .xz) or tables of questions, contexts and answers, separated by commas.

        [CLS] question [SEP] context[k doc_stride : k doc_stride + room] [SEP],   k = 0, 1, ...

    Questions are truncated to `max_query_length` tokens. The tokenizer is that of `init_from`; without it, one is
    trained on contexts and questions and kept in `cache` ($ALLMLP_CACHE, ~/.cache/allmlp). Sources: Rajpurkar et al.,
    2016 and 2018; windows as in Devlin et al., BERT, 2018.
    """

    train: str
    test: str = ""
    """Empty: the questions of a tenth of the training contexts are held out."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    seq_len: Count = 384
    doc_stride: Count = 128
    max_query_length: Count = 64
    cache: str = ""

    @property
    def windows(self) -> WindowConfig:
        return WindowConfig(self.seq_len, self.doc_stride, self.max_query_length)

    def check(self) -> None:
        self.windows.check()

    def load(self) -> SquadDataset:
        train_examples, notes = read(self.train), ()
        if self.test:
            test_examples = read(self.test)
        else:
            train_examples, test_examples = hold_out(train_examples, self.train)
            notes = (f"split by context with seed 0: {len(train_examples):,} train, {len(test_examples):,} test",)
        contexts = dict.fromkeys(example.context for example in train_examples)
        texts = [*contexts, *(example.question for example in train_examples)]
        tokenizer = self.tokenizer.build_cached(texts, self.cache)
        train_questions = encode(train_examples, tokenizer, self.max_query_length)
        test_questions = encode(test_examples, tokenizer, self.max_query_length)
        kept = [
            question
            for question, example in zip(train_questions, train_examples)
            if example.impossible or question.answer is not None
        ]
        if skipped := len(train_questions) - len(kept):
            message = "%s: skipped %d of %d questions whose answer is not in the context"
            log.warning(message, self.train, skipped, len(train_questions))
        if not kept:
            raise UserError(f"{self.train} has no training question whose answer is in its context")
        return replace(build_dataset(kept, test_questions, tokenizer, self.windows), notes=notes)

    def load_test(self, tokenizer: Tokenizer) -> SquadDataset:
        questions = encode(read(self.test), tokenizer, self.max_query_length)
        test = test_split(questions, tokenizer, self.windows)
        return SquadDataset(test, test, tokenizer, self.windows, questions, questions)


def hold_out(examples: list[SquadExample], file: str) -> tuple[list[SquadExample], list[SquadExample]]:
    """The questions of nine tenths of the contexts, and those of the others."""
    contexts = list(dict.fromkeys(example.context for example in examples))
    if len(contexts) < 2:
        raise UserError(f"{file} has a single context, so no questions can be held out: set data.test")
    order = torch.randperm(len(contexts), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = {contexts[number] for number in order[: -(-len(contexts) // 10)]}
    parts: tuple[list[SquadExample], list[SquadExample]] = [], []
    for example in examples:
        parts[example.context in held_out].append(example)
    return parts


# --- reading -----------------------------------------------------------------------------------------------

ANSWERS = ("answers", "answer")
"""Names of the column of answers in a table."""


def is_squad(file: str) -> bool:
    if table_suffix(file) != ".json":
        return False
    start = peek(file)
    return start.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{") and b'"paragraphs"' in start


def peek(file: str) -> bytes:
    with open_file(file) as binary:
        return binary.read(PEEKED_BYTES)


def has_answers(file: str) -> bool:
    """Whether this is a SQuAD file or a table of questions, contexts and answers."""
    return is_squad(file) or answer_table(file) is not None


def answer_table(file: str) -> Table | None:
    """A table with the columns question, context, and answers or answer; None for any other file."""
    if not is_table(file) or is_squad(file):
        return None
    if table_suffix(file) == ".json" and b'"question"' not in peek(file):
        return None
    table = read_table(file, nested=ANSWERS)
    named = {"question", "context"} <= {*table.columns} and not {*ANSWERS}.isdisjoint(table.columns)
    return table if named else None


class SquadExample(NamedTuple):
    """A question in a SQuAD file."""

    question: str
    context: str
    answers: tuple[ReferenceAnswer, ...]
    impossible: bool
    id: str = ""


def question_table(file: str) -> Table:
    """The questions of a SQuAD file as a table."""

    def rows() -> Iterator[TableRow]:
        for example in read(file):
            yield {"id": example.id, "question": example.question, "context": example.context}

    return Table(file, ("id", "question", "context"), rows)


def read(files: str) -> list[SquadExample]:
    """The questions of comma-separated files."""
    if not files:
        raise UserError(
            "no files: set data.train to SQuAD's JSON file or to a table with the columns question, context and answers"
        )
    return [example for file in split_commas(files) for example in read_file(file)]


def read_file(file: str) -> list[SquadExample]:
    path = file if "://" in file else str(expand_user(file))
    table = answer_table(path)
    if table is not None:
        rows = [parse_row(row, number, file) for number, row in enumerate(table, 1)]
        return rows or refuse_empty(file)
    with open_file(path) as binary:
        content = binary.read()
    try:
        examples = list(parse(json.loads(content)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        what = f"{reason} is missing" if isinstance(reason, KeyError) else one_line(reason)
        raise UserError(f"{file} is not a SQuAD file (JSON with data, paragraphs, context and qas): {what}") from None
    return examples or refuse_empty(file)


def refuse_empty(file: str) -> NoReturn:
    raise UserError(f"{file} has no questions")


def parse(record: Any) -> Iterator[SquadExample]:
    for article in record["data"]:
        for paragraph in article["paragraphs"]:
            context = clean(paragraph["context"])
            for entry in paragraph["qas"]:
                impossible = bool(entry.get("is_impossible", False))
                given = [] if impossible else entry.get("answers") or []
                answers = tuple(ReferenceAnswer(clean(one["text"]), int(one.get("answer_start", 0))) for one in given)
                name = clean(str(entry.get("id", "")))
                yield SquadExample(clean(entry["question"]), context, answers, impossible, name)


def parse_row(row: TableRow, number: int, file: str) -> SquadExample:
    """A question in a table. Its answers are one text, a list of texts, SQuAD's list of objects, or an object of lists
    as in datasets of the Hub; without one it cannot be answered.
    """
    given = (row.get("answers") or row.get("answer") or "").strip()
    try:
        answers = tuple(parse_answers(given, row.get("answer_start") or 0))
    except (ValueError, KeyError, TypeError, RecursionError) as reason:
        what = f"{reason} is missing" if isinstance(reason, KeyError) else one_line(reason)
        raise UserError(
            f"{file}, question {number}: the answers {one_line(given)[:80]} cannot be read: {what}"
        ) from None
    return SquadExample(clean(row["question"]), clean(row["context"]), answers, not answers, row.get("id", ""))


def parse_answers(given: str, start: str | int) -> Iterator[ReferenceAnswer]:
    try:
        value = json.loads(given) if given.startswith(("[", "{")) else given
    except ValueError:  # a text that starts with a bracket
        value = given
    if isinstance(value, dict) and isinstance(value["text"], str):
        value = [value]
    if isinstance(value, dict):
        texts = value["text"]
        starts = value.get("answer_start") or [0] * len(texts)
        value = [{"text": text, "answer_start": first} for text, first in zip(texts, starts, strict=True)]
    if isinstance(value, str):
        value = [{"text": value, "answer_start": start}] if value else []
    for answer in value:
        fields = {"text": answer} if isinstance(answer, str) else answer
        yield ReferenceAnswer(clean(fields["text"]), int(fields.get("answer_start") or 0))


def clean(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError("a context, question or answer is not text")
    return replace_surrogates(text)


def encode(examples: list[SquadExample], tokenizer: Tokenizer, max_query_length: int) -> list[TokenizedQuestion]:
    """Tokenize questions and contexts, each context once."""
    contexts = {
        context: TokenizedContext(context, *tokenizer.encode_with_offsets(context))
        for context in dict.fromkeys(example.context for example in examples)
    }
    tokens = tokenizer.encode([example.question for example in examples])
    return [
        TokenizedQuestion(ids[:max_query_length], contexts[example.context], example.answers, example.question)
        for ids, example in zip(tokens, examples)
    ]


def answer_tokens(context: TokenizedContext, answer: ReferenceAnswer) -> tuple[int, int] | None:
    """First and last token that overlap an answer; None if the answer is not in the context."""
    start = locate(context.text, answer)
    if start is None:
        return None
    stop = start + len(answer.text)
    overlapping = [number for number, (left, right) in enumerate(context.offsets) if left < stop and right > start]
    return (overlapping[0], overlapping[-1]) if overlapping else None


def locate(text: str, answer: ReferenceAnswer) -> int | None:
    """Start of the answer in the text: the occurrence nearest to the given start."""
    positions = [match.start() for match in re.finditer(f"(?={re.escape(answer.text)})", text)] if answer.text else []
    return min(positions, key=lambda start: abs(start - answer.start), default=None)


# --- tensors -----------------------------------------------------------------------------------------------


def build_dataset(
    train_questions: list[TokenizedQuestion],
    test_questions: list[TokenizedQuestion],
    tokenizer: Tokenizer,
    windows: WindowConfig,
) -> SquadDataset:
    train = InMemory(*train_batch(train_questions, tokenizer, windows), batch_type=SquadTrainBatch)
    test = test_split(test_questions, tokenizer, windows)
    return SquadDataset(train, test, tokenizer, windows, train_questions, test_questions)


def test_split(questions: list[TokenizedQuestion], tokenizer: Tokenizer, windows: WindowConfig) -> InMemory:
    return InMemory(*eval_batch(questions, tokenizer, windows), batch_type=SquadEvalBatch)


def train_batch(questions: Sequence[TokenizedQuestion], tokenizer: Tokenizer, windows: WindowConfig) -> SquadTrainBatch:
    """All windows of all questions, with the positions of the answers."""
    cut = [(question, part) for question in questions for part in windows.split(question)]
    ids, segments = encode_windows(cut, tokenizer, windows.seq_len)
    positions = torch.tensor([answer_positions(question, part) for question, part in cut])
    first, last = (column.clone() for column in positions.unbind(1))
    return SquadTrainBatch(torch.from_numpy(ids), torch.from_numpy(segments), first, last)


def answer_positions(question: TokenizedQuestion, part: range) -> tuple[int, int]:
    """Positions of the first and last token of the answer; 0, 0 unless the window contains all of it."""
    if question.answer is None or question.answer[0] not in part or question.answer[1] not in part:
        return 0, 0
    first, last = question.answer
    return question.offset + first - part.start, question.offset + last - part.start


def eval_batch(questions: Sequence[TokenizedQuestion], tokenizer: Tokenizer, windows: WindowConfig) -> SquadEvalBatch:
    """All questions with their windows."""
    parts = [windows.split(question) for question in questions]
    most = max(map(len, parts))
    shape = len(questions), most, windows.seq_len
    ids, segments = np.full(shape, tokenizer.pad_token_id, np.int32), np.zeros(shape, np.uint8)
    starts, ends = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for number, question in enumerate(questions):
        question_parts = parts[number]
        ids[number, : len(question_parts)], segments[number, : len(question_parts)] = encode_windows(
            [(question, part) for part in question_parts], tokenizer, windows.seq_len
        )
        for window, part in enumerate(question_parts):
            ends[number, window, question.offset : question.offset + len(part)] = True
        for token, window in enumerate(max_context_windows(question_parts, len(question.context.ids))):
            starts[number, window, question.offset + token - question_parts[window].start] = True
    tensors = [torch.from_numpy(array) for array in (ids, segments, starts, ends)]
    return SquadEvalBatch(*tensors, question_index=torch.arange(len(questions)))


def encode_windows(
    cut: list[tuple[TokenizedQuestion, range]], tokenizer: Tokenizer, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and segments of windows, n s."""
    ids = np.full((len(cut), seq_len), tokenizer.pad_token_id, np.int32)
    segments = np.zeros((len(cut), seq_len), np.uint8)
    for row, (question, part) in enumerate(cut):
        context = question.context.ids[part.start : part.stop]
        tokens = [tokenizer.cls_token_id, *question.ids, tokenizer.sep_token_id, *context, tokenizer.sep_token_id]
        ids[row, : len(tokens)] = tokens
        segments[row, question.offset : len(tokens)] = 1
    return ids, segments


def max_context_windows(parts: list[range], tokens: int) -> list[int]:
    """The window of maximum context for each token, as in BERT.

    window(i) = argmax_w min(i - start_w, end_w - i) + 0.01 length_w,   the first maximum
    """
    if len(parts) == 1:
        return [0] * tokens

    def best(token: int) -> int:
        return max(
            (window for window, part in enumerate(parts) if token in part),
            key=lambda window: (
                min(token - parts[window].start, parts[window].stop - 1 - token) + 0.01 * len(parts[window])
            ),
        )

    return [best(token) for token in range(tokens)]
