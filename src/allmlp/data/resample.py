"""Cropping and bicubic resizing of 8-bit pixels on a CPU.

torch resamples bytes by Pillow's algorithm with vector instructions: on x86-64 it takes a quarter of Pillow's time, and
pixels differ by at most 2, since each of two passes rounds. Elsewhere torch is not vectorized, and Pillow is used.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from allmlp.errors import require
from allmlp.spec import Size

Box = tuple[int, int, int, int]
"""Left, top, width and height."""
LONG = 4
"""If a resized image has more than this many times the pixels of its center crop, only the crop is computed."""


@cache
def is_vectorized() -> bool:
    """Whether torch resizes bytes with vector instructions on this processor."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def crop_box(source: Any, original: Size, box: Box, size: Size) -> np.ndarray:
    """A box of an image, resized: uint8, h w c.

    `source` is a Pillow image or an array (h w c). If it is smaller than the `original` that the box refers to, the box
    may start at a fraction of a pixel, which is left to Pillow.
    """
    Image = require("PIL.Image", "train")
    height, width = size_of(source)
    left, top, wide, high = box
    right, bottom = left + wide, top + high
    if (height, width) != original:
        down, across = height / original[0], width / original[1]
        part = left * across, top * down, min(right * across, width), min(bottom * down, height)
        return as_array(as_image(source).resize(size[::-1], Image.Resampling.BICUBIC, box=part))
    if is_vectorized():
        return resize(as_array(source)[top:bottom, left:right], size)
    image = as_image(source).crop((left, top, right, bottom))
    # A large reduction starts by averaging whole blocks.
    return as_array(image.resize(size[::-1], Image.Resampling.BICUBIC, reducing_gap=2.0))


def crop_center(source: Any, size: Size, crop_pct: float) -> np.ndarray:
    """The center of an image, resized so that its short side is that of `size` divided by `crop_pct`: uint8, h w c."""
    height, width = size_of(source)
    whole, (top, left) = center_crop(height, width, size, crop_pct)
    if is_vectorized() and math.prod(whole) <= LONG * math.prod(size):
        return resize(as_array(source), whole)[top : top + size[0], left : left + size[1]]
    x, y, wide, high = center_box(height, width, size, crop_pct)
    box = max(x, 0.0), max(y, 0.0), min(x + wide, width), min(y + high, height)
    Image = require("PIL.Image", "train")
    return as_array(as_image(source).resize(size[::-1], Image.Resampling.BICUBIC, box=box))


def center_crop(height: int, width: int, size: Size, crop_pct: float) -> tuple[Size, Size]:
    """The size of the whole image after resizing, and the top left corner of the crop in it."""
    tall, broad = (math.floor(side / crop_pct) for side in size)
    if tall * width >= broad * height:
        broad = max(broad, tall * width // height)
    else:
        tall = max(tall, broad * height // width)
    return (tall, broad), (round((tall - size[0]) / 2), round((broad - size[1]) / 2))


def center_box(height: int, width: int, size: Size, crop_pct: float) -> tuple[float, float, float, float]:
    """Left, top, width and height of the center crop in the original image.

    Resizing only this box gives the same pixels as resizing the whole image and cropping, and very long images do not
    become very large ones.
    """
    (tall, broad), (top, left) = center_crop(height, width, size, crop_pct)
    across, down = width / broad, height / tall
    return left * across, top * down, size[1] * across, size[0] * down


def resize_short_side(pixels: np.ndarray, side: int) -> np.ndarray:
    """Resize an image to this short side, as before the center crop for evaluation; smaller images are unchanged."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    if short <= side:
        return pixels
    return crop_box(pixels, (height, width), (0, 0, width, height), (side * height // short, side * width // short))


def resize(pixels: np.ndarray, size: Size) -> np.ndarray:
    """Resize with antialiasing, by torch."""
    if pixels.shape[:2] == size:
        return pixels
    # A writable, contiguous copy: torch would make it with several threads.
    source = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None]
    return F.interpolate(source, size, mode="bicubic", antialias=True)[0].permute(1, 2, 0).numpy()


def size_of(source: Any) -> Size:
    return source.shape[:2] if isinstance(source, np.ndarray) else (source.height, source.width)


def as_array(source: Any) -> np.ndarray:
    pixels = np.asarray(source)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def as_image(source: Any) -> Any:
    if not isinstance(source, np.ndarray):
        return source
    pixels = source if source.shape[2] > 1 else source[:, :, 0]
    return require("PIL.Image", "train").fromarray(np.ascontiguousarray(pixels))
