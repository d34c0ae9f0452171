"""The augmentations of the published recipes, and a strong one for CIFAR."""

from __future__ import annotations

from allmlp.data.augment.colour import ColourJitter, Normalise
from allmlp.data.augment.crops import MultiCrop
from allmlp.data.augment.erase import Cutout, Erasing
from allmlp.data.augment.geometry import AlternatingFlip, Filter, Flip, RandomResizedCrop, Translate
from allmlp.data.augment.mix import Mix
from allmlp.data.augment.policy import AutoAugment, RandAugment
from allmlp.data.augment.transform import Augment, Transform

Colours = tuple[float, ...]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

DEIT_MIX = Mix(mixup=0.8, cutmix=1.0, per_sample=False)
"""DeiT, ResMLP and gMLP: one draw per batch, as timm's default mode; `per_sample` mixes each picture its own way."""
MIXER_MIX = Mix(mixup=0.5, cutmix=0.0, per_sample=False, partner="rolled", dominant=True)
"""big_vision's mixup of Mixer on ImageNet-1k."""


def crop(image: int | tuple[int, int], filter: Filter = "bicubic", least: float = 0.08) -> RandomResizedCrop:
    size = (image, image) if isinstance(image, int) else image
    return RandomResizedCrop(scale=(least, 1.0), size=size, filter=filter)


def deit(image: int = 224, mean: Colours = IMAGENET_MEAN, std: Colours = IMAGENET_STD) -> Augment:
    """DeiT: RandAugment m9 and erasing 0.25. Its colour jitter is off, as timm has it beside RandAugment."""
    return Augment((crop(image), Flip(), RandAugment(), Normalise(mean, std), Erasing(0.25)))


def resmlp(image: int = 224, mean: Colours = IMAGENET_MEAN, std: Colours = IMAGENET_STD) -> Augment:
    """ResMLP as its author gave it (deit issue 106): DeiT's."""
    return deit(image, mean, std)


def mixer_i1k(image: int = 224) -> Augment:
    """Mixer in big_vision: Inception crop, flip, RandAugment of two operations at 15, values in [-1, 1].

    Its levels go beyond 10, and a higher one is not always stronger. An operation is applied with a probability drawn
    from U(0.2, 0.8), which is 0.5. Of its sixteen operations cutout is left out, as in timm.
    """
    policy = RandAugment(2, 15, std=0.0, increasing=False, ceiling=15)
    return Augment((crop(image, "bilinear", 0.05), Flip(), policy, Normalise()))


def gmlp(image: int = 224, mean: Colours = IMAGENET_MEAN, std: Colours = IMAGENET_STD) -> Augment:
    """gMLP: AutoAugment in place of RandAugment, no erasing."""
    return Augment((crop(image), Flip(), AutoAugment("imagenet"), Normalise(mean, std)))


def cifar(
    mean: Colours = CIFAR10_MEAN,
    std: Colours = CIFAR10_STD,
    pixels: int = 4,
    policy: Transform | None = RandAugment(),
    colour: float = 0.0,
    erasing: float = 0.25,
    cutout: int = 0,
    alternating: bool = False,
) -> Augment:
    """For 32-pixel pictures: shift with reflected border, flip, a policy, erasing or cutout.

    `alternating` needs a `Step` at each call. Long runs of small models want less: erasing 0, or a weaker policy.
    """
    transforms: list[Transform] = [Translate(pixels), AlternatingFlip() if alternating else Flip()]
    transforms += [policy] if policy else []
    transforms += [ColourJitter(colour, colour, colour, 0.0)] if colour else []
    transforms += [Normalise(mean, std)]
    transforms += [Erasing(erasing)] if erasing else []
    transforms += [Cutout(cutout)] if cutout else []
    return Augment(tuple(transforms))


def dino(
    image: int = 224, local: int = 96, views: int = 8, mean: Colours = IMAGENET_MEAN, std: Colours = IMAGENET_STD
) -> MultiCrop:
    """DINO's defaults; `local` is the size of its `views` small crops. Blur shrinks with the picture."""
    sigma = (0.1, 2.0 * image / 224)
    size, small = (image, image), (local, local)
    return MultiCrop(
        local=views, global_size=size, local_size=small, sigma=(min(sigma), max(sigma)), normalise=Normalise(mean, std)
    )
