"""Small generated images in many formats."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def scene(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    """Smooth colors and a bright square in the upper left corner, which shows the orientation."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows * 255 / height, columns * 255 / width, np.full(rows.shape, (seed * 37) % 256)], axis=-1)
    pixels[: height // 4, : width // 4] = 255
    return Image.fromarray(pixels.astype(np.uint8))


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def rotated(orientation: int, kind: str) -> bytes:
    """The scene as stored by a camera with this EXIF orientation."""
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    stored = scene() if undo is None else scene().transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(stored, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))


def png_header(width: int, height: int) -> bytes:
    """A tiny PNG with a huge size in its header."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


CORRUPT = {
    "empty": b"",
    "text": b"this is not an image at all",
    "truncated jpeg": encode(scene(), "JPEG")[:-200],
    "truncated png": encode(scene())[:-60],
    "truncated webp": encode(scene(), "WEBP", lossless=True)[:-60],
    "header only": encode(scene(), "JPEG")[:20],
    "bomb": png_header(12_000, 8_000),
    "larger bomb": png_header(60_000, 60_000),
    "floating point": encode(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"),
}
