"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

RUN = "run.json"
"""In the folder of a run: everything that decides it."""


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `file`, wait until it is on the disk, then rename it over `file`."""
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
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
