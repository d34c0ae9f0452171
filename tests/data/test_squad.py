"""SQuAD files: windows, answers and errors."""

from __future__ import annotations

import gzip
import json
import logging
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch

from allmlp.data.preprocessing import TextPreprocessing
from allmlp.data.squad import (
    Squad,
    SquadDataset,
    TokenizedContext,
    TokenizedQuestion,
    WindowConfig,
    answer_table,
    max_context_windows,
    read,
)
from allmlp.data.tokenizer import SPECIAL_TOKENS, TokenizerConfig
from allmlp.errors import UserError
from allmlp.spec import from_json

LETTERS = [chr(ord("a") + number) for number in range(26)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))


def vocab_file(folder: Path, words: list[str] = LETTERS) -> str:
    file = folder / "vocab.txt"
    file.write_text("\n".join([*SPECIAL_TOKENS, *words]), encoding="utf8")
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


def questions(folder: Path, *paragraphs: tuple[str, list[dict[str, Any]]], **options: Any) -> SquadDataset:
    """The same paragraphs for training and testing, with one token per letter."""
    file = folder / "squad.json"
    file.write_text(content(*paragraphs), encoding="utf8")
    options = {
        "seq_len": 12,
        "doc_stride": 3,
        "max_query_length": 2,
        "tokenizer": TokenizerConfig(path=vocab_file(folder)),
        **options,
    }
    return Squad(str(file), str(file), **options).load()


ALPHABET = " ".join(LETTERS)


def naive_windows(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """BERT's loop, literally: start and length."""
    spans, start = [], 0
    while start < tokens:
        length = min(tokens - start, room)
        spans.append((start, length))
        if start + length == tokens:
            break
        start += min(length, stride)
    return spans


def naive_max_context(spans: list[tuple[int, int]], token: int) -> int | None:
    """BERT's rule, literally."""
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
    windows = WindowConfig(seq_len=12, doc_stride=stride, max_query_length=2)
    windows.check()
    for tokens in range(1, 40):
        question = TokenizedQuestion([9] * words, TokenizedContext("", [1] * tokens, []))
        parts = windows.split(question)
        naive = naive_windows(tokens, 12 - words - 3, stride)
        assert [(part.start, len(part)) for part in parts] == naive
        assert max_context_windows(parts, tokens) == [naive_max_context(naive, token) for token in range(tokens)]
    assert windows.split(TokenizedQuestion([], TokenizedContext("", [], []))) == [range(0)]


def test_rows_hold_question_and_context(tmp_path: Path) -> None:
    found = questions(tmp_path, (ALPHABET[:19], [entry("x y", [("d e", 6)])]))  # a to j: four windows of seven
    tokenizer = found.tokenizer
    rows = [
        " ".join(map(tokenizer.id_to_token, row))
        for row in found.train.fetch(torch.arange(len(found.train))).ids.tolist()
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
    assert asked.question_index.tolist() == [0]


def test_questions_with_fewer_windows_have_empty_ones(tmp_path: Path) -> None:
    found = questions(tmp_path, (ALPHABET, [entry("x", [("z", 50)])]), ("a b", [entry("y", [("b", 2)])]))
    asked = found.test.fetch(torch.arange(2))
    windows = len(naive_windows(26, 8, 3))
    assert asked.ids.shape == (2, windows, 12)
    assert (asked.ids[1, 1:] == found.tokenizer.pad_token_id).all()
    assert not asked.starts[1, 1:].any() and not asked.ends[1, 1:].any()
    assert asked.starts.sum((1, 2)).tolist() == [26, 2]


def test_an_answer_must_be_in_the_window_completely(tmp_path: Path) -> None:
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
    assert rows.ids[0, :4].tolist() == [
        tokenizer.cls_token_id,
        tokenizer.encode(["x"])[0][0],
        tokenizer.sep_token_id,
        tokenizer.sep_token_id,
    ]
    assert rows.start.tolist() == [0, 0, 3]
    assert not found.test.fetch(torch.tensor([0])).starts.any()


def test_a_long_question_is_truncated(tmp_path: Path) -> None:
    found = questions(tmp_path, ("a b", [entry("p q r s t", [("b", 2)]), entry("", [("a", 0)])]))
    assert [len(question.ids) for question in found.test_questions] == [2, 0]
    assert found.train.fetch(torch.tensor([0, 1])).start.tolist() == [5, 2]


def test_offsets_count_characters_not_bytes(tmp_path: Path) -> None:
    text = "👨‍👩‍👧 😀 café שלום עולם مرحبا e\u0301té z"
    answers = ["😀", "café", "שלום עולם", "مرحبا", "e\u0301té", "z"]
    for algorithm in ("wordpiece", "bpe", "unigram"):
        entries = [entry(f"q {answer}", [(answer, text.index(answer))]) for answer in answers]
        found = questions(
            tmp_path,
            (text, entries),
            seq_len=128,
            doc_stride=32,
            max_query_length=32,
            tokenizer=TokenizerConfig(algorithm, vocab_size=400),
        )
        for question, answer in zip(found.train_questions, answers, strict=True):
            assert question.answer is not None
            first, last = question.answer
            offsets = question.context.offsets
            assert text[offsets[first][0] : offsets[last][1]].strip() == answer, algorithm


def test_the_nearest_occurrence_of_an_answer_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = [
        entry("x", [("a", 7)]),  # a is at 0 and 8: the nearest is used
        entry("x", [("a", -3)]),
        entry("x", [("nowhere", 0), ("c", 0)]),  # the second answer is there
        entry("x", [("nowhere", 0)]),
        entry("x", [("", 0)]),
        entry("x", []),  # v1.1 without an answer teaches nothing
        entry("x", [("b", 2)], is_impossible=True),  # v2.0 says which counts
    ]
    with caplog.at_level(logging.WARNING, "allmlp.data"):
        found = questions(tmp_path, ("a b c d a", entries), seq_len=20)
    assert [question.answer for question in found.train_questions] == [(4, 4), (0, 0), (2, 2), None]
    assert len(caplog.records) == 1 and "skipped 3 of 7 questions" in caplog.text
    assert [len(question.answers) for question in found.test_questions] == [1, 1, 2, 1, 1, 0, 0]


def test_a_text_may_contain_special_tokens(tmp_path: Path) -> None:
    found = questions(tmp_path, ("a [PAD] b [SEP] \ud83d c", [entry("[PAD]", [("[PAD]", 2), ("c", 18)])]), seq_len=20)
    row = found.train.fetch(torch.tensor([0]))
    real = row.ids[0] != found.tokenizer.pad_token_id
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
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"other\.json is not a SQuAD file") as caught:
        Squad(str(file), str(file)).load()
    assert "\n" not in str(caught.value)


def test_errors_are_one_line(tmp_path: Path) -> None:
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
        (str(hopeless), "no training question"),
    ):
        with pytest.raises(UserError, match=message):
            Squad(train, str(good)).load()
    with pytest.raises(UserError, match="no room"):
        Squad(str(good), str(good), seq_len=128)
    with pytest.raises(UserError, match="neither"):
        Squad(str(good), str(good)).for_model(str(tmp_path)).load()


