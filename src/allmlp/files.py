"""Atomic writes, by which a file is there completely or not at all, and locks between processes."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

RUN = "run.json"
"""The configuration of a run, in its folder."""


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
    """Hold an exclusive lock on `file`, which is created. Without `wait`, BlockingIOError if another process has it."""
    with open(file, "a", encoding="utf8") as handle:
        take_lock(handle.fileno(), wait)
        yield  # closing the file releases the lock


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
