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
from fuzz.http_requests import HEALTH, judge


def report(text: str) -> None:
    raise UserError(text)


def spin() -> None:
    while True:
        pass


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
        (spin, "took more than"),
        (fill, "traceback: MemoryError"),
    ],
)
def test_the_sandbox_finds_faults(case: object, fault: str, tmp_path: Path) -> None:
    seconds = 0.5 if fault.startswith("took") else 20.0
    outcome = sandbox.run(case, tmp_path, seconds=seconds)  # type: ignore[arg-type]
    assert outcome.fault.startswith(fault) and bool(outcome.fault) == bool(fault), outcome


@pytest.mark.parametrize(
    ("received", "fault"),
    [
        (b"HTTP/1.1 200 OK\r\nx-content-type-options: nosniff\r\n\r\n", ""),
        (b"HTTP/1.1 500 Internal Server Error\r\nx-content-type-options: nosniff\r\n\r\n", "a good request"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "an answer without nosniff"),
        (b"", "a good request is answered by []"),
    ],
)
def test_answers_are_judged(received: bytes, fault: str) -> None:
    assert judge(HEALTH, received).startswith(fault) and bool(judge(HEALTH, received)) == bool(fault)
    assert judge(HEALTH._replace(is_good=False), b"") == ""
    assert judge(HEALTH._replace(is_good=False), b"HTTP/1.1 500 Internal Server Error\r\n\r\n").startswith(
        "status {500}"
    )


@pytest.mark.slow
def test_no_fault_in_a_few_seconds() -> None:
    command = [sys.executable, "-m", "fuzz", "--minutes", "0.05", "--seed", "1"]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
