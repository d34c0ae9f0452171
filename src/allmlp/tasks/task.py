"""The verbs of a task: build; prepare, learn and after_step, once a step; evaluate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from allmlp.data.order import Step
from allmlp.data.source import Dataset, Examples, Splits
from allmlp.errors import UserError
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
    reads: ClassVar[type[Splits]] = Dataset
    """The kind of data it learns from, which is what `dataset` is below."""

    def accept(self, dataset: Splits) -> None:
        if not isinstance(dataset, self.reads):
            kind, wanted = (cls.__doc__.split(":")[0].lower().rstrip(".") for cls in (type(dataset), self.reads))  # type: ignore[union-attr]
            raise UserError(f"the task {type(self).__name__} learns from {wanted}, not from {kind}")

    def fit(self, model: ModelSpec, dataset: Any) -> ModelSpec:
        """The model as this task and these data need it: its number of classes, for instance."""
        return model

    def build(self, model: Model, dataset: Any) -> TaskModule:
        """The module that holds `model` and everything else the loss needs."""
        raise NotImplementedError

    def judge(self, model: Model, dataset: Any) -> TaskModule:
        """The module that evaluates a finished model, without what only training needs."""
        return self.build(model, dataset)


class TaskModule(nn.Module):
    """Calling it gives the loss, so that a wrapper (DDP, compile) around it sees the whole step."""

    model: Model
    """What is trained, saved and used afterwards."""

    def forward(self, step: Step, moment: Moment) -> Losses:
        return self.learn(*self.prepare(step, moment))

    def prepare(self, step: Step, moment: Moment) -> tuple[Tensor, ...]:
        """The inputs of `learn`: the examples, and the random numbers for them."""
        raise NotImplementedError

    def learn(self, *inputs: Tensor) -> Losses:
        """A pure function of tensors, so that it compiles as one graph from bytes to loss."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Of one example's training step: forward, and twice as much backward; two per multiply-add."""
        return 6 * self.model.describe().macs

    @property
    def unit(self) -> tuple[str, int]:
        """What the speed of training is counted in, and how many of them an example has."""
        return "images", 1

    def quicken(self, graphs: bool) -> None:
        """Compile the step; with `graphs` torch records the parts of it as CUDA graphs."""
        self.learn = torch.compile(self.learn, mode="reduce-overhead" if graphs else None)

    def after_step(self, progress: float) -> None:
        """After the optimiser: averages, centres."""

    def evaluate(self, model: Model, batches: Iterable[Examples]) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> (sum, count) over this process's share of the test examples, judging `model`."""
        raise NotImplementedError

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """What is told of the means over all test examples."""
        return means


class Pixels(nn.Module):
    """uint8 pictures to what a model reads: divided by 255, brought to `size` where that is given and another one,
    centred and scaled by the training set's statistics.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], size: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        images = images.float().div(255) if images.dtype == torch.uint8 else images
        if self.size is not None and images.shape[2:] != self.size:
            images = functional.interpolate(images, self.size, mode="bicubic", antialias=True)
        return (images - self.mean) / self.std
