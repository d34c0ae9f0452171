"""A trained model by name: a folder of ours, or what timm and transformers publish."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

import allmlp
from allmlp.data.inputs import Inputs, picture_inputs
from allmlp.errors import UserError
from allmlp.models.foreign import Foreign
from allmlp.models.model import Model
from allmlp.models.zoo import preset
from allmlp.weights import folder


class Pretrained(NamedTuple):
    model: Model
    inputs: Inputs


SHIPPED = "allmlp:cifar10"


def shipped() -> Path:
    """The model that comes along: a gMLP that knows CIFAR-10's ten classes."""
    package = Path(allmlp.__file__).parent
    for place in (package / "weights" / "cifar10", package.parent.parent / "weights" / "cifar10"):
        if (place / "config.json").is_file():
            return place
    raise UserError("this installation came without the CIFAR-10 model; name a model folder instead")


def pretrained(name: str, device: str | torch.device = "cpu") -> Pretrained:
    """The model in the folder `name`, the one that comes along (`allmlp:cifar10`), or the published weights of
    `timm:NAME` or `hf:NAME`; in evaluation mode.
    """
    place = shipped() if name == SHIPPED else Path(name)
    if place.is_dir():
        return Pretrained(folder.load(place, device).float(), picture_inputs(place))
    if ":" not in name:
        raise UserError(f"{name} is not a folder; name a trained model's folder, {SHIPPED}, timm:NAME or hf:NAME")
    spec = preset(name).spec
    if not isinstance(spec, Foreign):
        raise UserError(f"{name} is not an image classifier")
    trained = spec.pretrained()
    return Pretrained(trained.model.to(device).eval(), Inputs(trained.mean, trained.std, crop=trained.crop))
