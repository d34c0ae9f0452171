"""Augmentations that move pixels: flips, shifts, crops and affine maps."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.augment.transform import Span, Step, Transform, between, choose, integer
from allmlp.errors import UserError
from allmlp.spec import Count, NonNegative, Rate, Size

Filter = Literal["bilinear", "bicubic"]
Outside = Literal["border", "reflection"]
TRIES = 10
"""How often a box of random area and shape is drawn until it fits, as in torchvision and timm."""


def warp(
    images: Tensor,
    matrix: Tensor,
    size: tuple[int, int] | None = None,
    filter: Filter = "bilinear",
    outside: float | Outside = "border",
) -> Tensor:
    """Pictures seen through affine maps: one `grid_sample` for the batch.

    `matrix` (b 2 3, in pixels with the origin at the outer corner) takes a place in the result to the place in the
    picture it shows, as Pillow's `transform` does. A number for `outside` is the colour beyond the edge.
    """
    height, width = images.shape[2:]
    rows, columns = size or (height, width)
    x = torch.arange(columns, device=images.device) + 0.5
    y = (torch.arange(rows, device=images.device) + 0.5)[:, None]
    a, b, c, d, e, f = matrix.flatten(1).unflatten(1, (6, 1, 1)).unbind(1)  # each b 1 1
    across, down = a * x + b * y + c, d * x + e * y + f  # b h w
    grid = torch.stack((across * (2 / width) - 1, down * (2 / height) - 1), dim=-1)
    padding = outside if isinstance(outside, str) else "border"
    # Coordinates need more than the eight bits of bfloat16, and grid_sample wants one dtype for both.
    result = F.grid_sample(images.float(), grid, mode=filter, padding_mode=padding, align_corners=False)
    if filter == "bicubic":
        result = result.clamp(0, 1)  # it overshoots at edges
    if not isinstance(outside, str):
        inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
        result = torch.where(inside[:, None], result, outside)
    return result.to(images.dtype)


def affine(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """x' = ax + by + c, y' = dx + ey + f as b 2 3."""
    return torch.stack((a, b, c, d, e, f), dim=1).unflatten(1, (2, 3))


class Flip(Transform):
    """Left becomes right with probability p."""

    p: Rate = 0.5

    def numbers(self) -> int:
        return 1

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        return choose(draws[:, 0] < self.p, images.flip(-1), images)


class AlternatingFlip(Transform):
    """Flips at random in the first epoch, then each picture in every other epoch.

    Two successive epochs show both sides of every picture. The first side is a hash of the example's index and the
    seed. Source: Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU, 2024 (airbench).
    """

    seed: int = 0

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        if step is None:
            raise UserError("AlternatingFlip needs a Step: the epoch and the examples' indices")
        side = scramble(step.indices.to(images.device) + (self.seed * 0x9E3779B1 & 0xFFFFFFFF))
        return choose((side + step.epoch) % 2 == 1, images.flip(-1), images)


def scramble(values: Tensor) -> Tensor:
    """A hash of whole numbers (int64) to 0 .. 2^31 - 1: Wellons' lowbias32. Only the low 32 bits matter."""
    low = 0xFFFFFFFF
    values = values & low
    values = ((values ^ (values >> 16)) * 0x7FEB352D) & low
    values = ((values ^ (values >> 15)) * 0x846CA68B) & low
    return (values ^ (values >> 16)) & 0x7FFFFFFF


class Translate(Transform):
    """Shifts by whole pixels, up to `pixels` each way; the border is reflected.

    The same as a random crop of a reflect-padded picture. Source: airbench; 4 pixels is He et al.'s CIFAR crop.
    """

    pixels: Count = 4

    def numbers(self) -> int:
        return 2

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        height, width = images.shape[2:]
        if self.pixels >= min(height, width):
            raise UserError(f"Translate.pixels must be less than the picture's side {min(height, width)}")
        shifts = (integer(draws, 2 * self.pixels + 1) - self.pixels).long()
        rows = reflect(torch.arange(height, device=images.device) + shifts[:, :1], height)  # b h
        columns = reflect(torch.arange(width, device=images.device) + shifts[:, 1:], width)  # b w
        shifted = images.gather(2, rows[:, None, :, None].expand_as(images))
        return shifted.gather(3, columns[:, None, None, :].expand_as(images))


def reflect(position: Tensor, size: int) -> Tensor:
    return (size - 1) - ((size - 1) - position.abs()).abs()


