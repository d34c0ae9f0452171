"""RandAugment and AutoAugment: randomly chosen operations, every picture its own.

A layer of either applies one operation of fifteen to each picture. Instead of fifteen results of which one is kept,
a layer computes three for the batch: all maps of a byte to a byte become one table per picture, looked up once;
colour and sharpness are one blend; rotation, shears and shifts are one affine map.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from allmlp.data.augment.colour import (
    autocontrast_table,
    bytes_of,
    equalise_table,
    grey,
    look_up,
    posterise_table,
    ramp,
    smooth,
)
from allmlp.data.augment.geometry import affine, warp
from allmlp.data.augment.transform import Step, Transform, choose, integer, normal, table, wide
from allmlp.spec import Count, NonNegative, Rate

OPERATIONS = (
    "autocontrast",
    "equalise",
    "invert",
    "posterise",
    "solarise",
    "solarise_add",
    "brightness",
    "contrast",
    "colour",
    "sharpness",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
"""First the maps of bytes, then the blends, then the geometry. Chosen uniformly, so their order does not matter."""
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
NONE = -1
GREY = 128 / 255

# --- from a level between 0 and 10 to what an operation takes -------------------------------------------

Arguments = tuple[tuple[float, ...], ...]
ROW = tuple[float, float, float, float, float, float]


def rows(enhance: ROW, posterise: ROW, solarise: ROW, translate: float) -> Arguments:
    """Per operation: scale, offset, direction (0: random sign), whether scale * level is cut to a whole, and bounds."""
    none = (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    special = {
        "posterise": posterise,
        "solarise": solarise,
        "solarise_add": (11.0, 0.0, 1.0, 1.0, 0.0, 128.0),
        "rotate": (3.0, 0.0, 0.0, 0.0, -360.0, 360.0),
        "shear_x": (0.03, 0.0, 0.0, 0.0, -9.0, 9.0),
        "shear_y": (0.03, 0.0, 0.0, 0.0, -9.0, 9.0),
        "translate_x": (translate, 0.0, 0.0, 0.0, -9.0, 9.0),
        "translate_y": (translate, 0.0, 0.0, 0.0, -9.0, 9.0),
    } | dict.fromkeys(("brightness", "contrast", "colour", "sharpness"), enhance)
    return tuple(special.get(name, none) for name in OPERATIONS)


PLAIN_ENHANCE = (0.18, 0.1, 1.0, 0.0, 0.0, 9.0)
PLAIN_SOLARISE = (25.6, 0.0, 1.0, 1.0, 0.0, 256.0)
RISING_POSTERISE = (0.4, 4.0, -1.0, 1.0, 0.0, 8.0)
RISING_SOLARISE = (25.6, 256.0, -1.0, 1.0, 0.0, 256.0)
RISING = rows((0.09, 1.0, 0.0, 0.0, 0.1, 9.0), RISING_POSTERISE, RISING_SOLARISE, 0.045)
PLAIN = rows(PLAIN_ENHANCE, (0.4, 0.0, 1.0, 1.0, 0.0, 8.0), PLAIN_SOLARISE, 0.045)
IMAGENET = rows(PLAIN_ENHANCE, (0.4, 4.0, 1.0, 1.0, 0.0, 8.0), PLAIN_SOLARISE, 0.045)
CIFAR = rows(PLAIN_ENHANCE, RISING_POSTERISE, RISING_SOLARISE, 1 / 32)


def arguments(operation: Tensor, level: Tensor, sign: Tensor, meaning: Arguments) -> Tensor:
    """What each picture's operation takes: bits, a threshold, a factor, degrees or a share of the side. All b."""
    scale, offset, direction, whole, low, high = table(meaning, level.device)[operation].unbind(1)
    # The small number keeps 0.3 * 110 a 33 in single precision.
    amount = torch.where(whole > 0, torch.floor(scale * level + 1e-4), scale * level)
    direction = torch.where(direction == 0, torch.where(sign < 0.5, -1.0, 1.0), direction)
    return (offset + direction * amount).clamp(low, high)


