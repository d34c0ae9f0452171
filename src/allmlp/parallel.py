"""The processes of a run: one, or several under torchrun with DDP or FSDP2."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from allmlp.device import own_device
from allmlp.kernels.launch import device_guard
from allmlp.layers.block import BlockLayer
from allmlp.models.model import Model

Sharding = Literal["ddp", "fsdp"]
GROUPS = itertools.count()
COLLECTIVES = {"cuda": "nccl", "xpu": "xccl"}
FORWARD_METHODS = ("forward_features", "forward_head", "encode", "decode")
"""Methods besides `forward` that tasks call, for which FSDP must gather the weights too."""


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wrap(self, task: nn.Module, sharding: Sharding, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Wrap `task` for several processes. FSDP gathers weights in `dtype` and reduces gradients in float32."""
        if self.size == 1:
            return task
        if sharding == "fsdp":
            shard(task, self.device, dtype)
            return task
        return DistributedDataParallel(task, device_ids=None if self.device.type == "cpu" else [self.device])

    def sync(self, task: nn.Module, when: bool) -> Any:
        """Reduce gradients over the processes only in the last of the accumulated passes."""
        if isinstance(task, DistributedDataParallel):
            return nullcontext() if when else task.no_sync()
        if is_sharded(task):
            task.set_requires_gradient_sync(when)  # type: ignore[operator]
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.size

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any process, so that all of them take the same branch."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the main one."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values)
        return values or []

    def broadcast(self, value: Any) -> Any:
        """The value of the main process."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def share_buffers(self, module: nn.Module) -> None:
        """Copy the buffers of the main process, which are saved, to all: BatchNorm's statistics differ between them."""
        for buffer in module.buffers():
            if self.size > 1 and buffer.is_floating_point():
                dist.broadcast(buffer, 0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def shard(task: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Shard the weights of `task` by FSDP2."""
    # Here, because it loads sympy and much else, for half a second.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Inputs are left to autocast: cast to bfloat16, uniforms and targets would be rounded.
    mixed = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else mixed
    # Models are separate FSDP units because evaluation calls them without the task.
    for module in reversed(list(task.modules())):
        if isinstance(module, (BlockLayer, Model)):
            fully_shard(module, mp_policy=policy)
        for name in FORWARD_METHODS if isinstance(module, Model) else ():
            if hasattr(module, name):
                register_fsdp_forward_method(module, name)
    fully_shard(task, mp_policy=policy)
    if device.type not in COLLECTIVES:
        # With torch 2.8, gloo's reduce-scatter gives the sum where FSDP asks for the mean.
        for module in task.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    # The task is the root also if its model is called first, by an evaluation before the first step.
    fully_shard.state(task)._lazy_init()  # type: ignore[attr-defined]


def is_sharded(module: nn.Module) -> bool:
    """Whether `module` is an FSDPModule."""
    return hasattr(module, "set_requires_gradient_sync")


@contextmanager
def join(device: str | None = None) -> Iterator[World]:
    """Join the process group described by torchrun's environment variables; a single process without them."""
    local = own_device(device)
    if "RANK" not in os.environ:
        with device_guard(local):
            yield World(0, 1, local)
        return
    if local.type != "cpu":
        torch.accelerator.set_device_index(local)
    store, rank, size = next(dist.rendezvous("env://"))
    # The store outlives a process group, of restarted workers or of an earlier run: without a new prefix, the next
    # group would read stale addresses.
    fresh = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(GROUPS)}", store)
    # gloo for CPU tensors, from which checkpoints are written in the background.
    backend = f"cpu:gloo,{local.type}:{COLLECTIVES[local.type]}" if local.type in COLLECTIVES else "gloo"
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local)
    finally:
        # Objects in reference cycles that still hold the group must be freed first, or destroying it hangs.
        gc.collect()
        dist.destroy_process_group()
