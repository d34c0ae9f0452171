"""Geometric transforms: flip, translation, random affine map, random resized crop."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.augment.transform import FloatRange, RandomApply, Transform, uniform_between, uniform_integer
from allmlp.errors import UserError
from allmlp.spec import Count, NonNegative, Rate, Size

Interpolation = Literal["bilinear", "bicubic"]
MAX_TRIES = 10
"""Number of boxes drawn until one fits into the image, as in torchvision and timm."""


def warp(
    images: Tensor,
    matrix: Tensor,
    size: tuple[int, int] | None = None,
    interpolation: Interpolation = "bilinear",
    fill: float | None = None,
) -> Tensor:
    """Apply one affine map per image, with one `grid_sample` for the batch.

    `matrix` (b 2 3, in pixels, origin at the outer corner) maps output to input coordinates, like Pillow's `transform`.
    `fill` is the value outside of the image; None repeats the border.
    """
    height, width = images.shape[2:]
    rows, columns = size or (height, width)
    x = torch.arange(columns, device=images.device) + 0.5
    y = (torch.arange(rows, device=images.device) + 0.5)[:, None]
    a, b, c, d, e, f = matrix.flatten(1).unflatten(1, (6, 1, 1)).unbind(1)  # each b 1 1
    input_x, input_y = a * x + b * y + c, d * x + e * y + f  # b h w
    grid = torch.stack((input_x * (2 / width) - 1, input_y * (2 / height) - 1), dim=-1)
    # Coordinates need more than the eight bits of bfloat16, and grid_sample needs one dtype for both.
    result = F.grid_sample(images.float(), grid, mode=interpolation, padding_mode="border", align_corners=False)
    if interpolation == "bicubic":
        result = result.clamp(0, 1)  # it overshoots at edges
    if fill is not None:
        inside = (input_x >= 0) & (input_x < width) & (input_y >= 0) & (input_y < height)
        result = torch.where(inside[:, None], result, fill)
    return result.to(images.dtype)


def affine(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """x' = ax + by + c, y' = dx + ey + f as b 2 3."""
    return torch.stack((a, b, c, d, e, f), dim=1).unflatten(1, (2, 3))


class HorizontalFlip(RandomApply):
    """Swap left and right with probability p."""

    p: Rate = 0.5

    def change(self, images: Tensor) -> Tensor:
        return images.flip(-1)


class Translate(Transform):
    """Shift by up to `pixels` whole pixels in each direction, with reflect padding.

    The same as a random crop of the padded image. Source: airbench; 4 pixels is He et al.'s CIFAR crop.
    """

    pixels: Count = 4

    def num_uniforms(self) -> int:
        return 2

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        height, width = images.shape[2:]
        if self.pixels >= min(height, width):
            raise UserError(f"Translate.pixels must be less than the side of the images, {min(height, width)}")
        shifts = (uniform_integer(uniforms, 2 * self.pixels + 1) - self.pixels).long()
        rows = reflect(torch.arange(height, device=images.device) + shifts[:, :1], height)  # b h
        columns = reflect(torch.arange(width, device=images.device) + shifts[:, 1:], width)  # b w
        shifted = images.gather(2, rows[:, None, :, None].expand_as(images))
        return shifted.gather(3, columns[:, None, None, :].expand_as(images))


def reflect(index: Tensor, size: int) -> Tensor:
    return (size - 1) - ((size - 1) - index.abs()).abs()


class RandomAffine(Transform):
    """Rotate by up to `degrees`, scale height and width by independent factors in `scale`, and shift by up to
    `translate` of the side, about the center; pixels outside of the image are black.
    """

    degrees: NonNegative = 10.0
    translate: Rate = 0.1
    scale: FloatRange = (0.9, 1.1)

    def check(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise UserError("RandomAffine: scale must be positive, the smaller number first")

    def num_uniforms(self) -> int:
        return 5

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        height, width = images.shape[2:]
        angle, right, down, across, along = uniforms.float().unbind(1)
        angle = uniform_between(angle, (-math.radians(self.degrees), math.radians(self.degrees)))
        right, down = (uniform_between(shift, (-self.translate, self.translate)) for shift in (right, down))
        across, along = (1 / uniform_between(factor, self.scale) for factor in (across, along))
        a, b, d, e = across * angle.cos(), across * angle.sin(), -along * angle.sin(), along * angle.cos()
        x, y = width * (0.5 + right), height * (0.5 + down)  # of the output, where the center of the input is
        return warp(images, affine(a, b, width / 2 - a * x - b * y, d, e, height / 2 - d * x - e * y), fill=0.0)


class RandomResizedCrop(Transform):
    """Crop a box of random area and aspect ratio and resize it.

    area ~ U(scale) of the image, log(width / height) ~ U(log ratio), position uniform; integer pixels and at most ten
    tries, then the largest centered box, as in torchvision. `size` is that of the output, by default of the input.

    There is no antialiasing: if boxes have many more pixels than the output, resize the images before (when decoding).
    Source: Szegedy et al., Going deeper with convolutions, 2014.
    """

    scale: FloatRange = (0.08, 1.0)
    ratio: FloatRange = (3 / 4, 4 / 3)
    size: Size | None = None
    interpolation: Interpolation = "bilinear"

    def check(self) -> None:
        if not (0 < self.scale[0] <= self.scale[1] and 0 < self.ratio[0] <= self.ratio[1]):
            raise UserError("RandomResizedCrop: scale and ratio must be positive, the smaller number first")

    def num_uniforms(self) -> int:
        return 2 * MAX_TRIES + 2

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        top, left, rows, columns = self.boxes(images.shape[2], images.shape[3], uniforms)
        size = self.size or (images.shape[2], images.shape[3])
        zero = torch.zeros_like(top)
        matrix = affine(columns / size[1], zero, left, zero, rows / size[0], top)
        return warp(images, matrix, size, self.interpolation)

    def boxes(self, height: int, width: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, height and width of each image's box: integers as floats, each b."""
        rows, columns, fits = random_boxes(height, width, self.scale, self.ratio, uniforms[:, : 2 * MAX_TRIES])
        ratio = width / height
        most_rows = min(height, round(width / self.ratio[0])) if ratio < self.ratio[0] else height
        most_columns = min(width, round(height * self.ratio[1])) if ratio > self.ratio[1] else width
        rows, columns = torch.where(fits, rows, most_rows), torch.where(fits, columns, most_columns)
        top = torch.where(fits, uniform_integer(uniforms[:, -2], height - rows + 1), (height - most_rows) // 2)
        left = torch.where(fits, uniform_integer(uniforms[:, -1], width - columns + 1), (width - most_columns) // 2)
        return top, left, rows, columns


def random_boxes(
    height: int, width: int, scale: FloatRange, ratio: FloatRange, uniforms: Tensor, margin: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the first box that fits, and whether one does (each b), from 2 * tries uniforms per image.

    `scale` is a fraction of the area, `ratio` is width / height; boxes are at least `margin` smaller than the image.
    """
    area, aspect = uniforms.unflatten(1, (2, -1)).unbind(1)  # b tries
    pixels = uniform_between(area, scale) * (height * width)
    aspect = torch.exp(uniform_between(aspect, (math.log(ratio[0]), math.log(ratio[1]))))
    columns, rows = torch.sqrt(pixels * aspect).round(), torch.sqrt(pixels / aspect).round()
    fits = (columns > 0) & (columns <= width - margin) & (rows > 0) & (rows <= height - margin)
    first = fits.int().argmax(1, keepdim=True)  # argmax returns the first maximum
    return rows.gather(1, first)[:, 0], columns.gather(1, first)[:, 0], fits.any(1)
