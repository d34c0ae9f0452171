"""Text corpora: tokenized once, split into rows, with the same rows after every reload."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from allmlp.data import corpus
from allmlp.data.corpus import Corpus, TextDataset, TokenBatch, TokenRows, row_bounds
from allmlp.data.dataset import InMemory
from allmlp.data.docstrings import Docstrings, iter_docstrings
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.errors import UserError

pytest.importorskip("tokenizers")


@pytest.fixture
def spec(tmp_path: Path) -> Corpus:
    paragraphs = [f"sheep number {number} jumps over the fence" + " again" * (number % 7) for number in range(60)]
    (tmp_path / "train.txt").write_text("\n\n".join(paragraphs))
    (tmp_path / "test.txt").write_text("sheep jumps again\n\nover the fence")
    return Corpus(
        str(tmp_path / "train.txt"),
        test=str(tmp_path / "test.txt"),
        tokenizer=TokenizerConfig(vocab_size=200),
        seq_len=12,
        cache=str(tmp_path / "cache"),
    )


def words(data: TextDataset, rows: torch.Tensor) -> list[str]:
    return data.tokenizer.decode(rows.flatten().tolist()).split()


def test_packed_rows_contain_the_whole_text(spec: Corpus) -> None:
    data = spec.load()
    ids = data.train.fetch(torch.arange(len(data.train))).ids
    assert ids.dtype == torch.int32 and (ids[:, 0] == data.tokenizer.cls_token_id).all()
    assert (ids[:-1, -1] == data.tokenizer.sep_token_id).all() and not (ids[:-1] == data.tokenizer.pad_token_id).any()
    text = Path(spec.path).read_text().split()
    assert words(data, ids) == text
    assert words(data, data.test.fetch(torch.arange(len(data.test))).ids) == Path(spec.test).read_text().split()


def test_documents_are_not_mixed_unless_asked(spec: Corpus) -> None:
    data = spec.replace(packing=False).load()
    ids = data.train.fetch(torch.arange(len(data.train))).ids
    assert words(data, ids) == Path(spec.path).read_text().split()
    starts = [row for row in ids if data.tokenizer.decode(row.tolist()).startswith("sheep number")]
    assert len(starts) == 60
    for row in ids:
        real = (row != data.tokenizer.pad_token_id).sum()
        assert row[real - 1] == data.tokenizer.sep_token_id and (row[real:] == data.tokenizer.pad_token_id).all()


def test_cuts() -> None:
    starts, stops = row_bounds(np.array([5, 5, 12]), 4, packing=True)
    assert list(zip(starts, stops)) == [(0, 4), (4, 8), (8, 12)]
    starts, stops = row_bounds(np.array([5, 5, 12]), 4, packing=False)
    assert list(zip(starts, stops)) == [(0, 4), (4, 5), (5, 9), (9, 12)]


def test_tokens_are_kept_until_something_changes(spec: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    first = spec.load()
    original = corpus.write
    calls = []
    monkeypatch.setattr(corpus, "write", lambda *arguments: (calls.append(1), original(*arguments)))
    again = spec.replace(seq_len=20).load()
    assert not calls and again.tokenizer == first.tokenizer
    Path(spec.path).write_text("other words entirely\n\nand more of them")
    assert words(spec.load(), spec.load().train.fetch(torch.arange(1)).ids)[0] == "other" and len(calls) == 1


def test_tokens_of_other_test_files_are_others(spec: Corpus, tmp_path: Path) -> None:
    """The same files in the same order, of which the second is for training, then for testing."""
    (tmp_path / "more.txt").write_text("sheep number one sleeps\n\nsheep number two sleeps")
    first, second = spec.path, str(tmp_path / "more.txt")
    sizes = []
    for path, test in ((f"{first},{second}", spec.test), (first, f"{second},{spec.test}")):
        data = spec.replace(path=path, test=test, packing=False).load()
        sizes.append(len(data.train))
    assert sizes[0] > sizes[1]


def test_an_interrupted_cache_leaves_nothing(spec: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            spec.load()
    assert [file.suffix for file in (Path(spec.cache) / "text").iterdir()] == [".lock"]
    assert len(spec.load().train) > 10


def count(spec: Corpus) -> int:
    return len(spec.load().train)


@pytest.mark.slow
def test_several_processes_write_one_cache(spec: Corpus) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert len(set(pool.map(count, [spec] * 2))) == 1


def test_test_documents_are_not_in_the_training_split(spec: Corpus) -> None:
    data = spec.replace(test="", test_fraction=0.3, packing=False, seq_len=64).load()
    train, test = (
        {data.tokenizer.decode(row.tolist()) for row in split.fetch(torch.arange(len(split))).ids}
        for split in (data.train, data.test)
    )
    assert len(train) + len(test) == 60 and 5 < len(test) < 35 and not train & test


def test_files_for_testing_are_not_trained_on(spec: Corpus, tmp_path: Path) -> None:
    """Also where a pattern finds them; the same text for both is a trial."""
    alone = spec.load()
    data = spec.replace(path=f"{tmp_path}/./t*.txt").load()
    rows, others = (found.train.fetch(torch.arange(len(found.train))).ids for found in (data, alone))
    assert torch.equal(rows, others)
    trial = spec.replace(test=spec.path).load()
    assert len(trial.test) == len(trial.train) == len(alone.train)


def test_rows_that_stay_on_disk_are_the_same(spec: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    held = spec.load().train
    monkeypatch.setattr(corpus, "MAX_BYTES_IN_MEMORY", 0)
    streamed = spec.load().train
    assert isinstance(held, InMemory) and isinstance(streamed, TokenRows) and len(held) == len(streamed)
    chosen = torch.tensor([3, 0, len(held) - 1])
    assert torch.equal(held.fetch(chosen).ids, streamed.fetch(chosen).ids)


def test_the_tokenizer_of_another_model(spec: Corpus, tmp_path: Path) -> None:
    data = spec.load()
    (tmp_path / "model").mkdir()
    for name, text in data.files().items():
        (tmp_path / "model" / name).write_text(text)
    other = spec.replace(tokenizer=TokenizerConfig(vocab_size=50)).for_model(str(tmp_path / "model")).load()
    assert other.tokenizer == data.tokenizer
    with pytest.raises(UserError, match=r"train split of \d+ documents: set data\.test or lower data\.test_fraction"):
        spec.replace(test="", test_fraction=1.0).for_model(str(tmp_path / "model")).load()


def test_too_little_text(spec: Corpus, tmp_path: Path) -> None:
    Path(spec.test).write_text("\n\n  \n")
    with pytest.raises(UserError, match="there is no text in the test split: give more"):
        spec.load()
    with pytest.raises(
        UserError,
        match=r"test split of \d+ documents: set data\.test or raise .*, or set data\.sample_by=line$",
    ):
        spec.replace(test="", test_fraction=0.0).load()
    with pytest.raises(UserError, match=r"raise data\.test_fraction$"):
        spec.replace(test="", test_fraction=0.0, sample_by="line").load()
    Path(spec.path).write_text("one line\nanother\n")
    with pytest.raises(UserError, match=r"all of it is one document: set data\.test, or set data\.sample_by=line$"):
        spec.replace(test="", test_fraction=0.0).load()
    Path(spec.path).write_text("")
    with pytest.raises(UserError, match="cannot train a tokenizer"):
        spec.load()
    broken = Path(spec.path).with_name("broken.jsonl")
    broken.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=f"^{re.escape(str(broken))}, line 2: not a JSON object"):
        spec.replace(path=str(broken)).load()
    narrow = spec.replace(seq_len=2, path=__file__, test=__file__)
    with pytest.raises(UserError, match="at least three tokens"):
        narrow.load()
    (tmp_path / "short.txt").write_text("two words")
    short = spec.replace(path=str(tmp_path / "short.txt"), test=str(tmp_path / "short.txt"), seq_len=128).load()
    assert (
        len(short.train) == 1 and (short.train.fetch(torch.tensor([0])).ids != short.tokenizer.pad_token_id).sum() > 3
    )


@pytest.mark.slow
def test_embedded_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text for text, _ in zip(iter_docstrings(), range(300))]
    assert len(texts) == 300 and min(map(len, texts)) > 80
    monkeypatch.setattr("allmlp.data.docstrings.docstrings", lambda: tuple(texts))
    data = Docstrings(tokenizer=TokenizerConfig(vocab_size=500), cache=str(tmp_path)).load()
    assert isinstance(data.train.fetch(torch.tensor([0])), TokenBatch) and len(data.train) > len(data.test) > 0
