"""Decode image files into uint8 pixels of a given size.

The size in the header is checked before anything is decoded, and only common photo formats are accepted.
"""

from __future__ import annotations

import io
import math
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from allmlp.data.direct import ORIENTATION, open_direct
from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.data.resample import Box, as_array, crop_box, crop_center
from allmlp.errors import UserError, one_line, require
from allmlp.files import read_regular
from allmlp.spec import Range, Rate, Spec

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = frozenset((".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
MAX_TRIES = 10
BITS_PER_SAMPLE, PHOTOMETRIC_INTERPRETATION = 258, 262
"""Tags of TIFF."""

Ratio = Annotated[float, Range(0.01, 100.0)]


class CorruptImage(UserError):
    """An image that cannot be decoded; `Decode.on_corrupt` says what to do."""


class Decode(Spec):
    """How images are decoded, resized and cropped.

    For evaluation an image is resized (bicubic) so that its short side is the model's size divided by `crop_pct`, then
    center-cropped. For training a random box is cropped (Szegedy et al. 2015), with area uniform in `scale` and
    width / height log-uniform in `ratio`. Transparent pixels become white; animations are read up to the first frame.
    Of 12 or 16 bits per channel the upper 8 are used; pixels of 32 bits, whose range is unknown, are refused.
    """

    crop_pct: Annotated[float, Range(0.05, 1.0)] = 0.875
    scale: tuple[Rate, Rate] = (0.08, 1.0)
    ratio: tuple[Ratio, Ratio] = (3 / 4, 4 / 3)
    color: Literal["rgb", "gray"] = "rgb"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """Standard deviation of the pixels divided by 255; by default ImageNet's."""
    max_pixels: Annotated[int, Range(1, 178_956_970)] = 2**26
    """Larger images are treated as corrupt. The upper bound is Pillow's."""
    on_corrupt: Literal["error", "skip"] = "skip"
    """"skip" leaves out images that cannot be read, with a warning; more than a tenth of them is always an error."""

    def check(self) -> None:
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise UserError(f"Decode.{name} must be (smaller, larger), not {(low, high)}")
        for name in ("mean", "std"):
            if getattr(self, name) and len(getattr(self, name)) != self.channels:
                raise UserError(f"Decode.{name} needs {self.channels} numbers, one per channel")

    @property
    def channels(self) -> int:
        return 3 if self.color == "rgb" else 1

    @property
    def mode(self) -> str:
        """Pillow's name of the color mode."""
        return "RGB" if self.color == "rgb" else "L"

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        mean, std = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) if self.color == "rgb" else ((0.449,), (0.226,))
        return self.mean or mean, self.std or std


def decode_image(
    data: bytes, size: tuple[int, int], decode: Decode = Decode(), uniforms: Sequence[float] | None = None
) -> Tensor:
    """Decode an image (uint8, c h w), with a random crop from four `uniforms`, or else as for evaluation."""
    return as_tensor(decode_pixels(data, size, decode, uniforms))


def decode_pixels(
    data: bytes, size: tuple[int, int], decode: Decode, uniforms: Sequence[float] | None = None
) -> np.ndarray:
    """Like `decode_image`, but h w c."""
    if not data:
        raise CorruptImage("the file is empty")
    image = open_direct(data) if decode.color == "rgb" else None
    if image is not None and image.height * image.width <= decode.max_pixels:
        original = image.height, image.width
        box = None if uniforms is None else random_box(*original, decode, uniforms)
        pixels = image.decode(1 if box is None else reduction(*original, box, size))
        if pixels is not None:
            return crop_center(pixels, size, decode.crop_pct) if box is None else crop_box(pixels, original, box, size)
    with open_image(io.BytesIO(data), decode) as opened:
        return crop_and_resize(opened, size, decode, uniforms)


def decode_whole(data: bytes, decode: Decode) -> np.ndarray:
    """All pixels of an image, upright: uint8, h w c."""
    if not data:
        raise CorruptImage("the file is empty")
    with open_image(io.BytesIO(data), decode) as image:
        check_range(image)
        image.load()
        return as_array(upright(image, decode.mode))


def as_tensor(pixels: np.ndarray) -> Tensor:
    """Convert h w c to c h w; read-only pixels, which are part of a file's bytes, are copied."""
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)


