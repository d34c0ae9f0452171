"""Kill a training run at every file operation, resume it, and compare it with the run that was not killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from allmlp.recipes import runs
from allmlp.spec import override_all
from allmlp.training import train
from fuzz import sandbox

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate", "os.chmod")
STEPS = 6


def short_run() -> Any:
    changes = {"budget.steps": STEPS, "log_every": 1, "save_every": 2, "eval_every": 3, "model.depth": 1}
    return override_all(runs("digits_mixer")["digits_mixer"], changes)


def train_until(out: Path, last: int | None) -> None:
    """Train into `out`; the process ends without warning at its file operation number `last`."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in OPERATIONS and arguments and str(out) in str(arguments[0]):
            if last is None:
                os.write(1, b".")
            elif count == last:
                os._exit(0)
            count += 1

    sys.addaudithook(hook)
    train(short_run(), out, "cpu")


def losses(out: Path) -> list[tuple[int, str, float]]:
    """Step, kind and loss of every record, without times."""
    records = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf8").splitlines())
    return [(record["step"], record["kind"], record["loss"]) for record in records]


def crash_points(root: Path, seed: int) -> Iterator[tuple[str, sandbox.Outcome, str]]:
    """Name, outcome and fault of each point of a run, in random order."""
    whole = root / "whole" / "run"
    whole.parent.mkdir()
    counted = sandbox.run(partial(train_until, whole, None), whole.parent, seconds=120)
    yield "uninterrupted", counted, counted.fault
    expected = losses(whole)
    count = counted.output.count(".")
    for point in random.Random(seed).sample(range(count), count):
        folder = root / f"point{point}"
        folder.mkdir()
        out = folder / "run"
        sandbox.run(partial(train_until, out, point), folder, seconds=120)
        resumed = sandbox.run(partial(train_until, out, -1), folder, seconds=120)
        fault = resumed.fault or ("" if losses(out) == expected else "the records differ from the uninterrupted run")
        fault = fault or ("" if (out / "model.safetensors").is_file() else "there is no model")
        yield f"operation {point} of {count}", resumed, fault
        shutil.rmtree(folder)
