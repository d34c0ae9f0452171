"""What a dataset is: a spec that opens into splits, from which examples are fetched by index.

Which index comes at which step is decided elsewhere and by arithmetic alone (`data.order`), so a split
keeps no position: a run that resumes asks for the same examples again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from allmlp.data.inputs import FILE, Inputs
from allmlp.errors import UserError
from allmlp.spec import Spec, to_json

Examples = Any
"""A NamedTuple of tensors with the examples along the first axis: `Batch` for pictures, others for text."""


def each(examples: Examples, change: Callable[[Tensor], Tensor]) -> Examples:
    """The same kind of examples, every tensor changed."""
    return type(examples)(*map(change, examples))


class Batch(NamedTuple):
    images: Tensor
    """uint8, b c h w."""
    labels: Tensor
    """int64, b."""


class Split(Protocol):
    """One part of a dataset."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor, draws: Tensor | None = None) -> Examples:
        """The examples at `indices` (int64, b), on the split's device.

        `draws` are uniform random numbers, b 4, for splits that crop while they decode; without them the
        whole picture is returned as it is evaluated.
        """
        ...


class Resident:
    """A split that is in memory as a whole, on the device of the model: small pictures, sentences."""

    def __init__(self, *tensors: Tensor, kind: Callable[..., Examples] = Batch) -> None:
        self.examples = kind(*tensors)

    def __len__(self) -> int:
        return len(self.examples[0])

    def to(self, device: torch.device | str) -> Resident:
        return Resident(*(tensor.to(device) for tensor in self.examples), kind=type(self.examples))

    def fetch(self, indices: Tensor, draws: Tensor | None = None) -> Examples:
        indices = indices.to(self.examples[0].device)
        return each(self.examples, lambda tensor: tensor[indices])


class Subset:
    """Some examples of another split."""

    def __init__(self, split: Split, indices: Tensor) -> None:
        self.split, self.indices = split, indices

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor, draws: Tensor | None = None) -> Batch:
        return self.split.fetch(self.indices[indices.to(self.indices.device)], draws)


@dataclass(frozen=True)
class Splits:
    """What `Data.open` gives: examples to learn from and examples to judge on."""

    train: Split
    test: Split

    def hold_out(self, examples: int) -> Self:
        """Judge on `examples` of the training split instead of the test split: for every choice one makes."""
        if not examples:
            return self
        if not 0 < examples < len(self.train):
            raise UserError(f"cannot hold {examples} of {len(self.train)} training examples out")
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))
        kept, held = order[examples:].sort().values, order[:examples].sort().values
        return replace(self, train=subset(self.train, kept), test=subset(self.train, held))

    def files(self) -> dict[str, str]:
        """Name -> text of the files that must lie beside a model trained on these data, so that it can be used."""
        raise NotImplementedError


@dataclass(frozen=True)
class Dataset(Splits):
    """Labelled pictures."""

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of the pixels divided by 255, per colour channel."""
    crop: float = 1.0
    """The share of a picture's short side that is kept when it is evaluated."""

    def files(self) -> dict[str, str]:
        return {FILE: to_json(Inputs(self.mean, self.std, self.classes, self.crop))}


def subset(split: Split, indices: Tensor) -> Split:
    if isinstance(split, Resident):
        return Resident(*split.fetch(indices), kind=type(split.examples))
    return Subset(split, indices)


class Data(Spec, abstract=True):
    """Where examples come from."""

    def open(self) -> Splits:
        raise NotImplementedError

    def like(self, folder: str) -> Self:
        """These data as the model in `folder` reads them."""
        return self
