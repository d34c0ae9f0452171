"""Image augmentation in one place: `Augment((Flip(), Translate(4), Normalise(mean, std))).apply(images, generator)`."""

from __future__ import annotations

from allmlp.data.augment.colour import (
    AutoContrast,
    Blur,
    ColourJitter,
    Equalise,
    Greyscale,
    Invert,
    Normalise,
    Posterise,
    Sharpness,
    Solarise,
    ThreeAugment,
)
from allmlp.data.augment.crops import MultiCrop
from allmlp.data.augment.erase import Cutout, Erasing
from allmlp.data.augment.geometry import AlternatingFlip, Flip, RandomResizedCrop, Translate, Warp
from allmlp.data.augment.mix import Mix, one_hot
from allmlp.data.augment.policy import AutoAugment, RandAugment
from allmlp.data.augment.transform import Augment, Step, Transform, floats

__all__ = [
    "AlternatingFlip",
    "Augment",
    "AutoAugment",
    "AutoContrast",
    "Blur",
    "ColourJitter",
    "Cutout",
    "Equalise",
    "Erasing",
    "Flip",
    "Greyscale",
    "Invert",
    "Mix",
    "MultiCrop",
    "Normalise",
    "Posterise",
    "RandAugment",
    "RandomResizedCrop",
    "Sharpness",
    "Solarise",
    "Step",
    "ThreeAugment",
    "Transform",
    "Translate",
    "Warp",
    "floats",
    "one_hot",
]