ANSWER_FORMS = {
    "Hub.jsonl": {"answers": {"text": ["cat", "the cat"], "answer_start": [4, 0]}},
    "SQuAD.jsonl": {"answers": [{"text": "cat", "answer_start": 4}, {"text": "the cat", "answer_start": 0}]},
    "texts.jsonl": {"answers": ["cat", "the cat"]},
    "object.jsonl": {"answers": {"text": "cat", "answer_start": 4}},
    "one.csv": {"answer": "cat"},
    "position.csv": {"answer": "cat", "answer_start": 4},
    "bracket.csv": {"answer": "[cat"},
    "none.csv": {"answer": ""},
    "empty.jsonl": {"answers": {"text": [], "answer_start": []}},
    "array.json": {"answers": ["cat"]},
    "lines.json": {"answers": ["cat"]},
}


@pytest.mark.parametrize("name", ANSWER_FORMS)
def test_tables_of_questions(name: str, tmp_path: Path) -> None:
    row = {"id": "7", "question": "who sat?", "context": "the cat sat", **ANSWER_FORMS[name]}
    text = "".join(",".join(f'"{cell}"' for cell in cells) + "\n" for cells in (row, row.values()))
    if ".json" in name:
        text = json.dumps([row] if name == "array.json" else row)
    (tmp_path / name).write_text(text, encoding="utf8")
    (found,) = read(str(tmp_path / name))
    assert found[:2] == ("who sat?", "the cat sat") and found.id == "7"
    expected = {"bracket.csv": ["[cat"], "none.csv": [], "empty.jsonl": []}.get(name, ["cat"])
    assert [answer.text for answer in found.answers][:1] == expected and found.impossible == (not expected)
    positions = [answer.start for answer in found.answers]
    assert positions == ([4, 0] if name in ("Hub.jsonl", "SQuAD.jsonl") else [4] if "position" in name else positions)


