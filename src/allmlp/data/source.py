"""What a dataset is: a spec that opens into splits, from which examples are fetched by index.

Which index comes at which step is decided elsewhere and by arithmetic alone (`data.order`), so a split
keeps no position: a run that resumes asks for the same examples again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from allmlp.errors import UserError
from allmlp.spec import Spec


class Batch(NamedTuple):
    images: Tensor
    """uint8, b c h w."""
    labels: Tensor
    """int64, b."""


class Split(Protocol):
    """One part of a dataset."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor, draws: Tensor | None = None) -> Batch:
        """The examples at `indices` (int64, b), on the split's device.

        `draws` are uniform random numbers, b 4, for splits that crop while they decode; without them the
        whole picture is returned as it is evaluated.
        """
        ...


class Resident:
    """A split that is one tensor in memory: small pictures, on the device of the model."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Resident:
        return Resident(self.images.to(device), self.labels.to(device))

    def fetch(self, indices: Tensor, draws: Tensor | None = None) -> Batch:
        indices = indices.to(self.labels.device)
        return Batch(self.images[indices], self.labels[indices])


class Subset:
    """Some examples of another split."""

    def __init__(self, split: Split, indices: Tensor) -> None:
        self.split, self.indices = split, indices

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor, draws: Tensor | None = None) -> Batch:
        return self.split.fetch(self.indices[indices.to(self.indices.device)], draws)


class Dataset(NamedTuple):
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of the pixels divided by 255, per colour channel."""

    def hold_out(self, examples: int) -> Dataset:
        """Judge on `examples` of the training split instead of the test split: for every choice one makes."""
        if not examples:
            return self
        if not 0 < examples < len(self.train):
            raise UserError(f"cannot hold {examples} of {len(self.train)} training examples out")
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))
        kept, held = order[examples:].sort().values, order[:examples].sort().values
        return self._replace(train=subset(self.train, kept), test=subset(self.train, held))


def subset(split: Split, indices: Tensor) -> Split:
    if isinstance(split, Resident):
        return Resident(*split.fetch(indices))
    return Subset(split, indices)


class Data(Spec, abstract=True):
    """Where examples come from."""

    def open(self) -> Dataset:
        raise NotImplementedError
