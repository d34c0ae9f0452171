"""Answers for any number of inputs in bounded memory: workers decode the next batches while the model computes one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from allmlp.data.prefetch import read_ahead
from allmlp.data.shards import Shard
from allmlp.data.workers import Workers
from allmlp.errors import UserError
from allmlp.prediction.inputs import Item
from allmlp.prediction.predictor import CPU_BATCH_SIZE, Predictor
from allmlp.threads import Threads, limit

T = TypeVar("T")
GPU_BATCH_SIZE = 256
"""By default."""
AHEAD = 2
"""Batches that are decoded while one is computed."""


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
    workers = getattr(predictor, "workers", None)  # of images
    return answers(items, predictor.decode, compute, batch_size, predictor.device, workers)


def features(predictor: Predictor, items: Iterable[Item], batch_size: int | None = None) -> Iterator[Answer]:
    """The features of each input, a float32 array of c numbers, in order."""

    def compute(decoded: list[Any]) -> np.ndarray:
        return predictor.embed(decoded).cpu().numpy()

    workers = getattr(predictor, "workers", None)
    return answers(items, predictor.read, compute, batch_size, predictor.device, workers)


def answers(
    items: Iterable[Item],
    decode: Callable[[Any], Any],
    compute: Callable[[list[Any]], Iterable[Any]],
    batch_size: int | None,
    device: torch.device = torch.device("cpu"),
    workers: Workers | None = None,
) -> Iterator[Answer]:
    """Yield the results of compute(batch) on decoded inputs; an error for inputs that cannot be decoded.

    Inputs i batch_size to (i + 1) batch_size are one batch, even if some cannot be decoded. They are decoded by
    `workers`, if there are any: tensors of uint8.
    """
    is_cpu = device.type == "cpu"
    size = batch_size or (CPU_BATCH_SIZE if is_cpu else GPU_BATCH_SIZE)
    threads, threads_before = Threads(active=is_cpu), torch.get_num_threads()
    pool = ThreadPoolExecutor(limit(), thread_name_prefix="decode")

    def read(batch: list[Item]) -> tuple[list[Item], list[Any]]:
        sources = [item.source for item in batch]
        if workers is None:
            return batch, [*pool.map(partial(attempt, decode), sources)]
        pixels, failed = workers.map(sources, portable=all(map(is_portable, sources)))
        decoded: list[Any] = [*torch.from_numpy(pixels)]
        for position in failed:
            decoded[position] = attempt(decode, sources[position])
        return batch, decoded

    batches = read_ahead(read, chunks(items, size), AHEAD)
    try:
        for batch, decoded in batches:
            usable = [value for value in decoded if not isinstance(value, UserError)]
            try:
                with threads:
                    results = iter(compute(usable) if usable else ())
            except torch.OutOfMemoryError as reason:
                raise UserError(f"batches of {size} do not fit into memory: use a smaller --batch-size") from reason
            for item, value in zip(batch, decoded, strict=True):
                failed = isinstance(value, UserError)
                yield Answer(item, None, str(value)) if failed else Answer(item, next(results))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        batches.close()
        pool.shutdown()
        if is_cpu:
            torch.set_num_threads(threads_before)


def is_portable(source: Any) -> bool:
    """Whether a forked process can read a source: a path, or a part of a shard on a local disk (see `Inputs`)."""
    if isinstance(source, partial):
        owner = getattr(getattr(source.args[0], "func", None), "__self__", None)
        return isinstance(owner, Shard) and not owner.remote
    return isinstance(source, (str, os.PathLike))


def values(found: Iterable[Answer]) -> Iterator[Any]:
    """The values of answers; raises UserError for an input that could not be used."""
    for answer in found:
        if answer.error:
            raise UserError(f"{answer.item.name}: {answer.error}")
        yield answer.value


def chunks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Consecutive values, `size` at a time."""
    source = iter(values)
    return iter(lambda: list(islice(source, size)), [])


def attempt(decode: Callable[[Any], Any], source: Any) -> Any:
    try:
        return decode(source)
    except UserError as reason:
        return reason
