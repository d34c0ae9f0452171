"""Checkpoints: a folder per step with checksums, written completely or not at all.

One process, and DDP, write whole tensors as safetensors; FSDP writes shards in the background, see
`allmlp.sharded_checkpoint`. A run can resume from either on another number of processes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from allmlp.ema import ModelEma
from allmlp.errors import UserError, one_line
from allmlp.files import digest, flush
from allmlp.parallel import World, is_sharded

FOLDER = "checkpoints"
log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run; with FSDP in the background, while training continues.

    >>> with Saver(out, world, task, keep=2) as saver:
    ...     saver.save(task, optimizer, ema, state)
    ...     saver.poll()  # after every step
    ...     saver.wait()  # before the process group ends
    """

    def __init__(
        self,
        out: Path,
        world: World,
        task: nn.Module,
        keep: int,
        on_saved: Callable[[int, Path], object] = lambda step, folder: None,
    ) -> None:
        self.out, self.world, self.keep, self.on_saved = out, world, keep, on_saved
        self.group: Any = dist.new_group(backend="gloo") if is_sharded(task) else None
        self.writing: Future[Any] | None = None
        self.state: dict[str, Any] = {}
        for left in (out / FOLDER).glob(".step-*") if world.is_main else ():  # left by killed processes
            shutil.rmtree(left, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.writing is not None:  # after an error: the writing thread uses the process group
            futures.wait([self.writing])

    def save(
        self,
        task: nn.Module,
        optimizer: Optimizer,
        ema: ModelEma,
        state: dict[str, Any],
        best: Mapping[str, Tensor] | None = None,
        wait: bool = False,
    ) -> None:
        """Write the checkpoint of step `state["step"]`; with FSDP in the background, unless `wait`."""
        self.wait()
        self.state, parts = state, state_parts(task, optimizer, ema, best)
        if self.group is None:
            save(self.out, self.world, parts, state, self.keep)
            if self.world.is_main:  # other processes do not wait until it is written
                self.on_saved(state["step"], complete(self.out)[-1])
            return
        from allmlp.sharded_checkpoint import start_writing

        try:
            self.writing = start_writing(self.folder, parts, self.group)
        except OSError as reason:
            raise self.failure(reason) from reason
        if wait:
            self.wait()

    @property
    def folder(self) -> Path:
        """Temporary folder of the shards, renamed when complete."""
        return self.out / FOLDER / f".step-{self.state['step']:09d}"

    def failure(self, reason: BaseException) -> UserError:
        if failures := getattr(reason, "failures", None):  # a CheckpointException: raised in the processes
            reason = next(iter(failures.values()))[0]
        return UserError(f"cannot write {self.folder}: {one_line(reason)}; older checkpoints are untouched")

    def wait(self) -> None:
        """Wait until the checkpoint is written."""
        if self.writing is not None:
            futures.wait([self.writing])
            self.poll()

    def poll(self) -> None:
        """Rename a checkpoint to its final name if all processes have written their shards."""
        if self.writing is None or not self.writing.done():
            return
        writing, self.writing = self.writing, None
        if reason := writing.exception():
            raise self.failure(reason) from reason
        if not self.world.is_main:
            return
        from allmlp.sharded_checkpoint import checksums

        try:
            final = publish(self.folder, self.state, checksums(self.folder))
        except OSError as reason:
            raise self.failure(reason) from reason
        remove_old(self.out, self.keep)
        self.on_saved(self.state["step"], final)


def state_parts(
    task: nn.Module, optimizer: Optimizer, ema: ModelEma, best: Mapping[str, Tensor] | None
) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of a checkpoint; `best` are the weights of the best evaluation, if they are kept."""
    parts = {"task": task.state_dict(), "optimizer": optimizer_state(task, optimizer), "ema": ema.average}
    return parts | ({"best": best} if best else {})


def save(out: Path, world: World, parts: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any], keep: int) -> None:
    """Write the checkpoint of step `state["step"]`. All processes gather the tensors, the main one writes them.

    Files are written to a hidden folder that is renamed when everything is on disk: if the process dies in between,
    older checkpoints are unaffected.
    """
    tensors = {name: full_state_dict(part, world) for name, part in parts.items()}
    if not world.is_main:
        return
    final = out / FOLDER / f"step-{state['step']:09d}"
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        for name, part in tensors.items():
            save_file(part, temporary / f"{name}.safetensors")
            flush(temporary / f"{name}.safetensors")
        publish(temporary, state, {file.name: digest(file) for file in sorted(temporary.iterdir())})
    except (OSError, SafetensorError) as reason:
        raise UserError(f"cannot write {final}: {one_line(reason)}; older checkpoints are untouched") from reason
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    remove_old(out, keep)


def publish(temporary: Path, state: dict[str, Any], sums: dict[str, str]) -> Path:
    """Rename a folder whose tensors are on disk to its final name."""
    (temporary / "state.json").write_text(json.dumps(state | {"sha256": sums}, indent=1), encoding="utf8")
    flush(temporary / "state.json")
    final = temporary.with_name(f"step-{state['step']:09d}")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    flush(final.parent)
    return final


def remove_old(out: Path, keep: int) -> None:
    for old in complete(out)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def full_state_dict(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Unsharded tensors on the CPU of the main process; other processes take part in gathering and get nothing."""
    full = {}
    for name, tensor in tensors.items():
        gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # a DTensor
        if world.is_main:
            full[name] = gathered.detach().cpu().contiguous()
    return full


def reshard(tensor: Tensor, target: Tensor) -> Tensor:
    """Shard a tensor like `target`."""
    if hasattr(target, "full_tensor") and tensor.shape == target.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements)  # type: ignore[attr-defined]
    return tensor


