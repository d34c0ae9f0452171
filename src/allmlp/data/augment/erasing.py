"""Random erasing."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from allmlp.data.augment.geometry import MAX_TRIES, random_boxes
from allmlp.data.augment.transform import FloatRange, Transform, box_mask, constant, uniform_integer
from allmlp.errors import UserError
from allmlp.spec import Rate


class RandomErasing(Transform):
    """Fill a box of random area and aspect ratio with probability p.

    mode "pixel": mean + std N(0, 1) at each value; "noise": the same with one draw per channel and box; "mean": `mean`.
    The defaults are for normalized images; for images in [0, 1] set `mean` and `std` to those of the pixels. Source:
    Zhong et al., Random erasing, 2017; defaults and number of tries as in timm and DeiT.
    """

    p: Rate = 0.25
    scale: FloatRange = (0.02, 1 / 3)
    ratio: FloatRange = (0.3, 1 / 0.3)
    mode: Literal["pixel", "noise", "mean"] = "pixel"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def check(self) -> None:
        if not (0 < self.scale[0] <= self.scale[1] <= 1 and 0 < self.ratio[0] <= self.ratio[1]):
            raise UserError("RandomErasing: scale must be between 0 and 1, ratio above 0, the smaller number first")

    def num_uniforms(self) -> int:
        return 2 * MAX_TRIES + 4

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        channels, height, width = images.shape[1:]
        rows, columns, fits = random_boxes(height, width, self.scale, self.ratio, uniforms[:, 4:], margin=1)
        top = uniform_integer(uniforms[:, 1], height - rows + 1)
        left = uniform_integer(uniforms[:, 2], width - columns + 1)
        erased = box_mask(top, left, torch.where(fits & (uniforms[:, 0] < self.p), rows, 0), columns, images)
        mean, std = (constant(values, images.device)[:, None, None] for values in (self.mean, self.std))
        if self.mode == "mean":
            return torch.where(erased, mean.to(images.dtype), images)
        size = (channels, 1, 1) if self.mode == "noise" else (channels, height, width)
        return torch.where(erased, (mean + std * noise(uniforms[:, 3], size)).to(images.dtype), images)


def noise(u: Tensor, size: tuple[int, int, int]) -> Tensor:
    """N(0, 1) noise from one uniform number per image: b c h w.

    A hash of the number and the position: exactly reproducible, without drawing as many numbers as there are pixels.
    """
    seed = (u * 2**24).int()[:, None] * 69069
    values = seed + torch.arange(1, math.prod(size) + 1, dtype=torch.int32, device=u.device) * -1640531527
    # Wellons' lowbias32 in wrapping 32-bit arithmetic; the masks make the signed shifts logical.
    values = (values ^ ((values >> 16) & 0xFFFF)) * 0x7FEB352D
    values = (values ^ ((values >> 15) & 0x1FFFF)) * -2073254261
    values = values ^ ((values >> 16) & 0xFFFF)
    # Box-Muller on two 16-bit halves; the inverse error function takes five times as long on a CPU.
    radius = torch.sqrt(-2 * torch.log(((values & 0xFFFF) + 0.5) * 2.0**-16))
    return (radius * torch.cos((values >> 16) * (math.pi * 2.0**-15))).unflatten(1, size)
