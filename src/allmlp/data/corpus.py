"""Text for language models: tokenized once into a file on disk and cut into rows of equal length."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmlp.data.dataset import Dataset, InMemory, Split, evenly_spaced
from allmlp.data.paths import cache_folder, write_once
from allmlp.data.preprocessing import TextPreprocessing
from allmlp.data.splits import listing
from allmlp.data.text_files import SampleBy, find_files, leave_out, read_documents
from allmlp.data.tokenizer import TOKENIZER_FILE, TextData, Tokenizer, TokenizerConfig, load_tokenizer
from allmlp.errors import UserError, plural
from allmlp.spec import Count, Rate

MAX_BYTES_IN_MEMORY = 2**31
"""Larger splits are read from disk."""
ENCODE_BATCH = 512
"""Documents tokenized at once."""


Documents = Callable[[], Iterable[str]]


class TokenBatch(NamedTuple):
    ids: Tensor
    """int32, b s; padded on the right."""


@dataclass(frozen=True)
class TextDataset(Dataset):
    """Rows of token ids."""

    tokenizer: Tokenizer
    seq_len: int
    separate_documents: bool = False
    """Whether a row holds several documents or parts, each as [CLS] tokens [SEP], that do not see each other."""

    def separation(self, ids: Tensor) -> dict[str, Tensor]:
        """Model argument that separates the documents of a row: document number of each token, b s, 0 at padding."""
        if not self.separate_documents:
            return {}
        return {"documents": self.tokenizer.starts(ids).cumsum(1).masked_fill(self.tokenizer.padding(ids), 0)}

    def files(self) -> dict[str, str]:
        return self.tokenizer.files(TextPreprocessing("text", self.seq_len))


class Corpus(TextData):
    """Text files of any number and size; `path` and `test` as in `find_files`. README and LICENSE files are skipped
    unless named explicitly. Files of `test` are not trained on where `path` names others too.

    Without `test`, the hash of a document decides whether it belongs to the `test_fraction`. With `packing` rows span
    document boundaries, as in the papers; without it a row has tokens of one document and padding. With
    `separate_documents` a packed row holds several documents, [CLS] tokens [SEP] [CLS] tokens [SEP] ..., that do not
    see each other. `text_field` is the key in JSON lines or the column of Parquet files. Tokens are kept in `cache`
    ($ALLMLP_CACHE, ~/.cache/allmlp).
    """

    dataset_type: ClassVar[type[TextDataset]] = TextDataset
    path: str
    test: str = ""
    tokenizer: TokenizerConfig = TokenizerConfig()
    seq_len: Count = 128
    packing: bool = True
    separate_documents: bool = False
    test_fraction: Rate = 0.01
    sample_by: SampleBy = "paragraph"
    text_field: str = "text"
    cache: str = ""

    def check(self) -> None:
        if self.separate_documents and not self.packing:
            raise UserError("without packing a row has one document: set separate_documents=false")

    def load(self) -> TextDataset:
        files, left = leave_out(find_files(self.path), self.path)
        tests, more = leave_out(find_files(self.test), self.test) if self.test else ([], [])
        tested = {os.path.realpath(file) for file in tests}
        # One that is all of both is not left out: a trial, on the same text.
        files = [file for file in files if os.path.realpath(file) not in tested] or files
        stamps = [f"{file} {stamp(file)}" for file in (*files, *tests)]
        if len(tests) > 1:  # not with one, so that tokens cached by earlier versions are found
            stamps.append(f"{len(tests)} for testing")
        dataset = load_corpus(self, stamps, self.documents(files), self.documents(tests) if tests else None)
        return replace(dataset, notes=left_out_notes([*left, *more]))

    def load_test(self, tokenizer: Tokenizer) -> TextDataset:
        files, left = leave_out(find_files(self.test), self.test)
        stamps = ["for testing", *(f"{file} {stamp(file)}" for file in files)]
        folder = write_cached(self, stamps, lambda: (), self.documents(files), tokenizer)
        test = load_split(folder, "test", tokenizer, self)
        notes = left_out_notes(left)
        return self.dataset_type(test, test, tokenizer, self.seq_len, self.separate_documents, notes=notes)

    def documents(self, files: list[str]) -> Documents:
        return lambda: read_documents(files, self.sample_by, self.text_field)


@dataclass(frozen=True)
class PassageDataset(TextDataset):
    """Passages of text."""

    def files(self) -> dict[str, str]:
        return self.tokenizer.files(TextPreprocessing("span", self.seq_len))


class Passages(Corpus):
    """A `Corpus` whose rows `SpanSelection` turns into questions; it shares the cached tokens."""

    dataset_type: ClassVar[type[TextDataset]] = PassageDataset
    seq_len: Count = 384

    def check(self) -> None:
        super().check()
        if self.separate_documents:
            raise UserError("a passage is one row: set separate_documents=false")


def left_out_notes(files: list[str]) -> tuple[str, ...]:
    """A note about files that `leave_out` has left out."""
    left = [*dict.fromkeys(files)]
    are = plural(len(left), "file is", "files are")
    return (f"{are} not read as text unless named: {listing(left)}",) if left else ()


def stamp(file: str) -> str:
    """A string that changes with the file."""
    if "://" in file:
        return ""
    status = os.stat(file)
    return f"{status.st_size} {status.st_mtime_ns}"


def load_corpus(spec: Corpus, stamps: list[str], train: Documents, test: Documents | None) -> TextDataset:
    """Load both splits, from the cache if possible."""
    given = load_tokenizer(spec.tokenizer.path) if spec.tokenizer.path else None
    folder = write_cached(spec, stamps, train, test, given)
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    splits = [load_split(folder, name, tokenizer, spec) for name in ("train", "test")]
    return spec.dataset_type(splits[0], splits[1], tokenizer, spec.seq_len, spec.separate_documents)


def write_cached(
    spec: Corpus, stamps: list[str], train: Documents, test: Documents | None, tokenizer: Tokenizer | None
) -> Path:
    """The cache folder of these documents, which is written unless it is there; `stamps` change with the documents."""
    given = spec.tokenizer.replace(path="") if tokenizer is None else tokenizer.to_json()
    settings = (stamps, given, spec.sample_by, spec.text_field, spec.test_fraction, test is None)
    folder = cache_folder(spec.cache) / "text" / hashlib.sha256(repr(settings).encode()).hexdigest()[:24]
    write_once(folder, lambda: write(folder, spec, train, test, tokenizer))
    return folder


def write(folder: Path, spec: Corpus, train: Documents, test: Documents | None, tokenizer: Tokenizer | None) -> None:
    """Write tokens and document ends to a folder that appears only when complete."""
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        if tokenizer is None:
            documents = split_documents(spec, train, test)
            tokenizer = spec.tokenizer.build(text for text, is_test in documents if not is_test)
        (temporary / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf8")
        dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
        ends: dict[bool, list[int]] = {False: [], True: []}
        with open(temporary / "train.tokens", "wb") as train_file, open(temporary / "test.tokens", "wb") as test_file:
            documents = split_documents(spec, train, test)
            while texts := list(islice(documents, ENCODE_BATCH)):
                for (_, is_test), ids in zip(texts, tokenizer.encode([text for text, _ in texts])):
                    (test_file if is_test else train_file).write(np.array(ids, dtype=dtype).tobytes())
                    ends[is_test].append((ends[is_test][-1] if ends[is_test] else 0) + len(ids))
        for is_test, name in ((False, "train"), (True, "test")):
            np.save(temporary / f"{name}.ends.npy", np.array(ends[is_test], dtype=np.int64))
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def split_documents(spec: Corpus, train: Documents, test: Documents | None) -> Iterator[tuple[str, bool]]:
    """Yield every document, and whether it is for testing."""
    for text in train():
        number = int.from_bytes(hashlib.blake2b(text.encode("utf8", "replace"), digest_size=8).digest(), "big")
        yield text, test is None and number < spec.test_fraction * 2**64
    if test is not None:
        yield from ((text, True) for text in test())


def load_split(folder: Path, name: str, tokenizer: Tokenizer, spec: Corpus) -> Split:
    seq_len = spec.seq_len
    file, ends = folder / f"{name}.tokens", np.load(folder / f"{name}.ends.npy")
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    if seq_len < 3:
        raise UserError("a row needs at least three tokens: [CLS], one of the text, [SEP]; raise data.seq_len")
    if not len(ends) or not ends[-1]:
        documents = sum(len(np.load(folder / f"{split}.ends.npy")) for split in ("train", "test"))
        raise UserError(f"there is no text in the {name} split{how_to_split(spec, name, documents)}")
    tokens = np.memmap(file, dtype=dtype, mode="r")
    bounds = row_bounds(ends, seq_len - 2, spec.packing and not spec.separate_documents)
    rows = (SeparateRows if spec.separate_documents else TokenRows)(tokens, *bounds, tokenizer, seq_len)
    if len(rows) * seq_len * 4 > MAX_BYTES_IN_MEMORY:
        return rows
    return InMemory(*rows.fetch(torch.arange(len(rows))), batch_type=TokenBatch)


def how_to_split(spec: Corpus, name: str, documents: int) -> str:
    """What to do about a split without text."""
    if spec.test or not documents:
        return ": give more"
    smaller = ", or set data.sample_by=line" if spec.sample_by != "line" else ""
    if documents == 1:
        return f", for all of it is one document: set data.test{smaller}"
    change = "raise" if name == "test" else "lower"
    return f" of {documents:,} documents: set data.test or {change} data.test_fraction{smaller}"


def row_bounds(ends: np.ndarray, size: int, packing: bool) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each row in the stream of tokens."""
    if packing:
        starts = np.arange(0, ends[-1], size)
        return starts, np.minimum(starts + size, ends[-1])
    begins = np.concatenate([[0], ends[:-1]])
    starts = np.concatenate([np.arange(a, b, size) for a, b in zip(begins, ends)] or [np.empty(0, np.int64)])
    stops = np.concatenate([np.minimum(np.arange(a, b, size) + size, b) for a, b in zip(begins, ends)])
    return starts, stops