class RandomResizedCrop(Transform):
    """A box of random area and shape, resized: Inception's crop.

    area ~ U(scale) of the picture, log(width / height) ~ U(log ratio), place uniform; whole pixels and at most ten
    tries, then the largest centred box, as torchvision. `size` is the result's, the picture's own if None.

    The box is sampled without antialiasing: where it has many more pixels than the result, shrink pictures before
    (in the decoder), or details alias. Source: Szegedy et al., Going deeper with convolutions, 2014.
    """

    scale: Span = (0.08, 1.0)
    ratio: Span = (3 / 4, 4 / 3)
    size: Size | None = None
    filter: Filter = "bilinear"

    def check(self) -> None:
        if not (0 < self.scale[0] <= self.scale[1] and 0 < self.ratio[0] <= self.ratio[1]):
            raise UserError("RandomResizedCrop: scale and ratio must be positive, the smaller number first")

    def numbers(self) -> int:
        return 2 * TRIES + 2

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        top, left, rows, columns = self.boxes(images.shape[2], images.shape[3], draws)
        size = self.size or (images.shape[2], images.shape[3])
        zero = torch.zeros_like(top)
        matrix = affine(columns / size[1], zero, left, zero, rows / size[0], top)
        return warp(images, matrix, size, self.filter)

    def boxes(self, height: int, width: int, draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, height and width of each picture's box: whole numbers as floats, each b."""
        rows, columns, found = boxes(height, width, self.scale, self.ratio, draws[:, : 2 * TRIES])
        shape = width / height
        fallback_rows = min(height, round(width / self.ratio[0])) if shape < self.ratio[0] else height
        fallback_columns = min(width, round(height * self.ratio[1])) if shape > self.ratio[1] else width
        rows, columns = torch.where(found, rows, fallback_rows), torch.where(found, columns, fallback_columns)
        top = torch.where(found, integer(draws[:, -2], height - rows + 1), (height - fallback_rows) // 2)
        left = torch.where(found, integer(draws[:, -1], width - columns + 1), (width - fallback_columns) // 2)
        return top, left, rows, columns


def boxes(
    height: int, width: int, area: Span, ratio: Span, draws: Tensor, spare: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The first box that fits of those two draws each make: its rows, its columns (each b), and whether there is one.

    `area` is a share of the picture, `ratio` is width to height; a box leaves `spare` rows and columns free.
    """
    share, shape = draws.unflatten(1, (2, -1)).unbind(1)  # b tries
    pixels = between(share, area) * (height * width)
    shape = torch.exp(between(shape, (math.log(ratio[0]), math.log(ratio[1]))))
    columns, rows = torch.sqrt(pixels * shape).round(), torch.sqrt(pixels / shape).round()
    fits = (columns > 0) & (columns <= width - spare) & (rows > 0) & (rows <= height - spare)
    first = fits.int().argmax(1, keepdim=True)  # argmax gives the first of equals
    return rows.gather(1, first)[:, 0], columns.gather(1, first)[:, 0], fits.any(1)


class Warp(Transform):
    """Crop, flip, rotation, shear and shift as one affine map, so the picture is sampled once.

        place in the picture = centre + shift + R(angle) [1 shear; 0 1] diag(+-width, height) place in the result

    area ~ U(scale), log(width / height) ~ U(log ratio), angle ~ U(-degrees, degrees), shear ~ U(-shear, shear), shift
    up to `translate` of each side, beyond what keeps the box inside; a scale above 1 shrinks the picture. A number for
    `outside` is the colour beyond the edge. Not antialiased, as `RandomResizedCrop`.
    """

    flip: Rate = 0.5
    scale: Span = (1.0, 1.0)
    ratio: Span = (1.0, 1.0)
    degrees: NonNegative = 0.0
    shear: NonNegative = 0.0
    translate: NonNegative = 0.0
    size: Size | None = None
    filter: Filter = "bilinear"
    outside: Outside | Rate = "reflection"

    def check(self) -> None:
        if not (0 < self.scale[0] <= self.scale[1] and 0 < self.ratio[0] <= self.ratio[1]):
            raise UserError("Warp: scale and ratio must be positive, the smaller number first")

    def numbers(self) -> int:
        return 9

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        height, width = images.shape[2:]
        rows, columns = self.size or (height, width)
        flip, area, shape, angle, shear, *place = draws.unbind(1)
        area = between(area, self.scale)
        shape = torch.exp(between(shape, (math.log(self.ratio[0]), math.log(self.ratio[1]))))
        across, down = torch.sqrt(area * shape), torch.sqrt(area / shape)  # shares of the picture's sides
        angle = between(angle, (-math.radians(self.degrees), math.radians(self.degrees)))
        shear = between(shear, (-self.shear, self.shear))
        right = (place[0] - 0.5) * (1 - across).abs() + between(place[1], (-self.translate, self.translate))
        below = (place[2] - 0.5) * (1 - down).abs() + between(place[3], (-self.translate, self.translate))

        x = across * (width / columns) * torch.where(flip < self.flip, -1.0, 1.0)
        y = down * (height / rows)
        cosine, sine = torch.cos(angle), torch.sin(angle)
        a, b = cosine * x, (cosine * shear - sine) * y
        d, e = sine * x, (sine * shear + cosine) * y
        c = width * (0.5 + right) - a * (columns / 2) - b * (rows / 2)
        f = height * (0.5 + below) - d * (columns / 2) - e * (rows / 2)
        return warp(images, affine(a, b, c, d, e, f), (rows, columns), self.filter, self.outside)
