"""python -m allmlp.study.process COMMAND ...: `allmlp COMMAND ...` until standard input closes.

A study holds the other end of it (`lifeline`), which the system closes however the study ends.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STDIN = 0


@contextmanager
def lifeline() -> Iterator[int]:
    """Standard input for processes that must not outlive this one."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


@contextmanager
def terminations() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that the processes of a study do not outlive it."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_study() -> None:
    """Terminate this process when standard input closes."""

    def wait() -> None:
        while os.read(STDIN, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_study()
    runpy.run_module("allmlp", run_name="__main__", alter_sys=True)
