"""The world a run lives in: one process, or several under torchrun with DDP or FSDP2."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from allmlp.errors import UserError
from allmlp.layers.block import BlockLayer
from allmlp.models.model import Model

Sharding = Literal["ddp", "fsdp"]
OTHER_WAYS_IN = ("forward_features", "forward_head", "encode", "decode")
"""Methods beside `forward` that tasks call: a sharded model must gather its weights for these too."""


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wrap(self, task: nn.Module, sharding: Sharding) -> nn.Module:
        """Let several processes train `task` together."""
        if self.size == 1:
            return task
        if sharding == "fsdp":
            # The models are units of their own, because evaluation calls them without the task.
            for module in reversed(list(task.modules())):
                if isinstance(module, (BlockLayer, Model)):
                    fully_shard(module)
                for name in OTHER_WAYS_IN if isinstance(module, Model) else ():
                    if hasattr(module, name):
                        register_fsdp_forward_method(module, name)
            fully_shard(task)
            return task
        return DistributedDataParallel(task, device_ids=[self.device] if self.device.type == "cuda" else None)

    def sync(self, task: nn.Module, when: bool) -> Any:
        """Gradients are summed over the processes only at the last of several accumulated passes."""
        if isinstance(task, DistributedDataParallel):
            return nullcontext() if when else task.no_sync()
        if isinstance(task, FSDPModule):
            task.set_requires_gradient_sync(when)
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.size

    def any(self, flag: bool) -> bool:
        """Whether any process says so: all must take the same turn."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: str | None = None) -> Iterator[World]:
    """Take this process's place: torchrun's variables where they are set, alone otherwise."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise UserError(f"unknown device {kind!r}: use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device here: use --device cpu, or install a CUDA build of torch")
    if "RANK" not in os.environ:
        yield World(0, 1, torch.device(kind))
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    store, rank, size = next(dist.rendezvous("env://"))
    # torchrun keeps its store when it restarts dead workers: without a name of its own, a new life would find the
    # addresses of the old one there and knock at closed doors.
    life = dist.PrefixStore(f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", store=life, rank=rank, world_size=size)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), place)
    finally:
        # What still holds the group, in a cycle perhaps, must go first: freed later, it waits for ever.
        gc.collect()
        dist.destroy_process_group()
