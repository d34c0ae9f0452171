"""What an augmentation is: a spec, a row of random numbers per picture, and a pure function of both.

`apply` draws the numbers and computes. The two halves are separate because compiled code and CUDA graphs cannot draw
from a `torch.Generator`: compile `transform`, and give it fresh draws each step:

    fast = torch.compile(augment.transform)
    images = fast(images, augment.draw(images, generator))

Row i of the draws decides about picture i alone, so a picture's change does not depend on its neighbours. Nothing here
loops over pictures, reads a value back to the host, or has a shape that depends on data.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.errors import UserError
from allmlp.spec import Spec

Span = tuple[float, float]
"""The least and the greatest value of a uniform draw."""


class Step(NamedTuple):
    """Where training stands, for the augmentations that ask."""

    epoch: int | Tensor
    """Counted from zero. A tensor spares compiled code a recompilation per epoch."""
    indices: Tensor
    """Of the batch's examples in their dataset: int64, b."""


class Transform(Spec, abstract=True):
    """Changes pictures (floats, b c h w, in [0, 1] up to `Normalise`), each by its own draw."""

    def numbers(self) -> int:
        """How many uniform random numbers one picture takes."""
        return 0

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        """The changed pictures; a pure function of its arguments. `draws`: uniform in [0, 1), b numbers()."""
        raise NotImplementedError

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return uniform(images, self.numbers(), generator)

    def apply(self, images: Tensor, generator: torch.Generator, step: Step | None = None) -> Tensor:
        return self.transform(images, self.draw(images, generator), step)

    def __call__(self, images: Tensor, generator: torch.Generator, step: Step | None = None) -> Tensor:
        return self.apply(images, generator, step)


class Augment(Transform):
    """One augmentation after another. Bytes become floats in [0, 1] first."""

    transforms: tuple[Transform, ...] = ()

    def numbers(self) -> int:
        return sum(transform.numbers() for transform in self.transforms)

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        images, start = floats(images), 0
        for transform in self.transforms:
            end = start + transform.numbers()
            images, start = transform.transform(images, draws[:, start:end], step), end
        return images


def floats(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes as floats in [0, 1]; floats as they are."""
    return images if images.is_floating_point() else images.to(dtype) / 255


def uniform(images: Tensor, numbers: int, generator: torch.Generator) -> Tensor:
    if generator.device.type != images.device.type:
        raise UserError(f"the pictures are on {images.device}, the random generator is on {generator.device}")
    return torch.rand(len(images), numbers, generator=generator, device=images.device)


# --- from uniform numbers to what is needed ------------------------------------------------------------


def between(draw: Tensor, span: Span) -> Tensor:
    return span[0] + draw * (span[1] - span[0])


def integer(draw: Tensor, count: int | Tensor) -> Tensor:
    """A whole number (as float) from 0 to count - 1. The bound holds also where the product rounds up to `count`."""
    number = (draw * count).floor()
    return number.clamp(max=count - 1)


def normal(draw: Tensor) -> Tensor:
    # Half a step of torch.rand's grid: zero would become minus infinity.
    return torch.erfinv((draw + 2.0**-25) * 2 - 1) * math.sqrt(2)


def beta(draw: Tensor, other: Tensor, alpha: float) -> Tensor:
    """Beta(alpha, alpha) from two uniform numbers, without rejection.

    Source: Devroye, Random variate generation in one line of code, 1996.
    """
    cosine = torch.cos(2 * math.pi * other)
    radius = torch.expm1(-torch.log(draw.clamp(min=2.0**-25)) / alpha)  # U^(-1/alpha) - 1
    return 0.5 + 0.5 * torch.sign(cosine) / torch.sqrt(1 + 1 / (radius * cosine**2))


# --- pictures ------------------------------------------------------------------------------------------


def wide(values: Tensor) -> Tensor:
    """b -> b 1 1 1."""
    return values[:, None, None, None]


def choose(mask: Tensor, changed: Tensor, images: Tensor) -> Tensor:
    """`changed` for the pictures where the mask (b) is true."""
    return torch.where(wide(mask), changed.to(images.dtype), images)


def box(top: Tensor, left: Tensor, height: Tensor, width: Tensor, images: Tensor) -> Tensor:
    """Whether a pixel lies in its picture's rectangle: b 1 h w."""
    rows = torch.arange(images.shape[2], device=images.device)
    columns = torch.arange(images.shape[3], device=images.device)
    down = (rows >= top[:, None]) & (rows < (top + height)[:, None])
    across = (columns >= left[:, None]) & (columns < (left + width)[:, None])
    return (down[:, :, None] & across[:, None, :])[:, None]


_tables: dict[tuple[object, torch.device], Tensor] = {}


@torch.compiler.assume_constant_result
def table(values: tuple, device: torch.device) -> Tensor:
    """A constant on the device, copied there once."""
    if (values, device) not in _tables:
        _tables[values, device] = torch.tensor(values, device=device)
    return _tables[values, device]
