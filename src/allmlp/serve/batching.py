"""Admission of requests to the batching engine: limits, decoding and timeouts."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from starlette.exceptions import HTTPException

from allmlp.errors import UserError
from allmlp.serve.engine import BatchFunction, BatchingEngine, BatchResult

LARGE = 2**22
"""Pixels from which an image is decoded in separate threads, so that small ones need not wait for it."""
SECONDS_PER_PIXEL = 3e-8
"""Initial estimate of the decoding time."""
CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Address of the client of the current request."""
SHARE = 7 / 8
"""Fraction of the capacity shared equally by clients with inputs in flight; the rest is reserved for new clients."""


class ServiceUnavailable(HTTPException):
    """The server cannot accept the request now; the client may retry after `retry_after` seconds."""

    def __init__(self, detail: str, retry_after: int) -> None:
        super().__init__(503, detail, {"retry-after": str(retry_after)})
        self.retry_after = retry_after


Decode = Callable[[Any], Any]
"""Turns the body of a request into the input of a model, in a thread."""
Measure = Callable[[Any], int]
"""Returns the number of pixels of an encoded image."""


def identity(item: Any) -> Any:
    return item


def no_pixels(_raw: Any) -> int:
    return 0


class Batcher:
    """Accepts at most `max_concurrency` inputs at a time and answers each within `timeout` seconds.

    An input is also rejected if the expected wait exceeds a third of `timeout`, so that accepted ones are answered in
    time even if the model slows down. No client gets the whole capacity (`SHARE`). Inputs are decoded in
    `decode_threads` threads, and large images in as many others, so that they do not block other requests.
    """

    def __init__(
        self,
        engine: BatchingEngine | None = None,
        max_concurrency: int = 128,
        timeout: float = 20.0,
        decode_threads: int = 1,
    ) -> None:
        self.engine = engine or BatchingEngine()
        self.max_concurrency, self.timeout, self.decode_threads = max_concurrency, timeout, decode_threads
        self.in_flight = 0
        self.accepted = 0
        self.waiting: Counter[BatchFunction] = Counter()
        """Inputs in flight by function."""
        self.clients: dict[str, Counter[BatchFunction]] = {}
        """Inputs in flight by client and function."""
        self.pixels: Counter[str] = Counter()
        """Pixels of large images not decoded yet, by client."""
        self.seconds_per_pixel = SECONDS_PER_PIXEL
        self.draining = False
        self.decoders = ThreadPoolExecutor(decode_threads, "decoder")
        self.large_decoders = ThreadPoolExecutor(decode_threads, "large decoder")

    def start(self) -> None:
        self.engine.start()

    def drain(self) -> None:
        """Reject new requests; those in flight are completed."""
        self.draining = True

    def stop(self) -> None:
        self.engine.stop()
        self.decoders.shutdown()
        self.large_decoders.shutdown()

    def rejection(self, count: int = 1) -> ServiceUnavailable | None:
        """Return the error for `count` inputs that cannot be accepted now."""
        wait = self.wait(self.waiting)
        if self.draining:
            return ServiceUnavailable("the server is shutting down", retry_after(wait))
        if self.in_flight + count > self.max_concurrency or wait > self.timeout / 3:
            return self.busy(wait)
        if waiting := self.clients.get(CLIENT.get()):
            share = SHARE / len(self.clients)
            if (
                waiting.total() + count - 1 >= share * self.max_concurrency
                or self.wait(waiting) >= share * self.timeout / 3
            ):
                return self.busy(wait)
        return None

    def wait(self, waiting: Counter[BatchFunction]) -> float:
        """Expected model time for these inputs, in seconds."""
        return sum(number * self.engine.seconds.get(function, 0.0) for function, number in waiting.items())

    def busy(self, wait: float) -> ServiceUnavailable:
        after = retry_after(wait)
        return ServiceUnavailable(f"the server is busy with {self.in_flight} inputs; try again in {after} s", after)

    async def submit(
        self, decode: Decode, raw: Any, function: BatchFunction, batched: bool = True, measure: Measure = no_pixels
    ) -> BatchResult:
        """Decode and run one input.

        Raises 503 if the input is rejected, 504 if it is accepted and times out.
        """
        (result,) = await self.submit_all(decode, [raw], function, batched, measure)
        if isinstance(result, BaseException):
            raise result
        return result

    async def submit_all(
        self,
        decode: Decode,
        raws: list[Any],
        function: BatchFunction,
        batched: bool = True,
        measure: Measure = no_pixels,
    ) -> list[BatchResult | BaseException]:
        """Decode and run several inputs, accepted or rejected together; an input may fail alone."""
        if len(raws) > self.max_concurrency:
            raise UserError(f"{len(raws)} inputs in one request; the server takes at most {self.max_concurrency}")
        rejection = self.rejection(len(raws))
        if rejection is not None:
            raise rejection
        self.in_flight += len(raws)
        self.accepted += len(raws)
        client = CLIENT.get()
        waiting = self.clients.setdefault(client, Counter())
        for counter in (self.waiting, waiting):
            counter[function] += len(raws)
        tasks = [asyncio.ensure_future(self.answer(decode, raw, function, batched, measure)) for raw in raws]
        try:
            async with asyncio.timeout(self.timeout):
                return await asyncio.gather(*tasks, return_exceptions=True)
        except TimeoutError:
            raise HTTPException(504, f"no result within {self.timeout:g} s") from None
        finally:
            self.in_flight -= len(raws)
            for counter in (self.waiting, waiting):
                counter[function] -= len(raws)
            if not waiting.total():
                del self.clients[client]

    async def answer(
        self, decode: Decode, raw: Any, function: BatchFunction, batched: bool, measure: Measure
    ) -> BatchResult:
        start = time.monotonic()

        def decode_small() -> tuple[int, Any]:
            pixels = measure(raw)
            return pixels, decode(raw) if pixels <= LARGE else None

        pixels, item = await asyncio.get_running_loop().run_in_executor(self.decoders, decode_small)
        if pixels > LARGE:
            item = await self.decode_large(decode, raw, pixels)
        seconds = time.monotonic() - start
        result = await asyncio.wrap_future(self.engine.submit(function, item, batched))
        return result._replace(decode_seconds=seconds)

    async def decode_large(self, decode: Decode, raw: Any, pixels: int) -> Any:
        client, limit = CLIENT.get(), self.timeout / 3
        wait = (self.pixels.total() + pixels) * self.seconds_per_pixel / self.decode_threads
        client_wait = self.pixels[client] * self.seconds_per_pixel / self.decode_threads
        if (self.pixels.total() and wait > limit) or (client_wait and client_wait >= SHARE * limit / len(+self.pixels)):
            raise self.busy(wait)

        def timed() -> tuple[Any, float]:
            start = time.monotonic()
            return decode(raw), time.monotonic() - start

        self.pixels[client] += pixels
        try:
            item, seconds = await asyncio.get_running_loop().run_in_executor(self.large_decoders, timed)
        finally:
            self.pixels[client] -= pixels
            self.pixels += Counter()  # without clients that have none
        self.seconds_per_pixel = (self.seconds_per_pixel + seconds / pixels) / 2
        return item


def retry_after(wait: float) -> int:
    """Seconds until half of the queue is free; later the model would be idle."""
    return max(math.ceil(wait / 2), 1)
