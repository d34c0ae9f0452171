"""Augmentations that blank a part of the picture."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from allmlp.data.augment.geometry import TRIES, boxes
from allmlp.data.augment.transform import Span, Step, Transform, box, integer, table
from allmlp.errors import UserError
from allmlp.spec import Count, Rate


class Erasing(Transform):
    """A rectangle of random area and shape is painted over with probability p.

    mode "pixel": each value its own N(0, 1); "noise": one N(0, 1) colour per rectangle; "mean": zero. After
    `Normalise` these are noise and the mean colour; before it, give `mean` and `std` of the pixels for the same.
    Source: Zhong et al., Random erasing, 2017; defaults and tries as timm and DeiT.
    """

    p: Rate = 0.25
    area: Span = (0.02, 1 / 3)
    ratio: Span = (0.3, 1 / 0.3)
    mode: Literal["pixel", "noise", "mean"] = "pixel"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def check(self) -> None:
        if not (0 < self.area[0] <= self.area[1] <= 1 and 0 < self.ratio[0] <= self.ratio[1]):
            raise UserError("Erasing: area must lie between 0 and 1, ratio above 0, the smaller number first")

    def numbers(self) -> int:
        return 2 * TRIES + 4

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        channels, height, width = images.shape[1:]
        rows, columns, found = boxes(height, width, self.area, self.ratio, draws[:, 4:], spare=1)
        top, left = integer(draws[:, 1], height - rows + 1), integer(draws[:, 2], width - columns + 1)
        erased = box(top, left, torch.where(found & (draws[:, 0] < self.p), rows, 0), columns, images)
        mean, std = (table(values, images.device)[:, None, None] for values in (self.mean, self.std))
        if self.mode == "mean":
            return torch.where(erased, mean.to(images.dtype), images)
        size = (channels, 1, 1) if self.mode == "noise" else (channels, height, width)
        return torch.where(erased, (mean + std * noise(draws[:, 3], size)).to(images.dtype), images)


def noise(draw: Tensor, size: tuple[int, int, int]) -> Tensor:
    """N(0, 1) at every place, made of one uniform number per picture: b c h w.

    A hash of number and place: exactly repeatable, and nothing as large as the picture has to be drawn beforehand.
    """
    seed = (draw * 2**24).int()[:, None] * 69069
    values = seed + torch.arange(1, math.prod(size) + 1, dtype=torch.int32, device=draw.device) * -1640531527
    # Wellons' lowbias32 in wrapping 32-bit arithmetic; the masks make the signed shifts logical ones.
    values = (values ^ ((values >> 16) & 0xFFFF)) * 0x7FEB352D
    values = (values ^ ((values >> 15) & 0x1FFFF)) * -2073254261
    values = values ^ ((values >> 16) & 0xFFFF)
    # Box-Muller, of two 16-bit halves; the inverse error function would take five times as long on a CPU.
    radius = torch.sqrt(-2 * torch.log(((values & 0xFFFF) + 0.5) * 2.0**-16))
    return (radius * torch.cos((values >> 16) * (math.pi * 2.0**-15))).unflatten(1, size)


class Cutout(Transform):
    """A square of `size` pixels around a random pixel becomes zero; at the border a part of it is lost.

    Source: DeVries and Taylor, Improved regularization of convolutional neural networks with cutout, 2017.
    """

    size: Count = 8
    p: Rate = 1.0

    def numbers(self) -> int:
        return 3

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        height, width = images.shape[2:]
        top = integer(draws[:, 1], height) - self.size // 2
        left = integer(draws[:, 2], width) - self.size // 2
        side = torch.where(draws[:, 0] < self.p, float(self.size), 0.0)
        return images.masked_fill(box(top, left, side, side, images), 0)
