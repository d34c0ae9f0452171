"""The model of a run before its first step: new, or from the trained model it starts from."""

from __future__ import annotations

from typing import NamedTuple

from allmlp.data.dataset import Dataset
from allmlp.errors import UserError
from allmlp.models.model import Model
from allmlp.models.zoo import create
from allmlp.parallel import World
from allmlp.plan.fits import check_run
from allmlp.run import Run
from allmlp.weights.start import Start, transfer


class InitialModel(NamedTuple):
    model: Model
    parameters: int
    """Their number without LoRA."""
    new: list[str]
    """Of a model that starts from another: keys of the weights that do not come from it."""


def initial_model(run: Run, start: Start | None, dataset: Dataset, world: World) -> InitialModel:
    if start is None and (run.lora or run.model is None):
        missing = "lora adapts a trained model" if run.lora else "the run has no model"
        raise UserError(f"{missing}: name the one to start from, --model FOLDER")
    spec = run.task.configure_model(run.model or start.spec_for(dataset), dataset)  # type: ignore[union-attr]
    check_run(run, spec, world.device, world.size)
    model = create(spec, seed=run.seed, device=world.device)
    parameters = sum(weight.numel() for weight in model.parameters())
    new: list[str] = []
    if start is not None:
        new = transfer(model, start, getattr(dataset, "class_names", ()))
        if run.lora:
            run.lora.apply(model, run.seed, new)
    elif run.stem_init:
        run.stem_init.initialize(model, dataset, run.seed)
    model.set_grad_checkpointing(run.grad_checkpointing)
    return InitialModel(model, parameters, new)
