"""Color transforms and Gaussian blur."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from allmlp.data.augment.transform import FloatRange, RandomApply, Transform, per_image, uniform_between, where
from allmlp.errors import UserError
from allmlp.spec import NonNegative, Rate

# --- functions: one value per image (b), images b c h w in [0, 1] -----------------------------------------


def gray(images: Tensor) -> Tensor:
    """Luma (ITU-R 601) of RGB images, the mean over channels of others: b 1 h w."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """other + factor (images - other); a factor above 1 extrapolates."""
    return (other + per_image(factor).to(images.dtype) * (images - other)).clamp(0, 1)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """Rotate hues by a fraction of the color circle, through HSV. Images without three channels are unchanged."""
    if images.shape[1] != 3:
        return images
    red, green, blue = images.unbind(1)
    value, low = images.amax(1), images.amin(1)
    chroma = value - low
    divisor = torch.where(chroma > 0, chroma, 1.0)
    sixth = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixth = sixth + 6 * turn.to(images.dtype)[:, None, None]
    channels = []
    for offset in (5, 3, 1):
        k = (offset + sixth) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


def smooth(images: Tensor) -> Tensor:
    """Pillow's SMOOTH filter: a 3 x 3 mean with weight 5 at the center; border pixels are unchanged."""
    if min(images.shape[2:]) < 3:
        return images
    three = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    nine = three[..., :-2] + three[..., 1:-1] + three[..., 2:]
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = (nine + 4 * images[:, :, 1:-1, 1:-1]) / 13
    return result


def blur(images: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Gaussian blur with reflect padding and one sigma per image."""
    result = images.float()
    for size in (images.shape[3], images.shape[2]):
        lines = result.flatten(1, 2) @ blur_matrix(sigma, size, min(radius, size - 1))  # b c*h w, then b c*w h
        result = lines.view_as(result).mT
    return result.clamp(0, 1).to(images.dtype)


def blur_matrix(sigma: Tensor, size: int, radius: int) -> Tensor:
    """Weight of each input pixel of a line (first index) in each output pixel: b size size.

    Reflection at the borders is part of the matrix, so nothing is padded and a batch is one batched matmul.
    """
    output = torch.arange(size, device=sigma.device)
    pixel = output[:, None]
    variance = 2 * (sigma * sigma)[:, None, None]

    def weight(distance: Tensor) -> Tensor:
        return torch.where(distance.abs() <= radius, torch.exp(-(distance.float() ** 2) / variance), 0.0)

    matrix = weight(pixel - output)
    matrix = matrix + torch.where(pixel > 0, weight(-pixel - output), 0.0)
    matrix = matrix + torch.where(pixel < size - 1, weight(2 * (size - 1) - pixel - output), 0.0)
    return matrix / matrix.sum(1, keepdim=True)


# --- lookup tables: maps from byte to byte, as in Pillow ---------------------------------------------------


def to_levels(images: Tensor) -> Tensor:
    """The nearest of 256 levels: int64, b c hw."""
    return (images.float() * 255).round().clamp(0, 255).long().flatten(2)


def apply_tables(tables: Tensor, levels: Tensor, images: Tensor) -> Tensor:
    """Images in which level i is replaced by `tables[..., i]` (b c 256)."""
    return (tables.gather(2, levels) / 255).view_as(images).to(images.dtype)


def all_levels(images: Tensor) -> Tensor:
    return torch.arange(256.0, device=images.device)


def equalize_table(levels: Tensor) -> Tensor:
    """Histogram equalization in Pillow's integer arithmetic."""
    counts = torch.zeros(*levels.shape[:2], 256, device=levels.device)
    counts = counts.scatter_add(2, levels, torch.ones((), device=levels.device).expand_as(levels))
    last = counts.gather(2, levels.amax(2, keepdim=True))
    step = torch.floor((levels.shape[2] - last) / 255)
    below = torch.floor(step / 2) + counts.cumsum(2) - counts
    table = torch.div(below, step.clamp(min=1), rounding_mode="floor").clamp(max=255)
    return torch.where(step > 0, table, all_levels(levels))


def autocontrast_table(levels: Tensor) -> Tensor:
    """Stretch each channel: its lowest level becomes 0, its highest 255."""
    low, high = (edge.float() for edge in levels.aminmax(dim=2, keepdim=True))
    table = torch.floor((all_levels(levels) - low) * 255 / (high - low).clamp(min=1)).clamp(0, 255)
    return torch.where(high > low, table, all_levels(levels))


def posterize_table(levels: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` of eight: b 1 256."""
    width = torch.exp2(8 - bits)[:, None, None]
    return torch.floor(all_levels(levels) / width) * width


# --- transforms ------------------------------------------------------------------------------------------


class ColorJitter(Transform):
    """Brightness, contrast and saturation by factors ~ U(1 - x, 1 + x) in random order, then hue by U(-x, x) turns.

    As in torchvision, except that hue is always last. Source: Chen et al., SimCLR, 2020, appendix A.
    """

    brightness: NonNegative = 0.4
    contrast: NonNegative = 0.4
    saturation: NonNegative = 0.2
    hue: Rate = 0.1
    p: Rate = 1.0

    def check(self) -> None:
        if self.hue > 0.5:
            raise UserError("ColorJitter.hue must be at most 0.5, half a turn")

    def num_uniforms(self) -> int:
        return 8

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        amounts = (self.brightness, self.contrast, self.saturation)
        bounds = [(max(0.0, 1 - amount), 1 + amount) for amount in amounts]
        factors = torch.stack([uniform_between(u, b) for u, b in zip(uniforms[:, :3].unbind(1), bounds)], dim=1)
        order = uniforms[:, 3:6].argsort(dim=1)
        factors = factors.gather(1, order)
        result = images
        if any(amounts):
            for kind, factor in zip(order.unbind(1), factors.unbind(1)):
                other = gray(result)
                other = where(kind == 1, other.mean((2, 3), keepdim=True), other)
                result = blend(result, where(kind == 0, torch.zeros_like(other), other), factor)
        if self.hue:
            result = hue(result, uniform_between(uniforms[:, 6], (-self.hue, self.hue)))
        return result if self.p == 1 else where(uniforms[:, 7] < self.p, result, images)


class Grayscale(RandomApply):
    """Replace all channels by the luma with probability p."""

    def change(self, images: Tensor) -> Tensor:
        return gray(images).expand_as(images)


class Solarize(RandomApply):
    """Invert values from `threshold` on with probability p."""

    threshold: Rate = 0.5

    def change(self, images: Tensor) -> Tensor:
        return torch.where(images >= self.threshold, 1 - images, images)


class GaussianBlur(Transform):
    """Gaussian blur with sigma ~ U(sigma) pixels, truncated at four times the largest sigma, with probability p."""

    p: Rate = 0.5
    sigma: FloatRange = (0.1, 2.0)

    def check(self) -> None:
        if not 0 < self.sigma[0] <= self.sigma[1]:
            raise UserError("GaussianBlur.sigma must be positive, the smaller number first")

    def num_uniforms(self) -> int:
        return 2

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        result = blur(images, uniform_between(uniforms[:, 1], self.sigma), math.ceil(4 * self.sigma[1]))
        return where(uniforms[:, 0] < self.p, result, images)
