"""Read documents from plain or compressed text, JSON lines or arrays and Parquet files, local or at any fsspec URL."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import logging
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

from allmlp.errors import MissingExtra, UserError, one_line, require
from allmlp.files import expand_user

log = logging.getLogger("allmlp.data")

SampleBy = Literal["paragraph", "line", "document"]
"""Unit of a document in a plain text file: text between blank lines, a line, or the whole file."""
MAX_CHARS = 2**20
"""Longer documents are split."""
MAX_RECORD_CHARS = 2**24
"""A longer record of a JSON array is an error, and so is a longer line or cell of a table."""
SLACK_BYTES, MAX_EXPANSION = 2**24, 200
"""Decompressed text may have 16 MiB plus 200 times its compressed size; usual ratios are three to ten."""
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
ZST_CHUNK = 2**11
"""Bytes decompressed at a time: a block of five bytes may expand to 128 KiB."""
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""JSON lines, or a JSON array."""
REPLACED = "\ufffd"
"""In the place of bytes that are not UTF-8."""
MANY_REPLACED = 0.001
"""Above this fraction of the characters, a text is in another encoding; a few bytes may be damaged in any."""
WARNED: set[str] = set()
"""Folders for whose files a warning has been given."""
PEEKED_CHARS = PEEKED_BYTES = 2**16
PATTERN_MARKS = "*?[{"
ABOUT_DATA = re.compile(r"readme.*|(licen[sc]e|copying)([.-].*)?", re.IGNORECASE)
"""Names of files that accompany texts without being part of them."""
REMOTE_PACKAGES = ("adlfs", "aiohttp", "gcsfs", "requests", "s3fs")
"""Packages installed by the extra `remote`."""


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    try:
        return require("fsspec", "train").core.url_to_fs(url)
    except UserError:
        raise
    except ImportError as reason:
        protocol = url.partition("://")[0].rpartition("::")[2]
        is_ours = any(package in str(reason) for package in REMOTE_PACKAGES)
        hint = "pip install 'allmlp[remote]'" if is_ours else one_line(reason)
        raise MissingExtra(f"{protocol}:// needs a package that is not installed: {hint}") from reason
    except Exception as reason:  # unknown protocol, wrong options, no network: every file system has its own
        raise UserError(f"cannot read {url}: {one_line(reason) or type(reason).__name__}") from reason


def find_files(paths: str) -> list[str]:
    """List the files of comma-separated paths, folders, patterns (*, ?) and URLs."""
    all_files: list[str] = []
    for text in split_commas(paths):
        if "://" in text:
            system, matching = glob_remote(text)
            all_files += map(system.unstrip_protocol, matching)
            continue
        path = expand_user(text)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not is_hidden(file, path))
        elif path.is_file():
            files = [path]
        elif glob.has_magic(text):
            anchor = Path(path.anchor)
            parent = first_folder(path)
            visible = any(part.startswith(".") for part in path.relative_to(parent).parts)
            matched = anchor.glob(str(path.relative_to(anchor)))
            files = sorted(file for file in matched if file.is_file() and (visible or not is_hidden(file, parent)))
        else:
            files = []
        if not files:
            raise UserError(f"no text files at {text}")
        all_files += map(str, files)
    if not all_files:
        raise UserError("no text to read: set data.path to files, folders, patterns or URLs, separated by commas")
    return all_files


def leave_out(files: list[str], paths: str) -> tuple[list[str], list[str]]:
    """Split the files of `find_files(paths)` into texts to read and the names of those about the data (README,
    LICENSE), which are read only if `paths` names them or there are no others.
    """
    named = {part if "://" in part else str(expand_user(part)) for part in split_commas(paths)}
    about = [file for file in files if ABOUT_DATA.fullmatch(file_name(file)) and file not in named]
    if len(about) == len(files):
        return files, []
    return [file for file in files if file not in about], [file_name(file) for file in about]


def file_name(file: str) -> str:
    """The last part of a path or URL."""
    return file.rpartition("/")[2] if "://" in file else Path(file).name


def split_commas(paths: str, is_there: Callable[[str], bool] | None = None) -> list[str]:
    """Split at commas. File names may contain commas: a part that does not exist is extended until it does."""
    if paths and "://" not in paths and os.path.exists(expand_user(paths)):
        return [paths]
    pieces, places = paths.split(","), list[str]()
    while pieces:
        joined = [",".join(pieces[:count]).strip() for count in range(1, len(pieces) + 1)]
        count = next((count for count, place in enumerate(joined, 1) if (is_there or exists)(place)), 1)
        places.append(joined[count - 1])
        pieces = pieces[count:]
    return [part for part in places if part]


