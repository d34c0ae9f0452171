"""Augmentations that change a pixel's colour, and the blur."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from allmlp.data.augment.transform import Span, Step, Transform, between, choose, integer, wide
from allmlp.errors import UserError
from allmlp.spec import NonNegative, Rate

# --- functions: one value per picture (b), pictures b c h w in [0, 1] ----------------------------------


def grey(images: Tensor) -> Tensor:
    """Luma (ITU-R 601) of three channels, the mean of any other number of them: b 1 h w."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """`factor` of the picture and the rest of the other: 0 is the other, above 1 leads away from it."""
    return (other + wide(factor).to(images.dtype) * (images - other)).clamp(0, 1)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, torch.zeros_like(images[:, :1]), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, grey(images).mean((2, 3), keepdim=True), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, grey(images), factor)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """Hues turned by a share of the circle, through HSV. Pictures without three channels stay as they are."""
    if images.shape[1] != 3:
        return images
    red, green, blue = images.unbind(1)
    value, low = images.amax(1), images.amin(1)
    chroma = value - low
    spread = torch.where(chroma > 0, chroma, 1.0)
    sixth = torch.where(
        value == red,
        (green - blue) / spread,
        torch.where(value == green, 2 + (blue - red) / spread, 4 + (red - green) / spread),
    )
    sixth = sixth + 6 * turn.to(images.dtype)[:, None, None]
    channels = []
    for offset in (5, 3, 1):
        k = (offset + sixth) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


def solarise(images: Tensor, threshold: float | Tensor) -> Tensor:
    return torch.where(images >= threshold, 1 - images, images)


def smooth(images: Tensor) -> Tensor:
    """Pillow's SMOOTH: the mean of 3 x 3 pixels in which the middle one counts five times; edges stay."""
    if min(images.shape[2:]) < 3:
        return images
    three = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    nine = three[..., :-2] + three[..., 1:-1] + three[..., 2:]
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = (nine + 4 * images[:, :, 1:-1, 1:-1]) / 13
    return result


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, smooth(images), factor)


