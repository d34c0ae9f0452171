"""The four verbs of a task: build, loss, after_step, evaluate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from allmlp.data.order import Step
from allmlp.data.source import Batch, Dataset
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Spec


class Losses(NamedTuple):
    """What a step reports: the number to minimise, and others worth seeing, all scalars on the device."""

    total: Tensor
    shown: dict[str, Tensor]


class Moment(NamedTuple):
    """When in the run a step happens, and its source of random numbers."""

    progress: float
    generator: torch.Generator
    rank: int = 0
    world: int = 1

    def uniform(self, examples: int, numbers: int) -> Tensor:
        """Random numbers of this process's examples, b n: those that a single process would have drawn for them."""
        everyone = torch.rand(examples * self.world, numbers, generator=self.generator, device=self.generator.device)
        return everyone[self.rank :: self.world]


class Task(Spec, abstract=True):
    def fit(self, model: ModelSpec, dataset: Dataset) -> ModelSpec:
        """The model as this task and these data need it: its number of classes, for instance."""
        return model

    def build(self, model: Model, dataset: Dataset) -> TaskModule:
        """The module that holds `model` and everything else the loss needs."""
        raise NotImplementedError


class TaskModule(nn.Module):
    """Calling it gives the loss, so that a wrapper (DDP, compile) around it sees the whole step."""

    model: Model
    """What is trained, saved and used afterwards."""

    def forward(self, step: Step, moment: Moment) -> Losses:
        raise NotImplementedError

    def quicken(self) -> None:
        """Compile what is worth compiling."""
        self.model.compile()

    def after_step(self, progress: float) -> None:
        """After the optimiser: averages, centres."""

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> (sum, count) over this process's share of the test examples, judging `model`."""
        raise NotImplementedError


class Pixels(nn.Module):
    """uint8 pictures to what a model reads: divided by 255, centred and scaled by the training set's statistics."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(dataset.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(dataset.std).view(-1, 1, 1), persistent=False)

    def scale(self, images: Tensor) -> Tensor:
        return images.float().div(255) if images.dtype == torch.uint8 else images

    def forward(self, images: Tensor) -> Tensor:
        return (self.scale(images) - self.mean) / self.std
