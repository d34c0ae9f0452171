"""Parts of a dataset: a fraction of the training split."""

from __future__ import annotations

import pytest
import torch

from allmlp.data.corpus import TokenBatch
from allmlp.data.dataset import ImageDataset, InMemory, Subset, labels_of

LABELS = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)[torch.randperm(100, generator=torch.Generator().manual_seed(5))]


def dataset(wrapped: bool = False) -> ImageDataset:
    """100 images, whose value is their index, in classes of 60, 30 and 10."""
    split = InMemory(torch.arange(100, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2), LABELS)
    train = Subset(split, torch.arange(100)) if wrapped else split
    return ImageDataset(train, split, ("a", "b", "c"), (0.5,), (0.5,))


def kept(data: ImageDataset) -> list[int]:
    return data.train.fetch(torch.arange(len(data.train))).images[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("wrapped", [False, True], ids=["in memory", "subset"])
def test_a_fraction_has_all_classes_alike(wrapped: bool) -> None:
    for fraction, counts in ((0.1, [6, 3, 1]), (0.5, [30, 15, 5]), (0.01, [1, 1, 1]), (1.0, [60, 30, 10])):
        part = dataset(wrapped).take_fraction(fraction)
        assert labels_of(part.train).bincount().tolist() == counts and len(part.test) == 100
        assert all(LABELS[index] == label for index, label in zip(kept(part), labels_of(part.train).tolist()))


def test_smaller_fractions_are_part_of_larger_ones() -> None:
    small, large = (kept(dataset().take_fraction(fraction)) for fraction in (0.1, 0.3))
    assert set(small) < set(large) and small == kept(dataset().take_fraction(0.1)) and small != list(range(10))


def test_held_out_examples_do_not_come_back() -> None:
    split = dataset().split_validation(20)
    part = split.take_fraction(0.5)
    held_out = split.test.fetch(torch.arange(20)).images[:, 0, 0, 0].tolist()
    assert not set(kept(part)) & set(held_out) and 38 <= len(part.train) <= 42


def test_examples_without_labels() -> None:
    split = InMemory(torch.arange(50).view(50, 1), batch_type=TokenBatch)
    part = ImageDataset(split, split, (), (), ()).take_fraction(0.2)
    assert len(part.train) == 10
