"""Requests that wait together are answered together: a bounded queue before the one thread that runs the model.

Nothing waits for a batch to fill. While the model works on one batch the next one gathers, so a lone request is not
delayed, and the busier the server is the larger, and the cheaper per request, its batches are.
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

Work = Callable[[list[Any]], list[Any]]
"""Items in, as many results out, in the same order."""


class Refused(Exception):
    """A request that is not taken on now; it may come again after `seconds`."""

    def __init__(self, reason: str, seconds: int) -> None:
        super().__init__(reason)
        self.seconds = seconds


class TooLate(Exception):
    """A request that was taken on and not answered in time."""


class Done(NamedTuple):
    value: Any
    waited: float
    """Seconds in the queue."""
    ran: float
    """Seconds in the model, for the whole batch."""
    batch: int
    read: float = 0.0
    """Seconds until the model could be given it."""


@dataclass(eq=False)
class Job:
    work: Work
    item: Any
    future: asyncio.Future[Done]
    entered: float
    together: bool


class Batcher:
    """At most `capacity` requests are inside at a time, each for at most `timeout` seconds.

    A request that would wait for a third of that, as the pace of the last ones tells, is refused at once instead:
    what is taken on is answered in time even where the model becomes slower meanwhile.
    `readers` threads turn what was sent into what the model reads, so that a large photograph stops nobody else.
    """

    def __init__(self, size: int = 16, capacity: int = 128, timeout: float = 20.0, readers: int = 2) -> None:
        self.size, self.capacity, self.timeout = size, capacity, timeout
        self.inside = 0
        self.accepted = 0
        self.pace = 0.0
        """Seconds of the model for one request, averaged over the last batches."""
        self.draining = False
        self.on_batch: Callable[[int, float], None] = lambda size, seconds: None
        self.queue: deque[Job] = deque()
        self.changed = threading.Condition()
        self.stopped = False
        self.thread = threading.Thread(target=self.work, name="model", daemon=True)
        self.readers = ThreadPoolExecutor(readers, "reader")

    # --- on the event loop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def drain(self) -> None:
        """Refuse what comes from now on; what is inside is finished."""
        self.draining = True

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify()
        self.thread.join()
        self.readers.shutdown()

    def refusal(self) -> Refused | None:
        """Why a request would not be taken on now."""
        wait = self.inside * self.pace
        seconds = max(math.ceil(wait / 2), 1)  # then half of the places are free: who came later would find it idle
        if self.draining:
            return Refused("the server is shutting down", seconds)
        if self.inside >= self.capacity or wait > self.timeout / 3:
            return Refused(f"the server is busy with {self.inside} requests; try again in {seconds} s", seconds)
        return None

    async def answer(self, read: Callable[[Any], Any], raw: Any, work: Work, together: bool = True) -> Done:
        """One request from beginning to end, or `Refused`. What is taken on is answered, by `TooLate` at worst."""
        refused = self.refusal()
        if refused is not None:
            raise refused
        self.inside += 1
        self.accepted += 1
        try:
            async with asyncio.timeout(self.timeout):
                began = time.monotonic()
                item = await self.loop.run_in_executor(self.readers, read, raw)
                took = time.monotonic() - began
                return (await self.run(work, item, together))._replace(read=took)
        except TimeoutError:
            raise TooLate(f"no answer within {self.timeout:g} s") from None
        finally:
            self.inside -= 1

    async def run(self, work: Work, item: Any, together: bool = True) -> Done:
        """The result for one item, computed `together` with the others that wait for the same work.

        Work that takes as long together as one after the other is done alone, so that others come in between.
        Cancelled, the item leaves the queue.
        """
        job = Job(work, item, self.loop.create_future(), time.monotonic(), together)
        with self.changed:
            self.queue.append(job)
            self.changed.notify()
        return await job.future

    def deliver(self, batch: list[Job], values: list[Any], started: float, ran: float) -> None:
        self.pace += (ran / len(batch) - self.pace) * (0.5 if self.pace else 1.0)
        self.on_batch(len(batch), ran)
        for job, value in zip(batch, values, strict=True):
            if job.future.done():
                continue
            if isinstance(value, Exception):
                job.future.set_exception(value)
            else:
                job.future.set_result(Done(value, started - job.entered, ran, len(batch)))

    # --- in the model's thread ---------------------------------------------------------------------------------------

    def work(self) -> None:
        while batch := self.take():
            self.execute(batch)

    def take(self) -> list[Job]:
        """The oldest job and those like it, at most `size`; nothing when the server has stopped."""
        with self.changed:
            while True:
                self.queue = deque(job for job in self.queue if not job.future.done())
                if self.queue:
                    break
                if self.stopped:
                    return []
                self.changed.wait()
            first = self.queue[0]
            batch = [job for job in self.queue if job.work == first.work][: self.size if first.together else 1]
            chosen = set(map(id, batch))
            self.queue = deque(job for job in self.queue if id(job) not in chosen)
            return batch

    def execute(self, batch: list[Job]) -> None:
        started = time.monotonic()
        try:
            values = batch[0].work([job.item for job in batch])
        except Exception as reason:
            if len(batch) > 1:
                # One bad item must not take the others with it.
                for job in batch:
                    self.execute([job])
                return
            values = [reason]
        self.loop.call_soon_threadsafe(self.deliver, batch, values, started, time.monotonic() - started)