class TokenRows:
    """A split of rows [CLS] tokens [SEP], padded on the right, read from disk."""

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, tokenizer: Tokenizer, seq_len: int
    ) -> None:
        self.tokens, self.starts, self.stops = tokens, starts, stops
        self.tokenizer, self.seq_len = tokenizer, seq_len

    def __len__(self) -> int:
        return len(self.starts)

    def fetch(self, indices: Tensor, uniforms: Tensor | None = None) -> TokenBatch:
        chosen = indices.numpy()
        starts, sizes = self.starts[chosen], self.stops[chosen] - self.starts[chosen]
        columns = np.arange(self.seq_len - 2)
        inside = columns < sizes[:, None]
        places = np.minimum(starts[:, None] + columns, len(self.tokens) - 1)
        ids = np.full((len(chosen), self.seq_len), self.tokenizer.pad_token_id, dtype=np.int32)
        ids[:, 0] = self.tokenizer.cls_token_id
        ids[:, 1:-1] = np.where(inside, self.tokens[places], self.tokenizer.pad_token_id)
        ids[np.arange(len(chosen)), sizes + 1] = self.tokenizer.sep_token_id
        return TokenBatch(torch.from_numpy(ids))

    def content(self) -> Iterator[Any]:
        """Number and length of the rows, and the tokens of a few."""
        yield f"{len(self)} {self.seq_len} {len(self.tokens)}".encode()
        yield from self.fetch(evenly_spaced(len(self), 1024)).ids.numpy()


class SeparateRows(TokenRows):
    """A split of rows [CLS] tokens [SEP] [CLS] tokens [SEP] ..., each filled with as many documents as fit."""

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, tokenizer: Tokenizer, seq_len: int
    ) -> None:
        super().__init__(tokens, starts, stops, tokenizer, seq_len)
        firsts, filled = [], seq_len
        for number, length in enumerate((stops - starts + 2).tolist()):
            if filled + length > seq_len:
                firsts.append(number)
                filled = 0
            filled += length
        self.firsts = np.array([*firsts, len(starts)])
        """Index of the first part of each row."""

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def fetch(self, indices: Tensor, uniforms: Tensor | None = None) -> TokenBatch:
        first, last = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        ids = np.full((len(indices), self.seq_len), self.tokenizer.pad_token_id, dtype=np.int32)
        for row, index in zip(ids, indices.tolist(), strict=True):
            place = 0
            for part in range(self.firsts[index], self.firsts[index + 1]):
                tokens = self.tokens[self.starts[part] : self.stops[part]]
                row[place], row[place + 1 + len(tokens)] = first, last
                row[place + 1 : place + 1 + len(tokens)] = tokens
                place += len(tokens) + 2
        return TokenBatch(torch.from_numpy(ids))
