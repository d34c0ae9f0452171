"""The sampler: the examples of each step are computed from seed and step alone, so that a run can resume anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import IntEnum
from typing import Annotated, NamedTuple, Self

import torch
from torch import Tensor

from allmlp.data.dataset import Examples, InMemory, Split, map_tensors
from allmlp.data.prefetch import Moving, Transfer, read_ahead
from allmlp.spec import Count, Range, Spec


class Stream(IntEnum):
    """The random streams of a run. Each is seeded with `mix_seed(stream, run seed, ...)`, so no two can coincide."""

    EPOCH_ORDER = 1
    """Permutation of the examples; with the epoch."""
    DECODING = 2
    """Uniforms for reading examples (crops while decoding); with the step."""
    TASK_INIT = 3
    """Parameters that the task adds to the model."""
    GLOBAL_RNG = 4
    """torch's global generator (dropout, stochastic depth); with step and rank."""
    TASK_STEP = 5
    """Uniforms for augmentation and masking, drawn for the whole batch by every process; with the step."""
    IMAGE_SIZE = 6
    """The image size of a step, without the run seed: runs that are compared have the same sizes."""
    LORA_INIT = 7
    """The adapters that a run adds to the model it starts from."""
    CORRUPTION = 8
    """Corruptions of evaluated images, without the run seed: models that are compared see the same images."""