def exists(place: str) -> bool:
    """Whether a file or folder exists; for a pattern, its first folder. URLs are assumed to exist."""
    path = expand_user(place)
    folder = first_folder(path)
    return "://" in place or (folder.is_dir() if folder != path else bool(place) and os.path.exists(path))


def first_folder(path: Path) -> Path:
    """The part of a pattern before its first wildcard."""
    marked = [number for number, part in enumerate(path.parts) if any(mark in part for mark in PATTERN_MARKS)]
    return Path(*path.parts[: marked[0]]) if marked else path


def is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file, or one of its parent folders below `folder`, is hidden."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def glob_remote(url: str) -> tuple[Any, list[str]]:
    """The fsspec file system of a URL, and the paths in it that match."""
    system, path = file_system(url)
    try:
        return system, sorted(system.glob(path)) if glob.has_magic(path) else [path]
    except Exception as reason:  # no network, no permission: every file system has its own
        raise UserError(f"cannot list {url}: {one_line(reason) or type(reason).__name__}") from reason


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
    suffixes = Path(file.rpartition("/")[2].lower()).suffixes
    if ".parquet" in suffixes:
        yield from read_parquet(file, text_field)
        return
    with open_text(file, None) as lines:
        if any(suffix in suffixes for suffix in JSON_SUFFIXES):
            yield from read_json(lines, file, text_field)
        else:
            yield from read_plain(lines, "line" if ".tsv" in suffixes or ".csv" in suffixes else sample_by)


@contextmanager
def open_file(file: str) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed according to its suffix; UserError if it cannot be read."""
    suffix = Path(file).suffix.lower()
    damaged: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    with open_raw(file) as raw:
        try:
            if suffix == ".gz":
                yield bounded(gzip.GzipFile(fileobj=raw), raw, file)
            elif suffix == ".xz":
                yield bounded(lzma.LZMAFile(raw), raw, file)  # noqa: SIM115
            elif suffix == ".zst":
                zstandard = require("zstandard", "text")
                damaged += (zstandard.ZstdError,)
                yield bounded(ZstReader(raw, zstandard), raw, file)
            else:
                yield raw
        except damaged as reason:
            raise UserError(f"cannot read {file}: {getattr(reason, 'strerror', None) or one_line(reason)}") from reason


@contextmanager
def open_text(file: str, newline: str | None = "\n", errors: str = "replace") -> Iterator[io.TextIOWrapper]:
    """Open a text file. By default invalid bytes become U+FFFD, and lines end at line feeds only, as other separators
    may be in a sentence.
    """
    encoding = find_encoding(file, errors)
    with open_file(file) as binary:
        yield io.TextIOWrapper(binary, encoding=encoding, errors=errors, newline=newline)


def find_encoding(file: str, errors: str = "replace") -> str:
    """UTF-16 if the file starts with its byte order mark, else UTF-8, with or without one. Where invalid bytes would be
    replaced, a NUL shows that the file is an image or other data.
    """
    with open_file(file) as binary:
        start = binary.read(PEEKED_BYTES)
    if start.startswith(UTF16_MARKS):
        return "utf-16"
    if errors == "replace" and b"\0" in start:
        raise UserError(f"{file} is not text (it has NUL characters): name the files of text, such as 'texts/*.txt'")
    if errors == "replace":
        text = codecs.getincrementaldecoder("utf-8")(errors).decode(start)
        if text.count(REPLACED) - start.count(REPLACED.encode()) > MANY_REPLACED * len(text):
            warn_of_encoding(file)
    return "utf-8-sig"


def warn_of_encoding(file: str) -> None:
    """Warn, once for all files of a folder, of text in another encoding, such as Latin-1."""
    folder = os.path.dirname(file)
    if folder not in WARNED:
        WARNED.add(folder)
        log.warning(
            "%s is not UTF-8 text: letters such as ä and é are lost; save it, and others like it, as UTF-8", file
        )


def open_raw(file: str) -> Any:
    """Open a local file or a URL for reading bytes."""
    try:
        if "://" in file:
            system, path = file_system(file)
            return system.open(path, "rb")
        return open(file, "rb")
    except UserError:
        raise
    except Exception as reason:  # every file system has its own
        raise UserError(f"cannot read {file}: {getattr(reason, 'strerror', None) or one_line(reason)}") from reason


class ZstReader(io.RawIOBase):
    """Reads a .zst file and detects truncation, which the reader of `zstandard` does not."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self.raw, self.zstandard = raw, zstandard
        self.frame: Any = None
        self.ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self.ready:
            packed = self.raw.read(ZST_CHUNK)
            if not packed:
                if self.frame is not None:
                    raise EOFError("the file is cut off")
                return 0
            while packed:
                self.frame = self.frame or self.zstandard.ZstdDecompressor().decompressobj()
                self.ready += self.frame.decompress(packed)
                packed = self.frame.unused_data if self.frame.eof else b""
                if self.frame.eof:
                    self.frame = None
        size = min(len(target), len(self.ready))
        target[:size], self.ready = self.ready[:size], self.ready[size:]
        return size


