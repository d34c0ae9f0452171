"""Small images as data URIs, so that the page is a single file."""

from __future__ import annotations

import base64
import io
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from allmlp.errors import require

SIDE = 64
"""Maximum width and height of a thumbnail in pixels."""
PLUS, MINUS, GAP = (217, 99, 10), (22, 104, 199), (128, 128, 128)
LEVELS = 127


class EmbeddedImage(NamedTuple):
    uri: str
    width: int
    height: int


def weights_image(values: np.ndarray) -> EmbeddedImage:
    """Weights in [-1, 1] as a PNG: orange is positive, blue negative, 0 transparent, NaN a gap.

    A palette with transparency, so that the same image fits the light and the dark page.
    """
    pil = require("PIL.Image", "analysis")
    levels = np.rint(np.nan_to_num(values) * LEVELS).clip(-LEVELS, LEVELS).astype(int) + LEVELS
    indices = np.where(np.isnan(values), 2 * LEVELS + 1, levels).astype(np.uint8)
    image = pil.fromarray(indices)
    image.putpalette([part for color in (*[MINUS] * LEVELS, *[PLUS] * (LEVELS + 1), GAP) for part in color])
    alphas = bytes([*(round(255 * abs(level) / LEVELS) for level in range(-LEVELS, LEVELS + 1)), 40])
    return encode(image, "PNG", optimize=True, transparency=alphas)


def thumbnail(pixels: Tensor) -> EmbeddedImage:
    """One image, c h w (uint8, or float in [0, 1]), RGB or grayscale, downscaled to at most SIDE pixels."""
    pil = require("PIL.Image", "analysis")
    values = pixels.float() / (255 if pixels.dtype == torch.uint8 else 1)
    scale = SIDE / max(values.shape[1:])
    if scale < 1:
        size = tuple(max(round(side * scale), 1) for side in values.shape[1:])
        values = interpolate(values[None], size, mode="bilinear", antialias=True)[0]
    array = (values.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    image = pil.fromarray(array if array.shape[2] == 3 else array[..., 0])
    # Lossy compression would smear images of a few pixels.
    return encode(image, "WEBP", lossless=max(image.size) <= SIDE // 2, quality=80, method=4)


def encode(image: Any, kind: str, **options: Any) -> EmbeddedImage:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return EmbeddedImage(f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}", *image.size)
