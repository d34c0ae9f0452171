"""The batching engine: a thread that runs models on queued items, independent of HTTP and event loops.

    with BatchingEngine(max_batch_size=64) as engine:
        futures = [engine.submit(predictor.probabilities, image) for image in images]
        results = [future.result().value for future in futures]

There is no fixed batching delay. Items that arrive while a batch runs form the next one, so a single item is not
delayed and batches grow with the load. A GPU computes asynchronously: while a batch runs there, the next one is
launched as soon as it is full, and a second thread delivers the results.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from allmlp.threads import Threads

BatchFunction = Callable[[list[Any]], Any]
"""Maps a list of inputs to the results in the same order: a list, or a tensor with the inputs along its first axis."""
THREADS_WORTH = 1.25
"""Fewer CPU threads are used if they are slower by at most this factor: other requests need the cores too, and on busy
cores two threads take up to twice the processor time of one.
"""
GPU_THREADS = 4
"""CPU threads that gather a batch for a GPU: of 256 images 3.1 ms with one, 1.4 ms with four, 2.1 ms with sixteen."""
MAX_IN_FLIGHT = 2
"""Batches on a GPU: one that runs, and the next one."""
SWITCH_SECONDS = 5e-4
"""Python's thread switch interval. The default of 5 ms is a third of a batch on a fast GPU, and the thread that feeds
the GPU could wait that long after each of its operations.
"""


class BatchResult(NamedTuple):
    """The result of one item, with its timing in seconds."""

    value: Any
    queue_seconds: float
    model_seconds: float
    """Model time of the whole batch."""
    batch_size: int
    decode_seconds: float = 0.0


@dataclass(eq=False, slots=True)
class QueuedItem:
    function: BatchFunction
    item: Any
    batched: bool
    future: Future[BatchResult] = field(default_factory=Future)
    queued_at: float = field(default_factory=time.monotonic)

    @property
    def kind(self) -> tuple[BatchFunction, bool]:
        """Items of the same kind can share a batch."""
        return self.function, self.batched


class RunningBatch(NamedTuple):
    items: list[QueuedItem]
    values: Any
    start: float
    ready: Any
    """CUDA event after which the values are available; None if they are already."""

    def wait(self) -> list[Any]:
        """Wait for the results and return them."""
        if self.ready is not None:
            self.ready.synchronize()
        results = list(self.values)
        if len(results) != len(self.items):
            raise ValueError(f"{len(results)} results for {len(self.items)} inputs")
        return results


def to_host(values: Any) -> tuple[Any, Any]:
    """Values in main memory, and the CUDA event after which they are available; None if they are already."""
    if not isinstance(values, torch.Tensor) or values.device.type == "cpu":
        return values, None
    if values.device.type != "cuda":
        return values.cpu(), None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host, torch.cuda.current_stream(values.device).record_event()


class BatchingEngine:
    """Run items in batches of at most `max_batch_size`, those of one function together, the oldest first.

    On a CPU the number of threads is chosen by measurement for every function and batch size, limited to the processors
    that other processes leave free, unless `fixed_threads` is given.
    """

    def __init__(self, max_batch_size: int = 16, fixed_threads: int | None = None) -> None:
        self.max_batch_size, self.fixed_threads = max_batch_size, fixed_threads
        self.seconds: dict[BatchFunction, float] = {}
        """Moving average of the time for one item."""
        self.on_batch: Callable[[int, float], None] = lambda size, seconds: None
        self.queue: deque[QueuedItem] = deque()
        self.queued: Counter[tuple[BatchFunction, bool]] = Counter()
        """Items in the queue by kind."""
        self.retries: deque[QueuedItem] = deque()
        """Items of batches that have failed, to be run one by one."""
        self.in_flight: deque[RunningBatch] = deque()
        """Batches on a GPU, in the order of their launches."""
        self.free_at = 0.0
        """Time at which the last batch was done."""
        lock = threading.RLock()
        self.arrived, self.launched = threading.Condition(lock), threading.Condition(lock)
        """Signals to the two threads; everything above is changed under their lock."""
        self.stopped = self.launched_all = False
        self.thread = threading.Thread(target=self.run, name="model", daemon=True)
        self.finisher = threading.Thread(target=self.complete_launched, name="results", daemon=True)
        self.threads: dict[BatchFunction, dict[int, Threads]] = {}
        """Threads by function and bit length of the batch size."""

    def start(self) -> None:
        """Start the threads, unless they are running."""
        if not self.thread.is_alive():
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
            self.thread.start()
            self.finisher.start()

    def stop(self) -> None:
        """Complete the queued items, and end the threads."""
        with self.arrived:
            self.stopped = True
            self.arrived.notify()
        if self.thread.is_alive():
            self.thread.join()
            self.finisher.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit(self, function: BatchFunction, item: Any, batched: bool = True) -> Future[BatchResult]:
        """Queue an item, to run `batched` with others of the same function. If cancelled in time, it does not run.

        Work that does not get faster in a batch should run unbatched, so that other items get their turn in between.
        """
        queued = QueuedItem(function, item, batched)
        with self.arrived:
            self.queue.append(queued)
            self.queued[queued.kind] += 1
            if self.can_launch():
                self.arrived.notify()
        return queued.future

    # --- model thread ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        if self.fixed_threads:
            torch.set_num_threads(self.fixed_threads)
        while items := self.next_batch():
            batch = self.launch(items)
            if batch is not None and batch.ready is None:
                self.complete(batch)
            elif batch is not None:
                with self.launched:
                    self.in_flight.append(batch)
                    self.launched.notify()

    def can_launch(self) -> bool:
        """Whether there is a batch to launch; while one runs on a GPU, only a full one."""
        if len(self.in_flight) == MAX_IN_FLIGHT or not self.queue:
            return bool(self.retries) and len(self.in_flight) < MAX_IN_FLIGHT
        return not self.in_flight or bool(self.retries) or self.queued[self.queue[0].kind] >= self.largest_batch()

    def has_ended(self) -> bool:
        return self.stopped and not (self.queue or self.retries or self.in_flight)

    def largest_batch(self) -> int:
        """Maximum batch size for the kind of the oldest item."""
        return self.max_batch_size if self.queue[0].batched else 1

    def next_batch(self) -> list[QueuedItem]:
        """Wait for a batch: the oldest item, and others of the same kind. Empty once the engine has ended."""
        while True:
            with self.arrived:
                self.arrived.wait_for(lambda: self.can_launch() or self.has_ended())
                if self.retries:
                    return [self.retries.popleft()]
                if not self.queue:
                    self.launched_all = True
                    self.launched.notify()
                    return []
                kind, size = self.queue[0].kind, self.largest_batch()
                chosen, others = list[QueuedItem](), list[QueuedItem]()
                while self.queue and len(chosen) < size:
                    item = self.queue.popleft()
                    (chosen if item.kind == kind else others).append(item)
                self.queue.extendleft(reversed(others))
                self.queued[kind] -= len(chosen)
            if started := [item for item in chosen if item.future.set_running_or_notify_cancel()]:
                return started

    def launch(self, items: list[QueuedItem]) -> RunningBatch | None:
        """Run a batch; on a GPU, only start it."""
        start, function = time.monotonic(), items[0].function
        try:
            with self.thread_count(function, len(items)):
                values = function([one.item for one in items])
            values, ready = to_host(values)
            return RunningBatch(items, values, start, ready)
        except Exception as error:
            self.fail(items, error)
            return None

    def thread_count(self, function: BatchFunction, size: int) -> Threads:
        """The `Threads` for batches of about this size."""
        by_size = self.threads.setdefault(function, {})
        if size.bit_length() not in by_size:
            alike = next(iter(by_size.values()), None)
            first = Threads(active=self.fixed_threads is None, worth=THREADS_WORTH, spare_only=True)
            by_size[size.bit_length()] = alike.sibling() if alike else first
        return by_size[size.bit_length()]

    def fail(self, items: list[QueuedItem], error: Exception) -> None:
        """Queue the items of a failed batch to be run one by one, so that an invalid one does not fail the others."""
        if len(items) == 1:
            items[0].future.set_exception(error)
            return
        with self.arrived:
            self.retries.extend(items)

    def complete(self, batch: RunningBatch) -> None:
        """Wait until a batch is done, let the next one be launched, and set the results."""
        items, values = batch.items, None
        try:
            values = batch.wait()
        except Exception as error:
            self.fail(items, error)
        start, self.free_at = max(batch.start, self.free_at), time.monotonic()  # the previous batch had to end first
        with self.arrived:
            if batch.ready is not None:
                self.in_flight.popleft()
            self.arrived.notify()
        if values is None:
            return
        seconds = self.free_at - start
        average, each = self.seconds.get(items[0].function), seconds / len(items)
        self.seconds[items[0].function] = each if average is None else (average + each) / 2
        self.on_batch(len(items), seconds)
        for one, value in zip(items, values, strict=True):
            one.future.set_result(BatchResult(value, start - one.queued_at, seconds, len(items)))

    # --- result thread -----------------------------------------------------------------------------------------------

    def complete_launched(self) -> None:
        """Complete the batches on a GPU, the oldest first."""
        while True:
            with self.launched:
                # A batch that is being launched is in no queue: the model thread has to end first.
                self.launched.wait_for(lambda: self.in_flight or self.launched_all)
                if not self.in_flight:
                    return
                batch = self.in_flight[0]
            self.complete(batch)
