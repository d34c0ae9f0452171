"""Messages of a run: before the first step, when its duration is known, when it is stopped, at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from allmlp import checkpoint
from allmlp.accuracy import wilson_interval
from allmlp.data.dataset import Dataset, Split
from allmlp.data.sampler import Sampler
from allmlp.device import has_amx, slow_format
from allmlp.errors import command, plural
from allmlp.log import format_duration, format_values
from allmlp.models.model import ModelSpec
from allmlp.models.zoo import short_name
from allmlp.optim import Muon
from allmlp.parallel import World
from allmlp.provenance import cpu_name
from allmlp.record import split_sizes
from allmlp.run import Run
from allmlp.threads import limit

LONG = 3600.0
"""Duration in seconds above which a warning is shown."""


def header(
    run: Run,
    out: Path,
    spec: ModelSpec,
    parameters: int,
    trained: int,
    new: Sequence[str],
    dataset: Dataset,
    sampler: Sampler,
    steps: int | None,
    world: World,
    dtype: torch.dtype,
) -> str:
    """Model, start, data, length, device and folder of a run, a line each. `new` are keys of weights that do not come
    from the start.
    """
    sizes = ", ".join(f"{count:,} {name}" for name, count in split_sizes(dataset).items())
    batches = " to ".join(f"{size:,}" for size in dict.fromkeys((sampler.batch_size(0), run.batch_size)))
    limit = run.budget.minutes
    minutes = plural(limit, "minute", form="g") if limit is not None else ""
    epochs = sampler.epoch(steps) if steps else 0.0
    count = f"{plural(steps, 'step')} ({plural(epochs, 'epoch', form=',.3g')})" if steps else ""
    part = "" if trained == parameters else f" ({trained:,} trained)"
    layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in new))
    place = getattr(run.data, "path", "") or getattr(run.data, "train", "") or type(run.data).__name__
    rows = {
        "model": f"{short_name(spec)}, {parameters:,} parameters{part}, {spec.input_spec}",
        "start": (run.init_from or f"random weights, seed {run.seed}") + (f", {layers} new" if layers else ""),
        "data": f"{place}: {sizes}",
        "training": f"{type(run.task).__name__}, {' or '.join(filter(None, [count, minutes]))}, batches of {batches}",
        "device": describe_device(world) + ("" if dtype == torch.float32 else f", {str(dtype).removeprefix('torch.')}"),
        "folder": str(out),
    }
    lines = [f"{label:9} {text}" for label, text in rows.items()]
    notes = [*dataset.notes]
    if run.compile and dtype == torch.float16 and world.device.type == "cuda":
        notes.append("in float16, where steps can be skipped, the step is compiled but not recorded as a CUDA graph")
    notes += filter(None, [slow_format(world.device, dtype)])
    return "\n".join([*lines, *(f"note      {note}" for note in notes)])


def describe_device(world: World) -> str:
    if world.device.type == "cuda":
        return f"{world.size} x {torch.cuda.get_device_name(world.device)}"
    if world.device.type != "cpu":
        return str(world.device)
    processes = f", {world.size} processes" if world.size > 1 else ""
    return f"CPU, {cpu_name()}, {plural(limit(), 'core')}{processes}"


def describe_duration(run: Run, world: World, left: float) -> str:
    """Remaining time of the run and, if it is long, settings that shorten it."""
    about = f"about {format_duration(left)} to go"
    if left < LONG:
        return about
    settings = ["--set budget.minutes=30, which fits the schedule into half an hour"]
    if world.device.type == "cpu":
        settings += ["--set precision=bfloat16, faster on this CPU"] if run.precision == "auto" and has_amx() else []
        settings += ["--set compile=false"] if run.compile else []
        settings += ["--set optim=AdamW, cheaper on a CPU"] if isinstance(run.optim, Muon) else []
        settings += ["--set freeze_fraction=1 to train the head only"] if run.init_from else []
    return f"warning: {about} on this device; quicker with a new --out and {'; '.join(settings)}"


def describe_stop(out: Path, step: int) -> str:
    """Message of a run stopped after `step` steps: what was kept, and how to resume."""
    kept = checkpoint.last_step(out)
    if kept is None:
        return f"stopped at step {step}, before the first checkpoint: nothing is kept"
    lost = f" the last checkpoint is of step {kept};" if kept < step else ""
    return f"stopped at step {step};{lost} resume with: {command('train', '--resume', out)}"


def describe_result(out: Path, result: dict[str, Any], floors: dict[str, float], dataset: Dataset) -> str:
    """Results of the saved model with their uncertainty, and its folder."""
    lines, is_classified = [], bool(getattr(dataset, "class_names", ()))
    for split in (name for name in ("validation", "test") if name in result):
        values = {name: value for name, value in result[split].items() if name not in floors}
        examples = getattr(dataset, split) or dataset.test  # held-out examples stand in for the test split
        lines.append(f"{split:10} {format_values(values)}  {describe_examples(values, examples, is_classified)}")
        simple = {name: result[split][name] for name in floors if name in result[split]}
        lines += [f"{'':10} {format_values(simple)}  without a model"] if simple else []
    best = f"the weights of step {result['best_step']}, " if "best_step" in result else ""
    steps = f"{plural(result['steps'], 'step')} in {format_duration(result['seconds'])}"
    return "\n".join([*lines, f"saved {best}after {steps}: {out}"])


def describe_examples(values: dict[str, float], split: Split, is_classified: bool) -> str:
    """Number of examples, and the 95 % interval of the accuracy of a classifier: over the first of several test files.
    Accuracies of other tasks are not those of independent examples, but of tokens.
    """
    accuracy = values.get("accuracy", math.nan)
    if not is_classified or math.isnan(accuracy):
        return f"({plural(len(split), 'example')})"
    part = getattr(getattr(split, "examples", None), "test_set", None)
    examples = len(split) if part is None else int((part == 0).sum())
    low, high = wilson_interval(round(accuracy * examples), examples)
    counted = plural(examples, "example")
    return f"({counted}: accuracy {low:.1%} to {high:.1%} with 95% confidence)"
