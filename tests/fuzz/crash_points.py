"""Kill a training run at every file operation, resume it, and compare it with the run that was not killed."""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from allmlp import training
from allmlp.recipes import runs
from allmlp.spec import override_all
from fuzz import sandbox

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate", "os.chmod")
STEPS = 6


def short_run() -> Any:
    changes = {"budget.steps": STEPS, "log_every": 1, "save_every": 2, "eval_every": 3, "model.depth": 1}
    return override_all(runs("digits_mixer")["digits_mixer"], changes)


def train_with_copies(out: Path, copies: Path) -> None:
    """Train into `out`, and before each file operation copy it: what a process killed there would leave behind."""
    count, is_copying = 0, False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, is_copying
        if event in OPERATIONS and arguments and str(out) in str(arguments[0]) and not is_copying:
            is_copying = True
            if out.exists():
                try:
                    shutil.copytree(out, copies / str(count) / out.name, symlinks=True)
                except OSError:  # another thread has renamed a file meanwhile; its own operation is a point too
                    shutil.rmtree(copies / str(count))
                    count -= 1
            else:
                (copies / str(count)).mkdir()
            count, is_copying = count + 1, False

    sys.addaudithook(hook)
    training.train(short_run(), out, "cpu")


def resume(out: Path) -> None:
    # Drawing would take two thirds of the time; it reads the records, which are compared.
    training.draw_curves = lambda out: []
    training.train(short_run(), out, "cpu")


def losses(out: Path) -> list[tuple[int, str, float]]:
    """Step, kind and loss of every record, without times."""
    records = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf8").splitlines())
    return [(record["step"], record["kind"], record["loss"]) for record in records]


def crash_points(root: Path, seed: int) -> Iterator[tuple[str, sandbox.Outcome, str]]:
    """Name, outcome and fault of each point of a run, in random order."""
    whole, copies = root / "whole" / "run", root / "copies"
    whole.parent.mkdir()
    copies.mkdir()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        training.train(short_run(), root / "first", "cpu")  # the children inherit what it imports
    copied = sandbox.run(partial(train_with_copies, whole, copies), whole.parent, seconds=120)
    yield "uninterrupted", copied, copied.fault
    expected, points = losses(whole), sorted(copies.iterdir())
    for folder in random.Random(seed).sample(points, len(points)):
        out = folder / whole.name
        resumed = sandbox.run(partial(resume, out), folder, seconds=120)
        fault = resumed.fault or ("" if losses(out) == expected else "the records differ from the uninterrupted run")
        fault = fault or ("" if (out / "model.safetensors").is_file() else "there is no model")
        yield f"operation {folder.name} of {len(points)}", resumed, fault
        shutil.rmtree(folder)
