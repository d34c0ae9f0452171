"""Comparison of the plan with real steps on this device: bytes of tensors, wall-clock seconds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allmlp.compilation import compile_task
from allmlp.device import default_dtype
from allmlp.kernels import HAS_TRITON
from allmlp.models.model import Model, ModelSpec
from allmlp.models.zoo import create
from allmlp.optim import Optim
from allmlp.plan.activations import Execution, TrainingLoss
from allmlp.plan.memory import memory
from allmlp.plan.time import training_flops
from allmlp.train_step import WARMUP_CALLS, RecordedStep


class Comparison(NamedTuple):
    quantity: str
    unit: str
    predicted: float | None
    measured: float

    @property
    def error(self) -> float | None:
        """Error of the prediction, relative to the measurement."""
        return None if self.predicted is None else self.predicted / self.measured - 1


class RealStep:
    """A model with its optimizer, and one training step on random inputs."""

    def __init__(
        self,
        spec: ModelSpec,
        batch_size: int,
        optim: Optim,
        device: torch.device,
        grad_checkpointing: bool = False,
        compiled: bool = False,
        half: bool = True,
    ) -> None:
        self.model: Model = create(spec, seed=0, device=device).train()
        if grad_checkpointing:
            self.model.set_grad_checkpointing()
        self.optimizer: Optimizer = optim.build(self.model)
        self.device = device
        self.half = half and device.type == "cuda"
        self.inputs = self.model.dummy_inputs(batch_size)
        self.loss_function = TrainingLoss(self.model)
        if compiled:
            compile_task(self.loss_function)
        recorded = compiled and device.type == "cuda" and optim.capturable and not grad_checkpointing
        self.fast_run: Callable[[], object] = RecordedStep(self.run) if recorded else self.run
        """As `allmlp train` runs it: replayed as a CUDA graph, if all its kernels can be recorded."""

    def loss(self) -> Tensor:
        """Loss as in `allmlp train`: in half precision on a GPU unless the run is in float32, float32 on a CPU."""
        with torch.autocast("cuda", default_dtype(self.device)) if self.half else nullcontext():
            return self.loss_function(*self.inputs).total

    def run(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def saved_bytes(self) -> int:
        """Bytes that autograd saves for the backward pass, without parameters and buffers."""
        weights = {each.untyped_storage().data_ptr() for each in (*self.model.parameters(), *self.model.buffers())}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.loss()
        total = sum(saved.values())
        del loss
        return total

    def peak_bytes(self) -> int:
        """Bytes of all tensors at the peak of a step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.run()
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        with LiveTensors([*self.model.parameters(), *state, *self.inputs]) as live:
            self.run()
        return live.peak


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all live tensors at every op, for CPUs, whose allocator keeps no statistics."""

    def __init__(self, existing: Iterable[Any]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}
        for tensor in existing:
            self.count(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            self.count(result)
        return results

    def count(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def fastest(steps: Iterable[RealStep], rounds: int) -> list[float]:
    """Seconds of the fastest run of each, in interleaved rounds, so that background load affects all equally."""
    steps = list(steps)
    for step in steps:
        for _ in range(WARMUP_CALLS + 1):
            step.fast_run()
    times = [[timed(step) for step in steps] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


def timed(step: RealStep) -> float:
    synchronize(step.device)
    start = time.perf_counter()
    step.fast_run()
    synchronize(step.device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check(
    spec: ModelSpec,
    batch_size: int,
    optim: Optim,
    device: torch.device,
    rounds: int = 5,
    grad_checkpointing: bool = False,
    flops: float | None = None,
    calibrate: ModelSpec | None = None,
    compiled: bool = False,
    half: bool = True,
) -> list[Comparison]:
    """Compare prediction and measurement on one device, on a GPU in half precision if `half`.

    The time is predicted from `flops` per second, or from the speed that the model `calibrate` reaches here.
    """
    cuda = device.type == "cuda"
    region = "blocks" if compiled else None
    execution = Execution("cuda" if cuda else "cpu", bfloat16=cuda and half, compiled=region, fused_kernels=HAS_TRITON)
    plan = memory(spec, batch_size, optim, grad_checkpointing=grad_checkpointing, execution=execution)
    options = grad_checkpointing, compiled, half
    step = RealStep(spec, batch_size, optim, device, *options)
    for _ in range(WARMUP_CALLS):
        step.run()
    step.loss().backward()
    rows = [
        Comparison("weights", "bytes", plan.weights, size(step.model.parameters())),
        Comparison("gradients", "bytes", plan.gradients, size(w.grad for w in step.model.parameters())),
        Comparison("optimizer state", "bytes", plan.optimizer_state, size(state_tensors(step.optimizer))),
    ]
    step.optimizer.zero_grad(set_to_none=True)
    if not grad_checkpointing:
        rows.append(Comparison("activations", "bytes", plan.activations + plan.weight_copies, step.saved_bytes()))
    rows.append(Comparison("peak", "bytes", plan.peak, step.peak_bytes()))
    others = [RealStep(calibrate, batch_size, optim, device, *options)] if calibrate else []
    seconds, *other = fastest([step, *others], rounds)
    if calibrate:
        flops = batch_size * training_flops(calibrate, grad_checkpointing) / other[0]
    operations = batch_size * training_flops(spec, grad_checkpointing)
    rows.append(Comparison("step time", "s", operations / flops if flops else None, seconds))
    rows.append(Comparison("speed", "TFLOP/s", flops / 1e12 if flops else None, operations / seconds / 1e12))
    return rows


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer state without step counters."""
    return [value for state in optimizer.state.values() for value in state.values() if value.dim()]


def size(tensors: Iterable[Tensor | nn.Parameter | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