@contextmanager
def open_image(source: Path | io.BytesIO, decode: Decode) -> Iterator[Any]:
    """Open an image and read its header; any error, also inside the `with` block, becomes a CorruptImage."""
    Image = require("PIL.Image", "train")
    try:
        with Image.open(source, formats=FORMATS) as image:
            if image.width * image.height > decode.max_pixels:
                raise CorruptImage(f"{image.width} x {image.height} pixels exceed max_pixels={decode.max_pixels:,}")
            yield image
    except (CorruptImage, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        raise CorruptImage(f"not an image, or not one of the formats {', '.join(FORMATS)}") from None
    except Exception as reason:  # decoders raise many types on damaged files
        raise CorruptImage(one_line(reason) or type(reason).__name__) from reason


def is_image(cell: object) -> bool:
    """Whether a table's cell, bytes or {"bytes": ...}, holds an image with a header that can be read."""
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    try:
        with open_image(io.BytesIO(data if isinstance(data, bytes) else b""), Decode()):
            return True
    except CorruptImage:
        return False


def read_images(files: Sequence[Path], size: tuple[int, int], preprocessing: ImagePreprocessing) -> Tensor:
    """Read image files, resized and cropped as for evaluation: uint8, b c h w."""
    decode = Decode(crop_pct=preprocessing.crop_pct, color="rgb" if len(preprocessing.mean) == 3 else "gray")
    images = []
    for file in files:
        try:
            images.append(decode_image(read_regular(file), size, decode))
        except UserError as reason:
            raise UserError(f"{file}: {reason}") from None
        except IsADirectoryError:
            raise UserError(f"{file} is a folder: name the image files in it, such as {file}/*.jpg") from None
        except OSError as reason:
            raise UserError(f"cannot read {file}: {reason.strerror}") from None
    return torch.stack(images)


def crop_and_resize(image: Any, size: tuple[int, int], decode: Decode, uniforms: Sequence[float] | None) -> np.ndarray:
    """Crop and resize an opened image: uint8, h w c."""
    check_range(image)
    jpeg = image.format in ("JPEG", "MPO")
    if not jpeg:
        image.load()
        image = upright(image, decode.mode)  # other formats report the orientation only after loading
    rotated = jpeg and orientation(image) >= 5
    height, width = (image.width, image.height) if rotated else (image.height, image.width)
    box = None if uniforms is None else random_box(height, width, decode, uniforms)
    if jpeg:
        if box is not None:
            reduced = reduction(height, width, box, size)
            image.draft(None, (image.width // reduced, image.height // reduced))
        image.load()
        image = upright(image, decode.mode)
    if box is None:
        return crop_center(image, size, decode.crop_pct)
    return crop_box(image, (height, width), box, size)


def reduction(height: int, width: int, box: Box, size: tuple[int, int]) -> int:
    """The largest factor of 1, 2, 4 or 8 by which decoding can reduce a JPEG while the box is at least `size`."""
    _, _, wide, high = box
    most = min(width // math.ceil(width * size[1] / wide), height // math.ceil(height * size[0] / high))
    return next((factor for factor in (8, 4, 2) if factor <= most), 1)


def random_box(height: int, width: int, decode: Decode, uniforms: Sequence[float]) -> Box:
    """Left, top, width and height of a random box, a function of the uniforms."""
    area_draw, ratio_draw, across, down = uniforms
    low, high = (math.log(bound) for bound in decode.ratio)
    again: random.Random | None = None
    for _ in range(MAX_TRIES):
        area = height * width * (decode.scale[0] + (decode.scale[1] - decode.scale[0]) * area_draw)
        ratio = math.exp(low + (high - low) * ratio_draw)
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            break
        # A box that does not fit is drawn again, from a generator seeded with the uniforms.
        again = again or random.Random(struct.pack("4d", *uniforms))
        area_draw, ratio_draw = again.random(), again.random()
    else:
        wide = max(1, min(width, round(height * decode.ratio[1])))
        tall = max(1, min(height, round(width / decode.ratio[0])))
        return (width - wide) // 2, (height - tall) // 2, wide, tall
    left = min(int(across * (width - wide + 1)), width - wide)
    return left, min(int(down * (height - tall + 1)), height - tall), wide, tall


def orientation(image: Any) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # the image is usable without its EXIF block
        return 1


def upright(image: Any, mode: str) -> Any:
    """A loaded image in a mode of 8 bits, rotated or flipped according to the EXIF orientation."""
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
    image = convert_mode(image, mode)
    return image if how is None else image.transpose(how)


def check_range(image: Any) -> None:
    """Refuse pixels of 32 bits: nothing says which of their values are black and white."""
    # Pillow widens the 16 bits of a PGM file, and in its older versions of a PNG file.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise CorruptImage("pixels of 32 bits, whose range is unknown: save it with 8 or 16 bits")


def upper_bits(image: Any) -> np.ndarray:
    """The upper 8 bits of gray levels of 16, or of the 12 that a TIFF file may have."""
    tags = getattr(image, "tag_v2", {})
    pixels = (np.asarray(image) >> (tags.get(BITS_PER_SAMPLE, (16,))[0] - 8)).astype(np.uint8)
    # Pillow inverts a TIFF file in which 0 is white only if it has 8 bits or fewer.
    return 255 - pixels if tags.get(PHOTOMETRIC_INTERPRETATION) == 0 else pixels


def convert_mode(image: Any, mode: str) -> Any:
    """Convert to 8 bits per channel without alpha or palette."""
    Image = require("PIL.Image", "train")
    if image.mode.startswith("I"):
        image = Image.fromarray(upper_bits(image))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)
