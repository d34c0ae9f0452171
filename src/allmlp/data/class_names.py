"""Class names of data and of models, matched by name, by ImageNet's identifiers, or by a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from allmlp.data.tables import read_table
from allmlp.errors import UserError, did_you_mean

MAX_NAMES = 5
"""Class names listed in an error."""


class ClassMatch(NamedTuple):
    names: tuple[str, ...]
    """Names of the distinguished classes: those of the model, some of them merged."""
    columns: list[int]
    """Class of the model -> index in `names`."""
    labels: list[int]
    """Class of the data -> index in `names`; -1 is left out."""


@cache
def imagenet_classes() -> dict[str, tuple[str, ...]]:
    """WordNet identifier -> names of the 1,000 classes of ImageNet, in the order of a classifier's outputs."""
    text = (files("allmlp.data") / "imagenet_classes.tsv").read_text(encoding="utf8")
    rows = (line.split("\t") for line in text.splitlines())
    return {wnid: tuple(names.split(", ")) for wnid, names in rows}


def canonical(name: str) -> str:
    """Normalize a name: without case, spaces, underscores and hyphens; the sign of a number is kept."""
    return re.sub(r"(?!^-\d)[\s_-]+", "", name.strip()).casefold()


def aliases(name: str) -> set[str]:
    """A name, its comma-separated parts and, for an ImageNet identifier, the names of the class."""
    parts = [name, *name.split(","), *imagenet_classes().get(name.strip(), ())]
    return {canonical(part) for part in parts}


def are_same_classes(names: Sequence[str], others: Sequence[str]) -> bool:
    """Whether both name the same classes in the same order. Numbers, of classes without names, stand for any name."""
    numbers = [*map(str, range(len(names)))]
    if len(names) != len(others) or numbers in ([*names], [*others]):
        return len(names) == len(others)
    return all(name == other or aliases(name) & aliases(other) for name, other in zip(names, others))


def model_class_names(names: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """`names`, or ImageNet's identifiers for 1,000 classes without names, or else numbers."""
    if names:
        return tuple(names)
    return tuple(imagenet_classes()) if num_classes == 1000 else tuple(map(str, range(num_classes)))


def imagenet_numbers(data: Sequence[str], model: Sequence[str]) -> dict[str, list[str]]:
    """A table for `match_classes` if data's classes are numbers and the model's are ImageNet's, such as some of the
    folders of ImageNet-V2; otherwise empty.
    """
    if len(model) != 1000 or not set(data) <= set(map(str, range(1000))):
        return {}
    same = all(
        canonical(wnid) in aliases(name) or canonical(names[0]) in aliases(name)
        for name, (wnid, names) in zip(model, imagenet_classes().items())
    )
    return {name: [name] for name in data} if same else {}


class ModelClasses:
    """Finds the classes of a model: by their exact name, else without case and hyphens, else by another name.

    Names that differ by case or hyphens alone, such as a and A, are different classes if the model has both.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.exact = {name: {number} for number, name in reversed(list(enumerate(names)))}
        self.alike: dict[str, set[int]] = {}
        self.by_alias: dict[str, set[int]] = {}
        for name, numbers in self.exact.items():
            self.alike.setdefault(canonical(name), set()).update(numbers)
        for number, name in enumerate(names):
            for alias in aliases(name):
                self.by_alias.setdefault(alias, set()).add(number)

    def find(self, name: str) -> set[int]:
        """The classes that may be meant; empty if there is none."""
        numbers = self.exact.get(name) or self.alike.get(canonical(name))
        return numbers or set().union(*(self.by_alias.get(alias, ()) for alias in aliases(name)))


def match_classes(
    data: Sequence[str], model: Sequence[str], table: Mapping[str, Iterable[str]] | None = None
) -> ClassMatch:
    """Match the classes of data with those of a model; `table` takes precedence over names.

    A class of the data may correspond to several of the model; its probability is the sum of theirs. Numbers are output
    indices of the model, in `table` and if the data's classes are numbers from 0, as many as the model's.
    """
    members = corresponding_classes(data, model, table or {})
    owner = dict[int, frozenset[int]]()
    for name, group in zip(data, members, strict=True):
        for number in group:
            if owner.setdefault(number, group) != group:
                raise UserError(f"class {model[number]!r} of the model stands for {name!r} and for another class")
    merged = {min(group): name for name, group in zip(data, members, strict=True) if len(group) > 1}
    first = [min(owner.get(number, {number})) for number in range(len(model))]
    order = {number: column for column, number in enumerate(sorted(set(first)))}
    names = tuple(merged.get(number) or imagenet_classes().get(model[number], (model[number],))[0] for number in order)
    labels = [order[min(group)] if group else -1 for group in members]
    return ClassMatch(names, [order[number] for number in first], labels)


def corresponding_classes(
    data: Sequence[str], model: Sequence[str], table: Mapping[str, Iterable[str]]
) -> list[frozenset[int]]:
    """For each class of the data the model's classes that it stands for, none if the table leaves it out."""
    classes = ModelClasses(model)
    by_number = set(data) == set(map(str, range(len(model))))
    rows = {name: list(targets) for name, targets in table.items()}
    by_alias = {canonical(name): targets for name, targets in rows.items() if name not in data}
    members, missing = list[frozenset[int]](), list[str]()
    for name in data:
        numbers = set[int]()
        row = rows.get(name, by_alias.get(canonical(name)))
        for target in [name] if row is None else row:
            same = classes.find(target) if target else set[int]()
            if len(same) > 1:
                listed = ", ".join(model[number] for number in sorted(same)[:MAX_NAMES])
                raise UserError(f"class {target!r} may be any of {listed} of the model: choose in a table (--classes)")
            if not same and target.isdecimal() and int(target) < len(model) and (by_number or row is not None):
                same = {int(target)}
            if target and not same:
                missing.append(target)
            numbers |= same
        members.append(frozenset(numbers))
    if missing:
        listed = ", ".join(map(repr, missing[:MAX_NAMES])) + (", ..." if len(missing) > MAX_NAMES else "")
        raise UserError(
            f"the model has no class {listed}{did_you_mean(missing[0], model)}: leave it out, or map it to one of the "
            "model's classes in a table (--classes)"
        )
    return members


def read_class_table(file: str, data: Sequence[str] = ()) -> dict[str, list[str]]:
    """Read a table with classes of the data in the first column and of the model, by name or number, in the second.

    A class of the data may have several rows; with an empty second cell, it is left out. A first line with one of the
    classes of `data`, which would be lost as the names of the columns, is an error.
    """
    table, targets = read_table(file), dict[str, list[str]]()
    if len(table.columns) < 2:
        raise UserError(f"{file} has one column: it needs the class of the data and the class of the model")
    for row in table:
        name, target, *_ = row.values()
        targets.setdefault(name.strip(), []).append(target.strip())
    first = table.columns[0]
    if table.header and first in data and first not in targets:
        raise UserError(f"{file} begins with the class {first!r}: name the columns in a line before it, data,model")
    return targets
