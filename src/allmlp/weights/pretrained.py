"""A trained model by name: a folder, published weights, a model on the hub, or what timm and transformers publish."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import allmlp
from allmlp.data.inputs import FILE, Inputs, TextInputs, picture_inputs, read_inputs
from allmlp.errors import UserError
from allmlp.models.foreign import Foreign
from allmlp.models.grid import Rule, any_size
from allmlp.models.model import Model
from allmlp.models.timm import PREFIX
from allmlp.models.zoo import preset
from allmlp.weights import folder
from allmlp.weights.convert import build, is_ours, open_place, published
from allmlp.weights.fetch import HUB, locate
from allmlp.weights.published import checkpoints
from allmlp.weights.resize import resized


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


def pretrained(
    name: str, device: str | torch.device = "cpu", *, image: int | tuple[int, int] | None = None, dynamic: bool = False
) -> Pretrained:
    """An image classifier in evaluation mode: in the folder `name`, the one that comes along (`allmlp:cifar10`), a name
    of `allmlp list weights`, `hf:ORGANISATION/NAME` on the hub, or a network of `timm:NAME` or `hf:NAME` as its package
    has it. One of ours can be had for another `image` size, or for any (`dynamic`).
    """
    place = shipped() if name == SHIPPED else Path(name)
    if place.is_dir() or name in checkpoints() or (name.startswith(HUB) and "/" in name):
        model, inputs = open_model(str(place), device, image=image, dynamic=dynamic)
        return Pretrained(model.float(), inputs if isinstance(inputs, Inputs) else picture_inputs(place))
    if ":" not in name:
        raise UserError(f"{name} is not a folder; name a trained model's folder, {SHIPPED}, timm:NAME or hf:NAME")
    spec = preset(name).spec
    if not isinstance(spec, Foreign):
        raise UserError(f"{name} is not an image classifier")
    if image is not None or dynamic:
        raise UserError(f"only models of this library can be resized: first allmlp convert {name} FOLDER")
    trained = spec.pretrained()
    return Pretrained(trained.model.to(device).eval(), Inputs(trained.mean, trained.std, crop=trained.crop))


def from_pretrained(
    name: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    image: int | tuple[int, int] | None = None,
    length: int | None = None,
    rule: Rule | None = None,
    dynamic: bool = False,
    overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Model:
    """A trained model, in evaluation mode.

    `name` is a model folder, a weights file or folder of another library, a name of `allmlp list weights`, `timm:NAME`,
    or a model on the Hugging Face hub (`ORGANISATION/NAME`), for which the last five options are meant. With another
    `image` size or `length` of text its weights are resized as in `allmlp.load`. `overrides` say what the weights of
    another library do not: {"block.token.heads": 4}.
    """
    hub = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "force_download": force_download,
    }
    return open_model(os.fspath(name), device, image, length, rule, dynamic, overrides, **hub)[0]


def open_model(
    name: str,
    device: str | torch.device = "cpu",
    image: int | tuple[int, int] | None = None,
    length: int | None = None,
    rule: Rule | None = None,
    dynamic: bool = False,
    overrides: Mapping[str, Any] | None = None,
    **hub: Any,
) -> tuple[Model, Inputs | TextInputs | None]:
    """The model that `name` stands for, and how its inputs are prepared where that is known."""
    place = None if name.startswith(PREFIX) else locate(name, **hub)
    if place is not None and is_ours(place.path):
        model = folder.load(place.path, device, image=image, length=length, rule=rule, dynamic=dynamic)
        return model, read_inputs(place.path) if (place.path / FILE).is_file() else None
    found = published(name) if place is None else open_place(place.path, overrides)
    model = build(found, device)
    if image is not None or length is not None:
        model = resized(model, image, length, rule)
    known = place.inputs if place is not None else None
    return any_size(model, rule or "interpolate") if dynamic else model, known or found.inputs
