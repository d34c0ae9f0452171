"""Answers for any number of inputs in bounded memory: workers decode the next batches while the model computes one.

On a GPU the answers of a batch are made while it computes the next one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from allmlp.data.prefetch import Moving, Transfer, read_ahead
from allmlp.data.workers import Workers
from allmlp.errors import UserError
from allmlp.prediction.inputs import Item, ShardPart
from allmlp.prediction.predictor import CPU_BATCH_SIZE, ImagePredictor, Predictor
from allmlp.prediction.staging import start_copies
from allmlp.threads import Threads, limit

T = TypeVar("T")
GPU_BATCH_SIZE = 256
"""By default."""
MAX_NAME = 200
"""Characters of an input that an error message quotes: after a long text, its reason would be cut off."""


class Answer(NamedTuple):
    item: Item
    value: Any
    """Rows of predictions, or features; None if the input could not be used."""
    error: str = ""

    @property
    def message(self) -> str:
        """The error after the name of the input, which is the text itself for a text."""
        name = self.item.name
        return f"{(name if len(name) <= MAX_NAME else f'{name[:MAX_NAME]}...') or 'input'}: {self.error}"


class DecodedBatch(NamedTuple):
    items: list[Item]
    errors: dict[int, str]
    """By position, of inputs that could not be decoded."""
    inputs: Any
    """The others."""

    def answers(self, results: Iterable[Any]) -> Iterator[Answer]:
        values = iter(results)
        for place, item in enumerate(self.items):
            yield Answer(item, None, self.errors[place]) if place in self.errors else Answer(item, next(values))


class Pixels(NamedTuple):
    images: Tensor
    """uint8, b c h w."""


Results = Callable[[], Iterable[Any]]
"""Waits for the results of a batch that is being computed."""


def predictions(
    predictor: Predictor, items: Iterable[Item], top_k: int = 5, batch_size: int | None = None
) -> Iterator[Answer]:
    """The `top_k` predictions of each input, in order."""
    if isinstance(predictor, ImagePredictor):
        start = partial(predictor.start_predicting, top_k=top_k)
        return answers(items, predictor.decode, start, batch_size, predictor.device, predictor.workers)

    def compute(texts: list[Any]) -> Results:
        rows = predictor.predict(texts, top_k)
        return lambda: rows

    return answers(items, predictor.decode, compute, batch_size, predictor.device)


def features(predictor: Predictor, items: Iterable[Item], batch_size: int | None = None) -> Iterator[Answer]:
    """The features of each input, a float32 array of c numbers, in order."""

    def start(decoded: Any) -> Results:
        wait = start_copies(predictor.embed(decoded))

        def results() -> np.ndarray:
            (values,) = wait()
            return values.numpy().copy()  # page-locked memory is not kept

        return results

    workers = predictor.workers if isinstance(predictor, ImagePredictor) else None
    return answers(items, predictor.read, start, batch_size, predictor.device, workers)


def answers(
    items: Iterable[Item],
    decode: Callable[[Any], Any],
    start: Callable[[Any], Results],
    batch_size: int | None,
    device: torch.device = torch.device("cpu"),
    workers: Workers | None = None,
) -> Iterator[Answer]:
    """Yield the results of start(batch)() on decoded inputs; an error for inputs that cannot be decoded.

    Every `batch_size` consecutive inputs are one batch, even if some cannot be decoded. With `workers`, these decode
    them, and the batch is a tensor on the device.
    """
    is_cpu = device.type == "cpu"
    size = batch_size or (CPU_BATCH_SIZE if is_cpu else GPU_BATCH_SIZE)
    threads, threads_before = Threads(active=is_cpu), torch.get_num_threads()
    pool, transfer = ThreadPoolExecutor(limit(), thread_name_prefix="decode"), Transfer(device)

    def read(batch: list[Item]) -> DecodedBatch:
        if workers is None:
            return decode_in_threads(batch, decode, pool)
        decoded = decode_in_workers(batch, decode, workers)
        return decoded._replace(inputs=transfer.send(Pixels(decoded.inputs)))

    batches, started = read_ahead(read, chunks(items, size)), deque[tuple[DecodedBatch, Results]]()
    try:
        for batch in batches:
            inputs = transfer.receive(batch.inputs).images if isinstance(batch.inputs, Moving) else batch.inputs
            with threads:
                results = start(inputs) if len(batch.errors) < len(batch.items) else tuple
            started.append((batch._replace(inputs=None), results))
            while len(started) > (0 if is_cpu else 1):
                done, results = started.popleft()
                yield from done.answers(results())
        for done, results in started:
            yield from done.answers(results())
    except torch.OutOfMemoryError as reason:
        raise UserError(f"batches of {size} do not fit into memory: use a smaller --batch-size") from reason
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        batches.close()
        pool.shutdown()
        if is_cpu:
            torch.set_num_threads(threads_before)


def decode_in_threads(items: list[Item], decode: Callable[[Any], Any], pool: ThreadPoolExecutor) -> DecodedBatch:
    decoded = [*pool.map(partial(attempt, decode), [item.source for item in items])]
    errors = {place: str(value) for place, value in enumerate(decoded) if isinstance(value, UserError)}
    return DecodedBatch(items, errors, [value for value in decoded if not isinstance(value, UserError)])


def decode_in_workers(items: list[Item], decode: Callable[[Any], Any], workers: Workers) -> DecodedBatch:
    """The inputs are images in one tensor; those that the workers could not decode are tried here again."""
    sources, errors = [item.source for item in items], dict[int, str]()
    pixels, failed = workers.map(sources, portable=all(map(is_portable, sources)))
    images = torch.from_numpy(pixels)
    for place in failed:
        value = attempt(decode, sources[place])
        if isinstance(value, UserError):
            errors[place] = str(value)
        else:
            images[place] = value
    if errors:
        images = images[[place for place in range(len(items)) if place not in errors]]
    return DecodedBatch(items, errors, images)


def is_portable(source: Any) -> bool:
    """Whether a forked process can read a source: a path, or a part of a shard on a local disk."""
    if isinstance(source, ShardPart):
        return not source.shard.remote
    return isinstance(source, (str, os.PathLike))


def values(answered: Iterable[Answer]) -> Iterator[Any]:
    """The values of answers; raises UserError for an input that could not be used."""
    for answer in answered:
        if answer.error:
            raise UserError(answer.message)
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
