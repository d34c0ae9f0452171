"""A job from a name: a model of the zoo with numbers of one's own, or a recipe with its paper's."""

from __future__ import annotations

from typing import Any

from allmlp.errors import UserError, did_you_mean, lookup
from allmlp.models.model import ModelSpec
from allmlp.models.zoo import list_models, preset, presets
from allmlp.optim import Adagrad, AdamW, Lamb, Muon, Optim, Sgd
from allmlp.plan.forecast import Job, reads
from allmlp.recipes import recipes, runs
from allmlp.recipes.imagenet import PICTURES
from allmlp.run import Run

OPTIMS: dict[str, type[Optim]] = {"adamw": AdamW, "sgd": Sgd, "adagrad": Adagrad, "lamb": Lamb, "muon": Muon}
BATCH = {"image": 4096, "text": 2048}
"""The papers': MLP-Mixer and gMLP on ImageNet, gMLP's masked language models."""


def job(name: str, samples: float | None = None, epochs: float | None = None, **options: Any) -> Job:
    """`options` are fields of `Job`; those that are None are left to the recipe, or to their defaults."""
    given = {key: value for key, value in options.items() if value is not None}
    if isinstance(given.get("optim"), str):
        given["optim"] = lookup(given["optim"], OPTIMS, "optimiser")()
    if name.partition("/")[0] in recipes():
        found = runs(name)
        if len(found) > 1:
            raise UserError(f"{name} is a table of runs: name one of {', '.join(found)}")
        return from_run(name, next(iter(found.values())), samples, epochs, given)
    if name not in presets() and not name.startswith("timm:"):
        raise UserError(f"unknown model or recipe {name!r}{did_you_mean(name, [*list_models(), *recipes()])}")
    if samples is None:
        raise UserError(f"say how much {name} is to read: --samples 300e6 --epochs 14")
    entry = preset(name)
    batch = given.pop("batch", BATCH[reads(entry.spec)])
    return Job(name, entry.spec, entry.family, float(samples), epochs or 1.0, batch=batch, **given)


def from_run(name: str, run: Run, samples: float | None, epochs: float | None, given: dict[str, Any]) -> Job:
    if run.model is None:
        raise UserError(f"{name} has no model of its own: plan the model it starts from")
    model, length = run.model, getattr(run.data, "length", None)
    if reads(model) == "text" and length:
        model = model.configure(length=length)
    batch = given.pop("batch", run.batch)
    if samples is None and epochs is None and run.budget.steps is not None:
        samples, epochs = run.budget.steps * run.batch, 1.0
    samples = samples if samples is not None else PICTURES.get(getattr(run.data, "path", ""))
    epochs = epochs if epochs is not None else run.budget.epochs
    if samples is None or epochs is None:
        raise UserError(f"the data of {name} are not counted here: say --samples N --epochs E")
    precision = "float32" if run.precision == "float32" else "bfloat16"
    own: dict[str, Any] = {"passes": run.accumulate, "optim": run.optim, "ema": bool(run.ema)}
    own |= {"precision": precision, "compiled": run.compile}
    return Job(name, model, family(model), float(samples), float(epochs), batch=batch, **(own | given))


def family(model: ModelSpec) -> str:
    """By what mixes its tokens."""
    kinds = {type(spec).__name__ for spec in model.children()}
    for mark, name in (
        ("TinyAttention", "aMLP"),
        ("SpatialGate", "gMLP"),
        ("TokenLinear", "ResMLP"),
        ("TokenMlp", "Mixer"),
    ):
        if mark in kinds:
            return name
    return "ViT" if "Patches" in kinds else "BERT"
