"""One encoded picture -> uint8 pixels of a given size, whatever the file holds.

Nothing is decoded before its header has told how large it is, and only formats that photographs come in are tried.
"""

from __future__ import annotations

import io
import math
import random
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from allmlp.errors import UserError, one_line, require
from allmlp.spec import Range, Rate, Spec

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
ORIENTATION = 0x0112
TRIES = 10

Ratio = Annotated[float, Range(0.01, 100.0)]


class BrokenImage(UserError):
    """A picture that cannot be used; what happens then is `Decode.broken`."""


class Decode(Spec):
    """How pictures become pixels.

    Evaluated, a picture is resized (bicubic) until its short side is the model's size divided by `crop`, and its
    centre is taken. Trained on, a box is drawn (Szegedy et al. 2015): its area uniform in `scale` of the picture,
    width : height log-uniform in `ratio`. Transparent pixels become white; of an animation the first frame counts.
    """

    crop: Annotated[float, Range(0.05, 1.0)] = 0.875
    scale: tuple[Rate, Rate] = (0.08, 1.0)
    ratio: tuple[Ratio, Ratio] = (3 / 4, 4 / 3)
    colour: Literal["rgb", "grey"] = "rgb"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """Of the pixels divided by 255, for the model's input; those of ImageNet's photographs if not given."""
    limit: Annotated[int, Range(1, 178_956_970)] = 2**26
    """Pixels a file may announce; the bound is Pillow's own."""
    broken: Literal["error", "skip"] = "error"
    """Skipping takes the next readable picture instead, counts and reports."""

    def check(self) -> None:
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise UserError(f"Decode.{name} must be (smaller, larger), not {(low, high)}")
        for name in ("mean", "std"):
            if getattr(self, name) and len(getattr(self, name)) != self.channels:
                raise UserError(f"Decode.{name} needs {self.channels} numbers, one for each colour")

    @property
    def channels(self) -> int:
        return 3 if self.colour == "rgb" else 1

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        mean, std = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) if self.colour == "rgb" else ((0.449,), (0.226,))
        return self.mean or mean, self.std or std


def picture(data: bytes, size: tuple[int, int], how: Decode = Decode(), draws: Sequence[float] | None = None) -> Tensor:
    """Pixels of an encoded picture (uint8, c h w), cropped by four uniform `draws` or as it is evaluated."""
    Image = require("PIL.Image", "train")
    if not data:
        raise BrokenImage("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > how.limit:
                raise BrokenImage(f"{image.width} x {image.height} pixels are more than the limit of {how.limit:,}")
            return cut(image, size, how, draws)
    except (BrokenImage, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        raise BrokenImage(f"not a picture, or of a format other than {', '.join(FORMATS)}") from None
    except Exception as reason:  # decoders raise what they like on damaged files
        raise BrokenImage(one_line(reason) or type(reason).__name__) from reason


def cut(image: Any, size: tuple[int, int], how: Decode, draws: Sequence[float] | None) -> Tensor:
    """The chosen box of an opened picture, resized in one step."""
    Image = require("PIL.Image", "train")
    jpeg = image.format in ("JPEG", "MPO")
    if not jpeg:
        image.load()
        image = turn(image)  # only now is it known how every other format lies
    lying = jpeg and orientation(image) >= 5
    height, width = (image.width, image.height) if lying else (image.height, image.width)
    if draws is None:
        left, top, wide, high = centre_box(height, width, size, how.crop)
    else:
        left, top, wide, high = drawn_box(height, width, how, draws)
    if jpeg:
        if draws is not None:
            # JPEG can be decoded at 1/2, 1/4 or 1/8: never smaller than the box is needed.
            whole = math.ceil(width * size[1] / wide), math.ceil(height * size[0] / high)
            image.draft(None, whole[::-1] if lying else whole)
        image.load()
        image = turn(image)
    across, down = image.width / width, image.height / height
    box = (
        max(left * across, 0.0),
        max(top * down, 0.0),
        min((left + wide) * across, image.width),
        min((top + high) * down, image.height),
    )
    flat = flatten(image, "RGB" if how.colour == "rgb" else "L")
    gap = None if draws is None else 2.0
    pixels = np.array(flat.resize(size[::-1], Image.Resampling.BICUBIC, box=box, reducing_gap=gap))
    return torch.from_numpy(pixels).view(*size, how.channels).permute(2, 0, 1)


def centre_box(height: int, width: int, size: tuple[int, int], crop: float) -> tuple[float, float, float, float]:
    """Left, top, width and height of what remains when the picture is resized to cover size / crop and cut.

    Resizing only this box gives the pixels that resizing everything and cutting gives, and a very long picture
    never becomes a very large one.
    """
    tall, broad = (math.floor(side / crop) for side in size)
    if tall * width >= broad * height:
        broad = max(broad, tall * width // height)
    else:
        tall = max(tall, broad * height // width)
    left, top = round((broad - size[1]) / 2), round((tall - size[0]) / 2)
    across, down = width / broad, height / tall
    return left * across, top * down, size[1] * across, size[0] * down


def drawn_box(height: int, width: int, how: Decode, draws: Sequence[float]) -> tuple[int, int, int, int]:
    """Left, top, width and height of a random box; the same draws give the same box."""
    area_draw, ratio_draw, across, down = draws
    low, high = (math.log(bound) for bound in how.ratio)
    again: random.Random | None = None
    for _ in range(TRIES):
        area = height * width * (how.scale[0] + (how.scale[1] - how.scale[0]) * area_draw)
        ratio = math.exp(low + (high - low) * ratio_draw)
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            break
        # A box that does not fit is drawn again, from numbers that the four draws fix.
        again = again or random.Random(struct.pack("4d", *draws))
        area_draw, ratio_draw = again.random(), again.random()
    else:
        wide = max(1, min(width, round(height * how.ratio[1])))
        tall = max(1, min(height, round(width / how.ratio[0])))
        return (width - wide) // 2, (height - tall) // 2, wide, tall
    left = min(int(across * (width - wide + 1)), width - wide)
    return left, min(int(down * (height - tall + 1)), height - tall), wide, tall


def orientation(image: Any) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a damaged EXIF block says nothing, the picture is still good
        return 1


def turn(image: Any) -> Any:
    """The picture as its EXIF orientation wants it seen."""
    Transpose = require("PIL.Image", "train").Transpose
    how = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(orientation(image))
    return image if how is None else image.transpose(how)


def flatten(image: Any, mode: str) -> Any:
    """Eight bits a channel, no alpha, no palette."""
    Image = require("PIL.Image", "train")
    if image.mode == "F":
        raise BrokenImage("its pixels are floating-point numbers of unknown range: save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise BrokenImage("its pixels have more than 16 bits: save it with 8 or 16")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)
