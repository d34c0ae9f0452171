"""Refuse models and runs that cannot fit into the memory of a device, before anything is allocated.

`weights` counts the parameters on the meta device, `memory` traces a training step on fake tensors. Both are lower
bounds: the data, a teacher and the libraries need memory too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from allmlp.errors import UserError
from allmlp.models.model import ModelSpec
from allmlp.optim import Optim
from allmlp.plan.activations import FLOAT32, Execution
from allmlp.plan.memory import Memory, Sharding, memory, weights

if TYPE_CHECKING:
    from allmlp.run import Run

GIGABYTE = 1e9
ALWAYS_FITS = 2**28
"""Bytes of activations below which a trace, which takes half a second, is skipped."""


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on a device; infinite if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(machine_memory(), cgroup_memory(), limited_memory()) if device.type == "cpu" else float("inf")


def machine_memory() -> float:
    try:
        available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="utf8"))
    except OSError:
        return float("inf")
    return 1024.0 * int(available[1]) if available else float("inf")


def cgroup_memory() -> float:
    """Memory left in a container (cgroup v2); cached file pages, which can be dropped, count as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = ((root / name).read_text(encoding="utf8").strip() for name in ("memory.max", "memory.current"))
        cached = re.search(r"inactive_file (\d+)", (root / "memory.stat").read_text(encoding="utf8"))
        return float("inf") if limit == "max" else float(limit) - float(used) + float(cached[1] if cached else 0)
    except (OSError, ValueError):
        return float("inf")


def limited_memory() -> float:
    """Memory left under `ulimit -v`."""
    if sys.platform != "win32":
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="utf8").split()[0])
        except OSError:
            pages = 0
        if limit != resource.RLIM_INFINITY:
            return limit - pages * resource.getpagesize()
    return float("inf")


def check_weights(spec: ModelSpec, device: torch.device, copies: int = 1) -> None:
    """Raise UserError if `copies` of a model's parameters exceed the memory. Models of other libraries are not checked,
    since their parameters are only known after they are built.
    """
    if not spec.shallow()[1]:
        return
    count, free = sum(weight.elements for weight in weights(spec)), free_memory(device)
    if copies * FLOAT32 * count > free:
        raise UserError(
            f"{count:,} parameters need {copies * FLOAT32 * count / GIGABYTE:,.1f} GB, and {free / GIGABYTE:,.1f} GB "
            f"of {device.type} memory are free: lower the {largest_fields(spec)} of the model"
        )


def check_run(run: Run, spec: ModelSpec, device: torch.device, processes: int) -> None:
    """Raise UserError if a training step of `run` with the model `spec` needs more than the available memory."""
    if run.freeze_fraction == 1:  # hardly anything is kept for a backward pass
        return check_weights(spec, device)
    options = run.sharding, run.grad_checkpointing, run.ema_decay is not None, run.grad_accum_steps, bool(run.lora)
    return check_training(spec, run.batch_size, run.optim, device, processes, *options)


def check_training(
    spec: ModelSpec,
    batch_size: int,
    optim: Optim,
    device: torch.device,
    processes: int = 1,
    sharding: Sharding = "ddp",
    grad_checkpointing: bool = False,
    ema: bool = False,
    grad_accum_steps: int = 1,
    lora: bool = False,
) -> None:
    """Raise UserError if a training step needs more than the available memory. With `lora`, most weights have neither
    gradients nor optimizer state.
    """
    shards = processes if sharding == "fsdp" and device.type == "cuda" else 1
    check_weights(spec, device, copies=1 if lora else max(3 // shards, 1))
    local = max(batch_size // processes // grad_accum_steps, 1)
    if not spec.shallow()[1] or local * input_bytes(spec) * depth(spec) < ALWAYS_FITS:
        return

    def needed(examples: int) -> Memory:
        execution = Execution(device.type if device.type == "cuda" else "cpu", bfloat16=device.type == "cuda")
        options = processes, sharding, grad_checkpointing, ema, grad_accum_steps, execution
        estimate = memory(spec, examples, optim, *options)
        return estimate._replace(gradients=0, optimizer_state=0, largest_gradient=0, workspace=0) if lora else estimate

    try:
        whole, single = (needed(examples).peak for examples in (batch_size // processes, grad_accum_steps))
    except (UserError, NotImplementedError):  # memory of an optimizer or a layer is unknown
        return
    free = free_memory(device)
    if whole > free:
        what = "batch_size" if single <= free else largest_fields(spec)
        sizes = f"batch_size {batch_size:,}" if single <= free else f"{spec.input_spec}, batch_size {batch_size:,}"
        raise UserError(
            f"a step with {sizes} needs {whole / GIGABYTE:,.1f} GB, and {free / GIGABYTE:,.1f} GB of {device.type} "
            f"memory are free: lower {what}, or raise grad_accum_steps"
        )


def depth(spec: ModelSpec) -> int:
    return max(map(len, spec.shallow()[1].values()), default=1)


def input_bytes(spec: ModelSpec) -> int:
    """Upper bound on the bytes of one example's tokens in one layer."""
    width, tokens = getattr(spec, "width", 1024), 4096
    size, length = spec.input_size, getattr(spec, "seq_len", None)
    if size is not None:
        tokens = size[0] * size[1]
    elif isinstance(length, int):
        tokens = length
    return FLOAT32 * width * tokens


def largest_fields(spec: ModelSpec) -> str:
    """The sizes of a model and of its input that determine its memory."""
    inputs = "img_size" if spec.input_size is not None else "seq_len"
    return f"width ({getattr(spec, 'width', '?')}), depth ({depth(spec)}) or {inputs} ({spec.input_spec})"
