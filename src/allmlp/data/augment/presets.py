"""Augmentations of the published recipes, and a strong one for CIFAR.

They expect decoded images in [0, 1]: random crops of photographs are taken when decoding (`data.decode.scale`), and the
task normalizes afterwards.
"""

from __future__ import annotations

from allmlp.data.augment.erasing import RandomErasing
from allmlp.data.augment.geometry import HorizontalFlip, Translate
from allmlp.data.augment.mixup import Mixup
from allmlp.data.augment.multicrop import MultiCrop
from allmlp.data.augment.policy import AutoAugment, RandAugment
from allmlp.data.augment.transform import Augment

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

DEIT_MIXUP = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, per_sample=False)
"""DeiT, ResMLP and gMLP: one draw per batch, timm's default mode."""


def mixer_mixup(alpha: float = 0.5) -> Mixup:
    """MLP-Mixer's mixup, as in big_vision."""
    return Mixup(mixup_alpha=alpha, cutmix_alpha=0.0, per_sample=False, partner="rolled", dominant=True)


def deit() -> Augment:
    """DeiT and ResMLP: RandAugment m9 and erasing 0.25. No color jitter, as timm disables it with RandAugment."""
    return Augment((HorizontalFlip(), RandAugment(), RandomErasing(0.25, mean=IMAGENET_MEAN, std=IMAGENET_STD)))


def mixer(magnitude: float = 15.0) -> Augment:
    """MLP-Mixer in big_vision: flip, and RandAugment with two operations at magnitude 15.

    Magnitudes above 10 are allowed, and a greater one is not always a stronger change. big_vision draws the probability
    of an operation from U(0.2, 0.8), which amounts to 0.5. Its sixteenth operation, cutout, is left out, as in timm.
    """
    policy = RandAugment(2, magnitude, magnitude_std=0.0, increasing=False, max_magnitude=max(magnitude, 10.0))
    return Augment((HorizontalFlip(), policy))


def gmlp() -> Augment:
    """gMLP: AutoAugment instead of RandAugment, no erasing."""
    return Augment((HorizontalFlip(), AutoAugment("imagenet")))


def cifar() -> Augment:
    """For 32 x 32 images: flip, translation with reflect padding, RandAugment, erasing with black."""
    return Augment((HorizontalFlip(), Translate(4), RandAugment(2, 9), RandomErasing(0.25, mode="mean")))


def dino(img_size: int = 224, local_size: int = 96, num_local: int = 8) -> MultiCrop:
    """DINO's defaults, with blur in proportion to the image size."""
    return MultiCrop(
        num_local=num_local,
        global_size=(img_size, img_size),
        local_size=(local_size, local_size),
        blur_sigma=(0.1, max(2.0 * img_size / 224, 0.1)),
    )
