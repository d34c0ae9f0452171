"""Stopping a run by Ctrl-C or SIGTERM: within seconds, with a checkpoint if the current step ends in time."""

from __future__ import annotations

import _thread
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self, TypeVar

T = TypeVar("T")
GRACE, GRACE_OF_MANY = 4.0, 20.0
"""Seconds to wait for the end of the current step, alone and under torchrun, where all processes must reach the same
step and are killed after 30 seconds.
"""
FORCE = 1.0
"""Seconds for Python to leave an aborted step."""


class Stopped(KeyboardInterrupt):
    """Ends work between two batches, after which the run can still be saved."""


class Interrupts:
    """Collects SIGINT and SIGTERM inside a `with` block.

    After the first signal `requested` is true, and the loop saves and ends after the current step. A step that takes
    longer than `GRACE` is aborted by a KeyboardInterrupt and, if that has no effect (a backward pass is one call,
    during which Python handles no signals), the process exits. A second signal aborts at once. `lost` returns the
    message about what is lost.

    A thread waits for the signals, because Python calls its own handlers only between two instructions of the main
    thread. Under torchrun SIGTERM exits at once: it is sent when another process has died, for which this one may be
    waiting. An interactive Python, such as a notebook, is never exited.
    """

    def __init__(self) -> None:
        self.requested, self.given_up, self.is_saving = False, False, False
        self.last_saved = -math.inf
        self.lost: Callable[[], str] = lambda: "stopped before the first step"
        self.is_interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
        self.grace = GRACE_OF_MANY if "RANK" in os.environ else GRACE
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.signals, self.written = socket.socketpair()
            self.written.setblocking(False)
            self.wakeup = signal.set_wakeup_fd(self.written.fileno(), warn_on_full_buffer=False)
            self.handlers = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
            threading.Thread(target=self.watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.handlers:
            signal.set_wakeup_fd(self.wakeup)
            self.written.close()  # ends the thread

    def note(self, number: int, frame: Any) -> None:
        """Signal handler in the main thread."""
        if self.requested or self.given_up:
            raise KeyboardInterrupt
        self.requested = True

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches until a signal: then raise `Stopped`, unless other processes wait for this one."""
        for batch in batches:
            if self.requested and "RANK" not in os.environ:
                raise Stopped
            yield batch

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Suspend the time limit while a checkpoint is written; it starts anew afterwards."""
        self.is_saving = True
        try:
            yield
        finally:
            self.last_saved, self.is_saving = time.monotonic(), False

    def has_saved_within(self, seconds: float) -> bool:
        return self.is_saving or time.monotonic() - self.last_saved < seconds

    def watch(self) -> None:
        """Wait for a first signal, then for the end of the block, a second signal or the end of the grace period."""
        with self.signals:
            first = self.receive(None)
            if first is None:
                return
            if first == signal.SIGTERM and "RANK" in os.environ:
                self.exit(first)
            while (second := self.receive(self.grace)) == 0 and self.has_saved_within(self.grace):
                pass
            if second is None:
                return
            self.given_up = True
            if second == 0:
                _thread.interrupt_main()
            if self.is_interactive or self.ends_within(FORCE):
                return
            self.exit(first)

    def exit(self, number: int) -> NoReturn:
        """Exit at once; the first process prints what is lost and how to continue."""
        if os.environ.get("RANK", "0") == "0":
            show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
            print(show_cursor + self.lost(), file=sys.stderr, flush=True)
        os._exit(128 + number)

    def receive(self, timeout: float | None) -> int | None:
        """The next signal, 0 after `timeout` seconds, None at the end of the block."""
        while select.select([self.signals], [], [], timeout)[0]:
            number = self.signals.recv(1)
            if not number:
                return None
            if number[0] in self.handlers:
                return number[0]
        return 0

    def ends_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (number := self.receive(max(end - time.monotonic(), 0))) is not None:
            if number == 0:
                return False
        return True
