"""Sentence pairs: files, skipped pairs, rows, the tokenizer."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import lzma
from pathlib import Path

import pytest
import torch

from allmlp.data.parallel_corpus import ParallelCorpus, TranslationDataset
from allmlp.data.preprocessing import TextPreprocessing
from allmlp.data.tokenizer import TokenizerConfig, parse_tokenizer
from allmlp.errors import UserError
from allmlp.spec import from_json

LINES = [
    ("ein Hund", "a dog"),
    ("eine Katze schläft", "a cat sleeps"),
    ("zwei Männer lachen 😀", "two men laugh 😀"),
    ("ילד רץ", "يجري الولد"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tsv(pairs: list[tuple[str, str]], header: str = "en\tde\tcs") -> str:
    return "\n".join([header, *(f"{target}\t{source}\tx" for source, target in pairs)]) + "\n"


def data(folder: Path, train: str = tsv(LINES), test: str = tsv(LINES[:2]), **fields: object) -> ParallelCorpus:
    for name, text in (("train.tsv", train), ("test.tsv", test)):
        (folder / name).write_text(text, encoding="utf8")
    fields = {"tokenizer": TokenizerConfig("bpe", 400, lowercase=False), "seq_len": 32} | fields
    return ParallelCorpus(str(folder / "train.tsv"), str(folder / "test.tsv"), **fields)  # type: ignore[arg-type]


def texts(dataset: TranslationDataset, split: str = "train") -> list[tuple[str, str]]:
    """The pairs of a split, read back from their tokens."""
    part = getattr(dataset, split)
    found = part.fetch(torch.arange(len(part)))
    sides = ([dataset.tokenizer.decode(row).strip() for row in side.tolist()] for side in found[:2])
    return list(zip(*sides))


def test_rows_are_framed_and_padded(tmp_path: Path) -> None:
    dataset = data(tmp_path).load()
    known = dataset.tokenizer
    source, target, number = dataset.train.fetch(torch.arange(4))
    assert source.dtype == target.dtype == torch.int32 and source.shape == target.shape == (4, 32)
    for row, pair in zip(source.tolist(), LINES):
        ids = known.encode([pair[0]])[0]
        assert row == [*ids, known.sep_token_id] + [known.pad_token_id] * (31 - len(ids))
    for row, pair in zip(target.tolist(), LINES):
        ids = known.encode([pair[1]])[0]
        assert row == [known.cls_token_id, *ids, known.sep_token_id] + [known.pad_token_id] * (30 - len(ids))
    real = (source != known.pad_token_id).sum() + (target != known.pad_token_id).sum()
    assert number.tolist() == [0, 1, 2, 3] and dataset.tokens_per_pair == round(int(real) / 4)


def test_emoji_and_right_to_left_text_come_back(tmp_path: Path) -> None:
    assert texts(data(tmp_path).load()) == LINES


def test_examples_know_their_reference(tmp_path: Path) -> None:
    dataset = data(tmp_path).load()
    assert dataset.references == tuple(target for _, target in LINES + LINES[:2])
    assert dataset.test.fetch(torch.arange(2)).reference_index.tolist() == [4, 5]
    held = dataset.split_validation(2)
    for (_, target), number in zip(texts(held, "test"), held.test.fetch(torch.arange(2)).reference_index.tolist()):
        assert held.references[number] == target


@pytest.mark.parametrize(("suffix", "pack"), [(".tsv.gz", gzip.open), (".tsv.xz", lzma.open)])
def test_compressed_files(tmp_path: Path, suffix: str, pack: object) -> None:
    with pack(tmp_path / f"packed{suffix}", "wt", encoding="utf8") as file:  # type: ignore[operator]
        file.write(tsv(LINES))
    spec = data(tmp_path)
    packed = spec.replace(path=str(tmp_path / f"packed{suffix}")).load()
    assert texts(packed) == LINES
    assert len(spec.replace(path=f"{spec.path}, {tmp_path / f'packed{suffix}'}").load().train) == 8


def test_two_parallel_files(tmp_path: Path) -> None:
    spec = data(tmp_path)
    # An empty line on one side, one on both, and line ends of another system.
    (tmp_path / "train.de").write_text("ein Hund\r\n\r\n\r\neine Katze\r\n", encoding="utf8")
    (tmp_path / "train.en").write_text("a dog\nnothing\n\na cat\n", encoding="utf8")
    spec = spec.replace(path=f"{tmp_path / 'train.de'}+{tmp_path / 'train.en'}")
    assert texts(spec.load()) == [("ein Hund", "a dog"), ("eine Katze", "a cat")]
    (tmp_path / "train.en").write_text("a dog\nnothing\n", encoding="utf8")
    with pytest.raises(UserError, match=r"not aligned: .*train\.en ends after line 2"):
        spec.load()
    with pytest.raises(UserError, match="has 2 files"):
        spec.replace(path=f"{tmp_path / 'train.[de][en]'}+{tmp_path / 'train.en'}").load()


def test_a_name_with_a_plus_sign_is_one_file(tmp_path: Path) -> None:
    spec = data(tmp_path)
    (tmp_path / "c++.tsv").write_text(tsv(LINES), encoding="utf8")
    assert len(spec.replace(path=str(tmp_path / "c++.tsv")).load().train) == 4


def test_pairs_with_an_empty_side_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = tsv([*LINES, ("", "alone"), ("allein", "  ")]) + "\n\n" + "only english\n"
    with caplog.at_level(logging.WARNING, "allmlp.data"):
        assert texts(data(tmp_path, train).load()) == LINES
    (record,) = caplog.records
    assert "skipped 3 pairs with an empty sentence" in record.getMessage()


def test_long_and_unequal_pairs_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Bytes are the tokens: the text is too short to merge any but the space before a word.
    train = tsv([("ab", "cd"), ("a" * 40, "b"), ("e", "f" * 8), ("g", "h" * 5)])
    spec = data(tmp_path, train, seq_len=10, max_length_ratio=6, tokenizer=TokenizerConfig("bpe", 261, lowercase=False))
    with caplog.at_level(logging.WARNING, "allmlp.data"):
        assert texts(spec.load()) == [("ab", "cd"), ("g", "hhhhh")]
        assert len(spec.replace(max_length_ratio=2).load().train) == 1
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith("skipped 2 of 4 pairs, 2 longer than 10 tokens")
    assert second.endswith("2 longer than 10 tokens, 1 with a length ratio above 2")
    with pytest.raises(UserError, match=r"no training pair is left.*data\.seq_len"):
        spec.replace(seq_len=3).load()


def test_long_test_pairs_are_cut(tmp_path: Path) -> None:
    dataset = data(tmp_path, test=tsv([("Hund " * 50, "dog " * 50)]), seq_len=16).load()
    source, target, number = dataset.test.fetch(torch.tensor([0]))
    known = dataset.tokenizer
    assert source[0, -1] == known.sep_token_id and known.pad_token_id not in source.tolist()[0]
    assert target[0, 0] == known.cls_token_id and known.sep_token_id not in target.tolist()[0]
    assert dataset.references[int(number)] == ("dog " * 50).strip()


def test_one_tokenizer_for_both_languages_is_kept(tmp_path: Path, cache: Path) -> None:
    spec = data(tmp_path, tokenizer=TokenizerConfig("unigram", 60, lowercase=False))
    first = spec.load()
    assert first.tokenizer == spec.load().tokenizer and len(list(cache.rglob("*.json"))) == 1
    assert first.tokenizer.unk_token_id not in [
        i for pair in LINES for ids in first.tokenizer.encode(list(pair)) for i in ids
    ]
    files = first.files()
    assert parse_tokenizer(files["tokenizer.json"], "it") == first.tokenizer
    assert from_json(files["preprocessing.json"]) == TextPreprocessing("translation", 32, text_columns=("de",))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(files["tokenizer.json"], encoding="utf8")
    other = data(tmp_path, tsv(LINES[:2])).for_model(str(tmp_path / "model"))
    assert other.load().tokenizer == first.tokenizer
    assert other.for_model("elsewhere") == other


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source_lang": "ger"}, r"no column 'ger' \(set data.source_lang to another\), only en, de, cs"),
        ({"train": ""}, "first line must name the columns"),
        ({"train": "en\tde\n"}, "has no pairs of sentences"),
        ({"test": "en\tde\n\n\ta\n"}, r"test\.tsv has no pairs of sentences"),
        ({"train": "en\tde\na\tb\tc\n"}, "line 2: 3 columns instead of 2"),
        ({"seq_len": 2}, "at least three tokens"),
        ({"source_lang": "en"}, "the same column, 'en'"),
        ({"max_length_ratio": 0.5}, "at least 1, or none"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        data(tmp_path, **fields).load()  # type: ignore[arg-type]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    spec = data(tmp_path)
    (tmp_path / "torn.tsv.xz").write_bytes(b"not packed at all")
    (tmp_path / "file").touch()
    for change, message in [
        ({"path": ""}, r"set data\.path"),
        ({"path": str(tmp_path / "none.tsv")}, "no text files at"),
        ({"path": str(tmp_path / "torn.tsv.xz")}, "cannot read"),
        ({"cache": str(tmp_path / "file")}, r"set data\.cache"),
    ]:
        with pytest.raises(UserError, match=message):
            spec.replace(**change).load()


def test_splits_that_are_not_given(tmp_path: Path) -> None:
    """Equal sources stay together; another seed gives another split; validation or test may be given."""
    lines = [(f"ein Hund {n // 2}", f"dog {n}") for n in range(100)]
    spec = data(tmp_path, tsv(lines), test_fraction=0.1).replace(test="")
    dataset = spec.load()
    sources = [{source for source, _ in texts(dataset, split)} for split in ("train", "validation", "test")]
    assert [len(part) for part in sources] == [40, 5, 5] and len(set.union(*sources)) == 50
    assert dataset.notes == ("split with seed 0: 80 train, 10 validation, 10 test",)
    assert spec.load().checksum() == dataset.checksum() != spec.replace(split_seed=1).load().checksum()
    given = spec.replace(val=str(tmp_path / "test.tsv")).load()
    assert len(given.train) == 90 and texts(given, "validation") == LINES[:2] and len(given.test) == 10


def test_tabs_and_quotes_as_a_csv_writer_sets_them(tmp_path: Path) -> None:
    spec, lines = data(tmp_path), [*LINES, ('er sagte "nein" laut', 'he said "no" aloud')]
    with open(tmp_path / "train.tsv", "w", newline="", encoding="utf8") as file:
        csv.writer(file, delimiter="\t").writerows([("de", "en"), *lines])
    assert texts(spec.load()) == lines
    (tmp_path / "train.tsv").write_text(tsv([*LINES, ('"Nein" sagte er', '"No" he said')]), encoding="utf8")
    assert texts(spec.load())[-1] == ('"Nein" sagte er', '"No" he said')


def test_a_table_in_utf16_and_a_comma_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "a,b.tsv").write_text(tsv(LINES), encoding="utf-16")
    place = str(tmp_path / "a,b.tsv")
    spec = data(tmp_path).replace(path=place, test=place, val=place)
    assert texts(spec.load()) == texts(spec.load(), "test") == texts(spec.load(), "validation") == LINES


def test_other_tables(tmp_path: Path) -> None:
    spec = data(tmp_path)
    (tmp_path / "a.csv").write_text("de;en\n" + "".join(f"{a};{b}\n" for a, b in LINES), encoding="utf8")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"de": a, "en": b}) for a, b in LINES))
    for name in ("a.csv", "a.jsonl"):
        assert texts(spec.replace(path=str(tmp_path / name)).load()) == LINES
    with pytest.raises(
        UserError, match=r"a\.csv has no column 'dee' \(set data.source_lang to another\); did you mean 'de'\?"
    ):
        spec.replace(path=str(tmp_path / "a.csv"), source_lang="dee").load()