class BoundedReader(io.RawIOBase):
    """Reads decompressed text as long as its size is plausible for the compressed bytes read so far."""

    def __init__(self, source: Any, raw: IO[bytes], file: str) -> None:
        self.source, self.raw, self.file, self.count = source, raw, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        size = self.source.readinto(target)
        self.count += size or 0
        if self.count > SLACK_BYTES and self.count > SLACK_BYTES + MAX_EXPANSION * self.raw.tell():
            raise UserError(
                f"{self.file} unpacks to more than {MAX_EXPANSION} times its size: it may be damaged or made to fill "
                "the memory; if not, unpack it first"
            )
        return size


def bounded(source: Any, raw: IO[bytes], file: str) -> IO[bytes]:
    return io.BufferedReader(BoundedReader(source, raw, file))


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


def read_json(lines: io.TextIOWrapper, file: str, text_field: str) -> Iterator[str]:
    """The texts of JSON lines, or of an array."""
    start, skipped = lines.readline(PEEKED_CHARS), 0
    while start and not start.strip():
        start, skipped = lines.readline(PEEKED_CHARS), skipped + 1
    if start.lstrip().startswith("["):
        for number, record in enumerate(json_array(lines, file, start), 1):
            yield from text_of(record, text_field, f"{file}, record {number}")
        return
    first = start if start.endswith("\n") else start + lines.readline()
    for number, line in enumerate(chain([first], lines), skipped + 1):
        if line.strip():
            yield from text_of(parse_object(line), text_field, f"{file}, line {number}")


def json_array(text: IO[str], file: str, buffer: str = "") -> Iterator[dict[str, Any]]:
    """Yield the objects of an array without reading all of it into memory; `buffer` is the part already read."""
    decoder, number, size = json.JSONDecoder(), 0, 2**16
    mark = "["
    while True:
        buffer = buffer.lstrip()
        if not buffer and not (buffer := text.read(size)):
            raise UserError(f"{file} ends within a JSON array")
        if not (buffer := buffer.lstrip()):
            continue
        if buffer[0] == "]" and mark != "[":
            return
        if mark:
            if buffer[0] != mark:
                raise UserError(f"{file}: no {mark!r} before record {number + 1} of a JSON array")
            buffer, mark = buffer[1:], ""
            continue
        try:
            record, end = decoder.raw_decode(buffer)
        except (ValueError, RecursionError):
            more = text.read(max(len(buffer), size)) if len(buffer) <= MAX_RECORD_CHARS else ""
            if not more:
                raise UserError(f"{file}: record {number + 1} is not valid JSON") from None
            buffer += more
            continue
        number += 1
        if not isinstance(record, dict):
            raise UserError(f"{file}: record {number} is not a JSON object")
        yield record
        buffer, mark = buffer[end:], ","


def parse_object(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def text_of(record: Any, text_field: str, where: str) -> Iterator[str]:
    """The text of a record, unless it is empty."""
    if not isinstance(record, dict) or text_field not in record:
        raise UserError(f"{where}: not a JSON object with a {text_field!r}")
    if not isinstance(record[text_field], str):
        raise UserError(f"{where}: {text_field!r} is not text")
    if text := record[text_field].strip():
        yield text


def read_parquet(file: str, text_field: str) -> Iterator[str]:
    with open_parquet(file) as table:
        if text_field not in table.schema_arrow.names:
            raise UserError(f"{file} has no column {text_field!r}, only {', '.join(table.schema_arrow.names)}")
        cells = (cell for batch in table.iter_batches(columns=[text_field]) for cell in batch.column(0).to_pylist())
        for number, cell in enumerate(cells, 1):
            yield from text_of({text_field: "" if cell is None else cell}, text_field, f"{file}, row {number}")


@contextmanager
def open_parquet(file: str) -> Iterator[Any]:
    """Open a Parquet file; UserError if it cannot be read."""
    parquet, arrow = require("pyarrow.parquet", "parquet"), require("pyarrow", "parquet")
    try:
        with parquet.ParquetFile(open_raw(file) if "://" in file else file) as opened:
            yield opened
    except (OSError, arrow.ArrowException) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from reason
