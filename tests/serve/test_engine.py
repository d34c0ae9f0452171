"""The batching engine without a server."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from torch import Tensor

from allmlp.prediction import open_predictor
from allmlp.prediction.staging import Staging
from allmlp.serve import engine as engines
from allmlp.serve.engine import BatchingEngine
from folders import image_folder


def test_results_are_those_of_the_predictor(tmp_path: Path) -> None:
    predictor = open_predictor(image_folder(tmp_path), device="cpu")
    images = list(torch.randint(0, 256, (40, 3, 8, 12), dtype=torch.uint8))
    expected = predictor.probabilities(images)  # type: ignore[arg-type]
    with BatchingEngine(max_batch_size=8) as engine:
        futures = [engine.submit(predictor.probabilities, image) for image in images]
        found = [future.result(30) for future in futures]
    assert torch.stack([one.value for one in found]) == pytest.approx(expected.numpy(), abs=1e-5)
    assert max(one.batch_size for one in found) == 8


def test_models_take_turns_and_stopping_completes_the_queue() -> None:
    batches: list[tuple[str, int]] = []
    go = threading.Event()

    def first(items: list[Tensor]) -> Tensor:
        go.wait(10)
        batches.append(("first", len(items)))
        return torch.stack(items)

    def second(items: list[int]) -> list[int]:
        batches.append(("second", len(items)))
        return [item + 1 for item in items]

    engine = BatchingEngine(max_batch_size=3)
    engine.start()
    head = engine.submit(first, torch.tensor(0))
    while engine.queue:
        time.sleep(0.005)
    tensors = [engine.submit(first, torch.tensor(number)) for number in range(1, 5)]
    numbers = [engine.submit(second, number) for number in range(2)]
    cancelled = engine.submit(second, 9)
    assert cancelled.cancel()
    go.set()
    engine.stop()
    assert [int(one.result().value) for one in (head, *tensors)] == [0, 1, 2, 3, 4]
    assert [one.result().value for one in numbers] == [1, 2]
    assert batches == [("first", 1), ("first", 3), ("first", 1), ("second", 2)]
    with pytest.raises(CancelledError):
        cancelled.result()


def test_batches_of_another_size_begin_with_the_number_of_threads_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("allmlp.threads.limit", lambda: 4)

    def function(items: list[int]) -> list[int]:
        return items

    engine = BatchingEngine()
    single = engine.thread_count(function, 1)
    assert single.count == 1, "more are tried where processors are idle"
    single.plan = [(0, 2)]
    several = engine.thread_count(function, 9)
    assert several is engine.thread_count(function, 15) is not single
    assert several.count == 2
    assert BatchingEngine(fixed_threads=1).thread_count(function, 1).active is False


# --- a device that computes by itself ---------------------------------------------------------------------------------


class Device:
    """Stands in for a GPU: batches that were launched end one after another, when the test says so."""

    def __init__(self) -> None:
        self.launched: list[list[int]] = []
        self.events: list[DeviceEvent] = []
        self.failing = False

    def double(self, items: list[int]) -> list[int]:
        self.launched.append(items)
        return [2 * item for item in items]

    def to_host(self, values: list[int]) -> tuple[list[int], DeviceEvent]:
        self.events.append(DeviceEvent(self.failing))
        return values, self.events[-1]

    def wait(self, count: int) -> list[list[int]]:
        """The batches that were launched, once there are `count`."""
        deadline = time.monotonic() + 5
        while len(self.events) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)  # more would be a fault
        return [*self.launched]


class DeviceEvent:
    def __init__(self, fails: bool) -> None:
        self.done, self.fails = threading.Event(), fails

    def synchronize(self) -> None:
        self.done.wait()
        if self.fails:
            raise RuntimeError("device error")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(engines, "to_host", made.to_host)
    return made


def started(size: int) -> BatchingEngine:
    """Its threads end with the process: one that waits for the device cannot be stopped."""
    engine = BatchingEngine(max_batch_size=size)
    engine.start()
    return engine


def test_a_full_batch_is_launched_while_one_runs(device: Device) -> None:
    """But no third one, and no batch that can still fill up."""
    engine = started(3)
    futures = [engine.submit(device.double, 0)]
    assert device.wait(1) == [[0]]
    futures += [engine.submit(device.double, item) for item in (1, 2)]
    assert device.wait(1) == [[0]], "a batch that is not full waits"
    futures += [engine.submit(device.double, item) for item in range(3, 9)]
    assert device.wait(2) == [[0], [1, 2, 3]], "two are in flight"
    device.events[0].done.set()
    assert futures[0].result(10).value == 0
    assert device.wait(3) == [[0], [1, 2, 3], [4, 5, 6]]
    assert not futures[1].done()
    device.events[1].done.set()
    assert [one.result(10).value for one in futures[1:4]] == [2, 4, 6]
    assert len(device.wait(3)) == 3, "7 and 8 wait for a ninth, or for the device"
    device.events[2].done.set()
    assert device.wait(4)[3:] == [[7, 8]]
    device.events[3].done.set()
    engine.stop()
    assert [one.result().value for one in futures] == list(range(0, 18, 2))


def test_time_on_the_device_does_not_include_the_batch_before(device: Device) -> None:
    engine = started(1)
    first, second = (engine.submit(device.double, item) for item in (1, 2))
    assert device.wait(2) == [[1], [2]]
    time.sleep(0.5)
    for event in device.events:
        event.done.set()
    assert first.result(10).model_seconds > 0.5 > second.result(10).model_seconds
    assert second.result().queue_seconds > 0.5
    engine.stop()


def test_a_batch_that_fails_on_the_device_is_run_one_by_one(device: Device) -> None:
    engine = started(2)
    head = engine.submit(device.double, 0)
    device.wait(1)
    device.failing = True
    futures = [engine.submit(device.double, item) for item in (1, 2)]
    device.wait(2)
    device.failing = False
    for number in range(4):
        assert len(device.wait(number + 1)) > number
        device.events[number].done.set()
    assert [one.result(10).value for one in (head, *futures)] == [0, 2, 4]
    engine.stop()
    assert device.launched == [[0], [1, 2], [1], [2]]


def test_stopping_completes_what_is_on_the_device(device: Device) -> None:
    engine = started(2)
    futures = [engine.submit(device.double, item) for item in range(5)]
    device.wait(2)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    deadline = time.monotonic() + 10
    while stopping.is_alive() and time.monotonic() < deadline:
        for event in [*device.events]:
            event.done.set()
        stopping.join(0.01)
    assert not engine.thread.is_alive() and not engine.finisher.is_alive()
    assert [one.result().value for one in futures] == [0, 2, 4, 6, 8]


def test_stopping_waits_for_a_batch_that_is_being_launched(device: Device) -> None:
    launching, go = threading.Event(), threading.Event()

    def slow(items: list[int]) -> list[int]:
        launching.set()
        go.wait(10)
        return device.double(items)

    engine = started(2)
    future = engine.submit(slow, 1)
    assert launching.wait(10)
    stopping = threading.Thread(target=engine.stop, daemon=True)
    stopping.start()
    time.sleep(0.05)
    go.set()
    device.wait(1)
    device.events[0].done.set()
    stopping.join(10)
    assert not stopping.is_alive() and future.result(0).value == 2


def test_many_cancelled_items_in_a_row() -> None:
    """As after the disconnections of many clients."""
    launching, go = threading.Event(), threading.Event()

    def slow(items: list[int]) -> list[int]:
        launching.set()
        go.wait(10)
        return items

    engine = started(2)
    head = engine.submit(slow, 1)
    assert launching.wait(10)
    assert all(engine.submit(slow, item, batched=False).cancel() for item in range(sys.getrecursionlimit()))
    last = engine.submit(slow, 2)
    go.set()
    assert (head.result(10).value, last.result(10).value) == (1, 2)
    engine.stop()


def test_a_function_with_too_few_results_fails_alone() -> None:
    with BatchingEngine() as engine:
        short = engine.submit(lambda items: [], 1)
        with pytest.raises(ValueError, match="0 results for 1 inputs"):
            short.result(10)
        assert engine.submit(lambda items: items, 2).result(10).value == 2


def test_staging_stacks_in_buffers_that_are_used_again() -> None:
    staging = Staging(torch.device("cpu"))
    batches = [torch.randint(0, 256, (size, 3, 4, 5), dtype=torch.uint8) for size in (4, 2, 7, 7, 1)]
    batches.append(torch.rand(3, 2))
    with torch.inference_mode():
        found = [staging.stack(list(batch)) for batch in batches]
        buffers = [buffer.data_ptr() for buffer in staging.buffers]
    found += [staging.stack(list(batch)) for batch in batches]
    assert all(torch.equal(one, batch) for one, batch in zip(found, [*batches, *batches], strict=True))
    assert [buffer.data_ptr() for buffer in staging.buffers] == buffers
    assert [buffer.nbytes for buffer in staging.buffers] == [7 * 60, 7 * 60]
    with pytest.raises(RuntimeError, match="equal size"):
        staging.stack([torch.zeros(2), torch.zeros(3)])
