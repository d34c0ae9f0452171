"""Span selection: which spans recur, what becomes of a row, and that it can be learned."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp import training as loop
from allmlp.data.corpus import Passages
from allmlp.data.preprocessing import TextPreprocessing, read_preprocessing
from allmlp.data.tokenizer import SPECIAL_TOKENS, Tokenizer, TokenizerConfig, load_tokenizer
from allmlp.errors import UserError
from allmlp.models.bert import bert
from allmlp.optim import AdamW
from allmlp.run import Budget, Run
from allmlp.tasks.span_selection import SpanBatch, SpanSelection, SpanVocab

pytest.importorskip("tokenizers")
WORDS = ["the", "of", ",", "s", "7", "sun", "moon", "red", "##dish", "tree", *(f"w{n}" for n in range(40))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    file.write_text("\n".join([*SPECIAL_TOKENS, *WORDS]), encoding="utf8")
    return load_tokenizer(file)


def row(tokenizer: Tokenizer, text: str, length: int = 0) -> torch.Tensor:
    tokens = ["[CLS]", *text.split(), "[SEP]"]
    tokens += ["[PAD]"] * (length - len(tokens))
    return torch.tensor([[tokenizer.tokenizer.token_to_id(token) for token in tokens]])


def words(tokenizer: Tokenizer, ids: torch.Tensor) -> str:
    return " ".join(tokenizer.id_to_token(int(token)) for token in ids)


SPEC = SpanSelection(question_length=4, max_span_length=3)


def lengths(tokenizer: Tokenizer, text: str) -> dict[int, int]:
    found = SPEC.recurring_spans(row(tokenizer, text), SpanVocab(tokenizer))[0]
    return {place: int(length) for place, length in enumerate(found) if length}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sun w0 w1 w2 w3 w4 w5 sun", {1: 1, 8: 1}),
        ("sun w0 w1 w2 w3 w4 sun", {}),  # too near: it could be in the question
        ("the w0 w1 w2 w3 w4 w5 the", {}),  # function words
        (", w0 w1 w2 w3 w4 w5 ,", {}),
        ("s w0 w1 w2 w3 w4 w5 s", {}),
        ("7 w0 w1 w2 w3 w4 w5 7", {1: 1, 8: 1}),
        ("sun moon tree w3 w4 w5 w6 w7 sun moon tree", {1: 3, 9: 3}),  # not its parts, though they recur as well
        ("sun of moon w3 w4 w5 w6 w7 sun of moon", {1: 3, 3: 1, 9: 3, 11: 1}),  # but after a function word
        ("the sun , w3 w4 w5 w6 w7 the sun ,", {2: 1, 10: 1}),  # from the first to the last content word
        ("red ##dish w1 w2 w3 w4 w5 w6 red ##dish", {1: 2, 9: 2}),
        ("red ##dish w1 w2 w3 w4 w5 w6 red w7", {}),  # a part of a word
    ],
)
def test_recurring_spans(text: str, found: dict[int, int], tokenizer: Tokenizer) -> None:
    assert lengths(tokenizer, text) == found


def test_words_with_accents_are_words() -> None:
    """In a vocabulary of bytes, too."""
    made = TokenizerConfig("bpe", 300, lowercase=False).build(["un été chaud", "été, café"] * 20)
    content, (ids,) = SpanVocab(made).content, made.encode(["été café,"])
    assert content[ids].tolist() == [True, True, False]


def question(tokenizer: Tokenizer, text: str, first: int, length: int, place: float, size: int = 0) -> SpanBatch:
    ids = row(tokenizer, text, size)
    chosen = (torch.tensor([[value]]) for value in (first, length, place))
    return SPEC.make_question(ids, *chosen, torch.tensor([[True]]), SpanVocab(tokenizer))


@pytest.mark.parametrize(
    ("text", "first", "length", "place", "made", "starts", "ends"),
    [
        # the question: two words before the span, and one after it
        (
            "w0 w1 sun w2 w3 w4 w5 sun w6 w7",
            3,
            1,
            0.5,
            "[CLS] w0 w1 [MASK] w2 [SEP] w3 w4 w5 sun w6 w7",
            [9],
            [9],
        ),
        # a longer span leaves room for padding; two answers
        (
            "sun moon w1 w2 w3 sun moon w4 sun moon",
            1,
            2,
            0.0,
            "[CLS] [MASK] w1 w2 [SEP] w3 sun moon w4 sun moon [SEP]",
            [6, 9],
            [7, 10],
        ),
        # the last occurrence is the question; the words before it are cut out
        (
            "w0 sun moon tree w4 w5 w6 sun moon tree",
            8,
            3,
            0.9,
            "[CLS] w6 [MASK] [SEP] w0 sun moon tree w4 w5 [SEP] [PAD]",
            [5],
            [7],
        ),
    ],
)
def test_question_of_a_row(
    text: str,
    first: int,
    length: int,
    place: float,
    made: str,
    starts: list[int],
    ends: list[int],
    tokenizer: Tokenizer,
) -> None:
    batch = question(tokenizer, text, first, length, place)
    assert words(tokenizer, batch.ids[0]) == made
    assert batch.starts[0].nonzero().flatten().tolist() == starts and batch.ends[0].nonzero().flatten().tolist() == ends
    inside = made.split().index("[SEP]")
    assert batch.segments[0].tolist() == [int(n > inside and w != "[PAD]") for n, w in enumerate(made.split())]


def test_answers_of_random_rows_are_the_words_of_the_span(tokenizer: Tokenizer) -> None:
    """Of every row: one mask, no answer inside of the question, and every answer is the span that was replaced."""
    draw, vocab = random.Random(0), SpanVocab(tokenizer)
    rows = torch.cat([row(tokenizer, " ".join(draw.choices(WORDS[5:], k=draw.randint(20, 62))), 64) for _ in range(50)])
    uniforms = torch.rand(50, SPEC.num_uniforms(64), generator=torch.Generator().manual_seed(0))
    batch = SPEC.apply(rows, uniforms, vocab)
    assert batch.ids.shape == rows.shape and batch.weights.sum() > 40
    for ids, made, starts, ends, weight in zip(rows, batch.ids, batch.starts, batch.ends, batch.weights):
        if not weight:
            continue
        assert (made == tokenizer.mask_token_id).sum() == 1
        first, last = starts.nonzero().flatten().tolist(), ends.nonzero().flatten().tolist()
        spans = {words(tokenizer, made[a : b + 1]) for a, b in zip(first, last, strict=True)}
        (span,) = spans
        asked, passage = words(tokenizer, made).split(" [SEP]")[:2]
        restored = asked.removeprefix("[CLS] ").replace("[MASK]", span)
        assert f" {restored} " in words(tokenizer, ids)
        assert passage.count(f" {span} ".rstrip()) >= len(first)


def test_a_row_in_which_nothing_recurs_has_no_weight(tokenizer: Tokenizer) -> None:
    ids = torch.cat([row(tokenizer, " ".join(WORDS[10:30])), row(tokenizer, "the", 22)])
    batch = SPEC.apply(ids, torch.rand(2, 23), SpanVocab(tokenizer))
    assert batch.weights.tolist() == [0, 0] and batch.starts[:, 0].all() and batch.starts.sum() == 2


@pytest.mark.slow
def test_it_is_learned_and_its_model_answers(tmp_path: Path) -> None:
    """Every word occurs twice, always before the same word: the answer is the word of the mask's neighbor."""
    draw = random.Random(0)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]), encoding="utf8")
    for name, count in (("train", 400), ("test", 40)):
        texts = []
        for _ in range(count):
            names, rest = draw.sample(WORDS[10:26], 8), draw.sample(WORDS[26:], 8)
            half = [word for pair in zip(names, rest) for word in pair]
            texts.append(" ".join([*half, *half]))
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts))
    files = (str(tmp_path / f"{name}.txt") for name in ("train", "test"))
    data = Passages(*files, TokenizerConfig(path=str(tmp_path / "vocab.txt")), 34, packing=False, cache=str(tmp_path))
    run = Run(
        model=bert(2, 32, 2, seq_len=34, vocab_size=64),
        task=SpanSelection(question_length=3, max_span_length=1),
        data=data,
        batch_size=32,
        budget=Budget(steps=150),
        optim=AdamW(lr=3e-3),
        log_every=150,
        eval_every=150,
        save_every=150,
    )
    before = loop.train(run.replace(budget=Budget(steps=1)), tmp_path / "before", "cpu")
    after = loop.train(run, tmp_path / "after", "cpu")
    assert before["accuracy"] < 0.3 and after["accuracy"] > 0.6
    preprocessing = read_preprocessing(tmp_path / "after")
    assert isinstance(preprocessing, TextPreprocessing) and preprocessing.task == "span"
    assert allmlp.load(tmp_path / "after").spec.head is not None


def test_passages_are_single_rows() -> None:
    with pytest.raises(UserError, match="separate_documents=false"):
        Passages("text", separate_documents=True)
