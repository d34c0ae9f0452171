"""The request queue: accepted requests are completed, requests beyond the limits are rejected."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("starlette")
from starlette.exceptions import HTTPException

from allmlp.serve.batching import CLIENT, Batcher, ServiceUnavailable
from allmlp.serve.engine import BatchingEngine


def with_batcher(batcher: Batcher, test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def go() -> Any:
        batcher.start()
        try:
            return await test()
        finally:
            await asyncio.get_running_loop().run_in_executor(None, batcher.stop)

    return asyncio.run(go())


class BlockedModel:
    """Records its batches and blocks until `go` is set."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.go = threading.Event()

    def double(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        assert self.go.wait(10)
        if 13 in items:
            raise ValueError("unlucky")
        return [2 * item for item in items]

    def negate(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        return [-item for item in items]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("timed out")


def identity(item: Any) -> Any:
    return item


def test_waiting_requests_form_a_batch() -> None:
    batcher, model = Batcher(BatchingEngine(4)), BlockedModel()

    async def test() -> list[Any]:
        first = asyncio.ensure_future(batcher.submit(identity, 0, model.double))
        await until(lambda: model.batches == [[0]])
        rest = [asyncio.ensure_future(batcher.submit(identity, item, model.double)) for item in range(1, 8)]
        await until(lambda: len(batcher.engine.queue) == 7)
        assert batcher.in_flight == 8
        model.go.set()
        return await asyncio.gather(first, *rest)

    done = with_batcher(batcher, test)
    assert [one.value for one in done] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert model.batches == [[0], [1, 2, 3, 4], [5, 6, 7]]
    assert [one.batch_size for one in done] == [1, 4, 4, 4, 4, 3, 3, 3]
    assert batcher.in_flight == 0 and batcher.accepted == 8 and batcher.engine.seconds[model.double] > 0


def test_timing_separates_queue_and_model() -> None:
    batcher, model = Batcher(), BlockedModel()

    async def test() -> list[Any]:
        first = asyncio.ensure_future(batcher.submit(identity, 1, model.double))
        await until(lambda: model.batches == [[1]])
        second = asyncio.ensure_future(batcher.submit(identity, 2, model.double))
        await until(lambda: len(batcher.engine.queue) == 1)
        await asyncio.sleep(0.5)
        model.go.set()
        return await asyncio.gather(first, second)

    running, waiting = with_batcher(batcher, test)
    assert running.model_seconds > 0.4 > running.queue_seconds
    assert waiting.queue_seconds > 0.4 > waiting.model_seconds


def test_batches_hold_one_function_and_unbatched_requests_run_alone() -> None:
    batcher, model = Batcher(BatchingEngine(8)), BlockedModel()

    async def test() -> list[Any]:
        tasks = [asyncio.ensure_future(batcher.submit(identity, 0, model.double))]
        await until(lambda: bool(model.batches))
        for number, (function, batched) in enumerate(
            [(model.double, True), (model.negate, False), (model.double, True), (model.negate, False)], start=1
        ):
            tasks.append(asyncio.ensure_future(batcher.submit(identity, number, function, batched)))
            await until(lambda expected=number: len(batcher.engine.queue) == expected)
        model.go.set()
        return [done.value for done in await asyncio.gather(*tasks)]

    assert with_batcher(batcher, test) == [0, 2, -2, 6, -4]
    assert model.batches == [[0], [1, 3], [2], [4]]


def test_max_concurrency() -> None:
    batcher, model = Batcher(max_concurrency=2), BlockedModel()

    async def test() -> None:
        inside = [asyncio.ensure_future(batcher.submit(identity, item, model.double)) for item in (1, 2)]
        await until(lambda: bool(model.batches))
        with pytest.raises(ServiceUnavailable, match="busy with 2 inputs") as caught:
            await batcher.submit(identity, 3, model.double)  # while the model is blocked
        assert caught.value.retry_after >= 1
        model.go.set()
        assert [done.value for done in await asyncio.gather(*inside)] == [2, 4]
        assert (await batcher.submit(identity, 3, model.double)).value == 6

    with_batcher(batcher, test)
    assert batcher.accepted == 3


def test_long_expected_wait_is_rejected() -> None:
    batcher = Batcher(max_concurrency=100, timeout=9.0)
    batcher.engine.seconds = {len: 0.5, sum: 0.1}
    batcher.waiting.update({len: 5, sum: 5})
    assert batcher.rejection() is None
    batcher.waiting.update({sum: 1})
    rejection = batcher.rejection()
    assert rejection is not None and rejection.retry_after == 2
    assert rejection.status_code == 503 and rejection.headers == {"retry-after": "2"}


def test_clients_have_equal_shares() -> None:
    """A client that fills its share is rejected, one with nothing in flight is not."""
    batcher = Batcher(max_concurrency=16)

    def accepts(client: str, count: int = 1) -> bool:
        CLIENT.set(client)
        return batcher.rejection(count) is None

    def occupy(client: str, count: int) -> None:
        batcher.in_flight += count
        batcher.clients.setdefault(client, Counter())[len] += count

    assert accepts("a", 16)
    occupy("a", 13)
    assert accepts("a") and not accepts("a", 2)
    occupy("a", 1)
    assert not accepts("a") and accepts("b", 2)
    occupy("b", 1)
    assert accepts("b") and accepts("c")  # 7 of 16 for each of two
    batcher.engine.seconds = {len: 1.0}
    assert not accepts("a") and accepts("c")  # 14 s are more than a half of a third of 20 s
    occupy("c", 1)
    assert not accepts("d")


def test_shares_end_with_the_requests() -> None:
    batcher, model = Batcher(), BlockedModel()
    model.go.set()

    async def test() -> None:
        await asyncio.gather(*(batcher.submit(identity, item, model.double) for item in range(3)))

    with_batcher(batcher, test)
    assert not batcher.clients and not batcher.waiting.total()


def test_invalid_item_does_not_fail_the_batch() -> None:
    batcher, model = Batcher(), BlockedModel()
    model.go.set()

    async def test() -> list[Any]:
        return await batcher.submit_all(identity, [1, 13, 3], model.double)

    first, second, third = with_batcher(batcher, test)
    assert (first.value, third.value) == (2, 6)
    assert isinstance(second, ValueError) and str(second) == "unlucky"


def test_timeout_frees_the_slot() -> None:
    batcher, model = Batcher(max_concurrency=2, timeout=0.1), BlockedModel()

    async def test() -> None:
        results = await asyncio.gather(
            batcher.submit(identity, 1, model.double), batcher.submit(identity, 2, model.double), return_exceptions=True
        )
        assert all(isinstance(result, HTTPException) and result.status_code == 504 for result in results)
        assert batcher.in_flight == 0
        model.go.set()
        await until(lambda: model.double in batcher.engine.seconds)
        batcher.engine.seconds.clear()
        batcher.timeout = 60.0
        assert (await batcher.submit(identity, 5, model.double)).value == 10

    with_batcher(batcher, test)


def test_cancelled_request_is_not_run() -> None:
    batcher, model = Batcher(BatchingEngine(1)), BlockedModel()

    async def test() -> None:
        first = asyncio.ensure_future(batcher.submit(identity, 1, model.double))
        await until(lambda: bool(model.batches))
        cancelled = asyncio.ensure_future(batcher.submit(identity, 2, model.double))
        await until(lambda: len(batcher.engine.queue) == 1)
        cancelled.cancel()
        last = asyncio.ensure_future(batcher.submit(identity, 3, model.double))
        await until(lambda: len(batcher.engine.queue) == 2)
        model.go.set()
        await asyncio.gather(first, last)

    with_batcher(batcher, test)
    assert model.batches == [[1], [3]] and batcher.in_flight == 0


def test_draining_completes_requests_in_flight() -> None:
    batcher, model = Batcher(BatchingEngine(2)), BlockedModel()

    async def test() -> list[Any]:
        tasks = [asyncio.ensure_future(batcher.submit(identity, item, model.double)) for item in range(5)]
        await until(lambda: bool(model.batches))
        batcher.drain()
        with pytest.raises(ServiceUnavailable, match="shutting down"):
            await batcher.submit(identity, 9, model.double)
        model.go.set()
        return [done.value for done in await asyncio.gather(*tasks)]

    assert with_batcher(batcher, test) == [0, 2, 4, 6, 8]


def test_decode_error_fails_one_request() -> None:
    batcher, model = Batcher(), BlockedModel()
    model.go.set()

    async def test() -> list[Any]:
        return await asyncio.gather(
            batcher.submit(int, "4", model.double), batcher.submit(int, "x", model.double), return_exceptions=True
        )

    good, bad = with_batcher(batcher, test)
    assert good.value == 8 and good.decode_seconds > 0 and isinstance(bad, ValueError) and batcher.in_flight == 0
