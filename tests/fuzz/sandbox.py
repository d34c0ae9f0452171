"""Run a function in a child process with limited memory and time, and judge how it ends.

The parent has imported everything, so that a case costs a fork and not the import of torch. A case is a fault if it
ends by a traceback, a signal, too much memory or time, a message of several lines, or control characters in its output.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MEMORY, SECONDS = 2**30, 20.0
"""Bytes that a case may allocate, and seconds it may take."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that change what a terminal shows."""


class Outcome(NamedTuple):
    code: int
    """Exit status; negative is the number of a signal."""
    output: str
    errors: str
    seconds: float
    grown: int
    """Bytes of memory on top of the parent's."""
    timed_out: bool

    @property
    def fault(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.timed_out:
            return f"took more than {SECONDS:g} s"
        if self.code < 0:
            return f"ended by signal {-self.code}"
        if "Traceback (most recent call last)" in self.errors:
            lines = self.errors.strip().splitlines()
            return f"traceback: {lines[-1] if lines else ''}"[:300]
        if self.code not in (0, 1, 2):
            return f"exit status {self.code}: {self.errors[-200:]!r}"
        if found := CONTROL.search((self.output + self.errors).replace("\r\n", "\n")):
            return f"control character {found[0]!r} in the output"
        if self.code == 2 and not re.fullmatch(r"error: [^\n]+\n", self.errors[self.errors.rfind("error: ") :]):
            return f"not one line: {self.errors[-300:]!r}"
        return ""


def run(case: Callable[[], object], folder: Path, memory: int = MEMORY, seconds: float = SECONDS) -> Outcome:
    """Call `case` in a child process whose current folder is `folder`."""
    out, err = folder / ".stdout", folder / ".stderr"
    start = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        try:
            enter(folder, out, err, memory)
            code = call(case)
        except BaseException:
            traceback.print_exc()
            code = 70
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    timed_out = not wait(child, seconds)
    if timed_out:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    own = resident()
    texts = [file.read_bytes().decode("utf8", "surrogateescape") if file.exists() else "" for file in (out, err)]
    return Outcome(
        os.waitstatus_to_exitcode(status),
        *texts,
        time.monotonic() - start,
        max(usage.ru_maxrss * 1024 - own, 0),
        timed_out,
    )


def enter(folder: Path, out: Path, err: Path, memory: int) -> None:
    """In the child: leave the parent's files and folder, and limit what may be allocated."""
    os.setsid()
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    # pytest has replaced the streams.
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf8", closefd=False) for number in (1, 2))  # noqa: SIM115
    limit = data_bytes() + memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def call(case: Callable[[], object]) -> int:
    """The exit status of a case: 2 and one line for a UserError, 0 if it returns, a traceback for all else."""
    from allmlp.cli import fail
    from allmlp.errors import UserError

    try:
        try:
            case()
        except (UserError, OSError) as reason:  # as the command does
            fail(reason)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def wait(child: int, seconds: float) -> bool:
    """Whether the child ends in time; on a busy machine it has longer, as long as it waits for a processor."""
    handle = os.pidfd_open(child)
    try:
        while not select.select([handle], [], [], seconds)[0]:
            state, *fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            if state != "R" or sum(map(int, fields[10:12])) >= seconds * os.sysconf("SC_CLK_TCK"):
                return False
        return True
    finally:
        os.close(handle)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def data_bytes() -> int:
    """Private writable memory, which RLIMIT_DATA counts."""
    return int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
