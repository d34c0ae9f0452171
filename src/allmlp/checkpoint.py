"""Checkpoints: a folder per step with safetensors and checksums, written completely or not at all.

Tensors are written unsharded, so that a run can resume on another number of processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from allmlp.ema import ModelEma
from allmlp.errors import UserError, one_line
from allmlp.files import flush
from allmlp.parallel import World

FOLDER = "checkpoints"
log = logging.getLogger(__name__)


def save(
    out: Path,
    world: World,
    task: nn.Module,
    optimizer: Optimizer,
    ema: ModelEma,
    state: dict[str, Any],
    keep: int,
    best: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the checkpoint of step `state["step"]`. All processes gather, the main one writes.

    `best` are the weights of the best evaluation, if they are kept.

    Files go to a hidden folder that is renamed when everything is on disk: a process that dies in between
    leaves the older checkpoints as they were.
    """
    parts = {"task": task.state_dict(), "optimizer": optimizer_state(task, optimizer), "ema": ema.average}
    parts |= {"best": best} if best else {}
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
        sums = {file.name: digest(file) for file in sorted(temporary.iterdir())}
        (temporary / "state.json").write_text(json.dumps(state | {"sha256": sums}, indent=1), encoding="utf8")
        flush(temporary / "state.json")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        flush(final.parent)
    except (OSError, SafetensorError) as reason:
        raise UserError(f"cannot write {final}: {one_line(reason)}; older checkpoints are untouched") from reason
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in complete(out)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def full_state_dict(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Unsharded tensors on the CPU of the main process. The others join the gathering and get nothing."""
    full = {}
    for name, tensor in tensors.items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_main:
            full[name] = gathered.detach().cpu().contiguous()
    return full


def reshard(tensor: Tensor, target: Tensor) -> Tensor:
    """Distribute an unsharded tensor as `target` is."""
    if isinstance(target, DTensor) and tensor.shape == target.shape:
        return distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements)
    return tensor


def optimizer_state(task: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of the optimizer under "parameter/key"."""
    names = {id(weight): name for name, weight in task.named_parameters()}
    return {f"{names[id(w)]}/{key}": value for w, state in optimizer.state.items() for key, value in state.items()}


def last_step(out: Path) -> int | None:
    """The step of the last checkpoint, unchecked."""
    found = complete(out)
    return int(found[-1].name.removeprefix("step-")) if found else None


def complete(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((out / FOLDER).glob("step-*"))


def newest(out: Path) -> tuple[Path, dict[str, Any]] | None:
    """The last checkpoint whose checksums hold, and its state."""
    for folder in reversed(complete(out)):
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf8"))
            if all(digest(folder / name) == expected for name, expected in state["sha256"].items()):
                return folder, state
        except (OSError, ValueError, KeyError):
            continue
    return None


def resumed(out: Path, world: World) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to resume from. Damaged ones are renamed, so that they do not count as kept ones."""
    found = newest(out)
    damaged = [folder for folder in complete(out) if found is None or folder > found[0]]
    if damaged and found is None:
        raise UserError(f"every checkpoint of {out} is damaged; remove {out / FOLDER} to start again from step 0")
    for folder in damaged if world.is_main else []:
        aside = folder.with_name(f"damaged-{folder.name}")
        log.warning("%s is damaged: renamed to %s", folder, aside.name)
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    return found


def load(
    folder: Path, task: nn.Module, optimizer: Optimizer, ema: ModelEma, best: Mapping[str, Tensor] | None = None
) -> None:
    """Restore a checkpoint on any number of processes; its best weights, if there are any, go into `best`."""
    own_best = best or {}
    try:
        weights, states, averages = (load_file(folder / f"{n}.safetensors") for n in ("task", "optimizer", "ema"))
        best_weights = load_file(folder / "best.safetensors") if own_best else {}
    except (SafetensorError, OSError) as reason:
        raise UserError(f"cannot read the checkpoint {folder}: {one_line(reason)}") from None
    own = task.state_dict()
    pairs = ((own, weights), (ema.average, averages), (own_best, best_weights))
    if any(shapes(targets) != shapes(values) for targets, values in pairs):
        raise UserError(f"the checkpoint {folder} belongs to another model")
    with torch.no_grad():
        for targets, values in pairs:
            for name, target in targets.items():
                target.copy_(reshard(values[name], target))
    names = {id(weight): name for name, weight in task.named_parameters()}
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


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def digest(file: Path) -> str:
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