# --- one operation per picture ----------------------------------------------------------------------------


def operate(images: Tensor, operation: Tensor, argument: Tensor, fill: float = GREY) -> Tensor:
    """Each picture after its operation (b, NONE for nothing) with its argument (b). Each step leaves the rest alone."""
    images = remap(images, operation, argument)
    images = recolour(images, operation, argument)
    return move(images, operation, argument, fill)


def remap(images: Tensor, operation: Tensor, argument: Tensor) -> Tensor:
    levels = bytes_of(images)
    byte, amount = ramp(images), argument[:, None, None]
    middle = torch.floor(grey(images.float()).mean((2, 3))[:, :, None] * 255 + 0.5)
    values = autocontrast_table(levels)  # b c 256
    for name, other in (
        ("equalise", equalise_table(levels)),
        ("invert", 255 - byte),
        ("posterise", posterise_table(levels, argument)),
        ("solarise", torch.where(byte < amount, byte, 255 - byte)),
        ("solarise_add", torch.where(byte < 128, byte + amount, byte)),
        ("brightness", byte * amount),
        ("contrast", middle + amount * (byte - middle)),
    ):
        values = torch.where((operation == NUMBER[name])[:, None, None], other, values)
    changed = look_up(values.clamp(0, 255).floor(), levels, images)
    return choose((operation >= 0) & (operation <= NUMBER["contrast"]), changed, images)


def recolour(images: Tensor, operation: Tensor, argument: Tensor) -> Tensor:
    colour, sharpness = (operation == NUMBER[name] for name in ("colour", "sharpness"))
    fade = wide(torch.where(colour, 1 - argument, 0.0)).to(images.dtype)
    soften = wide(torch.where(sharpness, 1 - argument, 0.0)).to(images.dtype)
    result = images * (1 - fade - soften) + fade * grey(images) + soften * smooth(images)
    return result.clamp(0, 1)


def move(images: Tensor, operation: Tensor, argument: Tensor, fill: float) -> Tensor:
    height, width = images.shape[2:]
    amount = {name: torch.where(operation == NUMBER[name], argument, 0.0) for name in OPERATIONS[NUMBER["rotate"] :]}
    angle = torch.deg2rad(amount["rotate"])
    cosine, sine = torch.cos(angle), torch.sin(angle)
    # Rotation is about the centre; shears start at the upper left corner, as in Pillow and thus in the papers' code.
    matrix = affine(
        cosine,
        amount["shear_x"] - sine,
        amount["translate_x"] * width + (width - cosine * width + sine * height) / 2,
        amount["shear_y"] + sine,
        cosine,
        amount["translate_y"] * height + (height - sine * width - cosine * height) / 2,
    )
    return choose(operation >= NUMBER["rotate"], warp(images, matrix, outside=fill), images)


# --- transforms -------------------------------------------------------------------------------------------


class RandAugment(Transform):
    """`ops` operations of fifteen, each applied with probability p at about one level.

    level ~ N(magnitude, std), kept between 0 and `ceiling`. With `increasing` a higher level is always a stronger
    change. The defaults are timm's "rand-m9-mstd0.5-inc1", except that sampling is always bilinear.
    Source: Cubuk et al., RandAugment, 2019.
    """

    ops: Count = 2
    magnitude: NonNegative = 9.0
    std: NonNegative = 0.5
    increasing: bool = True
    p: Rate = 0.5
    ceiling: NonNegative = 10.0
    fill: Rate = GREY

    def numbers(self) -> int:
        return 4 * self.ops

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        for layer in draws.split(4, dim=1):
            which, applied, level, sign = layer.unbind(1)
            operation = integer(which, len(OPERATIONS)).long()
            level = (self.magnitude + self.std * normal(level)).clamp(0, self.ceiling)
            argument = arguments(operation, level, sign, RISING if self.increasing else PLAIN)
            images = operate(images, torch.where(applied < self.p, operation, NONE), argument, self.fill)
        return images


