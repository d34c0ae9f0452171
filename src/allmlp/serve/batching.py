"""Dynamic batching: a bounded queue in front of the one thread that runs the model.

There is no fixed batching delay. Requests that arrive while the model runs form the next batch, so a single request is
not delayed and batches grow with the load.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

BatchFunction = Callable[[list[Any]], list[Any]]
"""Maps a list of inputs to a list of results in the same order."""


class ServiceUnavailable(HTTPException):
    """The server cannot accept the request now; the client may retry after `retry_after` seconds."""

    def __init__(self, detail: str, retry_after: int) -> None:
        super().__init__(503, detail, {"retry-after": str(retry_after)})
        self.retry_after = retry_after


class BatchResult(NamedTuple):
    """The result of one request, with its timing in seconds."""

    value: Any
    queue_seconds: float
    model_seconds: float
    """For the whole batch."""
    batch_size: int
    decode_seconds: float = 0.0


@dataclass(eq=False)
class QueuedRequest:
    function: BatchFunction
    item: Any
    future: asyncio.Future[BatchResult]
    queued_at: float
    batched: bool


class Batcher:
    """Run requests in batches of at most `max_batch_size`, each within `timeout` seconds.

    At most `max_concurrency` requests are in flight. A request is also rejected if the expected wait exceeds a third of
    `timeout`, so that accepted requests finish in time even if the model slows down.
    Inputs are decoded in `decode_threads` threads, so that a large image does not block other requests.
    """

    def __init__(
        self, max_batch_size: int = 16, max_concurrency: int = 128, timeout: float = 20.0, decode_threads: int = 2
    ) -> None:
        self.max_batch_size, self.max_concurrency, self.timeout = max_batch_size, max_concurrency, timeout
        self.in_flight = 0
        self.accepted = 0
        self.seconds_per_request = 0.0
        """Moving average of the model time."""
        self.draining = False
        self.on_batch: Callable[[int, float], None] = lambda size, seconds: None
        self.queue: deque[QueuedRequest] = deque()
        self.condition = threading.Condition()
        self.stopped = False
        self.thread = threading.Thread(target=self.run_model, name="model", daemon=True)
        self.decoders = ThreadPoolExecutor(decode_threads, "decoder")

    # --- event loop --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def drain(self) -> None:
        """Reject new requests; those in flight are completed."""
        self.draining = True

    def stop(self) -> None:
        with self.condition:
            self.stopped = True
            self.condition.notify()
        self.thread.join()
        self.decoders.shutdown()

    def rejection(self) -> ServiceUnavailable | None:
        """Return the error for a request that cannot be accepted now."""
        wait = self.in_flight * self.seconds_per_request
        retry_after = max(math.ceil(wait / 2), 1)  # half of the queue is free by then; later the model would be idle
        if self.draining:
            return ServiceUnavailable("the server is shutting down", retry_after)
        if self.in_flight >= self.max_concurrency or wait > self.timeout / 3:
            detail = f"the server is busy with {self.in_flight} requests; try again in {retry_after} s"
            return ServiceUnavailable(detail, retry_after)
        return None

    async def submit(
        self, decode: Callable[[Any], Any], raw: Any, function: BatchFunction, batched: bool = True
    ) -> BatchResult:
        """Decode and run one request. Raises 503 if it is rejected, 504 if it is accepted and times out."""
        rejection = self.rejection()
        if rejection is not None:
            raise rejection
        self.in_flight += 1
        self.accepted += 1
        try:
            async with asyncio.timeout(self.timeout):
                start = time.monotonic()
                item = await self.loop.run_in_executor(self.decoders, decode, raw)
                elapsed = time.monotonic() - start
                return (await self.enqueue(function, item, batched))._replace(decode_seconds=elapsed)
        except TimeoutError:
            raise HTTPException(504, f"no result within {self.timeout:g} s") from None
        finally:
            self.in_flight -= 1

    async def enqueue(self, function: BatchFunction, item: Any, batched: bool = True) -> BatchResult:
        """Run one item, `batched` with other queued items of the same function.

        Work that does not get faster in a batch runs unbatched, so that other requests are served in between.
        If cancelled, the item is removed from the queue.
        """
        request = QueuedRequest(function, item, self.loop.create_future(), time.monotonic(), batched)
        with self.condition:
            self.queue.append(request)
            self.condition.notify()
        return await request.future

    def resolve(self, batch: list[QueuedRequest], values: list[Any], start: float, seconds: float) -> None:
        weight = 0.5 if self.seconds_per_request else 1.0
        self.seconds_per_request += (seconds / len(batch) - self.seconds_per_request) * weight
        self.on_batch(len(batch), seconds)
        for request, value in zip(batch, values, strict=True):
            if request.future.done():
                continue
            if isinstance(value, Exception):
                request.future.set_exception(value)
            else:
                request.future.set_result(BatchResult(value, start - request.queued_at, seconds, len(batch)))

    # --- model thread ------------------------------------------------------------------------------------------------

    def run_model(self) -> None:
        while batch := self.next_batch():
            self.run_batch(batch)

    def next_batch(self) -> list[QueuedRequest]:
        """Wait for the oldest request and those of the same function; an empty batch means that the server stopped."""
        with self.condition:
            while True:
                self.queue = deque(request for request in self.queue if not request.future.done())
                if self.queue:
                    break
                if self.stopped:
                    return []
                self.condition.wait()
            first = self.queue[0]
            size = self.max_batch_size if first.batched else 1
            batch = [request for request in self.queue if request.function == first.function][:size]
            taken = set(map(id, batch))
            self.queue = deque(request for request in self.queue if id(request) not in taken)
            return batch

    def run_batch(self, batch: list[QueuedRequest]) -> None:
        start = time.monotonic()
        try:
            values = batch[0].function([request.item for request in batch])
        except Exception as error:
            if len(batch) > 1:
                # Retry one by one: an invalid item must not fail the others.
                for request in batch:
                    self.run_batch([request])
                return
            values = [error]
        self.loop.call_soon_threadsafe(self.resolve, batch, values, start, time.monotonic() - start)
