"""Images of all formats are decoded to the right size, or give a one-line error."""

from __future__ import annotations

import contextlib
import io
import math
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from PIL import Image
from sample_images import CORRUPT, encode, rotated, scene

from allmlp.data.decode import CorruptImage, Decode, crop_and_resize, decode_image, decode_whole, random_box
from allmlp.data.resample import center_box
from allmlp.errors import UserError

SIZE = (24, 24)
WHOLE = Decode(crop_pct=1.0, scale=(1.0, 1.0), ratio=(4 / 3, 4 / 3))
uniform = some.floats(0, 1, exclude_max=True, width=32)


def near(pixels: torch.Tensor, wanted: torch.Tensor, tolerance: float = 3) -> bool:
    return bool((pixels.float() - wanted.float()).abs().mean() < tolerance)


GOOD = {
    "jpeg": encode(scene(), "JPEG", quality=95),
    "progressive": encode(scene(), "JPEG", quality=95, progressive=True),
    "png": encode(scene()),
    "webp": encode(scene(), "WEBP", lossless=True),
    "bmp": encode(scene(), "BMP"),
    "tiff": encode(scene(), "TIFF"),
    "ppm": encode(scene(), "PPM"),
    "cmyk jpeg": encode(scene().convert("CMYK"), "JPEG", quality=95),
    "cmyk tiff": encode(scene().convert("CMYK"), "TIFF"),
    "opaque alpha": encode(scene().convert("RGBA")),
    "palette": encode(scene().quantize(256)),
    "animated gif": encode(scene().quantize(256), "GIF", save_all=True, append_images=[scene(seed=3).quantize(256)]),
    "animated webp": encode(scene(), "WEBP", lossless=True, save_all=True, append_images=[scene(seed=3)]),
    "animated png": encode(scene(), "PNG", save_all=True, append_images=[scene(seed=3)]),
    "two pages": encode(scene(), "TIFF", save_all=True, append_images=[scene(seed=3)]),
}


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("uniforms", [None, (0.5, 0.5, 0.5, 0.5)])
def test_formats(kind: str, uniforms: tuple[float, ...] | None) -> None:
    pixels, wanted = (decode_image(data, (48, 64), WHOLE, uniforms) for data in (GOOD[kind], GOOD["png"]))
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 48, 64)
    assert near(pixels, wanted, 8 if kind in ("palette", "animated gif") else 3)
    assert torch.equal(wanted, torch.from_numpy(np.array(scene())).permute(2, 0, 1))


@pytest.mark.parametrize("uniforms", [None, (0.5, 0.5, 0.5, 0.5)])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize("largest", [1, 255, 60_000])
def test_thirty_two_bits_are_refused(dtype: type[np.generic], largest: int, uniforms: tuple[float, ...] | None) -> None:
    """They would be black, or not, by values that the file does not tell."""
    image = Image.fromarray((np.arange(48.0).reshape(6, 8) / 47 * largest).astype(dtype))
    with pytest.raises(CorruptImage, match="pixels of 32 bits, whose range is unknown: save it with 8 or 16 bits"):
        decode_image(encode(image, "TIFF"), SIZE, WHOLE, uniforms)
    with pytest.raises(CorruptImage, match="pixels of 32 bits"):
        crop_and_resize(image, SIZE, WHOLE, uniforms)
    with pytest.raises(CorruptImage, match="pixels of 32 bits"):
        decode_whole(encode(image, "TIFF"), WHOLE)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("uniforms", [None, (0.5, 0.5, 0.5, 0.5), (0.3, 0.6, 0.1, 0.2)])
def test_exif_orientation(kind: str, orientation: int, uniforms: tuple[float, ...] | None) -> None:
    how = WHOLE if uniforms is None or uniforms[0] == 0.5 else Decode()
    pixels = decode_image(rotated(orientation, kind), (12, 16), how, uniforms)
    assert near(pixels, decode_image(GOOD["png"], (12, 16), how, uniforms), 4)


