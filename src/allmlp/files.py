"""Atomic writes, reads of regular files only, and locks."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import math
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

CONFIG = "config.json"
"""The architecture of a model, in its folder."""
RUN = "run.json"
"""The configuration of a run, in its folder."""
MAX_BYTES = 2**29
"""Maximum size of a file that is read as a whole."""


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, flush it to disk, then rename it to `file`."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        flush(temporary)
        temporary.chmod(0o644)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(file: Path, text: str) -> None:
    """Write UTF-8; lone surrogates, as in names that are not UTF-8, are escaped."""
    write_atomically(file, lambda temporary: temporary.write_bytes(text.encode("utf8", "backslashreplace")))


def write_json_atomically(file: Path, value: Any) -> None:
    """Write indented JSON, into a new folder if there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, json.dumps(value, indent=1) + "\n")


def write_csv(file: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a table; None is an empty cell."""
    with open(file, "w", encoding="utf8", errors="backslashreplace", newline="") as target:
        writer = csv.writer(target)
        writer.writerow(header)
        writer.writerows(rows)


def write_csv_atomically(file: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    write_atomically(file, lambda temporary: write_csv(temporary, header, rows))


def make_writable(folder: Path) -> None:
    """Create a folder if there is none; OSError if no file can be written into it, before any work for one is done."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Expand ~ and ~name; unknown users are left unchanged."""
    try:
        return Path(os.path.expanduser(path))
    except ValueError:  # a NUL character: opening the file will report it
        return Path(path)


def read_regular(file: str | os.PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file; OSError for a pipe, which may never end, a device, and more than `limit` bytes."""
    if "\0" in os.fspath(file):
        raise OSError(errno.EINVAL, "a NUL character in the path", os.fspath(file))
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as source:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(file))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(file))
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, more than {limit:,}", os.fspath(file))
        return source.read(limit)


def encodable(cell: Any) -> Any:
    """Text in UTF-8; lone surrogates, as in names of files that are not UTF-8, are escaped: caf\\udce9.png."""
    return cell.encode("utf8", "backslashreplace").decode("utf8") if isinstance(cell, str) else cell


def finite(value: Any) -> Any:
    """`value` for JSON, which has neither NaN nor infinity: None stands for them. Texts are made `encodable`."""
    if isinstance(value, dict):
        return {encodable(name): finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [*map(finite, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else encodable(value)


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one per line; lines that were cut short by a crash are skipped."""
    records = []
    for line in file.read_text(encoding="utf8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file or folder to disk; Windows cannot flush folders, and files only if they are open for writing."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def lock(file: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `file`, created if missing. Without `wait`, BlockingIOError if it is taken."""
    with open(file, "a", encoding="utf8") as handle:
        take_lock(handle.fileno(), wait)
        yield  # closing the file releases the lock


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on `folder`, or BlockingIOError if it is taken. A missing folder is created, and removed
    at the end if it is empty. Where folders cannot be locked (Windows, some network drives), this does nothing else.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if is_new:
            stack.callback(remove_if_empty, folder)
        if sys.platform != "win32":
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                take_lock(handle, wait=False)
            except BlockingIOError:
                raise
            except OSError:
                pass
        yield


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def take_lock(handle: int, wait: bool) -> None:
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    msvcrt: Any = import_module("msvcrt")
    while True:
        try:
            os.lseek(handle, 0, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            return
        except OSError:
            if not wait:
                raise BlockingIOError("another process holds the lock") from None
            time.sleep(0.1)
