"""SQuAD's files: windows, answers in them, and everything that can be wrong with a file."""

from __future__ import annotations

import gzip
import json
import logging
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch

from allmlp.data.inputs import TextInputs
from allmlp.data.squad import Frame, Passage, Question, Questions, Squad, homes
from allmlp.data.tokenizer import SPECIAL, Tokenize
from allmlp.errors import UserError
from allmlp.spec import from_json

LETTERS = [chr(ord("a") + number) for number in range(26)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))


def vocabulary(folder: Path, words: list[str] = LETTERS) -> str:
    file = folder / "vocab.txt"
    file.write_text("\n".join([*SPECIAL, *words]), encoding="utf8")
    return str(file)


def entry(question: str, answers: list[tuple[str, int]], **more: Any) -> dict[str, Any]:
    return {
        "id": question,
        "question": question,
        "answers": [{"text": text, "answer_start": start} for text, start in answers],
        **more,
    }


def content(*paragraphs: tuple[str, list[dict[str, Any]]]) -> str:
    return json.dumps(
        {"version": "1.1", "data": [{"paragraphs": [{"context": text, "qas": qas} for text, qas in paragraphs]}]}
    )


def questions(folder: Path, *paragraphs: tuple[str, list[dict[str, Any]]], **options: Any) -> Questions:
    """The same paragraphs to learn from and to judge on, with a token for every letter."""
    file = folder / "squad.json"
    file.write_text(content(*paragraphs), encoding="utf8")
    options = {"length": 12, "stride": 3, "question": 2, "tokenize": Tokenize(path=vocabulary(folder)), **options}
    return Squad(str(file), str(file), **options).open()


ALPHABET = " ".join(LETTERS)


