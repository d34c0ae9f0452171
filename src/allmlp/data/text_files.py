"""Read documents from plain or compressed text, JSON lines and Parquet files, local or at any fsspec URL."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from allmlp.errors import UserError, one_line, require

SampleBy = Literal["paragraph", "line", "document"]
"""What is one document of a plain text file: text between blank lines, a line, or the whole file."""
MAX_CHARS = 2**20
"""Longer documents are split."""


def find_files(paths: str) -> list[str]:
    """List the files of comma-separated paths, folders, patterns (*, ?) and URLs."""
    found: list[str] = []
    whole = "://" not in paths and Path(paths).expanduser().exists()  # the name of a file may have a comma
    for text in filter(None, (part.strip() for part in ([paths] if paths and whole else paths.split(",")))):
        if "://" in text:
            system, path = require("fsspec", "train").core.url_to_fs(text)
            files = system.glob(path) if any(mark in path for mark in "*?[") else [path]
            found += [system.unstrip_protocol(file) for file in sorted(files)]
            continue
        path = Path(text).expanduser()
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        elif path.is_file():
            files = [path]
        elif any(mark in text for mark in "*?["):
            anchor = Path(path.anchor)
            files = sorted(file for file in anchor.glob(str(path.relative_to(anchor))) if file.is_file())
        else:
            files = []
        if not files:
            raise UserError(f"no text files at {text}")
        found += map(str, files)
    if not found:
        raise UserError("no text to read: set data.path to files, folders, patterns or URLs, separated by commas")
    return found


def read_documents(files: list[str], sample_by: SampleBy = "paragraph", text_field: str = "text") -> Iterator[str]:
    """Yield the documents of the files in order; invalid UTF-8 becomes U+FFFD."""
    for file in files:
        try:
            yield from read(file, sample_by, text_field)
        except UserError:
            raise
        except (OSError, ValueError, KeyError) as reason:
            raise UserError(f"cannot read {file}: {one_line(reason)}") from reason


def read(file: str, sample_by: SampleBy, text_field: str) -> Iterator[str]:
    suffixes = Path(file.rpartition("/")[2]).suffixes
    if ".parquet" in suffixes:
        yield from read_parquet(file, text_field)
        return
    with open_file(file) as binary:
        lines = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline=None)
        if ".jsonl" in suffixes or ".json" in suffixes:
            yield from read_json_lines(lines, file, text_field)
        else:
            yield from read_plain(lines, "line" if ".tsv" in suffixes or ".csv" in suffixes else sample_by)


@contextmanager
def open_file(file: str) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed according to its suffix."""
    raw: Any = require("fsspec", "train").open(file, "rb").open() if "://" in file else open(file, "rb")  # noqa: SIM115
    suffix = Path(file).suffix
    damaged: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
    with raw:
        try:
            if suffix == ".gz":
                yield gzip.GzipFile(fileobj=raw)  # type: ignore[misc]
            elif suffix == ".xz":
                yield lzma.LZMAFile(raw)  # type: ignore[misc]  # noqa: SIM115
            elif suffix == ".zst":
                zstandard = require("zstandard", "text")
                damaged += (zstandard.ZstdError,)
                yield zstandard.ZstdDecompressor().stream_reader(raw)
            else:
                yield raw
        except damaged as reason:
            raise UserError(f"cannot read {file}: {one_line(reason)}") from reason


def read_plain(lines: io.TextIOWrapper, sample_by: SampleBy) -> Iterator[str]:
    """Documents of a plain text file; at most `MAX_CHARS` characters are in memory."""
    pieces: list[str] = []
    size, inside = 0, False
    while line := lines.readline(MAX_CHARS):
        blank = sample_by == "paragraph" and not inside and not line.strip()
        inside = not line.endswith("\n")
        if not blank:
            pieces.append(line)
            size += len(line)
        if blank or (sample_by == "line" and not inside) or size >= MAX_CHARS:
            if text := "".join(pieces).strip():
                yield text
            pieces, size = [], 0
    if text := "".join(pieces).strip():
        yield text


def read_json_lines(lines: io.TextIOWrapper, file: str, text_field: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record[text_field]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{file}, line {number}: not a JSON object with a {text_field!r}") from None
        if not isinstance(text, str):
            raise UserError(f"{file}, line {number}: {text_field!r} is not text")
        if text.strip():
            yield text.strip()


def read_parquet(file: str, text_field: str) -> Iterator[str]:
    reader = require("pyarrow.parquet", "parquet")
    source: Any = require("fsspec", "train").open(file, "rb").open() if "://" in file else file
    table = reader.ParquetFile(source)
    if text_field not in table.schema_arrow.names:
        raise UserError(f"{file} has no column {text_field!r}, only {', '.join(table.schema_arrow.names)}")
    for batch in table.iter_batches(columns=[text_field]):
        yield from (text.strip() for text in batch.column(0).to_pylist() if text and text.strip())