class AutoAugment(Transform):
    """One of 25 pairs of operations found by search, each operation with its own probability and level.

    "imagenet" as timm's "original" policy, "cifar10" with the levels of the authors' CIFAR code.
    Source: Cubuk et al., AutoAugment, 2018, appendix.
    """

    policy: Literal["imagenet", "cifar10"] = "imagenet"
    fill: Rate = GREY

    def numbers(self) -> int:
        return 5

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        pairs = table(POLICIES[self.policy], images.device)  # 25 2 3
        pair = pairs[integer(draws[:, 0], len(pairs)).long()]
        for chosen, layer in zip(pair.unbind(1), draws[:, 1:].split(2, dim=1)):
            operation, probability, level = chosen.unbind(1)
            operation = operation.long()
            argument = arguments(operation, level, layer[:, 1], IMAGENET if self.policy == "imagenet" else CIFAR)
            images = operate(images, torch.where(layer[:, 0] < probability, operation, NONE), argument, self.fill)
        return images


def pairs(text: str) -> tuple[tuple[tuple[float, float, float], ...], ...]:
    """Read lines of "operation probability level operation probability level"."""

    def triple(name: str, probability: str, level: str) -> tuple[float, float, float]:
        return float(NUMBER[name]), float(probability), float(level)

    return tuple((triple(*line.split()[:3]), triple(*line.split()[3:])) for line in text.strip().splitlines())


POLICIES = {
    "imagenet": pairs("""
        posterise 0.4 8 rotate 0.6 9
        solarise 0.6 5 autocontrast 0.6 5
        equalise 0.8 8 equalise 0.6 3
        posterise 0.6 7 posterise 0.6 6
        equalise 0.4 7 solarise 0.2 4
        equalise 0.4 4 rotate 0.8 8
        solarise 0.6 3 equalise 0.6 7
        posterise 0.8 5 equalise 1.0 2
        rotate 0.2 3 solarise 0.6 8
        equalise 0.6 8 posterise 0.4 6
        rotate 0.8 8 colour 0.4 0
        rotate 0.4 9 equalise 0.6 2
        equalise 0.0 7 equalise 0.8 8
        invert 0.6 4 equalise 1.0 8
        colour 0.6 4 contrast 1.0 8
        rotate 0.8 8 colour 1.0 2
        colour 0.8 8 solarise 0.8 7
        sharpness 0.4 7 invert 0.6 8
        shear_x 0.6 5 equalise 1.0 9
        colour 0.4 0 equalise 0.6 3
        equalise 0.4 7 solarise 0.2 4
        solarise 0.6 5 autocontrast 0.6 5
        invert 0.6 4 equalise 1.0 8
        colour 0.6 4 contrast 1.0 8
        equalise 0.8 8 equalise 0.6 3
    """),
    "cifar10": pairs("""
        invert 0.1 7 contrast 0.2 6
        rotate 0.7 2 translate_x 0.3 9
        sharpness 0.8 1 sharpness 0.9 3
        shear_y 0.5 8 translate_y 0.7 9
        autocontrast 0.5 8 equalise 0.9 2
        shear_y 0.2 7 posterise 0.3 7
        colour 0.4 3 brightness 0.6 7
        sharpness 0.3 9 brightness 0.7 9
        equalise 0.6 5 equalise 0.5 1
        contrast 0.6 7 sharpness 0.6 5
        colour 0.7 7 translate_x 0.5 8
        equalise 0.3 7 autocontrast 0.4 8
        translate_y 0.4 3 sharpness 0.2 6
        brightness 0.9 6 colour 0.2 8
        solarise 0.5 2 invert 0.0 3
        equalise 0.2 0 autocontrast 0.6 0
        equalise 0.2 8 equalise 0.6 4
        colour 0.9 9 equalise 0.6 6
        autocontrast 0.8 4 solarise 0.2 8
        brightness 0.1 3 colour 0.7 0
        solarise 0.4 5 autocontrast 0.9 3
        translate_y 0.9 9 translate_y 0.7 9
        autocontrast 0.9 2 solarise 0.8 3
        equalise 0.8 8 invert 0.1 3
        translate_y 0.7 9 autocontrast 0.9 1
    """),
}
