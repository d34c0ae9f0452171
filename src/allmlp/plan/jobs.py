"""A job from a name: a preset with a given amount of data, or a recipe with its own settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from allmlp.errors import UserError, did_you_mean, lookup
from allmlp.models.zoo import family, list_models, preset, presets
from allmlp.optim import Adagrad, AdamW, Lamb, Muon, Optim, Sgd
from allmlp.plan.estimate import Job, modality
from allmlp.recipes import recipes, runs
from allmlp.recipes.imagenet import TRAIN_IMAGES
from allmlp.run import Run

OPTIMIZERS: dict[str, type[Optim]] = {"adamw": AdamW, "sgd": Sgd, "adagrad": Adagrad, "lamb": Lamb, "muon": Muon}
BATCH_SIZES = {"image": 4096, "text": 2048, "series": 64}
"""Batch sizes of the papers: MLP-Mixer and gMLP on ImageNet, gMLP's masked language models."""
TRAIN_EXAMPLES = {"Cifar10": 50_000, "Cifar100": 50_000}
"""Training examples of datasets of known size."""


def job(name: str, samples: float | None = None, epochs: float | None = None, **options: Any) -> Job:
    """Create a job. `options` are fields of `Job`; None stands for the recipe's value or the default."""
    given = {key: value for key, value in options.items() if value is not None}
    if isinstance(given.get("optim"), str):
        given["optim"] = lookup(given["optim"], OPTIMIZERS, "optimizer")()
    if name.partition("/")[0] in recipes():
        table = runs(name)
        if len(table) > 1:
            raise UserError(f"{name} contains several runs; choose one of {', '.join(table)}")
        return from_run(name, next(iter(table.values())), samples, epochs, given)
    if name not in presets() and not name.startswith("timm:"):
        if Path(name).exists():
            raise UserError(f"{name} is neither a model nor a recipe; losses of finished runs are read with --from")
        raise UserError(f"unknown model or recipe {name!r}{did_you_mean(name, [*list_models(), *recipes()])}")
    if samples is None:
        raise UserError(f"the size of the training set of {name} is unknown; pass --samples 300e6 --epochs 14")
    entry = preset(name)
    batch_size = given.pop("batch_size", BATCH_SIZES[modality(entry.spec)])
    epochs = 1.0 if epochs is None else epochs
    return Job(name, entry.spec, entry.family, float(samples), epochs, batch_size=batch_size, **given)


def from_run(name: str, run: Run, samples: float | None, epochs: float | None, given: dict[str, Any]) -> Job:
    if run.model is None:
        raise UserError(f"{name} has no model of its own; plan the model it starts from")
    if reason := "its model is frozen at first" if run.freeze_fraction else run.task.against_plan:
        raise UserError(f"the cost of {name} is not known: {reason}; plan counts a model, forward and backward")
    model, seq_len = run.model, getattr(run.data, "seq_len", None)
    if modality(model) == "text" and seq_len:
        model = model.configure(seq_len=seq_len)
    batch_size = given.pop("batch_size", run.batch_size)
    samples, epochs = data_of(run, samples, epochs)
    if samples is None or epochs is None:
        raise UserError(f"the size of the training set of {name} is unknown; pass --samples N --epochs E")
    of_recipe: dict[str, Any] = {
        "grad_accum_steps": run.grad_accum_steps,
        "optim": run.optim,
        "ema": bool(run.ema_decay),
        "precision": "float32" if run.precision == "float32" else "bfloat16",
        "compiled": run.compile,
    }
    return Job(name, model, family(model), float(samples), float(epochs), batch_size=batch_size, **(of_recipe | given))


def data_of(run: Run, samples: float | None, epochs: float | None) -> tuple[float | None, float | None]:
    """Training examples, and how often the run sees each of them; None if unknown. Given numbers take precedence."""
    examples = TRAIN_IMAGES.get(getattr(run.data, "path", "")) or TRAIN_EXAMPLES.get(type(run.data).__name__)
    if samples is None and examples is not None and not run.train_per_class:
        samples = run.train_fraction * (examples - run.val_size)
    if epochs is not None:
        return samples, epochs
    # A repeated example is one of an epoch, and computed several times.
    by_epochs = None if run.budget.epochs is None else run.budget.epochs * run.aug_repeats
    if run.budget.steps is None:
        return samples, by_epochs
    seen = run.examples(run.budget.steps)
    if samples is None:
        return (seen, 1.0) if by_epochs is None else (None, None)
    return samples, min(seen / samples, math.inf if by_epochs is None else by_epochs)
