"""The timing itself, with a clock whose times are known."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import repeat
from types import SimpleNamespace

import pytest
import torch

from allmlp.bench import clock
from allmlp.bench.clock import LEAD_CALLS, CpuClock, CudaClock
from allmlp.bench.timing import FEWEST, ROUNDS, WARM_UP, Failure, Timing, quartiles, speedup, time_interleaved


class Call:
    """Takes the seconds it is told, one after the other; what it raises, it raises at that call."""

    def __init__(self, name: str, seconds: Iterator[float], log: list[str], fails_at: int | None = None) -> None:
        self.name, self.seconds, self.log, self.fails_at, self.calls = name, seconds, log, fails_at, 0
        self.reason: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def __call__(self) -> float:
        self.calls += 1
        if self.calls == self.fails_at:
            raise self.reason
        self.log.append(self.name)
        return next(self.seconds)


class FakeClock:
    """Calls take what they return; the device takes a tenth of that."""

    min_calls, min_seconds = 1, 0.0

    def row(self, call: Callable[[], object], count: int) -> float:
        return sum(self.latency(call) for _ in range(count)) / count

    def latency(self, call: Callable[[], object]) -> float:
        return float(call())  # type: ignore[arg-type]

    def device_time(self, call: Callable[[], object], latency: float) -> float | None:
        return latency / 10


def turns(log: list[str]) -> list[str]:
    """Neighbours that are the same, once."""
    return [name for number, name in enumerate(log) if number == 0 or log[number - 1] != name]


def test_sides_take_turns() -> None:
    log: list[str] = []
    calls = {name: Call(name, repeat(0.01), log) for name in "abc"}
    found = time_interleaved(calls, FakeClock(), seconds=1.0)
    # Warming up goes once through all; then every round does, each in an order of its own.
    assert turns(log[: 3 * (WARM_UP + 1)]) == list("abc")
    rounds = log[3 * (WARM_UP + 1) :]
    # A second in ten rounds: a row of ten calls and a single one each.
    orders = ["".join(turns(rounds[33 * number : 33 * (number + 1)])) for number in range(ROUNDS)]
    assert all(sorted(order) == list("abc") for order in orders) and len(set(orders)) > 3
    assert [log.count(name) for name in "abc"] == [WARM_UP + 1 + ROUNDS * 11] * 3
    for timing in found.values():
        assert isinstance(timing, Timing)
        assert timing.latency == pytest.approx((0.01,) * 3) and timing.call == pytest.approx((0.01,) * 3)
        assert timing.device_time == pytest.approx((0.001, 0.001, 0.001))


def test_medians_and_quartiles() -> None:
    """A call slower than its turn is timed once a round; nine rounds of 1 .. 9 and a tenth of 100 seconds."""
    values = [7.0, 1.0, 9.0, 3.0, 100.0, 5.0, 2.0, 8.0, 4.0, 6.0]
    call = Call("a", iter([0.0] * WARM_UP + [1.0] + values), [])
    timing = time_interleaved({"a": call}, FakeClock(), seconds=10.0)["a"]
    assert isinstance(timing, Timing)
    assert timing.calls == tuple(values) == timing.latencies and timing.device_time is None
    assert timing.call.median == statistics.median(values) == 5.5
    assert (timing.call.low, timing.call.high) == (3.25, 7.75)


def test_slow_calls_get_fewer_rounds() -> None:
    slow = Call("slow", repeat(10.0), [])
    timing = time_interleaved({"slow": slow}, FakeClock(), seconds=1.0)["slow"]
    assert isinstance(timing, Timing) and len(timing.calls) == FEWEST
    assert slow.calls == WARM_UP + 1 + FEWEST


@pytest.mark.slow
def test_a_row_has_enough_calls_and_seconds() -> None:
    """Rows of one or two calls are mostly the launch of the first, and short ones are over before clocks fall."""

    class Patient(FakeClock):
        min_calls, min_seconds = 10, 0.3

    for one, seconds, rounds, row in [
        (0.3, 0.5, FEWEST, 10),
        (0.01, 0.5, FEWEST, 30),
        (0.01, 3, 10, 30),
        (0.01, 6, 10, 60),
    ]:
        log: list[str] = []
        time_interleaved({"a": Call("a", repeat(one), log)}, Patient(), seconds)
        assert len(log) == WARM_UP + 1 + rounds * (row + row // 10)


class Device:
    """A GPU of which only the order of what happens is known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("idle"))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.log.append(f"sleep {cycles / 1e6:g}"))

    def record(self) -> None:
        self.log.append("event")

    def synchronize(self) -> None:
        self.log.append("end")

    def elapsed_time(self, end: object) -> float:
        return 6.0

    def call(self) -> None:
        self.log.append("call")


