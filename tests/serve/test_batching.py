"""The queue before the model: what is taken on is answered, what is too much is refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from allmlp.serve.batching import Batcher, Refused, TooLate


def with_batcher(batcher: Batcher, test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def go() -> Any:
        batcher.start()
        try:
            return await test()
        finally:
            await asyncio.get_running_loop().run_in_executor(None, batcher.stop)

    return asyncio.run(go())


class Slow:
    """Work that waits until it is let go, and keeps the batches it was given."""

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
    raise AssertionError("it did not happen")


def same(item: Any) -> Any:
    return item


def test_what_waits_together_runs_together() -> None:
    batcher, slow = Batcher(size=4), Slow()

    async def test() -> list[Any]:
        first = asyncio.ensure_future(batcher.answer(same, 0, slow.double))
        await until(lambda: slow.batches == [[0]])
        rest = [asyncio.ensure_future(batcher.answer(same, item, slow.double)) for item in range(1, 8)]
        await until(lambda: len(batcher.queue) == 7)
        assert batcher.inside == 8
        slow.go.set()
        return await asyncio.gather(first, *rest)

    done = with_batcher(batcher, test)
    assert [one.value for one in done] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert slow.batches == [[0], [1, 2, 3, 4], [5, 6, 7]]
    assert [one.batch for one in done] == [1, 4, 4, 4, 4, 3, 3, 3]
    assert batcher.inside == 0 and batcher.accepted == 8 and batcher.pace > 0


def test_different_work_is_not_mixed_and_some_is_done_alone() -> None:
    batcher, slow = Batcher(size=8), Slow()

    async def test() -> list[Any]:
        tasks = [asyncio.ensure_future(batcher.answer(same, 0, slow.double))]
        await until(lambda: bool(slow.batches))
        for number, (work, together) in enumerate(
            [(slow.double, True), (slow.negate, False), (slow.double, True), (slow.negate, False)], start=1
        ):
            tasks.append(asyncio.ensure_future(batcher.answer(same, number, work, together)))
            await until(lambda expected=number: len(batcher.queue) == expected)
        slow.go.set()
        return [done.value for done in await asyncio.gather(*tasks)]

    assert with_batcher(batcher, test) == [0, 2, -2, 6, -4]
    assert slow.batches == [[0], [1, 3], [2], [4]]


def test_more_than_fits_is_refused_at_once() -> None:
    batcher, slow = Batcher(capacity=2), Slow()

    async def test() -> None:
        inside = [asyncio.ensure_future(batcher.answer(same, item, slow.double)) for item in (1, 2)]
        await until(lambda: bool(slow.batches))
        began = time.monotonic()
        with pytest.raises(Refused, match="busy with 2 requests") as caught:
            await batcher.answer(same, 3, slow.double)
        assert caught.value.seconds >= 1 and time.monotonic() - began < 0.1
        slow.go.set()
        assert [done.value for done in await asyncio.gather(*inside)] == [2, 4]
        assert (await batcher.answer(same, 3, slow.double)).value == 6

    with_batcher(batcher, test)
    assert batcher.accepted == 3


def test_who_would_wait_too_long_is_refused_before() -> None:
    batcher = Batcher(capacity=100, timeout=9.0)
    batcher.pace = 0.5
    batcher.inside = 6
    assert batcher.refusal() is None
    batcher.inside = 7
    refused = batcher.refusal()
    assert refused is not None and refused.seconds == 2


def test_one_bad_item_harms_no_other() -> None:
    batcher, slow = Batcher(), Slow()
    slow.go.set()

    async def test() -> list[Any]:
        tasks = [asyncio.ensure_future(batcher.run(slow.double, item)) for item in (1, 13, 3)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = with_batcher(batcher, test)
    assert (first.value, third.value) == (2, 6)
    assert isinstance(second, ValueError) and str(second) == "unlucky"


def test_a_late_answer_is_told_and_its_place_is_free_again() -> None:
    batcher, slow = Batcher(capacity=2, timeout=0.1), Slow()

    async def test() -> None:
        results = await asyncio.gather(
            batcher.answer(same, 1, slow.double), batcher.answer(same, 2, slow.double), return_exceptions=True
        )
        assert all(isinstance(result, TooLate) for result in results) and batcher.inside == 0
        slow.go.set()
        await until(lambda: batcher.pace > 0)
        batcher.pace = 0.0
        assert (await batcher.answer(same, 5, slow.double)).value == 10

    with_batcher(batcher, test)


def test_who_has_gone_is_not_computed() -> None:
    batcher, slow = Batcher(size=1), Slow()

    async def test() -> None:
        first = asyncio.ensure_future(batcher.answer(same, 1, slow.double))
        await until(lambda: bool(slow.batches))
        gone = asyncio.ensure_future(batcher.answer(same, 2, slow.double))
        await until(lambda: len(batcher.queue) == 1)
        gone.cancel()
        last = asyncio.ensure_future(batcher.answer(same, 3, slow.double))
        await until(lambda: len(batcher.queue) == 2)
        slow.go.set()
        await asyncio.gather(first, last)

    with_batcher(batcher, test)
    assert slow.batches == [[1], [3]] and batcher.inside == 0


def test_draining_finishes_what_is_inside() -> None:
    batcher, slow = Batcher(size=2), Slow()

    async def test() -> list[Any]:
        tasks = [asyncio.ensure_future(batcher.answer(same, item, slow.double)) for item in range(5)]
        await until(lambda: bool(slow.batches))
        batcher.drain()
        with pytest.raises(Refused, match="shutting down"):
            await batcher.answer(same, 9, slow.double)
        slow.go.set()
        return [done.value for done in await asyncio.gather(*tasks)]

    assert with_batcher(batcher, test) == [0, 2, 4, 6, 8]


def test_reading_fails_for_one_alone() -> None:
    batcher, slow = Batcher(), Slow()
    slow.go.set()

    async def test() -> list[Any]:
        return await asyncio.gather(
            batcher.answer(int, "4", slow.double), batcher.answer(int, "x", slow.double), return_exceptions=True
        )

    good, bad = with_batcher(batcher, test)
    assert good.value == 8 and good.read > 0 and isinstance(bad, ValueError) and batcher.inside == 0