def mix_seed(stream: Stream, *numbers: int) -> int:
    """Hash a stream and numbers such as seed and step into one 63-bit seed."""
    state = 0x9E3779B97F4A7C15
    for number in (stream.value, *numbers):
        state = ((state ^ (number + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) % 2**64
        state ^= state >> 31
    return state % 2**63


class Batch(NamedTuple):
    """The examples of one optimizer step on one process."""

    step: int
    epoch: float
    indices: Tensor
    examples: Examples

    def split(self, parts: int) -> list[Self]:
        """Micro-batches for gradient accumulation."""
        pieces = zip(self.indices.chunk(parts), *(tensor.chunk(parts) for tensor in self.examples), strict=True)
        return [self._replace(indices=i, examples=type(self.examples)(*tensors)) for i, *tensors in pieces]


class GrowingBatch(Spec):
    """A batch that grows up to the `batch_size` of the run.

        size(step) = min(start factor^floor(step / every), batch_size)

    Small batches suffice while gradients are large compared with their noise (Smith et al., 2018: instead of decaying
    the learning rate). The size depends on the step alone, so that a resumed run has the same batches; learning rates
    are not changed. With `compile`, every size is compiled.
    """

    start: Count = 32
    every: Count = 1000
    """Steps with one size."""
    factor: Annotated[int, Range(2, 1024)] = 2

    def stages(self, largest: int) -> Iterator[tuple[int, int]]:
        """First step of each batch size up to `largest`, and the sizes."""
        step, size = 0, self.start
        while size < largest:
            yield step, size
            step, size = step + self.every, size * self.factor
        yield step, largest


class Sampler:
    """Concatenates one permutation of the examples per epoch and cuts it into batches.

    Every example occurs exactly once per epoch, even if the batch size does not divide their number. With `repeats`
    each example occurs several times in its batch, augmented differently; the last one fewer times where the batch
    size is not a multiple.
    """

    def __init__(
        self, num_examples: int, batch_size: int, seed: int, repeats: int = 1, growth: GrowingBatch | None = None
    ) -> None:
        self.num_examples, self.seed, self.repeats = num_examples, seed, repeats
        self.stages = [*growth.stages(batch_size)] if growth else [(0, batch_size)]
        self.permutations: dict[int, Tensor] = {}

    def steps(self, epochs: float) -> int:
        """Number of steps in `epochs` passes over the data."""
        examples = epochs * self.num_examples
        first, size = [(start, size) for start, size in self.stages if self.position(start) <= examples][-1]
        return max(first + math.ceil((examples - self.position(first)) / self.distinct(size)), 1)

    def batch_size(self, step: int) -> int:
        return [size for first, size in self.stages if first <= step][-1]

    def distinct(self, batch_size: int) -> int:
        """Number of distinct examples in a batch of this size."""
        return math.ceil(batch_size / self.repeats)

    def position(self, step: int) -> int:
        """Number of examples before `step`."""
        ends = [*(first for first, _ in self.stages[1:]), step]
        return sum(
            max(min(end, step) - first, 0) * self.distinct(size)
            for (first, size), end in zip(self.stages, ends, strict=True)
        )

    def epoch(self, step: int) -> float:
        return self.position(step) / self.num_examples

    def indices(self, step: int) -> Tensor:
        position, end, pieces = self.position(step), self.position(step + 1), []
        while position < end:
            epoch, offset = divmod(position, self.num_examples)
            take = min(end - position, self.num_examples - offset)
            pieces.append(self.permutation(epoch)[offset : offset + take])
            position += take
        return torch.cat(pieces).repeat_interleave(self.repeats)[: self.batch_size(step)]

    def permutation(self, epoch: int) -> Tensor:
        cached = self.permutations
        if epoch in cached:
            return cached[epoch]
        generator = torch.Generator().manual_seed(mix_seed(Stream.EPOCH_ORDER, self.seed, epoch))
        fresh = torch.randperm(self.num_examples, generator=generator)
        # A new dictionary: other threads may be reading the old one.
        self.permutations = {k: v for k, v in cached.items() if k >= epoch - 1} | {epoch: fresh}
        return fresh


class Loader:
    """Batches of one process, starting at any step. Examples that are not in memory are read ahead by threads."""

    def __init__(
        self, split: Split, sampler: Sampler, device: torch.device, rank: int = 0, world_size: int = 1
    ) -> None:
        self.split = split.to(device) if isinstance(split, InMemory) else split
        self.sampler, self.rank, self.world_size = sampler, rank, world_size
        self.transfer = Transfer(device)

    def fetch(self, step: int) -> Batch:
        return self.receive(self.send(step))

    def send(self, step: int) -> tuple[int, Tensor, Moving]:
        """Read the examples of a step and start to copy them."""
        # Processes take strided slices of the batch and of its uniforms: together they see what one process would.
        share = slice(self.rank, None, self.world_size)
        indices = self.sampler.indices(step)[share]
        generator = torch.Generator().manual_seed(mix_seed(Stream.DECODING, self.sampler.seed, step))
        uniforms = torch.rand(self.sampler.batch_size(step), 4, generator=generator)[share]
        return step, indices, self.transfer.send(self.split.fetch(indices, uniforms))

    def receive(self, sent: tuple[int, Tensor, Moving]) -> Batch:
        step, indices, moving = sent
        return Batch(step, self.sampler.epoch(step), indices, self.transfer.receive(moving))

    def steps(self, start: int, stop: int) -> Iterator[Batch]:
        if isinstance(self.split, InMemory):
            return map(self.fetch, range(start, stop))
        return map(self.receive, read_ahead(self.send, range(start, stop)))


def eval_batches(
    split: Split, batch_size: int, device: torch.device, rank: int = 0, world_size: int = 1
) -> Iterator[Examples]:
    """Every example once, in order; each process gets its slice. Examples that are not in memory are read ahead.

    All processes get the same number of batches, the last one possibly empty, because sharded models run collectives.
    """
    split = split.to(device) if isinstance(split, InMemory) else split
    share, transfer = torch.arange(rank, len(split), world_size), Transfer(device)

    def send(start: int) -> Moving:
        indices = share[start : start + batch_size]
        examples = split.fetch(indices if len(indices) else torch.tensor([0]))
        return transfer.send(map_tensors(examples, lambda tensor: tensor[: len(indices)]))

    starts = range(0, math.ceil(len(split) / world_size), batch_size)
    return map(transfer.receive, map(send, starts) if isinstance(split, InMemory) else read_ahead(send, starts))
