"""A short slice of `make fuzz`, and the sandbox that judges it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allmlp.errors import UserError
from fuzz import sandbox


def report(text: str) -> None:
    raise UserError(text)


def fill() -> None:
    bytearray(2**32)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (lambda: print("fine"), ""),
        (lambda: report("what is wrong"), ""),
        (lambda: 1 // 0, "traceback: ZeroDivisionError"),
        (lambda: print("\x1b[31m"), "control character"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "ended by signal 15"),
        (lambda: time.sleep(60), "took more than"),
        (fill, "traceback: MemoryError"),
    ],
)
def test_the_sandbox_finds_faults(case: object, fault: str, tmp_path: Path) -> None:
    outcome = sandbox.run(case, tmp_path, seconds=2.0)  # type: ignore[arg-type]
    assert outcome.fault.startswith(fault) and bool(outcome.fault) == bool(fault), outcome


@pytest.mark.slow
def test_no_fault_in_a_short_run() -> None:
    command = [sys.executable, "-m", "fuzz", "--minutes", "0.5", "--seed", "1"]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
