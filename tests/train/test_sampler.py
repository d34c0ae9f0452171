"""Sampling: every example once per epoch, the same from any step on, split among processes; random streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmlp.data.dataset import InMemory, Subset
from allmlp.data.sampler import GrowingBatch, Loader, Sampler, Stream, eval_batches, mix_seed
from allmlp.errors import UserError
from allmlp.log import METRICS, read_metrics
from allmlp.run import Budget
from allmlp.train_step import TrainStep
from allmlp.training import train
from train.runs import small
from train.test_train import losses, same_weights, train_interrupted

CPU = torch.device("cpu")


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_every_example_comes_once_per_epoch(examples: int, batch: int, seed: int) -> None:
    sampler = Sampler(examples, batch, seed)
    drawn = torch.cat([sampler.indices(step) for step in range(sampler.steps(3))])[: 3 * examples]
    for epoch in drawn.split(examples):
        assert sorted(epoch.tolist()) == list(range(examples))


def test_any_step_can_be_computed_at_any_time() -> None:
    forward = [Sampler(50, 8, 3).indices(step).tolist() for step in range(30)]
    sampler = Sampler(50, 8, 3)
    assert [sampler.indices(step).tolist() for step in reversed(range(30))] == forward[::-1]
    assert Sampler(50, 8, 4).indices(0).tolist() != forward[0]


def test_every_epoch_has_another_order() -> None:
    epochs = [tuple(Sampler(50, 50, 3).indices(step).tolist()) for step in range(10)]
    assert len(set(epochs)) == 10


def test_repeated_augmentation() -> None:
    sampler = Sampler(30, 12, 0, repeats=3)
    assert sampler.steps(1) == 8
    assert [sampler.indices(0).tolist().count(index) for index in sampler.indices(0).unique()] == [3] * 4


@pytest.mark.parametrize("batch", [2, 8, 16])
def test_repeated_augmentation_fills_the_batch(batch: int) -> None:
    """The batch of 2048 of ResMLP's recipe is no multiple of its three copies either."""
    sampler = Sampler(30, batch, 0, repeats=3)
    batches = [sampler.indices(step) for step in range(sampler.steps(2))]
    assert {len(one) for one in batches} == {batch}
    for one in batches:
        assert one.tolist() == one[::3].repeat_interleave(3)[:batch].tolist()
    seen = torch.cat([one[::3] for one in batches])[: 2 * 30]
    for epoch in seen.split(30):
        assert sorted(epoch.tolist()) == list(range(30))
    loaders = [Loader(in_memory(30), sampler, CPU, rank, 2) for rank in range(2)]
    assert [len(loader.fetch(0).examples.labels) for loader in loaders] == [batch // 2] * 2


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 50), st.integers(1, 5), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_a_growing_batch_has_every_example_once_per_epoch(
    examples: int, batch: int, start: int, every: int, factor: int
) -> None:
    sampler = Sampler(examples, batch, 0, growth=GrowingBatch(start, every, factor))
    batches = [sampler.indices(step) for step in range(sampler.steps(3))]
    assert [len(one) for one in batches] == [
        min(start * factor ** (step // every), batch) for step in range(len(batches))
    ]
    drawn = torch.cat(batches)
    assert len(torch.cat(batches[:-1])) < 3 * examples if batches[1:] else True
    for epoch in drawn[: 3 * examples].split(examples):
        assert sorted(epoch.tolist()) == list(range(examples))
    assert sampler.epoch(len(batches)) == pytest.approx(len(drawn) / examples)
    assert sampler.indices(len(batches) // 2).tolist() == batches[len(batches) // 2].tolist()


def in_memory(examples: int = 50) -> InMemory:
    labels = torch.arange(examples)
    return InMemory(labels.view(-1, 1, 1, 1).to(torch.uint8).expand(-1, 1, 2, 2).clone(), labels)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_processes_split_one_batch(world: int) -> None:
    sampler = Sampler(50, 15, 1)
    whole = Loader(in_memory(), sampler, CPU).fetch(4).examples.labels
    parts = [Loader(in_memory(), sampler, CPU, rank, world).fetch(4).examples.labels for rank in range(world)]
    assert sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())


class Slow:
    """A split that is not in memory, and records what it is asked for."""

    def __init__(self) -> None:
        self.split, self.uniforms = in_memory(), []

    def __len__(self) -> int:
        return 50

    def fetch(self, indices: torch.Tensor, uniforms: torch.Tensor | None = None):
        self.uniforms.append((indices.tolist(), None if uniforms is None else uniforms.tolist()))
        return self.split.fetch(indices)


def test_prefetching_keeps_the_order() -> None:
    sampler = Sampler(50, 8, 2)
    labels = [batch.examples.labels.tolist() for batch in Loader(Slow(), sampler, CPU).steps(3, 20)]
    assert labels == [sampler.indices(step).tolist() for step in range(3, 20)]


def test_uniforms_belong_to_the_example_not_to_the_process() -> None:
    sampler = Sampler(50, 12, 2)
    alone, first, second = Slow(), Slow(), Slow()
    Loader(alone, sampler, CPU).fetch(1)
    Loader(first, sampler, CPU, 0, 2).fetch(1)
    Loader(second, sampler, CPU, 1, 2).fetch(1)

    def pairs(*splits: Slow) -> dict[int, list[float]]:
        return {i: draw for s in splits for indices, uniforms in s.uniforms for i, draw in zip(indices, uniforms)}

    assert pairs(alone) == pairs(first, second)


def test_evaluation_sees_every_example_once() -> None:
    for world in (1, 3):
        seen = [batch.labels for rank in range(world) for batch in eval_batches(in_memory(), 7, CPU, rank, world)]
        assert sorted(torch.cat(seen).tolist()) == list(range(50))
    subset = Subset(in_memory(), torch.tensor([3, 9, 27]))
    assert torch.cat([batch.labels for batch in eval_batches(subset, 2, CPU)]).tolist() == [3, 9, 27]


def test_micro_batches_are_the_batch_in_parts() -> None:
    batch = Loader(in_memory(), Sampler(50, 10, 0), CPU).fetch(3)
    parts = batch.split(3)
    assert [len(part.indices) for part in parts] == [4, 4, 2]
    assert torch.cat([part.examples.labels for part in parts]).tolist() == batch.indices.tolist()
    assert {(part.step, part.epoch) for part in parts} == {(3, batch.epoch)}


def test_seeds_differ() -> None:
    """For different numbers, for the same numbers in different streams, and for another count of numbers."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    numbers = [(), (-1,), (2**63,), (1, 2, 0), *((a,) for a in range(10)), *pairs]
    seeds = [mix_seed(stream, *some) for stream in Stream for some in numbers]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(Stream.DECODING, 2**64) >= 0


def test_the_order_of_an_epoch_repeats_no_other_stream() -> None:
    orders = {mix_seed(Stream.EPOCH_ORDER, 0, epoch) for epoch in range(1000)}
    others = set(Stream) - {Stream.EPOCH_ORDER}
    assert not orders & {mix_seed(stream, 0, *rest) for stream in others for rest in ((), (3,), (3, 0))}


def test_threads_share_the_orders_of_epochs() -> None:
    """The loader fetches several steps at a time: here another begins a later epoch whenever the orders are read."""

    class Interrupted(Sampler):
        later, busy = 0, False

        @property
        def permutations(self) -> dict[int, torch.Tensor]:
            if not self.busy:
                self.busy, self.later = True, self.later + 3
                self.permutation(self.later)
                self.busy = False
            return self.known

        @permutations.setter
        def permutations(self, value: dict[int, torch.Tensor]) -> None:
            self.known = value

    sampler = Interrupted(num_examples=9, batch_size=4, seed=0)
    assert sampler.permutation(0).equal(Sampler(num_examples=9, batch_size=4, seed=0).permutation(0))
    assert sampler.later


def test_a_run_with_a_growing_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are logged, micro-batches never exceed those of the largest batch, and resuming is exact."""
    sizes: list[int] = []
    original = TrainStep.backward

    def backward(self: TrainStep, parts: Any) -> Any:
        sizes.append(max(len(part[0]) for part in parts))
        return original(self, parts)

    monkeypatch.setattr(TrainStep, "backward", backward)
    run = small(batch_growth=GrowingBatch(6, 3), grad_accum_steps=2, save_every=5)
    train(run, tmp_path / "whole", "cpu")
    records = [record for record in read_metrics(tmp_path / "whole" / METRICS) if record["kind"] == "train"]
    assert [record["batch_size"] for record in records] == [6] * 3 + [12] * 3 + [24] * 6
    assert sizes == [6] * 3 + [12] * 9
    assert records[-1]["epoch"] == pytest.approx((3 * 6 + 3 * 12 + 6 * 24) / 64)
    train_interrupted(run, tmp_path / "parts", monkeypatch, step=7)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


def test_a_batch_that_cannot_grow_is_refused() -> None:
    with pytest.raises(UserError, match=r"batch_growth.start=32 does not grow to batch_size=24: lower start"):
        small(batch_growth=GrowingBatch())


def test_a_growing_batch_in_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small(batch_growth=GrowingBatch(8, 4), budget=Budget(epochs=2)), tmp_path, "cpu")
    assert "10 steps (2.25 epochs), batches of 8 to 24" in capsys.readouterr().err
