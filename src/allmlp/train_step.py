"""One training step, as the training loop and the benchmarks run it, and its recording as a CUDA graph.

In float16, gradients below 6e-8 vanish, so the loss is multiplied by a scale before the backward pass, and the
gradients are divided by it afterwards (`torch.amp.GradScaler`). The scale is halved where a gradient overflows, and
doubled after 2,000 steps without overflow. A step that overflows changes neither weights nor optimizer state nor EMA,
but it counts: the schedule and the order of examples are functions of the step number. The logged loss is not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from allmlp.cuda_graph import record
from allmlp.ema import ModelEma
from allmlp.errors import UserError
from allmlp.parallel import World
from allmlp.tasks.task import Losses, TaskModule

T = TypeVar("T")
WARMUP_CALLS = 3
MIN_SCALE = 2.0**-24
"""Gradients that overflow at this scale are not finite at all."""


@dataclass
class TrainStep:
    """Forward, backward, gradient clipping, optimizer step and EMA update on a list of micro-batches.

    >>> step = TrainStep(task, optimizer, world)
    >>> losses = step(task.prepare_batches(batch.split(grad_accum_steps), context))
    """

    task: TaskModule
    optimizer: Optimizer
    world: World
    dtype: torch.dtype = torch.float32
    """Dtype of matrix products under autocast; weights and gradients keep their own dtype."""
    max_grad_norm: float | None = None
    ema: ModelEma | None = None
    skip_nan: bool = False
    """Do not update weights and BatchNorm statistics if the loss is not finite."""
    wrapped: nn.Module | None = None
    """The task inside DDP."""
    scaler: GradScaler = field(init=False)
    """Does nothing unless `dtype` is float16."""

    def __post_init__(self) -> None:
        self.scaler = GradScaler(self.world.device.type, enabled=self.dtype == torch.float16)
        self.loss_scale = self.scaler.get_scale()
        self.statistics: list[tuple[Tensor, Tensor]] = []

    def load_scaler(self, state: dict[str, Any]) -> None:
        """Restore the state of the scaler from a checkpoint."""
        if self.scaler.is_enabled() and state:  # empty if the run had another precision, on another device
            self.scaler.load_state_dict(state)
            self.loss_scale = self.scaler.get_scale()

    def __call__(self, micro_batches: Sequence[tuple[Tensor, ...]]) -> Losses:
        losses = self.backward(micro_batches)
        self.update(losses)
        return losses

    def backward(self, micro_batches: Sequence[tuple[Tensor, ...]]) -> Losses:
        """Accumulate the gradients of the mean loss over the examples, or tokens, of all micro-batches."""
        module = self.wrapped or self.task
        self.statistics = copy_statistics(self.task) if self.skip_nan else []
        parts: list[Losses] = []
        for number, (inputs, share) in enumerate(zip(micro_batches, self.shares(micro_batches), strict=True), 1):
            with self.world.sync(module, number == len(micro_batches)), autocast(self.world.device, self.dtype):
                losses: Losses = module(*inputs)
            self.scaler.scale(losses.total * share).backward()
            # Products are new tensors: a compiled CUDA graph overwrites its outputs at the next call.
            parts.append(tree_map(lambda value, share=share: value.detach() * share, losses))
        return tree_map(lambda *values: torch.stack(values).sum(0), *parts)

    def shares(self, micro_batches: Sequence[tuple[Tensor, ...]]) -> Sequence[float | Tensor]:
        """Weight of each micro-batch, so that the means of parts of different sizes add up to the mean of the whole.

        Over all processes the weights sum to the number of processes, since gradients are averaged over them.
        """
        if len(micro_batches) == 1 and self.world.size == 1:
            return [1.0]
        weights = [self.task.loss_weight(*inputs) for inputs in micro_batches]
        if not any(isinstance(weight, Tensor) for weight in weights):  # every process has equally many examples
            return [weight / sum(weights) for weight in weights]
        counts = torch.stack([torch.as_tensor(weight, device=self.world.device) for weight in weights]).float()
        return (counts / self.world.mean(counts.sum()).clamp(min=1)).unbind()

    def update(self, losses: Losses) -> None:
        # All processes must skip together, since gradients of one reach all of them.
        if not (self.skip_nan and self.world.any(not self.is_finite(losses))):
            self.scaler.unscale_(self.optimizer)
            if self.max_grad_norm:
                nn.utils.clip_grad_norm_(self.task.parameters(), self.max_grad_norm, foreach=True)
            self.scaler.step(self.optimizer)
            if self.update_scale() and self.ema is not None:
                self.ema.update()
        else:
            for buffer, before in self.statistics:
                buffer.copy_(before)
        self.optimizer.zero_grad(set_to_none=True)

    def is_finite(self, losses: Losses) -> bool:
        """Whether the loss and its gradients are finite: gradients of a finite loss may overflow."""
        gradients = [weight.grad for weight in self.task.parameters() if weight.grad is not None]
        if self.scaler.is_enabled() or not bool(losses.total.isfinite()):  # the scaler skips such steps itself
            return bool(losses.total.isfinite())
        norms = torch._foreach_norm([getattr(gradient, "_local_tensor", gradient) for gradient in gradients])
        return not norms or bool(torch.stack(norms).isfinite().all())

    def update_scale(self) -> bool:
        """Adapt the loss scale; returns whether the gradients were finite, so that the weights were updated."""
        if not self.scaler.is_enabled():
            return True
        self.scaler.update()
        before, self.loss_scale = self.loss_scale, self.scaler.get_scale()
        if self.loss_scale < MIN_SCALE:
            raise UserError(
                "the gradients are not finite in float16 however small the scale of the loss: lower optim.lr, "
                "or set precision=float32"
            )
        return self.loss_scale >= before


def copy_statistics(task: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The running statistics of BatchNorm, which a forward pass updates, and copies of them."""
    norms = [module for module in task.modules() if isinstance(module, _BatchNorm)]
    return [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


class RecordedStep(Generic[T]):
    """Runs `step` a few times, then records it as a CUDA graph, which is replayed with new inputs.

    Small models are bound by kernel launches; a replay launches all kernels at once. `step` must run the same kernels
    on tensors at the same addresses every time, and read nothing back. Inputs of other shapes are recorded separately.
    Outputs are copied, since the next replay overwrites them.
    """

    def __init__(self, step: Callable[..., T]) -> None:
        self.step = step
        self.recordings: dict[tuple[torch.Size, ...], Recording[T]] = {}

    def __call__(self, *inputs: Any) -> T:
        shapes = tuple(tensor.shape for tensor in tree_leaves(inputs))
        if shapes not in self.recordings:
            self.recordings[shapes] = Recording(self.step)
        return self.recordings[shapes](*inputs)


class Recording(Generic[T]):
    """A step with inputs of certain shapes."""

    def __init__(self, step: Callable[..., T]) -> None:
        self.step, self.calls = step, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Any, ...] = ()
        self.outputs: T

    def __call__(self, *inputs: Any) -> T:
        self.calls += 1
        if self.calls <= WARMUP_CALLS:
            # On a side stream, as recording will be: memory allocated now must not be tied to the main stream.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs = self.step(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return outputs
        graph = self.graph or self.record(inputs)
        for buffer, new in zip(tree_leaves(self.inputs), tree_leaves(inputs), strict=True):
            buffer.copy_(new, non_blocking=True)
        graph.replay()
        return tree_map(torch.clone, self.outputs)

    def record(self, inputs: tuple[Any, ...]) -> torch.cuda.CUDAGraph:
        self.inputs = tree_map(torch.clone, inputs)

        def run() -> None:
            self.outputs = self.step(*self.inputs)

        self.graph = record(run)
        return self.graph
