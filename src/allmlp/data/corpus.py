"""Running text for language models: tokenised once into a file on disk, cut into rows of equal length."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmlp.data.inputs import FILE as INPUTS
from allmlp.data.inputs import TextInputs
from allmlp.data.source import Resident, Split, Splits
from allmlp.data.text import Unit, documents, find
from allmlp.data.tokenizer import FILE as TOKENIZER
from allmlp.data.tokenizer import TextData, Tokenize, Tokenizer, cache_folder, load
from allmlp.errors import UserError
from allmlp.spec import Count, Rate, to_json

IN_MEMORY = 2**31
"""Bytes of rows up to which a split is held in memory, or on the GPU."""


class Text(NamedTuple):
    ids: Tensor
    """int32, b s; padded on the right."""


@dataclass(frozen=True)
class Texts(Splits):
    """Running text: rows of tokens."""

    tokenizer: Tokenizer
    length: int

    def files(self) -> dict[str, str]:
        return {TOKENIZER: self.tokenizer.to_json(), INPUTS: to_json(TextInputs("text", self.length))}


class Corpus(TextData):
    """Text files of any number and size: `path` and `test` as in `data.text.find`.

    Without a `test`, the hash of a document decides whether it belongs to the `held` share. With `mix` rows run on over
    the ends of documents, as in the papers; without it a row holds one document's tokens, padded. Tokens are kept in
    `cache` ($ALLMLP_CACHE, ~/.cache/allmlp) for the next time.
    """

    path: str
    test: str = ""
    tokenize: Tokenize = Tokenize()
    length: Count = 128
    mix: bool = True
    held: Rate = 0.01
    unit: Unit = "paragraph"
    field: str = "text"
    cache: str = ""

    def open(self) -> Texts:
        files, tests = find(self.path), find(self.test) if self.test else []
        stamps = [f"{file} {stamp(file)}" for file in (*files, *tests)]
        return build(
            self,
            stamps,
            lambda: documents(files, self.unit, self.field),
            (lambda: documents(tests, self.unit, self.field)) if tests else None,
        )


def stamp(file: str) -> str:
    """What changes when a file does."""
    if "://" in file:
        return ""
    status = os.stat(file)
    return f"{status.st_size} {status.st_mtime_ns}"


Source = Callable[[], Iterable[str]]


def build(spec: Corpus, stamps: list[str], train: Source, test: Source | None) -> Texts:
    """Rows of both splits, from the cache or made anew."""
    tokenizer = load(spec.tokenize.path) if spec.tokenize.path else None
    given = spec.tokenize.replace(path="") if tokenizer is None else tokenizer.to_json()
    key = hashlib.sha256(repr((stamps, given, spec.unit, spec.field, spec.held, test is None)).encode()).hexdigest()[
        :24
    ]
    root = cache_folder(spec.cache) / "text"
    folder = root / key
    try:
        root.mkdir(parents=True, exist_ok=True)
        # One process tokenises, the others of a run wait for it.
        with open(root / f"{key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                write(folder, spec, train, test, tokenizer)
    except OSError as reason:
        raise UserError(f"cannot keep tokens in {root}: {reason}; set data.cache to another place") from reason
    tokenizer = load(folder / TOKENIZER)
    splits = [pack(folder, name, tokenizer, spec.length, spec.mix) for name in ("train", "test")]
    return Texts(splits[0], splits[1], tokenizer, spec.length)


def write(folder: Path, spec: Corpus, train: Source, test: Source | None, tokenizer: Tokenizer | None) -> None:
    """Tokens and the ends of documents, in a folder that appears when it is complete."""
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        if tokenizer is None:
            tokenizer = spec.tokenize.build(text for text, held in sides(spec, train, test) if not held)
        (temporary / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf8")
        wide = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
        ends: dict[bool, list[int]] = {False: [], True: []}
        with open(temporary / "train.tokens", "wb") as seen, open(temporary / "test.tokens", "wb") as unseen:
            for texts in batches(sides(spec, train, test), 512):
                for (_, held), ids in zip(texts, tokenizer.encode([text for text, _ in texts])):
                    (unseen if held else seen).write(np.array(ids, dtype=wide).tobytes())
                    ends[held].append((ends[held][-1] if ends[held] else 0) + len(ids))
        for held, name in ((False, "train"), (True, "test")):
            np.save(temporary / f"{name}.ends.npy", np.array(ends[held], dtype=np.int64))
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sides(spec: Corpus, train: Source, test: Source | None) -> Iterator[tuple[str, bool]]:
    """Every document, and whether it is held out for testing."""
    for text in train():
        number = int.from_bytes(hashlib.blake2b(text.encode("utf8", "replace"), digest_size=8).digest(), "big")
        yield text, test is None and number < spec.held * 2**64
    if test is not None:
        yield from ((text, True) for text in test())


def batches(items: Iterator[tuple[str, bool]], size: int) -> Iterator[list[tuple[str, bool]]]:
    while batch := list(islice(items, size)):
        yield batch


def pack(folder: Path, name: str, tokenizer: Tokenizer, length: int, mix: bool) -> Split:
    file, ends = folder / f"{name}.tokens", np.load(folder / f"{name}.ends.npy")
    wide = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    if length < 3:
        raise UserError("a row needs at least three tokens: [CLS], one of the text, [SEP]")
    if not len(ends) or not ends[-1]:
        raise UserError(f"there is no text to {'train' if name == 'train' else 'test'} on: give more, or set data.test")
    tokens = np.memmap(file, dtype=wide, mode="r")
    rows = Rows(tokens, *cuts(ends, length - 2, mix), tokenizer, length)
    if len(rows) * length * 4 > IN_MEMORY:
        return rows
    return Resident(*rows.fetch(torch.arange(len(rows))), kind=Text)


def cuts(ends: np.ndarray, size: int, mix: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where each row begins and ends in the stream of tokens."""
    if mix:
        starts = np.arange(0, ends[-1], size)
        return starts, np.minimum(starts + size, ends[-1])
    begins = np.concatenate([[0], ends[:-1]])
    starts = np.concatenate([np.arange(a, b, size) for a, b in zip(begins, ends)] or [np.empty(0, np.int64)])
    stops = np.concatenate([np.minimum(np.arange(a, b, size) + size, b) for a, b in zip(begins, ends)])
    return starts, stops


class Rows:
    """[CLS] tokens [SEP], padded on the right, cut from a stream on disk as they are asked for."""

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, tokenizer: Tokenizer, length: int
    ) -> None:
        self.tokens, self.starts, self.stops = tokens, starts, stops
        self.first, self.last, self.pad, self.length = tokenizer.first, tokenizer.last, tokenizer.pad, length

    def __len__(self) -> int:
        return len(self.starts)

    def fetch(self, indices: Tensor, draws: Tensor | None = None) -> Text:
        chosen = indices.numpy()
        starts, sizes = self.starts[chosen], self.stops[chosen] - self.starts[chosen]
        columns = np.arange(self.length - 2)
        inside = columns < sizes[:, None]
        places = np.minimum(starts[:, None] + columns, len(self.tokens) - 1)
        ids = np.full((len(chosen), self.length), self.pad, dtype=np.int32)
        ids[:, 0] = self.first
        ids[:, 1:-1] = np.where(inside, self.tokens[places], self.pad)
        ids[np.arange(len(chosen)), sizes + 1] = self.last
        return Text(torch.from_numpy(ids))
