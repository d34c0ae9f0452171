"""Base class of the augmentations: a spec, a row of uniform random numbers per image, and a pure function of both.

Calling a transform draws the numbers and applies it. The two steps are separate methods because compiled code and CUDA
graphs cannot draw from a `torch.Generator`; compile `apply` and give it new uniforms at each step:

    compiled = torch.compile(augment.apply)
    images = compiled(images, augment.draw_uniforms(images, generator))

Row i of the uniforms only affects image i. Nothing loops over images, synchronizes with the host, or has a shape that
depends on data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from allmlp.errors import UserError
from allmlp.spec import Rate, Spec

FloatRange = tuple[float, float]
"""Lower and upper bound of a uniform distribution."""


class Randomized(Spec, abstract=True):
    """A change of images that depends on uniform random numbers."""

    def num_uniforms(self) -> int:
        """Number of uniform random numbers per image."""
        return 0

    def draw_uniforms(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if generator.device.type != images.device.type:
            raise UserError(f"the images are on {images.device}, the random generator is on {generator.device}")
        return torch.rand(len(images), self.num_uniforms(), generator=generator, device=images.device)


class Transform(Randomized, abstract=True):
    """Transforms images (float, b c h w, in [0, 1]), each with its own random numbers."""

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """Transform images with `uniforms` in [0, 1), b num_uniforms(). A pure function."""
        raise NotImplementedError

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self.apply(images, self.draw_uniforms(images, generator))


class RandomApply(Transform, abstract=True):
    """A deterministic change, applied with probability p."""

    p: Rate = 0.2

    def num_uniforms(self) -> int:
        return 1

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        return where(uniforms[:, 0] < self.p, self.change(images), images)

    def change(self, images: Tensor) -> Tensor:
        raise NotImplementedError


class Augment(Transform):
    """A sequence of transforms. uint8 images are converted to floats in [0, 1] first."""

    transforms: tuple[Transform, ...] = ()

    def num_uniforms(self) -> int:
        return sum(transform.num_uniforms() for transform in self.transforms)

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        images = to_float(images)
        parts = uniforms.split([transform.num_uniforms() for transform in self.transforms], dim=1)
        for transform, part in zip(self.transforms, parts):
            images = transform.apply(images, part)
        return images


def to_float(images: Tensor) -> Tensor:
    """Convert uint8 images to floats in [0, 1]; floats are returned unchanged."""
    return images if images.is_floating_point() else images / 255


# --- uniform numbers to other distributions --------------------------------------------------------------


def uniform_between(u: Tensor, bounds: FloatRange) -> Tensor:
    return bounds[0] + u * (bounds[1] - bounds[0])


def uniform_integer(u: Tensor, count: int | Tensor) -> Tensor:
    """Uniform integer (as float) in [0, count), also where u * count rounds up to `count`."""
    return (u * count).floor().clamp(max=count - 1)


def standard_normal(u: Tensor) -> Tensor:
    # Half a step of torch.rand's grid is added, because 0 would give minus infinity.
    return torch.erfinv((u + 2.0**-25) * 2 - 1) * math.sqrt(2)


def symmetric_beta(u: Tensor, v: Tensor, alpha: float) -> Tensor:
    """Beta(alpha, alpha) from two uniform numbers, without rejection.

    Source: Devroye, Random variate generation in one line of code, 1996.
    """
    cosine = torch.cos(2 * math.pi * v)
    radius = torch.expm1(-torch.log(u.clamp(min=2.0**-25)) / alpha)  # u^(-1/alpha) - 1
    return 0.5 + 0.5 * torch.sign(cosine) / torch.sqrt(1 + 1 / (radius * cosine**2))


# --- helpers for batches of images -----------------------------------------------------------------------


def per_image(values: Tensor) -> Tensor:
    """b -> b 1 1 1, to broadcast over images."""
    return values[:, None, None, None]


def where(mask: Tensor, changed: Tensor, images: Tensor) -> Tensor:
    """`changed` for the images where the mask (b) is true, else `images`."""
    return torch.where(per_image(mask), changed.to(images.dtype), images)


def box_mask(top: Tensor, left: Tensor, height: Tensor, width: Tensor, images: Tensor) -> Tensor:
    """True for the pixels inside each image's box: b 1 h w."""
    rows = torch.arange(images.shape[2], device=images.device)
    columns = torch.arange(images.shape[3], device=images.device)
    in_rows = (rows >= top[:, None]) & (rows < (top + height)[:, None])
    in_columns = (columns >= left[:, None]) & (columns < (left + width)[:, None])
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


_constants: dict[tuple[object, torch.device, torch.dtype], Tensor] = {}


def constant(values: tuple, device: torch.device) -> Tensor:
    """A constant tensor on the device, copied there once."""
    key = values, device, torch.get_default_dtype()
    if key not in _constants:
        _constants[key] = torch.tensor(values, device=device)
    return _constants[key]


# The attribute set by torch.compiler.assume_constant_result; calling it would import all of torch._dynamo.
constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
