"""The inputs whose features are nearest to those of a query, by cosine, in bounded memory."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from allmlp.errors import UserError, one_line, require
from allmlp.prediction.output import FEATURES, encodable, names_file
from allmlp.prediction.stream import Answer, chunks

CHUNK = 8192
"""Features compared at a time."""


class Match(NamedTuple):
    name: str
    cosine: float


class NamedFeatures(NamedTuple):
    names: list[str]
    values: np.ndarray
    """n c."""


def nearest(query: np.ndarray, bank: Iterable[NamedFeatures], k: int, without: str = "") -> list[Match]:
    """The k nearest in the bank, nearest first; `without` is the name of the query, which is excluded."""
    best, without = list[Match](), encodable(without)  # as files of features have it
    for names, values in bank:
        if values.shape[1] != len(query):
            raise UserError(f"the features have {values.shape[1]} channels, those of the query {len(query)}")
        norms = np.linalg.norm(values, axis=1) * np.linalg.norm(query)
        cosines = values @ query / np.maximum(norms, 1e-12)
        pairs = zip(names, cosines, strict=True)
        matches = [Match(name, float(value)) for name, value in pairs if encodable(name) != without]
        best = sorted([*best, *matches], key=lambda match: -match.cosine)[:k]
    return best


def collect(answers: Iterable[Answer]) -> Iterator[NamedFeatures]:
    """Features in chunks, as they are computed; inputs with errors are skipped."""
    for part in chunks((answer for answer in answers if not answer.error), CHUNK):
        yield NamedFeatures([answer.item.name for answer in part], np.stack([answer.value for answer in part]))


def are_features(file: Path) -> bool:
    """Whether a file, or a folder of parts, was written by `allmlp embed`."""
    if file.is_dir():
        parts = sorted(file.glob("part-[0-9]*.parquet"))
        return bool(parts) and are_features(parts[0])
    if file.suffix != ".parquet" or not file.is_file():
        return file.suffix == ".npy" and file.is_file()
    with naming(file):
        return FEATURES in require("pyarrow.parquet", "parquet").read_schema(file).names


def read_features(file: Path) -> Iterator[NamedFeatures]:
    """The features that `allmlp embed` wrote."""
    if file.suffix == ".npy":
        yield from read_npy(file)
        return
    for part in sorted(file.glob("part-[0-9]*.parquet")) if file.is_dir() else [file]:
        with naming(part):
            source: Any = require("pyarrow.parquet", "parquet").ParquetFile(part)
            for rows in source.iter_batches(CHUNK, columns=["input", FEATURES]):
                values = rows.column(FEATURES).flatten().to_numpy(zero_copy_only=False)
                yield NamedFeatures(rows.column("input").to_pylist(), values.reshape(len(rows), -1))


def read_npy(file: Path) -> Iterator[NamedFeatures]:
    with naming(file):
        values = np.load(file, mmap_mode="r", allow_pickle=False)
        if values.ndim != 2:
            raise ValueError(f"it has the shape {list(values.shape)}, not a row for each input")
        with open(names_file(file), encoding="utf8", newline="") as source:
            start = 0
            for rows in chunks(csv.DictReader(source), CHUNK):
                if start + len(rows) <= len(values):
                    yield NamedFeatures([row["input"] for row in rows], np.asarray(values[start : start + len(rows)]))
                start += len(rows)
        if start != len(values):
            raise ValueError(f"it has {len(values):,} rows, and {names_file(file).name} {start:,} names")


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Raise errors of a damaged file as a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError) as reason:  # those of pyarrow are among them
        raise UserError(f"cannot read features from {file}: {one_line(reason)}") from reason