def naive_windows(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """BERT's loop, word for word: start and length."""
    spans, start = [], 0
    while start < tokens:
        length = min(tokens - start, room)
        spans.append((start, length))
        if start + length == tokens:
            break
        start += min(length, stride)
    return spans


def naive_home(spans: list[tuple[int, int]], token: int) -> int | None:
    """BERT's rule, word for word."""
    best_score, best = None, None
    for number, (start, length) in enumerate(spans):
        end = start + length - 1
        if token < start or token > end:
            continue
        score = min(token - start, end - token) + 0.01 * length
        if best_score is None or score > best_score:
            best_score, best = score, number
    return best


@pytest.mark.parametrize("stride", [1, 2, 3, 7])
@pytest.mark.parametrize("words", [0, 2])
def test_windows_are_those_of_bert(stride: int, words: int) -> None:
    frame = Frame(length=12, stride=stride, question=2)
    frame.check()
    for tokens in range(1, 40):
        question = Question([9] * words, Passage("", [1] * tokens, []))
        parts = frame.parts(question)
        naive = naive_windows(tokens, 12 - words - 3, stride)
        assert [(part.start, len(part)) for part in parts] == naive
        assert homes(parts, tokens) == [naive_home(naive, token) for token in range(tokens)]
    assert frame.parts(Question([], Passage("", [], []))) == [range(0)]


def test_rows_hold_question_and_context(tmp_path: Path) -> None:
    found = questions(tmp_path, (ALPHABET[:19], [entry("x y", [("d e", 6)])]))  # a to j: four windows of seven
    tokenizer = found.tokenizer
    rows = [
        " ".join(map(tokenizer.word, row)) for row in found.train.fetch(torch.arange(len(found.train))).ids.tolist()
    ]
    assert rows == [
        "[CLS] x y [SEP] a b c d e f g [SEP]",
        "[CLS] x y [SEP] d e f g h i j [SEP]",
    ]
    batch = found.train.fetch(torch.tensor([0, 1]))
    assert batch.ids.dtype == torch.int32
    assert batch.segments.tolist() == [[0] * 4 + [1] * 8] * 2
    assert list(zip(batch.start.tolist(), batch.end.tolist())) == [(7, 8), (4, 5)]
    asked = found.test.fetch(torch.tensor([0]))
    assert torch.equal(asked.ids[0], batch.ids)
    assert asked.ends[0].int().tolist() == [[0] * 4 + [1] * 7 + [0]] * 2
    # d, e and f have more context behind them in the first window, g and what follows in the second.
    assert asked.starts[0].int().tolist() == [[0] * 4 + [1] * 5 + [0] * 3, [0] * 6 + [1] * 5 + [0]]
    assert asked.number.tolist() == [0]


def test_questions_with_fewer_windows_have_empty_ones(tmp_path: Path) -> None:
    found = questions(tmp_path, (ALPHABET, [entry("x", [("z", 50)])]), ("a b", [entry("y", [("b", 2)])]))
    asked = found.test.fetch(torch.arange(2))
    windows = len(naive_windows(26, 8, 3))
    assert asked.ids.shape == (2, windows, 12)
    assert (asked.ids[1, 1:] == found.tokenizer.pad).all()
    assert not asked.starts[1, 1:].any() and not asked.ends[1, 1:].any()
    assert asked.starts.sum((1, 2)).tolist() == [26, 2]


def test_an_answer_that_a_window_cuts_off_is_not_in_it(tmp_path: Path) -> None:
    found = questions(tmp_path, (ALPHABET[:19], [entry("x y", [("f g h", 10)])]))
    batch = found.train.fetch(torch.arange(2))
    assert list(zip(batch.start.tolist(), batch.end.tolist())) == [(0, 0), (6, 8)]
    # Longer than a window: nowhere.
    found = questions(tmp_path, (ALPHABET, [entry("x y", [("b c d e f g h i j k", 2)])]))
    batch = found.train.fetch(torch.arange(len(found.train)))
    assert not batch.start.any() and not batch.end.any()


def test_an_empty_context_has_one_window(tmp_path: Path) -> None:
    impossible = entry("x", [], is_impossible=True)
    found = questions(tmp_path, ("", [impossible]), ("  ", [impossible]), ("a", [entry("x", [("a", 0)])]))
    assert len(found.train) == 3
    rows = found.train.fetch(torch.arange(3))
    tokenizer = found.tokenizer
    assert rows.ids[0, :4].tolist() == [tokenizer.first, tokenizer.encode(["x"])[0][0], tokenizer.last, tokenizer.last]
    assert rows.start.tolist() == [0, 0, 3]
    assert not found.test.fetch(torch.tensor([0])).starts.any()


def test_a_long_question_is_cut(tmp_path: Path) -> None:
    found = questions(tmp_path, ("a b", [entry("p q r s t", [("b", 2)]), entry("", [("a", 0)])]))
    assert [len(question.ids) for question in found.asked] == [2, 0]
    assert found.train.fetch(torch.tensor([0, 1])).start.tolist() == [5, 2]


def test_offsets_count_characters_not_bytes(tmp_path: Path) -> None:
    text = "👨‍👩‍👧 😀 café שלום עולם مرحبا e\u0301té z"
    answers = ["😀", "café", "שלום עולם", "مرحبا", "e\u0301té", "z"]
    for algorithm in ("wordpiece", "bpe", "unigram"):
        entries = [entry(f"q {answer}", [(answer, text.index(answer))]) for answer in answers]
        found = questions(
            tmp_path, (text, entries), length=128, stride=32, question=32, tokenize=Tokenize(algorithm, vocabulary=400)
        )
        for question, answer in zip(found.known, answers, strict=True):
            assert question.answer is not None
            first, last = question.answer
            spans = question.passage.spans
            assert text[spans[first][0] : spans[last][1]].strip() == answer, algorithm


def test_an_answer_is_looked_for_where_it_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = [
        entry("x", [("a", 7)]),  # a stands at 0 and 8: the nearest counts
        entry("x", [("a", -3)]),
        entry("x", [("nowhere", 0), ("c", 0)]),  # the second answer is there
        entry("x", [("nowhere", 0)]),
        entry("x", [("", 0)]),
        entry("x", []),  # v1.1 without an answer teaches nothing
        entry("x", [("b", 2)], is_impossible=True),  # v2.0 says which counts
    ]
    with caplog.at_level(logging.WARNING, "allmlp.data"):
        found = questions(tmp_path, ("a b c d a", entries), length=20)
    assert [question.answer for question in found.known] == [(4, 4), (0, 0), (2, 2), None]
    assert len(caplog.records) == 1 and "3 of 7 questions left out" in caplog.text
    assert [len(question.answers) for question in found.asked] == [1, 1, 2, 1, 1, 0, 0]


def test_a_text_may_spell_special_tokens(tmp_path: Path) -> None:
    found = questions(tmp_path, ("a [PAD] b [SEP] \ud83d c", [entry("[PAD]", [("[PAD]", 2), ("c", 18)])]), length=20)
    row = found.train.fetch(torch.tensor([0]))
    real = row.ids[0] != found.tokenizer.pad
    assert real.tolist() == [True] * int(real.sum()) + [False] * int((~real).sum())
    assert row.start.item() == row.end.item() == 4


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        "{}",
        '"data"',
        '{"data": 3}',
        '{"data": "abc"}',
        '{"data": [{"paragraphs": [{"qas": []}]}]}',
        '{"data": [{"paragraphs": [{"context": 3, "qas": []}]}]}',
        '{"data": [{"paragraphs": [{"context": "a", "qas": [{"answers": []}]}]}]}',
        '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": [3]}]}]}]}',
        '{"data": [{"paragraphs": [{"context": "a", "qas": ["b"]}]}]}',
        "[" * 100_000,
    ],
)
def test_what_is_not_squad_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"other\.json is not SQuAD's JSON") as caught:
        Squad(str(file), str(file)).open()
    assert "\n" not in str(caught.value)


