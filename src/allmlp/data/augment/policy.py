"""RandAugment and AutoAugment: randomly chosen operations, different for every image.

Each layer applies one of fifteen operations to each image. Instead of computing all fifteen for the batch and keeping
one, a layer computes three: all byte-to-byte maps are one lookup table per image, color and sharpness are one blend,
rotation, shears and translations are one affine map.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from allmlp.data.augment.color import (
    all_levels,
    apply_tables,
    autocontrast_table,
    equalize_table,
    gray,
    posterize_table,
    smooth,
    to_levels,
)
from allmlp.data.augment.geometry import affine, warp
from allmlp.data.augment.transform import Transform, constant, per_image, standard_normal, uniform_integer, where
from allmlp.spec import Count, NonNegative, Rate

OPERATIONS = (
    *("autocontrast", "equalize", "invert", "posterize", "solarize", "solarize_add", "brightness", "contrast"),
    *("color", "sharpness"),
    *("rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
)
"""Lookup tables first, then blends, then geometry; they are chosen uniformly."""
INDEX = {name: number for number, name in enumerate(OPERATIONS)}
NONE = -1
GRAY = 128 / 255

# --- magnitudes from 0 to 10 to arguments of the operations ----------------------------------------------

ArgumentTable = tuple[tuple[float, ...], ...]
ArgumentRow = tuple[float, float, float, float, float, float]


def argument_table(
    enhance: ArgumentRow, posterize: ArgumentRow, solarize: ArgumentRow, translate: float
) -> ArgumentTable:
    """Per operation: scale, offset, direction (0: random sign), whether scale * level is truncated, bounds."""
    none = (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    special = {
        "posterize": posterize,
        "solarize": solarize,
        "solarize_add": (11.0, 0.0, 1.0, 1.0, 0.0, 128.0),
        "rotate": (3.0, 0.0, 0.0, 0.0, -360.0, 360.0),
        "shear_x": (0.03, 0.0, 0.0, 0.0, -9.0, 9.0),
        "shear_y": (0.03, 0.0, 0.0, 0.0, -9.0, 9.0),
        "translate_x": (translate, 0.0, 0.0, 0.0, -9.0, 9.0),
        "translate_y": (translate, 0.0, 0.0, 0.0, -9.0, 9.0),
    } | dict.fromkeys(("brightness", "contrast", "color", "sharpness"), enhance)
    return tuple(special.get(name, none) for name in OPERATIONS)


PLAIN_ENHANCE = (0.18, 0.1, 1.0, 0.0, 0.0, 9.0)
PLAIN_SOLARIZE = (25.6, 0.0, 1.0, 1.0, 0.0, 256.0)
INCREASING_POSTERIZE = (0.4, 4.0, -1.0, 1.0, 0.0, 8.0)
INCREASING_SOLARIZE = (25.6, 256.0, -1.0, 1.0, 0.0, 256.0)
INCREASING = argument_table((0.09, 1.0, 0.0, 0.0, 0.1, 9.0), INCREASING_POSTERIZE, INCREASING_SOLARIZE, 0.045)
PLAIN = argument_table(PLAIN_ENHANCE, (0.4, 0.0, 1.0, 1.0, 0.0, 8.0), PLAIN_SOLARIZE, 0.045)
IMAGENET = argument_table(PLAIN_ENHANCE, (0.4, 4.0, 1.0, 1.0, 0.0, 8.0), PLAIN_SOLARIZE, 0.045)
CIFAR = argument_table(PLAIN_ENHANCE, INCREASING_POSTERIZE, INCREASING_SOLARIZE, 1 / 32)


def arguments(operation: Tensor, level: Tensor, sign: Tensor, ranges: ArgumentTable) -> Tensor:
    """Argument of each image's operation: bits, threshold, factor, degrees or fraction of the side. All b."""
    scale, offset, direction, truncate, low, high = constant(ranges, level.device)[operation].unbind(1)
    # The epsilon keeps 0.3 * 110 at 33 in single precision.
    amount = torch.where(truncate > 0, torch.floor(scale * level + 1e-4), scale * level)
    direction = torch.where(direction == 0, torch.where(sign < 0.5, -1.0, 1.0), direction)
    return (offset + direction * amount).clamp(low, high)


