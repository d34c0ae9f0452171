"""The plan against real steps on the device that is here: bytes counted one by one, seconds by the clock."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model, ModelSpec
from allmlp.models.zoo import create
from allmlp.optim import Optim
from allmlp.plan.activations import activations, asked
from allmlp.plan.memory import memory
from allmlp.plan.tape import CPU_FLOAT32, CUDA_BFLOAT16
from allmlp.plan.time import training_flops

WARM_UP = 2


class Compared(NamedTuple):
    what: str
    unit: str
    predicted: float | None
    measured: float

    @property
    def error(self) -> float | None:
        """Of the prediction, as a part of what was measured."""
        return None if self.predicted is None else self.predicted / self.measured - 1


class Bench:
    """A model with its optimiser, and one step of its training on random input."""

    def __init__(
        self,
        spec: ModelSpec,
        batch: int,
        optim: Optim,
        device: torch.device,
        checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        self.model: Model = create(spec, seed=0, device=device).train().set_grad_checkpointing(checkpointing)
        self.optimizer: Optimizer = optim.build(self.model)
        self.batch, self.device = batch, device
        self.inputs = self.model.example(batch)
        self.judge = torch.compile(self.cross_entropy) if compiled else self.cross_entropy

    def loss(self) -> Tensor:
        """As `allmlp train` computes it: bfloat16 on a GPU, float32 on a CPU."""
        with torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext():
            return self.judge(*self.inputs)

    def cross_entropy(self, *inputs: Tensor) -> Tensor:
        scores = self.scores(*inputs).float().flatten(0, -2)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=self.device))

    def scores(self, *inputs: Tensor) -> Tensor:
        """The head runs where something is asked."""
        if not isinstance(self.model, EncoderModel):
            return self.model(*inputs)
        features, count = self.model.forward_features(*inputs), asked(self.model.spec)
        if self.model.pool is None and count < features.shape[1]:
            places = torch.arange(count, device=self.device).view(1, -1, 1)
            features = features.gather(1, places.expand(self.batch, -1, features.shape[2]).contiguous())
        return self.model.forward_head(features)

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def saved(self) -> int:
        """Bytes that autograd keeps for the backward pass beside the parameters themselves."""
        own = {weight.untyped_storage().data_ptr() for weight in self.model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.loss()
        total = sum(kept.values())
        del loss
        return total

    def most(self) -> int:
        """Bytes of all tensors at the worst moment of a step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.step()
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        with Living([*self.model.parameters(), *state, *self.inputs]) as living:
            self.step()
        return living.most


class Living(TorchDispatchMode):
    """Counts the bytes of all tensors that exist, by watching every operation; for a CPU, which keeps no such count."""

    def __init__(self, known: Iterable[Any]) -> None:
        super().__init__()
        self.now = self.most = 0
        self.sizes: dict[int, int] = {}
        for tensor in known:
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
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def timed(call: Callable[[], None], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest(benches: Iterable[Bench], steps: int) -> list[float]:
    """Seconds of each one's quickest step, of `steps` in turns: what else the machine does meanwhile hits all alike."""
    benches = list(benches)
    for bench in benches:
        for _ in range(WARM_UP):
            bench.step()
    rounds = [[timed(bench.step, bench.device) for bench in benches] for _ in range(steps)]
    return [min(times) for times in zip(*rounds, strict=True)]


def check(
    spec: ModelSpec,
    batch: int,
    optim: Optim,
    device: torch.device,
    steps: int = 5,
    checkpointing: bool = False,
    flops: float | None = None,
    calibrate: ModelSpec | None = None,
    compiled: bool = False,
) -> list[Compared]:
    """Predicted against measured, on one device. The time is predicted from `flops` operations per second, or from
    those that another model reaches here and now.
    """
    arithmetic = replace(CUDA_BFLOAT16 if device.type == "cuda" else CPU_FLOAT32, compiled=compiled)
    plan = memory(spec, batch, optim, checkpointing=checkpointing, arithmetic=arithmetic)
    bench = Bench(spec, batch, optim, device, checkpointing, compiled)
    for _ in range(WARM_UP):
        bench.step()
    bench.loss().backward()
    rows = [
        Compared("weights", "bytes", plan.weights, size(bench.model.parameters())),
        Compared("gradients", "bytes", plan.gradients, size(w.grad for w in bench.model.parameters())),
        Compared("optimiser", "bytes", plan.optimiser, size(moments_of(bench.optimizer))),
    ]
    bench.optimizer.zero_grad(set_to_none=True)
    if not checkpointing:
        kept = activations(spec, batch, arithmetic)
        rows.append(Compared("activations", "bytes", kept.kept() + kept.copies, bench.saved()))
    rows.append(Compared("at most", "bytes", plan.most, bench.most()))
    others = [Bench(calibrate, batch, optim, device, checkpointing, compiled)] if calibrate else []
    seconds, *other = fastest([bench, *others], steps)
    if calibrate:
        flops = batch * training_flops(calibrate, checkpointing) / other[0]
    operations = batch * training_flops(spec, checkpointing)
    rows.append(Compared("step", "s", operations / flops if flops else None, seconds))
    rows.append(Compared("rate", "TFLOP/s", flops / 1e12 if flops else None, operations / seconds / 1e12))
    return rows


def moments_of(optimizer: Optimizer) -> list[Tensor]:
    """Its state without the step counters."""
    return [value for state in optimizer.state.values() for value in state.values() if value.dim()]


def size(tensors: Iterable[Tensor | nn.Parameter | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
