"""Ctrl-C and SIGTERM end a run within seconds, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allmlp import checkpoint
from allmlp.interrupts import Interrupts

TESTS = Path(__file__).parent.parent
# One call into C that takes minutes, as a backward pass may: Python handles no signals in it.
BLOCKED = "__import__('hashlib').pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)"
SLEEPING = "[time.sleep(0.01) for _ in range(20_000)]"
BLOCK = """
import sys, time
from allmlp import interrupts
interrupts.GRACE, interrupts.FORCE = {grace}, 0.3
with interrupts.Interrupts() as signals:
    signals.lost = lambda: "given up"
    print("ready", flush=True)
    try:
        {work}
    except KeyboardInterrupt:
        print("left", flush=True)
"""
RUN = """
import time
from allmlp import interrupts, training
from train.runs import small
interrupts.GRACE, interrupts.FORCE = 0.5, 0.3
original = training.TrainStep.backward

def backward(step, batches):
    if training_steps.pop() == 0:
        print("ready", flush=True)
        {blocked}
    return original(step, batches)

training_steps = list(range(7))
training.TrainStep.backward = backward
training.train(small(save_every=5), {out!r}, "cpu")
"""


def start(code: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=pipe, stderr=pipe, text=True)


def interrupt(code: str, *numbers: int) -> tuple[int, str, float]:
    """Exit code, output and duration of a process that is sent signals once it is ready."""
    process = start(code)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        begin = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.2)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, output + errors, time.monotonic() - begin


def test_a_call_that_handles_no_signals_is_ended() -> None:
    code = BLOCK.format(grace=0.5, work=BLOCKED)
    status, output, seconds = interrupt(code, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM and "given up" in output and 0.5 < seconds < 30


def test_a_second_signal_ends_it_at_once() -> None:
    code = BLOCK.format(grace=1000, work=BLOCKED)
    status, output, _ = interrupt(code, signal.SIGINT, signal.SIGINT)
    assert status == 128 + signal.SIGINT and "given up" in output


def test_python_is_left_in_order() -> None:
    """Where Python handles signals, the exception is enough, and everything is cleaned up."""
    code = BLOCK.format(grace=0.5, work=SLEEPING)
    assert interrupt(code, signal.SIGTERM)[:2] == (0, "left\n")
    code = BLOCK.format(grace=1000, work=SLEEPING)
    assert interrupt(code, signal.SIGINT, signal.SIGINT)[:2] == (0, "left\n")


def test_a_checkpoint_is_waited_for() -> None:
    work = "time.sleep(0.1)\n        with signals.saving(): time.sleep(2)\n        print('saved')"
    status, output, seconds = interrupt(BLOCK.format(grace=0.3, work=work), signal.SIGINT)
    assert (status, output) == (0, "saved\n") and seconds > 1


@pytest.mark.slow
def test_the_grace_period_starts_anew_after_a_checkpoint() -> None:
    """The signal comes at 0 s; the checkpoint ends at 3 s, between two looks at the clock at 2 and 4 s."""
    work = "with signals.saving(): time.sleep(3)\n        time.sleep(1.5)\n        print('saved')"
    assert interrupt(BLOCK.format(grace=2, work=work), signal.SIGINT)[:2] == (0, "saved\n")


@pytest.mark.slow
def test_the_step_is_lost_and_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    status, output, seconds = interrupt(RUN.format(blocked=BLOCKED, out=str(tmp_path)), signal.SIGTERM)
    assert status == 128 + signal.SIGTERM and seconds < 30
    assert checkpoint.last_step(tmp_path) == 5
    assert (
        f"stopped at step 6; the last checkpoint is of step 5; resume with: allmlp train --resume {tmp_path}" in output
    )


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Python's own handler of Ctrl-C: a process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_signals_belong_to_the_block(default_handler: None) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Interrupts() as interrupts:
        assert not interrupts.requested
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.requested
    assert before == {number: signal.getsignal(number) for number in before}
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
