"""The batching engine: one thread that runs models on whatever is queued. It needs no HTTP and no event loop.

    with BatchingEngine(max_batch_size=64) as engine:
        futures = [engine.submit(predictor.probabilities, image) for image in images]
        results = [future.result().value for future in futures]

There is no fixed batching delay. Items that arrive while a batch runs form the next one, so a single item is not
delayed and batches grow with the load. On a GPU, which computes by itself, the next batch is launched while one runs
once it is full, and the results of one are handed out while the next one runs.
"""

from __future__ import annotations

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
MAX_IN_FLIGHT = 2
"""Batches on a GPU: one that runs, and the next one."""
POLL_SECONDS = 5e-4
"""Between two looks whether a running batch is done, while the next one fills up."""


class BatchResult(NamedTuple):
    """The result of one item, with its timing in seconds."""

    value: Any
    queue_seconds: float
    model_seconds: float
    """For the whole batch."""
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
        """Items of one kind can be in one batch."""
        return self.function, self.batched


class RunningBatch(NamedTuple):
    items: list[QueuedItem]
    values: Any
    start: float
    ready: Any
    """A CUDA event, or None if the values are there."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended, or failed."""
        try:
            return self.ready is None or self.ready.query()
        except RuntimeError:  # which `finish` handles
            return True


def to_host(values: Any) -> tuple[Any, Any]:
    """Values in main memory, and the CUDA event after which they are there; None if they are there now."""
    if not isinstance(values, torch.Tensor) or values.device.type == "cpu":
        return values, None
    if values.device.type != "cuda":
        return values.cpu(), None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host, torch.cuda.current_stream(values.device).record_event()


class BatchingEngine:
    """Run items in batches of at most `max_batch_size`, those of one function together, the oldest first.

    On a CPU the number of threads is chosen by measurement for every function and size of batch, unless
    `fixed_threads` is given.
    """

    def __init__(self, max_batch_size: int = 16, fixed_threads: int | None = None) -> None:
        self.max_batch_size, self.fixed_threads = max_batch_size, fixed_threads
        self.seconds: dict[BatchFunction, float] = {}
        """Moving average of the time for one item."""
        self.on_batch: Callable[[int, float], None] = lambda size, seconds: None
        self.queue: deque[QueuedItem] = deque()
        self.queued: Counter[tuple[BatchFunction, bool]] = Counter()
        """Items in the queue by kind."""
        self.free_at = 0.0
        """When the last batch was done."""
        self.condition = threading.Condition()
        self.stopped = False
        self.thread = threading.Thread(target=self.run, name="model", daemon=True)
        self.threads: dict[BatchFunction, dict[int, Threads]] = {}
        """By the number of bits of the size of a batch."""

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if not self.thread.is_alive():
            self.thread.start()

    def stop(self) -> None:
        """Complete what is queued, and end the thread."""
        with self.condition:
            self.stopped = True
            self.condition.notify()
        if self.thread.is_alive():
            self.thread.join()

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
        with self.condition:
            self.queue.append(queued)
            self.queued[queued.kind] += 1
            self.condition.notify()
        return queued.future

    # --- model thread ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        if self.fixed_threads:
            torch.set_num_threads(self.fixed_threads)
        running: deque[RunningBatch] = deque()
        while True:
            items = self.next_batch(running[0] if running else None) if len(running) < MAX_IN_FLIGHT else []
            if not items and not running:
                return
            if items and (launched := self.launch(items)) is not None:
                running.append(launched)
            if running and (not items or running[0].is_done):
                self.finish(running.popleft())

    def next_batch(self, running: RunningBatch | None) -> list[QueuedItem]:
        """Wait for the oldest item, and take those of the same kind; none once the engine has stopped.

        While a batch is running, a full one is waited for, but no longer than until the running one is done.
        """
        with self.condition:
            if running is None:
                while not self.queue and not self.stopped:
                    self.condition.wait()
            while running and self.queue and not self.is_full() and not running.is_done:
                self.condition.wait(POLL_SECONDS)
            if not self.queue:
                return []
            kind, size = self.queue[0].kind, self.batch_limit()
            chosen, others = list[QueuedItem](), list[QueuedItem]()
            while self.queue and len(chosen) < size:
                one = self.queue.popleft()
                (chosen if one.kind == kind else others).append(one)
            self.queue.extendleft(reversed(others))
            self.queued[kind] -= len(chosen)
        found = [one for one in chosen if one.future.set_running_or_notify_cancel()]
        return found or self.next_batch(running)

    def batch_limit(self) -> int:
        """The largest batch of the oldest item."""
        return self.max_batch_size if self.queue[0].batched else 1

    def is_full(self) -> bool:
        return self.queued[self.queue[0].kind] >= self.batch_limit()

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
        """Measures and sets the number of threads for batches of about this size."""
        known = self.threads.setdefault(function, {})
        if size.bit_length() not in known:
            alike = next(iter(known.values()), None)
            known[size.bit_length()] = alike.sibling() if alike else Threads(active=self.fixed_threads is None)
        return known[size.bit_length()]

    def finish(self, batch: RunningBatch) -> None:
        items, values, start, ready = batch
        try:
            if ready is not None:
                ready.synchronize()
            values = list(values)
        except Exception as error:
            self.fail(items, error)
            return
        start, self.free_at = max(start, self.free_at), time.monotonic()  # launched early, it waits for the one before
        seconds = self.free_at - start
        known = self.seconds.get(items[0].function)
        each = seconds / len(items)
        self.seconds[items[0].function] = each if known is None else (known + each) / 2
        self.on_batch(len(items), seconds)
        for one, value in zip(items, values, strict=True):
            one.future.set_result(BatchResult(value, start - one.queued_at, seconds, len(items)))

    def fail(self, items: list[QueuedItem], error: Exception) -> None:
        """Run the items one by one: an invalid one must not fail the others."""
        if len(items) == 1:
            items[0].future.set_exception(error)
            return
        for one in items:
            batch = self.launch([one])
            if batch is not None:
                self.finish(batch)
