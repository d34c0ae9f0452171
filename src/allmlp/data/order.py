"""Which example comes at which step: arithmetic alone, so any step can be asked for at any time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.data.source import Examples, Resident, Split, each


def fold(*numbers: int) -> int:
    """One seed from several numbers, unlike for unlike ones."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ (number + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) % 2**64
        state ^= state >> 31
    return state % 2**63


class Step(NamedTuple):
    """One optimiser step's examples on one process."""

    number: int
    epoch: float
    indices: Tensor
    batch: Examples


class Order:
    """Permutations of the examples, one per epoch, end to end and cut into batches.

    Every example comes exactly once per epoch, also where the batch does not divide their number.
    With `repeats` each example stands several times in its batch, differently augmented.
    """

    def __init__(self, examples: int, batch: int, seed: int, repeats: int = 1) -> None:
        self.examples, self.batch, self.seed, self.repeats = examples, batch, seed, repeats
        self.epochs: dict[int, Tensor] = {}

    def steps(self, epochs: float) -> int:
        """Steps that `epochs` passes over the data take."""
        return max(math.ceil(epochs * self.examples / self.fresh), 1)

    @property
    def fresh(self) -> int:
        """Different examples in one batch."""
        return max(self.batch // self.repeats, 1)

    def epoch(self, step: int) -> float:
        return step * self.fresh / self.examples

    def indices(self, step: int) -> Tensor:
        position, end, pieces = step * self.fresh, (step + 1) * self.fresh, []
        while position < end:
            epoch, offset = divmod(position, self.examples)
            take = min(end - position, self.examples - offset)
            pieces.append(self.permutation(epoch)[offset : offset + take])
            position += take
        return torch.cat(pieces).repeat_interleave(self.repeats)[: self.batch]

    def permutation(self, epoch: int) -> Tensor:
        if epoch not in self.epochs:
            generator = torch.Generator().manual_seed(fold(self.seed, epoch))
            self.epochs = {k: v for k, v in self.epochs.items() if k >= epoch - 1}
            self.epochs[epoch] = torch.randperm(self.examples, generator=generator)
        return self.epochs[epoch]


class Loader:
    """Batches of one process from any step on, fetched ahead of time where fetching takes time."""

    def __init__(self, split: Split, order: Order, device: torch.device, rank: int = 0, world: int = 1) -> None:
        self.split = split.to(device) if isinstance(split, Resident) else split
        self.order, self.device, self.rank, self.world = order, device, rank, world

    def fetch(self, number: int) -> Step:
        # Every world-th example, so that the union over the processes is the batch of a single one.
        indices = self.order.indices(number)[self.rank :: self.world]
        generator = torch.Generator().manual_seed(fold(self.order.seed, number, 1))
        draws = torch.rand(self.order.batch, 4, generator=generator)[self.rank :: self.world]
        moved = each(self.split.fetch(indices, draws), lambda tensor: tensor.to(self.device, non_blocking=True))
        return Step(number, self.order.epoch(number), indices, moved)

    def steps(self, start: int, stop: int, ahead: int = 3) -> Iterator[Step]:
        if isinstance(self.split, Resident):
            yield from map(self.fetch, range(start, stop))
            return
        with ThreadPoolExecutor(ahead) as pool:
            waiting: deque[Future[Step]] = deque()
            for number in range(start, stop):
                while len(waiting) < ahead and number + len(waiting) < stop:
                    waiting.append(pool.submit(self.fetch, number + len(waiting)))
                yield waiting.popleft().result()


def in_order(split: Split, batch: int, device: torch.device, rank: int = 0, world: int = 1) -> Iterator[Examples]:
    """Every example once, this process's share of them, for evaluation.

    All processes get the same number of batches, the last one empty where need be: sharded models compute together.
    """
    split = split.to(device) if isinstance(split, Resident) else split
    own = torch.arange(rank, len(split), world)
    for start in range(0, math.ceil(len(split) / world), batch):
        indices = own[start : start + batch]
        found = split.fetch(indices if len(indices) else torch.tensor([0]))
        yield each(found, lambda tensor, count=len(indices): tensor[:count].to(device))
