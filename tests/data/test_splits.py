"""Splits: of every class alike, by whole groups, seeded; small and odd data."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allmlp.data.splits import (
    SplitIndices,
    group_by_keys,
    overlap_notes,
    single_example_note,
    split_by_group,
    untested_note,
)
from allmlp.errors import UserError


def split(
    labels: list[int], groups: list[int] | None = None, val: float = 0.15, test: float | None = 0.15, seed: int = 0
) -> SplitIndices:
    groups = groups if groups is not None else list(range(len(labels)))
    return split_by_group(labels, groups, [f"name {group}" for group in groups], val, test, seed)


def per_class(labels: list[int], indices: list[int]) -> Counter[int]:
    return Counter(labels[index] for index in indices)


def test_shares_of_every_class() -> None:
    labels = [0] * 100 + [1] * 40 + [2] * 20
    found = split(labels)
    assert per_class(labels, found.test) == {0: 15, 1: 6, 2: 3} == per_class(labels, found.validation)
    assert sorted(found.train + found.validation + found.test) == list(range(160))


def test_a_thousand_classes_with_three_each() -> None:
    """Totals are right, no class is without a training example, and hardly one is in both of the other splits."""
    labels = [number % 1000 for number in range(3000)]
    found = split(labels)
    assert len(found.validation) == len(found.test) == 450
    counts = per_class(labels, found.train)
    assert len(counts) == 1000 and min(counts.values()) >= 1 and Counter(counts.values())[1] <= 100


def test_a_class_with_one_example_is_for_training() -> None:
    labels = [0] * 20 + [1]
    for seed in range(20):
        assert 20 in split(labels, seed=seed).train
    assert untested_note(["a", "a", "b", "c", "c"], ["a"]) == ["1 class has too few examples for the test split: c"]
    assert not untested_note(["a", "a", "b"], ["a"]), "the other note says so"
    assert single_example_note(["a", "a", "b", "c", "d", "e"]) == ["4 classes have one example: b, c, d and 1 more"]


def test_hardly_any_examples() -> None:
    found = split([0, 0, 1, 1])
    assert [len(part) for part in found] == [2, 1, 1] and per_class([0, 0, 1, 1], found.train) == {0: 1, 1: 1}
    for labels in ([0, 1], [0, 0, 1]):
        with pytest.raises(
            UserError, match=r"too few for a (test|validation) split: add examples, or set data.(test|val)"
        ):
            split(labels)


def test_some_of_the_splits() -> None:
    labels = [0, 1] * 20
    assert [len(part) for part in split(labels, val=0.0)] == [34, 0, 6]
    assert [len(part) for part in split(labels, test=None)] == [34, 6, 0]
    assert [len(part) for part in split(labels, val=0.0, test=0.0)] == [39, 0, 1]
    with pytest.raises(UserError, match=r"val_fraction=1 leaves nothing to train on"):
        split(labels, val=1.0, test=None)
    with pytest.raises(UserError, match=r"val_fraction=0.5 and test_fraction=0.5 leave nothing"):
        split(labels, val=0.5, test=0.5)


def test_large_groups_are_held_out_whole() -> None:
    """Five videos of 20 frames: a fraction of 15 % is rounded to one of them."""
    groups = [number // 20 for number in range(100)]
    found = split([0] * 100, groups)
    assert [len(part) for part in found] == [60, 20, 20]


def test_few_change_their_split_when_others_are_added() -> None:
    labels = [number % 2 for number in range(400)]
    before, after = split(labels[:360]), split(labels)
    assert len(set(before.test) - set(after.test)) <= 5 and set(split(labels, seed=1).test) != set(after.test)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_groups_are_never_divided(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 60))
    labels = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    groups = data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    try:
        found = split(labels, groups, 0.2, 0.2, data.draw(st.integers(0, 3)))
    except UserError as reason:
        assert "too few" in str(reason)
        return
    parts = [{groups[index] for index in part} for part in found]
    assert sum(map(len, parts)) == len(set(groups)) and sorted(itertools.chain(*found)) == list(range(count))
    assert {labels[index] for index in found.train} == set(labels)


def test_groups_by_common_keys() -> None:
    keys: list[list[Hashable]] = [["a"], ["b", "c"], ["d"], ["c", "a"], ["e", "d"]]
    assert group_by_keys(keys) == [0, 0, 1, 0, 1]


def test_examples_of_the_training_split_in_others() -> None:
    notes = overlap_notes(["a", "b"], {"validation": ["c"], "test": ["a", "c", "a"]}, "texts")
    assert notes == ["2 of 3 test texts are also training texts"]
