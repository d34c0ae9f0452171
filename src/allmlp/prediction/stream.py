"""Answers for any number of inputs in bounded memory: threads decode the next batches while the model computes one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from allmlp.errors import UserError
from allmlp.prediction.inputs import Item
from allmlp.prediction.predictor import CPU_BATCH_SIZE, Predictor
from allmlp.threads import Threads, limit

GPU_BATCH_SIZE = 256
"""By default."""


class Answer(NamedTuple):
    item: Item
    value: Any
    """Rows of predictions, or features; None if the input could not be used."""
    error: str = ""


def predictions(
    predictor: Predictor, items: Iterable[Item], top_k: int = 5, batch_size: int | None = None
) -> Iterator[Answer]:
    """The `top_k` predictions of each input, in order."""
    compute = partial(predictor.predict, top_k=top_k)
    return answers(items, predictor.decode, compute, batch_size, predictor.device)


def features(predictor: Predictor, items: Iterable[Item], batch_size: int | None = None) -> Iterator[Answer]:
    """The features of each input, a float32 array of c numbers, in order."""

    def compute(decoded: list[Any]) -> np.ndarray:
        return predictor.embed(decoded).cpu().numpy()

    return answers(items, predictor.read, compute, batch_size, predictor.device)


def answers(
    items: Iterable[Item],
    decode: Callable[[Any], Any],
    compute: Callable[[list[Any]], Iterable[Any]],
    batch_size: int | None,
    device: torch.device = torch.device("cpu"),
) -> Iterator[Answer]:
    """Yield the results of compute(batch) on decoded inputs; an error for inputs that cannot be decoded.

    Inputs i batch_size to (i + 1) batch_size are one batch, even if some cannot be decoded. At most two batches, and
    one input per decoding thread, are read ahead.
    """
    is_cpu = device.type == "cpu"
    size = batch_size or (CPU_BATCH_SIZE if is_cpu else GPU_BATCH_SIZE)
    source, threads, workers = iter(items), Threads(active=is_cpu), limit()
    pending: deque[tuple[Item, Future[Any]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    threads_before = torch.get_num_threads()

    def read_ahead() -> None:
        for item in islice(source, 2 * size + workers - len(pending)):
            pending.append((item, pool.submit(attempt, decode, item.source)))

    try:
        read_ahead()
        while pending:
            batch = [pending.popleft() for _ in range(min(size, len(pending)))]
            decoded = [future.result() for _, future in batch]
            usable = [value for value in decoded if not isinstance(value, UserError)]
            read_ahead()  # the inputs of the previous batch can be freed now
            try:
                with threads:
                    results = iter(compute(usable) if usable else ())
            except torch.OutOfMemoryError as reason:
                raise UserError(f"batches of {size} do not fit into memory: use a smaller --batch-size") from reason
            for (item, _), value in zip(batch, decoded, strict=True):
                failed = isinstance(value, UserError)
                yield Answer(item, None, str(value)) if failed else Answer(item, next(results))
    finally:
        pool.shutdown(cancel_futures=True)
        if is_cpu:
            torch.set_num_threads(threads_before)


def values(found: Iterable[Answer]) -> Iterator[Any]:
    """The values of answers; raises UserError for an input that could not be used."""
    for answer in found:
        if answer.error:
            raise UserError(f"{answer.item.name}: {answer.error}")
        yield answer.value


def chunks(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Consecutive values, `size` at a time."""
    source = iter(values)
    return iter(lambda: list(islice(source, size)), [])


def attempt(decode: Callable[[Any], Any], source: Any) -> Any:
    try:
        return decode(source)
    except UserError as reason:
        return reason
