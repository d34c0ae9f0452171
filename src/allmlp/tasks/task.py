"""The task interface: `build`; `prepare_batch`, `compute_loss` and `after_step`, called once per step; `evaluate`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from allmlp.data.dataset import Dataset, Examples, ImageDataset
from allmlp.data.sampler import Batch
from allmlp.device import sum_dtype
from allmlp.errors import UserError
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Range, Spec

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Temperatures at which probabilities can be computed in float32."""
Temperature = Annotated[float, Range(MIN_TEMPERATURE, MAX_TEMPERATURE)]


Sums = dict[str, tuple[Tensor, Tensor]]
"""Metrics of an evaluation: name -> (sum, count) over the examples of this process."""


class Losses(NamedTuple):
    """The loss to minimize, and further values to log, all scalars on the device."""

    total: Tensor
    metrics: dict[str, Tensor]


class TokenScores(NamedTuple):
    """Loss and correctness of each token or row, times its weight, and the weight: 0 where nothing is predicted."""

    loss: Tensor
    correct: Tensor
    weight: Tensor

    def losses(self) -> Losses:
        """The mean loss and the accuracy."""
        loss, correct, count = (part.sum() for part in self)
        count = count.clamp(min=1)
        return Losses(loss / count, {"accuracy": correct / count})


class StepContext(NamedTuple):
    """Progress of the run (0 to 1), and the random numbers of the step."""

    progress: float
    generator: torch.Generator
    rank: int = 0
    world_size: int = 1

    def uniform(self, examples: int, numbers: int) -> Tensor:
        """Uniforms for the examples of this process, b n: the same as if one process drew them for all examples."""
        size = (examples * self.world_size, numbers)
        return torch.rand(size, generator=self.generator, device=self.generator.device)[self.rank :: self.world_size]


class Task(Spec, abstract=True):
    dataset_type: ClassVar[type[Dataset]] = ImageDataset
    """The type of `dataset` in the methods below."""
    saves_trained: ClassVar[bool] = True
    """Whether the model that has gradients is the one that is evaluated and saved."""

    @property
    def against_fsdp(self) -> str:
        """Why the task cannot be trained with sharding=fsdp; empty if it can."""
        return ""

    @property
    def against_plan(self) -> str:
        """Why a training step does not cost what the model costs, forward and backward; empty if it does."""
        return ""

    def check_dataset(self, dataset: Dataset) -> None:
        if not isinstance(dataset, self.dataset_type):
            kind, expected = (
                (cls.__doc__ or cls.__name__).split(":")[0].lower().rstrip(".")
                for cls in (type(dataset), self.dataset_type)
            )
            raise UserError(f"the task {type(self).__name__} needs {expected}, not {kind}")

    def configure_model(self, model: ModelSpec, dataset: Any) -> ModelSpec:
        """Adapt the model to task and data, for example its number of classes."""
        return model

    def build(self, model: Model, dataset: Any) -> TaskModule:
        """The module that holds `model` and everything else that the loss needs."""
        raise NotImplementedError

    def build_evaluator(self, model: Model, dataset: Any) -> TaskModule:
        """The module that evaluates a finished model, without the parts needed only for training."""
        return self.build(model, dataset)

    def files(self, dataset: Dataset) -> dict[str, str]:
        """Name -> text of the files that are saved next to a model trained by this task."""
        return dataset.files()

    def floors(self, dataset: Any, split: Any) -> dict[str, float]:
        """Metrics of trivial baselines on `split`, for example of always predicting the most frequent class."""
        return {}


class DistillationTask(Task, abstract=True):
    """A task that adds a teacher's loss to another task, and uses its model and evaluation."""

    @property
    def student_task(self) -> Task:
        """The field that is a task."""
        return next(part for part in self.children() if isinstance(part, Task) and part is not self)

    @property
    def against_plan(self) -> str:
        return "its teacher reads every example too"

    def configure_model(self, model: ModelSpec, dataset: Any) -> ModelSpec:
        return self.student_task.configure_model(model, dataset)

    def build_evaluator(self, model: Model, dataset: Any) -> TaskModule:
        return self.student_task.build_evaluator(model, dataset)

    def files(self, dataset: Dataset) -> dict[str, str]:
        return self.student_task.files(dataset)

    def floors(self, dataset: Any, split: Any) -> dict[str, float]:
        return self.student_task.floors(dataset, split)


class TaskModule(nn.Module):
    """Computes the loss of a batch; DDP and FSDP wrap it as a whole."""

    model: Model
    """The model that is evaluated and saved."""
    unit: tuple[str, int] = ("images", 1)
    """Unit of throughput, and the number of units per example."""
    keeps_outputs: ClassVar[bool] = False
    """Whether `evaluate` calls `keep`, so that metrics can be computed from logits and labels."""
    kept: list[tuple[Tensor, Tensor, Tensor]] | None = None
    """Logits, labels and split numbers of the batches evaluated so far; None if they are not collected."""
    split_names: tuple[str, ...] = ("",)
    """Names of the test sets, if there are several."""
    evaluates_part: bool = False
    """Whether `evaluate` is of a part of a split, to be quick in training; that of `Task.build_evaluator` is of all."""

    def forward(self, *inputs: Tensor) -> Losses:
        return self.compute_loss(*inputs)

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        """The inputs of `compute_loss`: the examples, and random numbers for them."""
        raise NotImplementedError

    def prepare_batches(self, parts: list[Batch], context: StepContext) -> list[tuple[Tensor, ...]]:
        """The inputs of all micro-batches of a step."""
        return [self.prepare_batch(part, context) for part in parts]

    def compute_loss(self, *inputs: Tensor) -> Losses:
        """A pure function of tensors, so that it can be compiled and recorded."""
        raise NotImplementedError

    def loss_weight(self, *inputs: Tensor) -> int | Tensor:
        """Number of terms that the loss of these inputs is averaged over: examples, or tokens (as a tensor)."""
        return len(inputs[0])

    @property
    def networks(self) -> list[nn.Module]:
        """Networks on the meta device that run with the weights of `model`: the same model at other image sizes."""
        return []

    @property
    def flops(self) -> int:
        """Floating-point operations per example and step: two per multiply-add, forward once and backward twice."""
        return 6 * self.model.describe().macs

    def after_step(self, progress: float) -> None:
        """Called after the optimizer step, for example to update a teacher."""

    def evaluate(self, model: Model, batches: Iterable[Examples]) -> Sums:
        """Metrics of `model` over the test examples."""
        raise NotImplementedError

    def keep(self, logits: Tensor, labels: Tensor, part: Tensor | None = None) -> None:
        """Keep the outputs of a batch for metrics; `part` is the number of the test set of each example."""
        if self.kept is not None:
            part = torch.zeros_like(labels) if part is None else part
            self.kept.append((logits.float().cpu(), labels.cpu(), part.cpu()))

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics to report, from the means over all test examples."""
        return means


def sum_scores(scores: Iterable[TokenScores], device: torch.device) -> Sums:
    """The metrics of an evaluation from the scores of its batches."""
    sums = torch.zeros(3, dtype=sum_dtype(device), device=device)
    for batch in scores:
        sums += torch.stack([part.sum() for part in batch])
    loss, correct, count = sums
    return {"loss": (loss, count), "accuracy": (correct, count)}


class Normalize(nn.Module):
    """Turn uint8 images into model inputs: divide by 255, resize to `size` if given, subtract mean, divide by std."""

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
