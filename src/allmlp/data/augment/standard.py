"""The augmentations of the published recipes, and a strong one for CIFAR.

Each works on decoded pictures in [0, 1]: the random crop of a photograph is drawn where it is decoded
(`data.decode.scale`), and the task normalises afterwards.
"""

from __future__ import annotations

from allmlp.data.augment.crops import MultiCrop
from allmlp.data.augment.erase import Erasing
from allmlp.data.augment.geometry import Flip, Translate
from allmlp.data.augment.mix import Mix
from allmlp.data.augment.policy import AutoAugment, RandAugment
from allmlp.data.augment.transform import Augment

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

DEIT_MIX = Mix(mixup=0.8, cutmix=1.0, per_sample=False)
"""DeiT, ResMLP and gMLP: one draw per batch, as timm's default mode; `per_sample` mixes each picture its own way."""


def mixer_mix(amount: float = 0.5) -> Mix:
    """big_vision's mixup of Mixer."""
    return Mix(mixup=amount, cutmix=0.0, per_sample=False, partner="rolled", dominant=True)


def deit() -> Augment:
    """DeiT and ResMLP: RandAugment m9 and erasing 0.25. No colour jitter, as timm has it beside RandAugment."""
    return Augment((Flip(), RandAugment(), Erasing(0.25, mean=IMAGENET_MEAN, std=IMAGENET_STD)))


def mixer(magnitude: float = 15.0) -> Augment:
    """Mixer in big_vision: flip, and RandAugment of two operations at 15.

    Its levels go beyond 10, and a higher one is not always stronger. An operation is applied with a probability drawn
    from U(0.2, 0.8), which is 0.5. Of its sixteen operations cutout is left out, as in timm.
    """
    return Augment((Flip(), RandAugment(2, magnitude, std=0.0, increasing=False, ceiling=max(magnitude, 10.0))))


def gmlp() -> Augment:
    """gMLP: AutoAugment in place of RandAugment, no erasing."""
    return Augment((Flip(), AutoAugment("imagenet")))


def cifar() -> Augment:
    """For 32-pixel pictures: flip, shift with reflected border, RandAugment, erasing in black."""
    return Augment((Flip(), Translate(4), RandAugment(2, 9), Erasing(0.25, mode="mean")))


def dino(image: int = 224, local: int = 96, views: int = 8) -> MultiCrop:
    """DINO's defaults; `local` is the size of its `views` small crops. Blur shrinks with the picture."""
    sigma = (0.1, max(2.0 * image / 224, 0.1))
    return MultiCrop(local=views, global_size=(image, image), local_size=(local, local), sigma=sigma)