def optimizer_state(task: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """State of the optimizer: "parameter/key" -> tensor."""
    names = {id(weight): name for name, weight in task.named_parameters()}
    return {f"{names[id(w)]}/{key}": value for w, state in optimizer.state.items() for key, value in state.items()}


def last_step(out: Path) -> int | None:
    """Step of the last checkpoint, without verifying it."""
    folders = complete(out)
    return int(folders[-1].name.removeprefix("step-")) if folders else None


def complete(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((out / FOLDER).glob("step-*"))


def newest(out: Path, world: World | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The last checkpoint with valid checksums, and its state. Each process of `world` checks a part of the files."""
    folders = complete(out)
    for folder in reversed(world.broadcast(folders) if world else folders):
        state, damaged = dict[str, Any](), False
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf8"))
            files = sorted(state["sha256"].items())[world.rank :: world.size] if world else state["sha256"].items()
            damaged = any(digest(folder / name) != expected for name, expected in files)
        except (OSError, ValueError, KeyError):
            damaged = True
        if not (world.any(damaged) if world else damaged):
            return folder, state
    return None


def resumed(out: Path, world: World) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to resume from. Damaged ones are renamed, so that they are not counted as kept."""
    last_good = newest(out, world)
    damaged = [folder for folder in complete(out) if last_good is None or folder > last_good[0]]
    if damaged and last_good is None:
        raise UserError(f"every checkpoint of {out} is damaged; remove {out / FOLDER} to start again from step 0")
    for folder in damaged if world.is_main else []:
        aside = folder.with_name(f"damaged-{folder.name}")
        log.warning("%s is damaged: renamed to %s", folder, aside.name)
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    return last_good


def load(
    folder: Path, task: nn.Module, optimizer: Optimizer, ema: ModelEma, best: Mapping[str, Tensor] | None = None
) -> None:
    """Restore a checkpoint on any number of processes; its best weights, if any, are loaded into `best`."""
    parts: dict[str, Mapping[str, Tensor]] = {"task": task.state_dict(), "ema": ema.average}
    parts |= {"best": best} if best else {}
    weights = dict(task.named_parameters())
    read = read_shards if has_shards(folder) else read_whole
    states = read(folder, parts, weights)
    names = {id(weight): name for name, weight in weights.items()}
    record = optimizer.state_dict()
    ordered = [weight for group in optimizer.param_groups for weight in group["params"]]
    record["state"] = {
        number: {
            key.rpartition("/")[2]: reshard(value, weight)
            for key, value in states.items()
            if key.rpartition("/")[0] == names[id(weight)]
        }
        for number, weight in enumerate(ordered)
    }
    # load_state_dict moves every value to the device and type that the optimizer needs.
    optimizer.load_state_dict(record)


def has_shards(folder: Path) -> bool:
    return (folder / ".metadata").is_file()


def read_whole(
    folder: Path, parts: dict[str, Mapping[str, Tensor]], weights: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Fill the tensors of `parts` from safetensors; returns the state of the optimizer."""
    stored = {part: read_part(folder, part) for part in parts}
    check_shapes(folder, parts, {part: shapes(values) for part, values in stored.items()})
    with torch.no_grad():
        for part, targets in parts.items():
            for name, target in targets.items():
                target.copy_(reshard(stored[part][name], target))
    return read_part(folder, "optimizer")


def read_shards(
    folder: Path, parts: dict[str, Mapping[str, Tensor]], weights: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Fill the tensors of `parts` from shards; returns the state of the optimizer, sharded as the weights are."""
    from allmlp.sharded_checkpoint import read_into, stored_parts

    stored = stored_parts(folder)
    check_shapes(folder, parts, {part: {name: entry.size for name, entry in stored[part].items()} for part in parts})
    states = {}
    for name, entry in stored["optimizer"].items():
        weight, dtype = weights[name.rpartition("/")[0]].detach(), entry.properties.dtype
        states[name] = (
            torch.empty(entry.size, dtype=dtype)
            if entry.size != weight.shape
            else torch.empty_like(weight, dtype=dtype)
        )
    read_into(folder, parts | {"optimizer": states})
    return states


def check_shapes(
    folder: Path, parts: dict[str, Mapping[str, Tensor]], stored: dict[str, dict[str, torch.Size]]
) -> None:
    if any(shapes(tensors) != stored[part] for part, tensors in parts.items()):
        raise UserError(f"the checkpoint {folder} belongs to another model")


def read_part(folder: Path, part: str) -> dict[str, Tensor]:
    """Unsharded tensors of "task", "optimizer", "ema" or "best"."""
    if has_shards(folder):
        from allmlp.sharded_checkpoint import read_into, stored_parts

        entries = stored_parts(folder)[part]
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        read_into(folder, {part: tensors})
        return tensors
    try:
        return load_file(folder / f"{part}.safetensors")
    except (SafetensorError, OSError) as reason:
        raise UserError(f"cannot read the checkpoint {folder}: {one_line(reason)}") from None


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
