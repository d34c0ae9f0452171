"""Image augmentation for whole batches, on the device of the images.

>>> augment = Augment((HorizontalFlip(), Translate(4), RandAugment()))
>>> images = augment(images, generator)
"""

from __future__ import annotations

from allmlp.data.augment.color import ColorJitter, GaussianBlur, Grayscale, Solarize
from allmlp.data.augment.erasing import RandomErasing
from allmlp.data.augment.geometry import HorizontalFlip, RandomAffine, RandomResizedCrop, Translate
from allmlp.data.augment.mixup import Mixup, one_hot
from allmlp.data.augment.multicrop import MultiCrop
from allmlp.data.augment.policy import AutoAugment, RandAugment
from allmlp.data.augment.transform import Augment, Transform, to_float

__all__ = [
    "Augment",
    "AutoAugment",
    "ColorJitter",
    "GaussianBlur",
    "Grayscale",
    "HorizontalFlip",
    "Mixup",
    "MultiCrop",
    "RandAugment",
    "RandomAffine",
    "RandomErasing",
    "RandomResizedCrop",
    "Solarize",
    "Transform",
    "Translate",
    "one_hot",
    "to_float",
]
