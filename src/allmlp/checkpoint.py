"""Checkpoints: a folder per step with safetensors and checksums, complete or not there at all.

Tensors are written whole, whatever the number of processes and however they share them, so that any other
number can read them.
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
    average: list[Tensor],
    state: dict[str, Any],
    keep: int,
) -> None:
    """Write step `state["step"]`; all processes take part, the first one writes.

    Files go to a hidden folder that is renamed when everything is on disk: a process that dies in between
    leaves the older checkpoints as they were.
    """
    tensors = {
        "task": whole(task.state_dict()),
        "optimizer": whole(moments(task, optimizer)),
        "average": whole({str(number): weight for number, weight in enumerate(average)}),
    }
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


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors gathered from all processes, on the CPU."""
    gathered = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in gathered.items()}


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """A whole tensor shared out as `part` is."""
    if isinstance(part, DTensor) and tensor.shape == part.shape:
        return distribute_tensor(tensor.to(part.device), part.device_mesh, part.placements)
    return tensor


def moments(task: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by the names of the parameters."""
    names = {id(weight): name for name, weight in task.named_parameters()}
    return {f"{names[id(w)]}/{key}": value for w, state in optimizer.state.items() for key, value in state.items()}


def complete(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((out / FOLDER).glob("step-*"))


def newest(out: Path) -> tuple[Path, dict[str, Any]] | None:
    """The last checkpoint whose files are what was written, and its state."""
    for folder in reversed(complete(out)):
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf8"))
            if all(digest(folder / name) == expected for name, expected in state["sha256"].items()):
                return folder, state
        except (OSError, ValueError, KeyError):
            continue
    return None


def resumed(out: Path, world: World) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint to go on from. Damaged ones are put aside: they would count as kept ones."""
    found = newest(out)
    damaged = [folder for folder in complete(out) if found is None or folder > found[0]]
    if damaged and found is None:
        raise UserError(f"every checkpoint of {out} is damaged; remove {out / FOLDER} to start again from step 0")
    for folder in damaged if world.is_main else []:
        aside = folder.with_name(f"damaged-{folder.name}")
        log.warning("%s is damaged: put aside as %s", folder, aside.name)
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    return found


def load(folder: Path, task: nn.Module, optimizer: Optimizer, average: list[Tensor]) -> None:
    """Put a checkpoint back, into any number of processes."""
    try:
        weights, states, averages = (load_file(folder / f"{n}.safetensors") for n in ("task", "optimizer", "average"))
    except (SafetensorError, OSError) as reason:
        raise UserError(f"cannot read the checkpoint {folder}: {one_line(reason)}") from None
    own = task.state_dict()
    if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in weights.items()} or len(averages) != len(
        average
    ):
        raise UserError(f"the checkpoint {folder} belongs to another model")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(like(weights[name], value))
        for number, value in enumerate(average):
            value.copy_(like(averages[str(number)], value))
    names = {id(weight): name for name, weight in task.named_parameters()}
    record = optimizer.state_dict()
    ordered = [weight for group in optimizer.param_groups for weight in group["params"]]
    record["state"] = {
        number: {
            key.rpartition("/")[2]: like(value, weight)
            for key, value in states.items()
            if key.rpartition("/")[0] == names[id(weight)]
        }
        for number, weight in enumerate(ordered)
    }
    # torch puts every number where the parameter is, and as its own state would be.
    optimizer.load_state_dict(record)


def digest(file: Path) -> str:
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