# --- one operation per image -------------------------------------------------------------------------------


def apply_operations(images: Tensor, operation: Tensor, argument: Tensor, fill: float = GRAY) -> Tensor:
    """Apply to each image its operation (b, NONE for nothing) with its argument (b)."""
    images = apply_lookup(images, operation, argument)
    images = apply_blend(images, operation, argument)
    return apply_affine(images, operation, argument, fill)


def apply_lookup(images: Tensor, operation: Tensor, argument: Tensor) -> Tensor:
    levels = to_levels(images)
    byte, amount = all_levels(images), argument[:, None, None]
    middle = torch.floor(gray(images.float()).mean((2, 3))[:, :, None] * 255 + 0.5)
    values = autocontrast_table(levels)  # b c 256
    for name, other in (
        ("equalize", equalize_table(levels)),
        ("invert", 255 - byte),
        ("posterize", posterize_table(levels, argument)),
        ("solarize", torch.where(byte < amount, byte, 255 - byte)),
        ("solarize_add", torch.where(byte < 128, byte + amount, byte)),
        ("brightness", byte * amount),
        ("contrast", middle + amount * (byte - middle)),
    ):
        values = torch.where((operation == INDEX[name])[:, None, None], other, values)
    changed = apply_tables(values.clamp(0, 255).floor(), levels, images)
    return where((operation >= 0) & (operation <= INDEX["contrast"]), changed, images)


def apply_blend(images: Tensor, operation: Tensor, argument: Tensor) -> Tensor:
    color, sharpness = (operation == INDEX[name] for name in ("color", "sharpness"))
    fade = per_image(torch.where(color, 1 - argument, 0.0)).to(images.dtype)
    soften = per_image(torch.where(sharpness, 1 - argument, 0.0)).to(images.dtype)
    result = images * (1 - fade - soften) + fade * gray(images) + soften * smooth(images)
    return result.clamp(0, 1)


def apply_affine(images: Tensor, operation: Tensor, argument: Tensor, fill: float) -> Tensor:
    height, width = images.shape[2:]
    amount = {name: torch.where(operation == INDEX[name], argument, 0.0) for name in OPERATIONS[INDEX["rotate"] :]}
    angle = torch.deg2rad(amount["rotate"])
    cosine, sine = torch.cos(angle), torch.sin(angle)
    # Rotation is about the center, shears start at the upper left corner, as in Pillow and so in the papers' code.
    matrix = affine(
        cosine,
        amount["shear_x"] - sine,
        amount["translate_x"] * width + (width - cosine * width + sine * height) / 2,
        amount["shear_y"] + sine,
        cosine,
        amount["translate_y"] * height + (height - sine * width - cosine * height) / 2,
    )
    return where(operation >= INDEX["rotate"], warp(images, matrix, fill=fill), images)


# --- transforms -------------------------------------------------------------------------------------------


class RandAugment(Transform):
    """`num_ops` random operations of fifteen, each applied with probability p.

    The level of an operation is N(magnitude, magnitude_std), clipped to [0, max_magnitude]. With `increasing` a greater
    level is always a stronger change. The defaults are timm's "rand-m9-mstd0.5-inc1", except that interpolation is
    always bilinear. Source: Cubuk et al., RandAugment, 2019.
    """

    num_ops: Count = 2
    magnitude: NonNegative = 9.0
    magnitude_std: NonNegative = 0.5
    increasing: bool = True
    p: Rate = 0.5
    max_magnitude: NonNegative = 10.0
    fill: Rate = GRAY

    def num_uniforms(self) -> int:
        return 4 * self.num_ops

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        for layer in uniforms.split(4, dim=1):
            which, applied, level, sign = layer.unbind(1)
            operation = uniform_integer(which, len(OPERATIONS)).long()
            level = (self.magnitude + self.magnitude_std * standard_normal(level)).clamp(0, self.max_magnitude)
            argument = arguments(operation, level, sign, INCREASING if self.increasing else PLAIN)
            images = apply_operations(images, torch.where(applied < self.p, operation, NONE), argument, self.fill)
        return images


