"""Small pictures as data URIs, so that a page needs no file beside it."""

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
"""Pixels of a thumbnail's longer side, at most."""
PLUS, MINUS, GAP = (217, 99, 10), (22, 104, 199), (128, 128, 128)
LEVELS = 127


class Picture(NamedTuple):
    uri: str
    width: int
    height: int


def weights_picture(values: np.ndarray) -> Picture:
    """Weights in [-1, 1] as a PNG: orange adds, blue subtracts, 0 lets the page through; not a number is a gap.

    A palette with transparency: the same picture serves a light page and a dark one.
    """
    image = require("PIL.Image", "analysis")
    levels = np.rint(np.nan_to_num(values) * LEVELS).clip(-LEVELS, LEVELS).astype(int) + LEVELS
    indices = np.where(np.isnan(values), 2 * LEVELS + 1, levels).astype(np.uint8)
    picture = image.fromarray(indices)
    picture.putpalette([part for colour in (*[MINUS] * LEVELS, *[PLUS] * (LEVELS + 1), GAP) for part in colour])
    shares = [abs(level) / LEVELS for level in range(-LEVELS, LEVELS + 1)]
    alphas = bytes([*(round(255 * share) for share in shares), 40])
    return encode(picture, "PNG", optimize=True, transparency=alphas)


def thumbnail(pixels: Tensor) -> Picture:
    """One picture, c h w (uint8, or in [0, 1]), in colour or grey, at most SIDE pixels wide and high."""
    image = require("PIL.Image", "analysis")
    values = pixels.float() / (255 if pixels.dtype == torch.uint8 else 1)
    scale = SIDE / max(values.shape[1:])
    if scale < 1:
        size = tuple(max(round(side * scale), 1) for side in values.shape[1:])
        values = interpolate(values[None], size, mode="bilinear", antialias=True)[0]
    array = (values.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = image.fromarray(array if array.shape[2] == 3 else array[..., 0])
    # Lossy compression would smear pictures of a few pixels.
    return encode(picture, "WEBP", lossless=max(picture.size) <= SIDE // 2, quality=80, method=4)


def encode(image: Any, kind: str, **options: Any) -> Picture:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Picture(f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}", *image.size)
