"""Pixels of JPEG and PPM images without Pillow.

Pillow runs a third of a millisecond of Python code per JPEG, during which other threads wait for its lock.
Here a few lines read the header, and simplejpeg, if installed, decodes without the lock. Unusual files (other color
modes, damage) are left to Pillow; pixels are the same.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from allmlp.errors import require

START_OF_IMAGE, APP1, START_OF_SCAN = 0xD8, 0xE1, 0xDA
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Start of frame: sizes follow. The others in this range are tables."""
STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers without a length."""
ORIENTATION = 0x0112
PPM = re.compile(rb"P6\s(\d{1,9})\s(\d{1,9})\s255\s")


class DirectImage(NamedTuple):
    """An RGB image that can be decoded without Pillow."""

    height: int
    width: int
    decode: Callable[[int], np.ndarray | None]
    """Reduction -> uint8 pixels, h w 3; a JPEG at 1 / reduction of its size. None if Pillow has to decode it."""


@cache
def simplejpeg() -> Any:
    """The package simplejpeg, or None if it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def open_direct(data: bytes) -> DirectImage | None:
    """Read the header of an image; None if only Pillow can read it."""
    if data.startswith(b"\xff\xd8"):
        return open_jpeg(data) if simplejpeg() else None
    if header := PPM.match(data):
        width, height = int(header[1]), int(header[2])
        if width and height and len(data) == header.end() + 3 * width * height:
            pixels = np.frombuffer(data, dtype=np.uint8, offset=header.end()).reshape(height, width, 3)
            return DirectImage(height, width, lambda reduction: pixels)
    return None


def open_jpeg(data: bytes) -> DirectImage | None:
    """Walk over the segments of a JPEG up to the frame header; None if anything is unusual."""
    place = 2
    while place + 10 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF or marker in STANDALONE:
            place += 1 if marker == 0xFF else 2
            continue
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        if marker in FRAMES:
            height, width = (int.from_bytes(data[place + at : place + at + 2], "big") for at in (5, 7))
            is_usual = data[place + 4] == 8 and data[place + 9] == 3 and height and width
            return DirectImage(height, width, partial(decode_jpeg, data, height, width)) if is_usual else None
        if marker == APP1 and is_rotated(data[place + 4 : place + 2 + length]):
            return None
        if marker in (START_OF_SCAN, START_OF_IMAGE) or length < 2:
            return None
        place += 2 + length
    return None


def is_rotated(segment: bytes) -> bool:
    """Whether the image is rotated or flipped according to its Exif or XMP block; True if that cannot be read."""
    if not segment.startswith(b"Exif\0\0"):
        return b"tiff:Orientation" in segment
    exif = require("PIL.Image", "train").Exif()
    try:
        exif.load(segment)
        return exif.get(ORIENTATION, 1) != 1
    except Exception:  # Pillow raises many types on damaged blocks
        return True


def decode_jpeg(data: bytes, height: int, width: int, reduction: int) -> np.ndarray | None:
    """RGB pixels; None if anything is wrong with the data."""
    least = {"min_height": -(-height // reduction), "min_width": -(-width // reduction), "min_factor": reduction}
    try:
        return simplejpeg().decode_jpeg(data, **least)
    except ValueError:  # also where Pillow would show what could be decoded
        return None
