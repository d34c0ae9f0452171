"""Documents out of files: plain or compressed text, JSON lines, Parquet; local or at any fsspec URL."""

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

Unit = Literal["paragraph", "line", "file"]
"""What one document of a plain file is: what stands between blank lines, a line, or all of it."""
LONGEST = 2**20
"""Characters; a longer document is handed on in pieces."""


def find(places: str) -> list[str]:
    """Files that a path, folder, pattern (*, ?) or URL names; commas join several."""
    found: list[str] = []
    for place in filter(None, (part.strip() for part in places.split(","))):
        if "://" in place:
            system, path = require("fsspec", "train").core.url_to_fs(place)
            files = system.glob(path) if any(mark in path for mark in "*?[") else [path]
            found += [system.unstrip_protocol(file) for file in sorted(files)]
            continue
        path = Path(place).expanduser()
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        elif any(mark in place for mark in "*?["):
            anchor = Path(path.anchor)
            files = sorted(file for file in anchor.glob(str(path.relative_to(anchor))) if file.is_file())
        else:
            files = [path] if path.is_file() else []
        if not files:
            raise UserError(f"no text files at {place}")
        found += map(str, files)
    if not found:
        raise UserError("no text to read: set data.path to files, folders, patterns or URLs, joined by commas")
    return found


def documents(files: list[str], unit: Unit = "paragraph", field: str = "text") -> Iterator[str]:
    """Every document of the files, in their order; bytes that are not UTF-8 become U+FFFD."""
    for file in files:
        try:
            yield from read(file, unit, field)
        except UserError:
            raise
        except (OSError, ValueError, KeyError) as reason:
            raise UserError(f"cannot read {file}: {one_line(reason)}") from reason


def read(file: str, unit: Unit, field: str) -> Iterator[str]:
    kinds = Path(file.rpartition("/")[2]).suffixes
    if ".parquet" in kinds:
        yield from parquet(file, field)
        return
    with unpack(file) as binary:
        lines = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline=None)
        if ".jsonl" in kinds or ".json" in kinds:
            yield from json_lines(lines, file, field)
        else:
            yield from plain(lines, "line" if ".tsv" in kinds or ".csv" in kinds else unit)


@contextmanager
def unpack(file: str) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed as its name says."""
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


def plain(lines: io.TextIOWrapper, unit: Unit) -> Iterator[str]:
    """Lines may be of any length: no more than `LONGEST` characters are held at once."""
    pieces: list[str] = []
    size, inside = 0, False
    while line := lines.readline(LONGEST):
        blank = unit == "paragraph" and not inside and not line.strip()
        inside = not line.endswith("\n")
        if not blank:
            pieces.append(line)
            size += len(line)
        if blank or (unit == "line" and not inside) or size >= LONGEST:
            if text := "".join(pieces).strip():
                yield text
            pieces, size = [], 0
    if text := "".join(pieces).strip():
        yield text


def json_lines(lines: io.TextIOWrapper, file: str, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record[field]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{file}, line {number}: not a JSON object with a {field!r}") from None
        if not isinstance(text, str):
            raise UserError(f"{file}, line {number}: {field!r} is not text")
        if text.strip():
            yield text.strip()


def parquet(file: str, field: str) -> Iterator[str]:
    reader = require("pyarrow.parquet", "hub")
    source: Any = require("fsspec", "train").open(file, "rb").open() if "://" in file else file
    table = reader.ParquetFile(source)
    if field not in table.schema_arrow.names:
        raise UserError(f"{file} has no column {field!r}, only {', '.join(table.schema_arrow.names)}")
    for batch in table.iter_batches(columns=[field]):
        yield from (text.strip() for text in batch.column(0).to_pylist() if text and text.strip())