def test_what_is_timed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row behind untimed calls, one call behind an idle device, one behind a device that sleeps at least as long."""
    device = Device(monkeypatch)
    assert CudaClock().row(device.call, 3) == pytest.approx(0.002)
    assert device.log == ["call"] * LEAD_CALLS + ["event"] + ["call"] * 3 + ["event", "end"]
    device.log.clear()
    assert CudaClock().latency(device.call) == pytest.approx(0.006)
    assert device.log == ["idle", "event", "call", "event", "end"]
    device.log.clear()
    assert CudaClock().device_time(device.call, 0.004) == pytest.approx(0.006)
    assert device.log == [f"sleep {0.004 * clock.SLEEP_CYCLES_PER_S / 1e6:g}", "event", "call", "event", "end"]


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [1, WARM_UP + 1, WARM_UP + 20])
def test_what_runs_out_of_memory_leaves_and_the_others_go_on(fails_at: int) -> None:
    log: list[str] = []
    calls = {"a": Call("a", repeat(0.01), log, fails_at), "b": Call("b", repeat(0.01), log)}
    found = time_interleaved(calls, FakeClock(), seconds=1.0)
    assert list(found) == ["a", "b"]
    assert found["a"] == Failure("out of memory")
    assert isinstance(found["b"], Timing) and len(found["b"].calls) == ROUNDS


@pytest.mark.slow
def test_other_failures_say_what_happened() -> None:
    call = Call("a", repeat(0.01), [], fails_at=1)
    call.reason = RuntimeError("no kernel\n  for this shape")
    assert time_interleaved({"a": call}, FakeClock(), 1.0)["a"] == Failure("failed: no kernel for this shape")
    call = Call("a", repeat(0.01), [], fails_at=1)
    call.reason = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    assert time_interleaved({"a": call}, FakeClock(), 1.0)["a"] == Failure("out of memory")


@pytest.mark.slow
def test_a_failed_capture_does_not_spoil_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch leaves the stream of the capture current, and the default generator waiting for its end."""
    log: list[object] = []
    generator = SimpleNamespace(device=torch.device("cpu"), graphsafe_set_state=log.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default stream")
    monkeypatch.setattr(torch.cuda, "set_stream", log.append)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(graphsafe_get_state=lambda: "new state"))
    call = Call("a", repeat(0.01), [], fails_at=1)
    call.reason = RuntimeError("operation failed due to a previous error during capture")
    time_interleaved({"a": call}, FakeClock(), 1.0)
    assert log == ["default stream", "new state"]


def test_ratios_are_of_the_same_round() -> None:
    """The machine was three times slower half of the time: each side's own median would say nothing of it."""
    ours, theirs = [1.0, 3.0, 1.0, 3.0, 3.0], [2.0, 6.0, 2.0, 6.0, 6.0]
    assert speedup(ours, theirs) == (2.0, 2.0, 2.0)
    assert speedup([1.0, 1.0, 1.0], [2.0, 3.0, 4.0]) == quartiles([2.0, 3.0, 4.0]) == (3.0, 2.5, 3.5)


def test_a_real_clock_sees_time_pass() -> None:
    seen = []
    assert CpuClock().row(lambda: seen.append(1), 5) > 0
    assert len(seen) == 5