def test_damaged_exif_is_ignored() -> None:
    data = encode(scene(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decode_image(data, SIZE).shape == (3, 24, 24)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits(kind: str) -> None:
    values = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    pixels = decode_image(encode(Image.fromarray(values), kind), (64, 64), Decode(crop_pct=1.0))
    assert torch.equal(pixels[0], torch.from_numpy((values >> 8).astype(np.uint8))) and torch.equal(
        pixels[0], pixels[2]
    )


@pytest.mark.parametrize(("bits", "zero"), [(8, "black"), (8, "white"), (12, "black"), (16, "black"), (16, "white")])
def test_gray_levels_of_tiff(bits: int, zero: str) -> None:
    """12 bits were almost black, and an image in which 0 is white was its negative, as scans and X-rays may be."""
    values = np.linspace(0, 2**bits - 1, 64).astype(int)
    data = int("".join(f"{value:0{bits}b}" for value in values), 2).to_bytes(8 * bits, "big")
    data = values.astype("<u2").tobytes() if bits == 16 else data
    tags = {256: 8, 257: 8, 258: bits, 259: 1, 262: zero == "black", 273: 8, 277: 1, 278: 8, 279: len(data)}
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items())
    file = b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)
    wanted = values >> (bits - 8) if zero == "black" else 255 - (values >> (bits - 8))
    for mode in ("rgb", "gray"):
        pixels = decode_image(file, (8, 8), Decode(crop_pct=1.0, color=mode))  # type: ignore[arg-type]
        assert pixels[0].flatten().tolist() == wanted.tolist()


def test_transparent_is_white() -> None:
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert decode_image(encode(clear), SIZE).min() == 255
    palette = scene().quantize(4)
    data = encode(palette, transparency=int(palette.getpixel((63, 0))))  # type: ignore[arg-type]
    assert decode_image(data, (48, 64), WHOLE)[:, 0, 63].tolist() == [255] * 3
    gray = encode(Image.new("LA", (8, 8), (0, 0)))
    assert decode_image(gray, SIZE, Decode(color="gray")).min() == 255


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (1, 60_000), (3, 2)])
@pytest.mark.parametrize("uniforms", [None, (0.9, 0.0, 0.999, 0.999)])
def test_tiny_and_very_long(mode: str, size: tuple[int, int], uniforms: tuple[float, ...] | None) -> None:
    pixels = decode_image(
        encode(Image.new(mode, size), "TIFF" if mode == "CMYK" else "PNG"), (30, 20), Decode(), uniforms
    )
    assert pixels.shape == (3, 30, 20) and (pixels == pixels[0, 0, 0]).all()


def test_gray() -> None:
    pixels = decode_image(GOOD["png"], (48, 64), Decode(crop_pct=1.0, color="gray"))
    assert torch.equal(pixels[0], torch.from_numpy(np.array(scene().convert("L"))))
    assert len(Decode(color="gray").statistics()[0]) == 1


@pytest.mark.parametrize("kind", CORRUPT)
@pytest.mark.parametrize("uniforms", [None, (0.5, 0.5, 0.5, 0.5)])
def test_corrupt_files(kind: str, uniforms: tuple[float, ...] | None) -> None:
    with pytest.raises(CorruptImage) as caught:
        decode_image(CORRUPT[kind], SIZE, Decode(), uniforms)
    assert "\n" not in str(caught.value) and len(str(caught.value)) > 5


def test_max_pixels_is_checked_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    with pytest.raises(CorruptImage, match="64 x 48 pixels exceed max_pixels=3,000"):
        decode_image(GOOD["jpeg"], SIZE, Decode(max_pixels=3000))


@settings(max_examples=100, deadline=None)
@given(kind=some.sampled_from(sorted(GOOD)), cuts=some.integers(0, 10**6), junk=some.binary(min_size=1, max_size=8))
def test_damaged_bytes_give_pixels_or_an_error(kind: str, cuts: int, junk: bytes) -> None:
    data = bytearray(GOOD[kind])
    place = cuts % len(data)
    data[place : place + len(junk)] = junk
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(CorruptImage):
            assert decode_image(bytes(data), SIZE).shape == (3, 24, 24)