def blur(images: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Gaussian blur with reflected borders, each picture with its own sigma."""
    result = images.float()
    for size in (images.shape[3], images.shape[2]):
        lines = result.flatten(1, 2) @ smear(sigma, size, min(radius, size - 1))  # b c*h w, then b c*w h
        result = lines.view_as(result).mT
    return result.clamp(0, 1).to(images.dtype)


def smear(sigma: Tensor, size: int, radius: int) -> Tensor:
    """What each pixel of a line (first index) gives to each pixel of the blurred line: b size size.

    The reflection of the line's ends is folded in, so nothing is padded, and a batch is one batched product.
    """
    here = torch.arange(size, device=sigma.device)
    there = here[:, None]
    variance = 2 * (sigma * sigma)[:, None, None]

    def weight(distance: Tensor) -> Tensor:
        return torch.where(distance.abs() <= radius, torch.exp(-(distance.float() ** 2) / variance), 0.0)

    matrix = weight(there - here)
    matrix = matrix + torch.where(there > 0, weight(-there - here), 0.0)
    matrix = matrix + torch.where(there < size - 1, weight(2 * (size - 1) - there - here), 0.0)
    return matrix / matrix.sum(1, keepdim=True)


# --- tables: maps of a byte to a byte, as Pillow has them ----------------------------------------------


def bytes_of(images: Tensor) -> Tensor:
    """The nearest of 256 levels: int64, b c hw."""
    return (images.float() * 255).round().clamp(0, 255).long().flatten(2)


def look_up(tables: Tensor, levels: Tensor, images: Tensor) -> Tensor:
    """Pictures whose byte i became `tables[..., i]` (b c 256)."""
    return (tables.gather(2, levels) / 255).view_as(images).to(images.dtype)


def ramp(images: Tensor) -> Tensor:
    return torch.arange(256.0, device=images.device)


def equalise_table(levels: Tensor) -> Tensor:
    """Levels spread so that each is about as frequent as any other; Pillow's whole-number arithmetic."""
    counts = torch.zeros(*levels.shape[:2], 256, device=levels.device)
    counts = counts.scatter_add(2, levels, torch.ones((), device=levels.device).expand_as(levels))
    last = counts.gather(2, levels.amax(2, keepdim=True))
    step = torch.floor((levels.shape[2] - last) / 255)
    below = torch.floor(step / 2) + counts.cumsum(2) - counts
    table = torch.div(below, step.clamp(min=1), rounding_mode="floor").clamp(max=255)
    return torch.where(step > 0, table, ramp(levels))


def autocontrast_table(levels: Tensor) -> Tensor:
    """The darkest level of each channel becomes 0, the brightest 255."""
    low, high = (edge.float() for edge in levels.aminmax(dim=2, keepdim=True))
    table = torch.floor((ramp(levels) - low) * 255 / (high - low).clamp(min=1)).clamp(0, 255)
    return torch.where(high > low, table, ramp(levels))


def posterise_table(levels: Tensor, bits: Tensor) -> Tensor:
    """The highest `bits` of eight are kept: b 1 256."""
    width = torch.exp2(8 - bits)[:, None, None]
    return torch.floor(ramp(levels) / width) * width


# --- transforms -------------------------------------------------------------------------------------------


class ColourJitter(Transform):
    """Brightness, contrast and saturation by factors ~ U(1 - x, 1 + x) in random order, then hue by U(-x, x) turns.

    As torchvision's, but that hue is always the last. Source: Chen et al., SimCLR, 2020, appendix A.
    """

    brightness: NonNegative = 0.4
    contrast: NonNegative = 0.4
    saturation: NonNegative = 0.2
    hue: Rate = 0.1
    p: Rate = 1.0

    def check(self) -> None:
        if self.hue > 0.5:
            raise UserError("ColourJitter.hue must be at most 0.5, half a turn")

    def numbers(self) -> int:
        return 8

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        amounts = (self.brightness, self.contrast, self.saturation)
        spans = [(max(0.0, 1 - amount), 1 + amount) for amount in amounts]
        factors = torch.stack([between(draw, span) for draw, span in zip(draws[:, :3].unbind(1), spans)], dim=1)
        order = draws[:, 3:6].argsort(dim=1)
        factors = factors.gather(1, order)
        result = images
        if any(amounts):
            for kind, factor in zip(order.unbind(1), factors.unbind(1)):
                target = grey(result)
                target = choose(kind == 1, target.mean((2, 3), keepdim=True), target)
                result = blend(result, choose(kind == 0, torch.zeros_like(target), target), factor)
        if self.hue:
            result = hue(result, between(draws[:, 6], (-self.hue, self.hue)))
        return result if self.p == 1 else choose(draws[:, 7] < self.p, result, images)


class Sometimes(Transform, abstract=True):
    """A change without draws of its own, with probability p."""

    p: Rate = 1.0

    def numbers(self) -> int:
        return 1

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        return choose(draws[:, 0] < self.p, self.change(images), images)

    def change(self, images: Tensor) -> Tensor:
        raise NotImplementedError


class Greyscale(Sometimes):
    """All channels become the luma."""

    p: Rate = 0.2

    def change(self, images: Tensor) -> Tensor:
        return grey(images).expand_as(images)


class Solarise(Sometimes):
    """Values from the threshold on are inverted."""

    p: Rate = 0.2
    threshold: Rate = 0.5

    def change(self, images: Tensor) -> Tensor:
        return solarise(images, self.threshold)


class Invert(Sometimes):
    """x becomes 1 - x."""

    def change(self, images: Tensor) -> Tensor:
        return 1 - images


class Posterise(Sometimes):
    """Keeps the highest bits of each byte."""

    bits: int = 4

    def check(self) -> None:
        if not 0 <= self.bits <= 8:
            raise UserError("Posterise.bits must be between 0 and 8")

    def change(self, images: Tensor) -> Tensor:
        width = 2 ** (8 - self.bits)
        return torch.floor((images.float() * 255).round() / width) * (width / 255)


class Equalise(Sometimes):
    """Spreads the bytes of each channel so that all are about as frequent."""

    def change(self, images: Tensor) -> Tensor:
        levels = bytes_of(images)
        return look_up(equalise_table(levels), levels, images)


class AutoContrast(Sometimes):
    """Stretches each channel to the whole range."""

    def change(self, images: Tensor) -> Tensor:
        levels = bytes_of(images)
        return look_up(autocontrast_table(levels), levels, images)


class Sharpness(Transform):
    """Blends with the smoothed picture by a factor ~ U(factor): below 1 smooths, above 1 sharpens."""

    factor: Span = (0.1, 1.9)
    p: Rate = 1.0

    def numbers(self) -> int:
        return 2

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        return choose(draws[:, 0] < self.p, sharpness(images, between(draws[:, 1], self.factor)), images)


class Blur(Transform):
    """Gaussian blur with sigma ~ U(sigma) pixels, cut off at four of the largest sigmas."""

    p: Rate = 0.5
    sigma: Span = (0.1, 2.0)

    def check(self) -> None:
        if not 0 < self.sigma[0] <= self.sigma[1]:
            raise UserError("Blur.sigma must be positive, the smaller number first")

    def numbers(self) -> int:
        return 2

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        result = blur(images, between(draws[:, 1], self.sigma), math.ceil(4 * self.sigma[1]))
        return choose(draws[:, 0] < self.p, result, images)


class ThreeAugment(Transform):
    """One of greyscale, solarise and blur. Source: Touvron et al., DeiT III, 2022."""

    def numbers(self) -> int:
        return 2

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        kind = integer(draws[:, 0], 3)
        result = choose(kind == 0, grey(images).expand_as(images), solarise(images, 0.5))
        return choose(kind == 2, blur(images, between(draws[:, 1], (0.1, 2.0)), 8), result)


class Normalise(Transform):
    """(x - mean) / std per channel; one number stands for all channels. What comes after it is not in [0, 1]."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def check(self) -> None:
        if len(self.mean) != len(self.std) or min(self.std, default=0) <= 0:
            raise UserError("Normalise needs as many means as positive deviations")

    def transform(self, images: Tensor, draws: Tensor, step: Step | None = None) -> Tensor:
        if len(self.mean) == 1:
            return (images - self.mean[0]) / self.std[0]
        if len(self.mean) != images.shape[1]:
            raise UserError(f"Normalise has {len(self.mean)} means, the pictures have {images.shape[1]} channels")
        channels = zip(images.unbind(1), self.mean, self.std)
        return torch.stack([(channel - mean) / std for channel, mean, std in channels], dim=1)