class AutoAugment(Transform):
    """One of 25 pairs of operations found by search, each operation with its own probability and level.

    "imagenet" is timm's "original" policy, "cifar10" uses the levels of the authors' CIFAR code.
    Source: Cubuk et al., AutoAugment, 2018, appendix.
    """

    policy: Literal["imagenet", "cifar10"] = "imagenet"
    fill: Rate = GRAY

    def num_uniforms(self) -> int:
        return 5

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        pairs = constant(POLICIES[self.policy], images.device)  # 25 2 3
        pair = pairs[uniform_integer(uniforms[:, 0], len(pairs)).long()]
        for chosen, layer in zip(pair.unbind(1), uniforms[:, 1:].split(2, dim=1)):
            (operation, probability, level), (applied, sign) = chosen.unbind(1), layer.unbind(1)
            operation = operation.long()
            argument = arguments(operation, level, sign, IMAGENET if self.policy == "imagenet" else CIFAR)
            images = apply_operations(images, torch.where(applied < probability, operation, NONE), argument, self.fill)
        return images


def parse_policy(text: str) -> tuple[tuple[tuple[float, float, float], ...], ...]:
    """Parse lines of "operation probability level operation probability level"."""

    def triple(name: str, probability: str, level: str) -> tuple[float, float, float]:
        return float(INDEX[name]), float(probability), float(level)

    return tuple((triple(*line.split()[:3]), triple(*line.split()[3:])) for line in text.strip().splitlines())


POLICIES = {
    "imagenet": parse_policy("""
        posterize 0.4 8 rotate 0.6 9
        solarize 0.6 5 autocontrast 0.6 5
        equalize 0.8 8 equalize 0.6 3
        posterize 0.6 7 posterize 0.6 6
        equalize 0.4 7 solarize 0.2 4
        equalize 0.4 4 rotate 0.8 8
        solarize 0.6 3 equalize 0.6 7
        posterize 0.8 5 equalize 1.0 2
        rotate 0.2 3 solarize 0.6 8
        equalize 0.6 8 posterize 0.4 6
        rotate 0.8 8 color 0.4 0
        rotate 0.4 9 equalize 0.6 2
        equalize 0.0 7 equalize 0.8 8
        invert 0.6 4 equalize 1.0 8
        color 0.6 4 contrast 1.0 8
        rotate 0.8 8 color 1.0 2
        color 0.8 8 solarize 0.8 7
        sharpness 0.4 7 invert 0.6 8
        shear_x 0.6 5 equalize 1.0 9
        color 0.4 0 equalize 0.6 3
        equalize 0.4 7 solarize 0.2 4
        solarize 0.6 5 autocontrast 0.6 5
        invert 0.6 4 equalize 1.0 8
        color 0.6 4 contrast 1.0 8
        equalize 0.8 8 equalize 0.6 3
    """),
    "cifar10": parse_policy("""
        invert 0.1 7 contrast 0.2 6
        rotate 0.7 2 translate_x 0.3 9
        sharpness 0.8 1 sharpness 0.9 3
        shear_y 0.5 8 translate_y 0.7 9
        autocontrast 0.5 8 equalize 0.9 2
        shear_y 0.2 7 posterize 0.3 7
        color 0.4 3 brightness 0.6 7
        sharpness 0.3 9 brightness 0.7 9
        equalize 0.6 5 equalize 0.5 1
        contrast 0.6 7 sharpness 0.6 5
        color 0.7 7 translate_x 0.5 8
        equalize 0.3 7 autocontrast 0.4 8
        translate_y 0.4 3 sharpness 0.2 6
        brightness 0.9 6 color 0.2 8
        solarize 0.5 2 invert 0.0 3
        equalize 0.2 0 autocontrast 0.6 0
        equalize 0.2 8 equalize 0.6 4
        color 0.9 9 equalize 0.6 6
        autocontrast 0.8 4 solarize 0.2 8
        brightness 0.1 3 color 0.7 0
        solarize 0.4 5 autocontrast 0.9 3
        translate_y 0.9 9 translate_y 0.7 9
        autocontrast 0.9 2 solarize 0.8 3
        equalize 0.8 8 invert 0.1 3
        translate_y 0.7 9 autocontrast 0.9 1
    """),
}