@pytest.mark.parametrize(
    "answers",
    [
        [{"text": ["cat", "the cat"], "answer_start": [4, 0]}, {"text": [], "answer_start": []}],
        [[{"text": "cat", "answer_start": 4}, {"text": "the cat", "answer_start": 0}], []],
        [["cat", "the cat"], None],
        [{"text": "cat", "answer_start": 4}, None],
        ["cat", None],
    ],
)
def test_parquet_tables_of_questions(answers: list[object], tmp_path: Path) -> None:
    """Other nested columns, such as features, are not read."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = {"id": ["7", "8"], "question": ["who sat?", "who ran?"], "context": ["the cat sat"] * 2}
    table = arrow.table({**texts, "features": [[0.5], [1.5]], "answers": answers})
    files = [tmp_path / "train-00000-of-00002.parquet", tmp_path / "train-00001-of-00002.parquet"]
    for file in files:
        parquet.write_table(table, file)
    found = answer_table(str(files[0]))
    assert found is not None and found.columns == (*texts, "answers")
    first, second, *others = read(",".join(map(str, files)))
    assert (first.id, first.question, first.answers[0].text) == ("7", "who sat?", "cat") and not first.impossible
    assert second.id == "8" and second.impossible and others == [first, second]


def test_contexts_are_held_out_without_a_test_file(tmp_path: Path) -> None:
    words = ["aa", "bb", "cc", "dd", "ee", "ff", "gg", "hh", "ii", "jj", "kk"]
    rows = [f"{kind},{word} x,x\n" for word in words for kind in "op"]
    (tmp_path / "a.csv").write_text("question,context,answer\n" + "".join(rows))
    data = Squad(
        str(tmp_path / "a.csv"),
        tokenizer=TokenizerConfig(path=vocab_file(tmp_path)),
        seq_len=12,
        doc_stride=3,
        max_query_length=2,
    )
    first, again = data.load(), data.load()
    train, test = (
        {question.context.text for question in part} for part in (first.train_questions, first.test_questions)
    )
    assert train | test == {f"{word} x" for word in words} and not train & test and len(test) == 2
    assert first.notes == ("split by context with seed 0: 18 train, 4 test",)
    assert test == {question.context.text for question in again.test_questions}
    (tmp_path / "a.csv").write_text("question,context,answer\n")
    with pytest.raises(UserError, match=r"a\.csv has no questions"):
        data.load()
    (tmp_path / "a.csv").write_text("question,context,answer\n" + rows[0])
    with pytest.raises(UserError, match=r"has a single context.*: set data\.test"):
        data.load()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"answer_start": [4]}, "'text' is missing"),
        ({"text": ["cat", "mat"], "answer_start": [4]}, "shorter"),
        ([3], "cannot be read"),
        ({"text": [3]}, "is not text"),
        ([{"text": "cat", "answer_start": "x"}], "invalid literal"),
    ],
)
def test_answers_that_cannot_be_read(answers: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"question": "who?", "context": "the cat", "answers": answers}))
    with pytest.raises(UserError, match=rf"a\.jsonl, question 1: the answers .*{message}"):
        read(str(file))


def test_packed_files_are_the_same(tmp_path: Path) -> None:
    text = content((ALPHABET, [entry("x", [("c", 4)])])).encode()
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + text)
    (tmp_path / "a.json.xz").write_bytes(lzma.compress(text))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text))
    tokenizer = TokenizerConfig(path=vocab_file(tmp_path))
    plain, *packed = (
        Squad(str(tmp_path / name), str(tmp_path / name), tokenizer).load()
        for name in ("a.json", "a.json.xz", "a.json.gz")
    )
    for other in packed:
        assert torch.equal(other.train.fetch(torch.tensor([0])).ids, plain.train.fetch(torch.tensor([0])).ids)


def test_a_tokenizer_is_trained_once(tmp_path: Path) -> None:
    """Training again could give other ids, and a resumed run would read other tokens."""
    first, second = (
        questions(tmp_path, ("the cat sat on the mat", [entry("who sat?", [("cat", 4)])]), tokenizer=TokenizerConfig())
        for _ in range(2)
    )
    assert first.tokenizer == second.tokenizer
    files = first.files()
    assert from_json(files["preprocessing.json"]) == TextPreprocessing("span", 12)
    (tmp_path / "tokenizer.json").write_text(files["tokenizer.json"], encoding="utf8")
    file = str(tmp_path / "squad.json")
    data = Squad(file, file, seq_len=12, doc_stride=3, max_query_length=2).for_model(str(tmp_path))
    assert data.load().tokenizer == first.tokenizer
    assert data.for_model("elsewhere") == data


def test_whole_questions_are_held_out(tmp_path: Path) -> None:
    paragraphs = [
        (f"{ALPHABET} {letter}", [entry(f"{letter} {other}", [(other, 2 * LETTERS.index(other))]) for other in "abc"])
        for letter in LETTERS[:5]
    ]
    found = questions(tmp_path, *paragraphs)
    held = found.split_validation(6)
    assert len(held.test) == len(held.test_questions) == 6 and len(held.train_questions) == 9
    assert {question.context.text for question in held.test_questions}.isdisjoint(
        q.context.text for q in held.train_questions
    )
    assert len(held.train) == sum(len(held.windows.split(question)) for question in held.train_questions)
    assert found.split_validation(0) is found
    with pytest.raises(UserError, match="15 training questions"):
        found.split_validation(15)
