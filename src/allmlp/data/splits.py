"""Training, validation and test splits for data without any: seeded, stratified by class, in whole groups.

Images of the same thing, or texts that share a sentence, form a group and stay in one split.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from allmlp.data.dataset import Split, labels_of, subset
from allmlp.errors import UserError, plural

SHOWN = 3
"""Examples named in a note."""


class SplitIndices(NamedTuple):
    """Positions of the examples of each split, in order."""

    train: list[int]
    validation: list[int]
    test: list[int]

    def note(self, seed: int) -> str:
        counts = ", ".join(f"{len(indices):,} {name}" for name, indices in self._asdict().items() if indices)
        return f"split with seed {seed}: {counts}"


def group_by_keys(keys: Iterable[Iterable[Hashable]]) -> list[int]:
    """The group of each example. Examples that share a key, directly or through others, are in the same group."""
    parents: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        while parents.setdefault(key, key) != key:
            parents[key] = key = parents[parents[key]]
        return key

    firsts = []
    for first, *others in keys:
        firsts.append(first)
        for other in others:
            parents[root(first)] = root(other)
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(root(first), len(numbers)) for first in firsts]


class Fractions(Protocol):
    """What a spec says about splits that its data may not have."""

    @property
    def test_fraction(self) -> float: ...
    @property
    def val_fraction(self) -> float | None: ...


def missing_fractions(spec: Fractions, given: Collection[str]) -> tuple[float, float | None] | None:
    """The fractions to hold out for validation and testing, 0 and None if these splits are `given`; None if there is
    nothing to hold out.
    """
    test_fraction = None if "test" in given else spec.test_fraction
    val_fraction = (test_fraction or 0.0) if spec.val_fraction is None else spec.val_fraction
    val_fraction = 0.0 if "validation" in given else val_fraction
    return (val_fraction, test_fraction) if val_fraction or test_fraction is not None else None


def split_by_group(
    labels: Sequence[Hashable],
    groups: Sequence[int],
    names: Sequence[str],
    val_fraction: float,
    test_fraction: float | None,
    seed: int,
) -> SplitIndices:
    """Hold out about these fractions of every class, in whole groups; every class keeps a group for training.

    The test split has at least one group; without a `test_fraction` there is none.

    Groups are held out in the order of a hash of the seed and their first name, so that few examples change split when
    others are added. Very small classes contribute no example or one, so that the totals are right.
    """
    if val_fraction + (test_fraction or 0.0) >= 1:
        if test_fraction is None:
            raise UserError(f"val_fraction={val_fraction:g} leaves nothing to train on")
        raise UserError(f"val_fraction={val_fraction:g} and test_fraction={test_fraction:g} leave nothing to train on")
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    keys = {group: hash_name(seed, min(names[index] for index in inside)) for group, inside in members.items()}
    counts = Counter(labels)
    left = Counter(label for inside in members.values() for label in {labels[index] for index in inside})
    """Groups of each class that may still be needed for training."""
    room = {"test": shares(counts, test_fraction, 0.5)} if test_fraction is not None else {}
    room |= {"validation": shares(counts, val_fraction, 0.0)} if val_fraction else {}
    splits = {"train": list[int](), "validation": list[int](), "test": list[int]()}
    for group in sorted(members, key=keys.__getitem__):
        inside = members[group]
        size = Counter(labels[index] for index in inside)
        chosen = "train"
        if all(left[label] > 1 for label in size):
            needed = {name: sum(max(min(size[c], free[c]), 0) for c in size) for name, free in room.items()}
            # A group larger than the remaining number is held out if at least half of it is needed.
            chosen = next((name for name in needed if 2 * needed[name] >= len(inside)), "train")
        splits[chosen] += inside
        if chosen != "train":
            left.subtract(size.keys())
            room[chosen].subtract(size)
    for name in room:
        if not splits[name]:
            raise UserError(
                f"{len(labels)} examples in {len(members)} groups and {len(counts)} classes are too few for a {name} "
                f"split: add examples, or set data.{name.removesuffix('idation')}"
            )
    return SplitIndices(*(sorted(splits[name]) for name in ("train", "validation", "test")))


def divide(split: Split, val_fraction: float, test_fraction: float, seed: int) -> tuple[Split, Split, Split]:
    """Training, validation and test part of a labeled split."""
    labels = labels_of(split).tolist()
    numbers = range(len(labels))
    indices_of = split_by_group(labels, numbers, [*map(str, numbers)], val_fraction, test_fraction, seed)
    train, validation, test = (subset(split, torch.tensor(indices)) for indices in indices_of)
    return train, validation, test


def shares(counts: Counter[Hashable], fraction: float, start: float) -> Counter[Hashable]:
    """Examples per class for this fraction, rounded so that errors of small classes cancel; at least one in all."""
    quotas: Counter[Hashable] = Counter()
    due = start
    for label, count in counts.items():
        due += fraction * count
        quotas[label] = int(due + 1e-6)  # 0.15 + 0.15 + ... may be slightly below a whole number
        due -= quotas[label]
    if not quotas.total():
        quotas[counts.most_common(1)[0][0]] = 1
    return quotas


def hash_name(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed} {name}".encode("utf8", "surrogatepass"), digest_size=8).digest()


def single_example_note(labels: Sequence[str]) -> list[str]:
    """A note about classes with a single example, which is always in the training split."""
    single = [label for label, count in Counter(labels).items() if count == 1]
    return [f"{plural(len(single), 'class has', 'classes have')} one example: {listing(single)}"] if single else []


def untested_note(labels: Sequence[str], tested: Collection[str]) -> list[str]:
    """A note about classes of several examples, none of which is in the test split."""
    missing = [label for label, count in Counter(labels).items() if count > 1 and label not in tested]
    has = plural(len(missing), "class has", "classes have")
    return [f"{has} too few examples for the test split: {listing(missing)}"] if missing else []


def similar_class_note(classes: Iterable[str]) -> list[str]:
    """A note about classes whose names differ only in case and white space, perhaps by mistake."""
    same: dict[str, list[str]] = {}
    for name in classes:
        same.setdefault("".join(name.casefold().split()), []).append(name)
    alike = [" and ".join(map(repr, names)) for names in same.values() if len(names) > 1]
    return [f"classes with almost the same name: {listing(alike)}"] if alike else []


def overlap_notes(train: Iterable[Hashable], others: Mapping[str, Sequence[Hashable]], noun: str) -> list[str]:
    """A note for each split that shares examples with the training split."""
    train_keys = set(train)
    shared = {name: sum(key in train_keys for key in keys) for name, keys in others.items()}
    return [
        f"{count:,} of {len(others[name]):,} {name} {noun} are also training {noun}"
        for name, count in shared.items()
        if count
    ]


def listing(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