# --- the boxes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(224, 224), (32, 32), (96, 160)])
@pytest.mark.parametrize("source", [(500, 375), (333, 500), (97, 1000), (256, 256), (20, 30)])
def test_evaluation_is_resize_then_center_crop(size: tuple[int, int], source: tuple[int, int]) -> None:
    width, height = source
    # Not from 0 to 255: Pillow clips between its two passes, and their order depends on the sizes.
    noise = np.random.default_rng(0).integers(90, 166, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    tall, broad = (math.floor(side / 0.875) for side in size)
    if tall / height >= broad / width:
        resized = image.resize((tall * width // height, tall), Image.Resampling.BICUBIC)
    else:
        resized = image.resize((broad, broad * height // width), Image.Resampling.BICUBIC)
    left, top = round((resized.width - size[1]) / 2), round((resized.height - size[0]) / 2)
    wanted = np.array(resized.crop((left, top, left + size[1], top + size[0])), dtype=np.int16)
    pixels = decode_image(encode(image), size).permute(1, 2, 0).numpy().astype(np.int16)
    assert np.abs(pixels - wanted).max() <= 2  # each pass rounds


@settings(deadline=None)
@given(some.integers(1, 3000), some.integers(1, 3000), some.integers(1, 300), some.integers(1, 300))
def test_center_box_is_inside_the_image(height: int, width: int, tall: int, broad: int) -> None:
    left, top, wide, high = center_box(height, width, (tall, broad), 0.875)
    assert left > -1e-6 and top > -1e-6 and left + wide < width + 1e-6 and top + high < height + 1e-6


@settings(deadline=None)
@given(some.integers(1, 3000), some.integers(1, 3000), some.tuples(uniform, uniform, uniform, uniform))
def test_random_box_is_inside_the_image_and_reproducible(height: int, width: int, uniforms: tuple[float, ...]) -> None:
    left, top, wide, high = box = random_box(height, width, Decode(), uniforms)
    assert 0 <= left <= left + wide <= width and 0 <= top <= top + high <= height and wide > 0 and high > 0
    assert random_box(height, width, Decode(), uniforms) == box


def test_random_boxes_have_the_published_distribution() -> None:
    """If every box fits, areas and positions are uniform and ratios log-uniform."""
    how, side = Decode(scale=(0.1, 0.5)), 2000
    uniforms = torch.rand(4000, 4, generator=torch.Generator().manual_seed(0)).tolist()
    boxes = np.array([random_box(side, side, how, numbers) for numbers in uniforms], dtype=np.float64)
    left, top, wide, high = boxes.T
    for values, low, top_value in (
        (wide * high / side**2, 0.1, 0.5),
        (np.log(wide / high), math.log(3 / 4), math.log(4 / 3)),
        (left / (side - wide), 0, 1),
        (top / (side - high), 0, 1),
    ):
        found = np.sort((values - low) / (top_value - low))
        assert np.abs(found - np.linspace(0, 1, len(found))).max() < 0.03  # Kolmogorov-Smirnov


def test_boxes_that_do_not_fit_are_drawn_again() -> None:
    """Compare with torchvision's loop: draw until a box fits, a center crop after ten tries."""
    how, uniforms = Decode(scale=(0.5, 1.0)), torch.rand(2000, 4, generator=torch.Generator().manual_seed(1)).tolist()
    areas = np.array(
        [wide * high / (100 * 130) for _, _, wide, high in (random_box(100, 130, how, d) for d in uniforms)]
    )
    source, wanted = np.random.default_rng(0), []
    while len(wanted) < 2000:
        area, ratio = source.uniform(0.5, 1), math.exp(source.uniform(math.log(3 / 4), math.log(4 / 3)))
        if math.sqrt(area * 13000 * ratio) <= 130 and math.sqrt(area * 13000 / ratio) <= 100:
            wanted.append(area)
    assert np.abs(np.quantile(areas, np.linspace(0, 1, 11)) - np.quantile(wanted, np.linspace(0, 1, 11))).max() < 0.04
    assert random_box(10, 1000, Decode(scale=(1.0, 1.0)), (0.0, 0.0, 0.0, 0.0)) == (493, 0, 13, 10)


def test_same_uniforms_give_the_same_crop() -> None:
    first, second, other = (
        decode_image(GOOD["jpeg"], SIZE, Decode(), uniforms)
        for uniforms in ((0.1, 0.2, 0.3, 0.4), (0.1, 0.2, 0.3, 0.4), (0.1, 0.2, 0.9, 0.4))
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_a_large_jpeg_decoded_at_reduced_size_gives_the_same_crop() -> None:
    image, uniforms = scene(1600, 1200), (0.9, 0.5, 0.3, 0.6)
    fast, exact = (decode_image(encode(image, kind), (64, 64), Decode(), uniforms) for kind in ("JPEG", "PNG"))
    assert near(fast, exact)
    with Image.open(io.BytesIO(encode(image, "JPEG"))) as opened:
        assert opened.draft(None, (64, 64)) is not None and opened.width == 200  # this is what makes it fast


def test_invalid_fields() -> None:
    with pytest.raises(UserError, match=r"Decode.scale must be \(smaller, larger\)"):
        Decode(scale=(1.0, 0.5))
    with pytest.raises(UserError, match=r"Decode.max_pixels must be"):
        Decode(max_pixels=10**9)
