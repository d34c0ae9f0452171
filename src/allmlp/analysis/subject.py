"""What is analysed: a model with its name, and pictures to show to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.filters import spread
from allmlp.data.decode import SUFFIXES, Decode
from allmlp.data.inputs import FILE, Inputs, read_inputs
from allmlp.data.pictures import read_pictures
from allmlp.data.source import Split
from allmlp.errors import UserError
from allmlp.models.encoder import Encoder
from allmlp.models.foreign import Foreign
from allmlp.models.model import Model, ModelSpec
from allmlp.models.zoo import create
from allmlp.tasks.task import Pixels
from allmlp.weights import folder
from allmlp.weights.pretrained import SHIPPED, shipped

WORK = 5e11
"""Multiply-adds that one part of a survey may cost where nobody asked for more: half a minute of a CPU core."""


class Pictures(NamedTuple):
    names: tuple[str, ...]
    pixels: Tensor
    """In [0, 1], at the size the model reads, b c h w."""
    labels: Tensor | None = None
    """int64, b; None where they are not known."""


@dataclass(frozen=True)
class Subject:
    name: str
    model: Model
    """In evaluation mode; its weights take no gradients."""
    trained: bool
    inputs: Inputs | None = None
    """How pictures become its input; None where it reads something else."""

    def class_name(self, label: int) -> str:
        classes = self.inputs.classes if self.inputs else ()
        return classes[label] if label < len(classes) else f"class {label}"

    def read(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] as the model reads them."""
        assert self.inputs is not None, "only a model that reads pictures is shown any"
        return Pixels(self.inputs.mean, self.inputs.std)(pixels)

    def files(self, files: Sequence[Path]) -> Pictures:
        """Picture files, cropped and resized as `allmlp predict` does."""
        size, inputs = self.model.spec.image_size, self.inputs
        if size is None or inputs is None:
            raise UserError(f"{self.name} reads {self.model.spec.reads}: it cannot be shown pictures")
        return Pictures(tuple(file.name for file in files), read_pictures(files, size, inputs).float() / 255)

    def split(self, split: Split, most: int) -> Pictures:
        """At most so many pictures of a dataset, evenly spread over it."""
        chosen = spread(len(split), most)
        images, labels = split.fetch(torch.tensor(chosen))
        unchanged = (0.0,) * images.shape[1], (1.0,) * images.shape[1]
        pixels = Pixels(*unchanged, self.model.spec.image_size)(images).clamp(0, 1)
        return Pictures(tuple(f"test {number}" for number in chosen), pixels, labels)


def arguments(things: Sequence[str]) -> tuple[str, list[Path]]:
    """What the command was given, as a model and pictures: without a model in front, the one that comes along."""
    names = list(things)
    alone = not names or Path(names[0]).is_file() or Path(names[0]).suffix.lower() in SUFFIXES
    model = SHIPPED if alone else names.pop(0)
    return model, [Path(name) for name in names]


def affordable(model: Model, most: int, least: int = 1, passes: int = 1) -> int:
    """How many pictures the model reads `passes` times in about WORK multiply-adds, within the two limits."""
    return max(least, min(most, int(WORK / (passes * max(model.describe().macs, 1)))))


def open_subject(name: str = SHIPPED) -> Subject:
    """The model in the folder `name`, the CIFAR-10 model that comes along, or a model of the zoo as it starts.

    A model of the zoo is drawn with seed 0: it has learnt nothing.
    """
    place = shipped() if name == SHIPPED else Path(name)
    if place.is_dir():
        model = folder.load(place).float()
        label = "cifar10" if name == SHIPPED else str(place)
        return Subject(label, model.requires_grad_(False), True, known_inputs(place, model.spec))
    if place.exists() or (":" not in name and {"/", "\\"} & set(name)):
        raise UserError(f"{name} is not a folder; name a model folder or a model of `allmlp list`")
    model = create(name, seed=0).eval().requires_grad_(False)
    return Subject(name, model, False, default_inputs(model.spec))


def known_inputs(place: Path, spec: ModelSpec) -> Inputs | None:
    found = read_inputs(place) if (place / FILE).is_file() else default_inputs(spec)
    return found if isinstance(found, Inputs) else None


def default_inputs(spec: ModelSpec) -> Inputs | None:
    """ImageNet's statistics, for a model that does not say how it was taught."""
    if isinstance(spec, Foreign):
        channels = spec.in_channels
    elif isinstance(spec, Encoder) and spec.image_size is not None:
        channels = spec.stem.in_channels  # type: ignore[attr-defined]
    else:
        return None
    if channels not in (1, 3):
        return None
    how = Decode(colour="rgb" if channels == 3 else "grey")
    return Inputs(*how.statistics(), crop=how.crop)