def test_other_mistakes_are_one_line(tmp_path: Path) -> None:
    good, empty, hopeless = tmp_path / "good.json", tmp_path / "empty.json", tmp_path / "hopeless.json"
    good.write_text(content(("a b", [entry("x", [("b", 2)])])))
    empty.write_text('{"data": []}')
    hopeless.write_text(content(("a b", [entry("x", [("c", 2)])])))
    broken = tmp_path / "broken.json.xz"
    broken.write_bytes(lzma.compress(good.read_bytes())[:-20])
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(good.read_bytes())[:-20])
    for train, message in (
        ("", "set data.train"),
        (str(tmp_path / "none.json"), "cannot read"),
        (str(tmp_path), "cannot read"),
        (str(broken), "cannot read"),
        (str(cut), "cannot read"),
        (str(empty), "has no questions"),
        (str(hopeless), "no question to learn from"),
    ):
        with pytest.raises(UserError, match=message):
            Squad(train, str(good)).open()
    with pytest.raises(UserError, match="no room"):
        Squad(str(good), str(good), length=128)
    with pytest.raises(UserError, match="neither"):
        Squad(str(good), str(good)).like(str(tmp_path)).open()


def test_packed_files_are_the_same(tmp_path: Path) -> None:
    text = content((ALPHABET, [entry("x", [("c", 4)])])).encode()
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + text)
    (tmp_path / "a.json.xz").write_bytes(lzma.compress(text))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text))
    tokenize = Tokenize(path=vocabulary(tmp_path))
    plain, *packed = (
        Squad(str(tmp_path / name), str(tmp_path / name), tokenize).open()
        for name in ("a.json", "a.json.xz", "a.json.gz")
    )
    for other in packed:
        assert torch.equal(other.train.fetch(torch.tensor([0])).ids, plain.train.fetch(torch.tensor([0])).ids)


def test_a_tokenizer_is_trained_once(tmp_path: Path) -> None:
    """Another training would number the words otherwise, and a run that resumes would read other tokens."""
    first, second = (
        questions(tmp_path, ("the cat sat on the mat", [entry("who sat?", [("cat", 4)])]), tokenize=Tokenize())
        for _ in range(2)
    )
    assert first.tokenizer == second.tokenizer
    files = first.files()
    assert from_json(files["inputs.json"]) == TextInputs("span", 12)
    (tmp_path / "tokenizer.json").write_text(files["tokenizer.json"], encoding="utf8")
    file = str(tmp_path / "squad.json")
    data = Squad(file, file, length=12, stride=3, question=2).like(str(tmp_path))
    assert data.open().tokenizer == first.tokenizer
    assert data.like("elsewhere") == data


def test_whole_questions_are_held_out(tmp_path: Path) -> None:
    paragraphs = [
        (f"{ALPHABET} {letter}", [entry(f"{letter} {other}", [(other, 2 * LETTERS.index(other))]) for other in "abc"])
        for letter in LETTERS[:5]
    ]
    found = questions(tmp_path, *paragraphs)
    held = found.hold_out(6)
    assert len(held.test) == len(held.asked) == 6 and len(held.known) == 9
    assert {question.passage.text for question in held.asked}.isdisjoint(q.passage.text for q in held.known)
    assert len(held.train) == sum(len(held.frame.parts(question)) for question in held.known)
    assert found.hold_out(0) is found
    with pytest.raises(UserError, match="15 training questions"):
        found.hold_out(15)
