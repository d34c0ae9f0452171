"""Which example comes when: every one once per epoch, the same again from any step, shared out among processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmlp.data.order import Loader, Order, fold, in_order
from allmlp.data.source import Resident, Subset

CPU = torch.device("cpu")


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_every_example_comes_once_per_epoch(examples: int, batch: int, seed: int) -> None:
    order = Order(examples, batch, seed)
    drawn = torch.cat([order.indices(step) for step in range(order.steps(3))])[: 3 * examples]
    for epoch in drawn.split(examples):
        assert sorted(epoch.tolist()) == list(range(examples))


def test_any_step_can_be_asked_for_at_any_time() -> None:
    forward = [Order(50, 8, 3).indices(step).tolist() for step in range(30)]
    order = Order(50, 8, 3)
    assert [order.indices(step).tolist() for step in reversed(range(30))] == forward[::-1]
    assert Order(50, 8, 4).indices(0).tolist() != forward[0]


def test_repeated_augmentation() -> None:
    order = Order(30, 12, 0, repeats=3)
    assert order.steps(1) == 8
    assert [order.indices(0).tolist().count(index) for index in order.indices(0).unique()] == [3] * 4


def resident(examples: int = 50) -> Resident:
    labels = torch.arange(examples)
    return Resident(labels.view(-1, 1, 1, 1).to(torch.uint8).expand(-1, 1, 2, 2).clone(), labels)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_processes_share_one_batch(world: int) -> None:
    order = Order(50, 15, 1)
    whole = Loader(resident(), order, CPU).fetch(4).batch.labels
    parts = [Loader(resident(), order, CPU, rank, world).fetch(4).batch.labels for rank in range(world)]
    assert sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())


class Slow:
    """A split that is not in memory, and says what it was asked for."""

    def __init__(self) -> None:
        self.split, self.draws = resident(), []

    def __len__(self) -> int:
        return 50

    def fetch(self, indices: torch.Tensor, draws: torch.Tensor | None = None):
        self.draws.append((indices.tolist(), None if draws is None else draws.tolist()))
        return self.split.fetch(indices)


def test_fetching_ahead_keeps_the_order() -> None:
    order = Order(50, 8, 2)
    labels = [step.batch.labels.tolist() for step in Loader(Slow(), order, CPU).steps(3, 20)]
    assert labels == [order.indices(step).tolist() for step in range(3, 20)]


def test_draws_belong_to_the_example_not_to_the_process() -> None:
    order = Order(50, 12, 2)
    alone, first, second = Slow(), Slow(), Slow()
    Loader(alone, order, CPU).fetch(1)
    Loader(first, order, CPU, 0, 2).fetch(1)
    Loader(second, order, CPU, 1, 2).fetch(1)

    def pairs(*splits: Slow) -> dict[int, list[float]]:
        return {i: draw for s in splits for indices, draws in s.draws for i, draw in zip(indices, draws)}

    assert pairs(alone) == pairs(first, second)


def test_evaluation_sees_every_example_once() -> None:
    for world in (1, 3):
        seen = [batch.labels for rank in range(world) for batch in in_order(resident(), 7, CPU, rank, world)]
        assert sorted(torch.cat(seen).tolist()) == list(range(50))
    subset = Subset(resident(), torch.tensor([3, 9, 27]))
    assert torch.cat([batch.labels for batch in in_order(subset, 2, CPU)]).tolist() == [3, 9, 27]


def test_seeds_are_folded_apart() -> None:
    assert len({fold(a, b, c) for a in range(10) for b in range(10) for c in range(10)}) == 1000
    assert all(0 <= fold(a) < 2**63 for a in (0, -1, 2**64))
