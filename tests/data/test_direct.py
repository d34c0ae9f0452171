"""JPEG and PPM images that are decoded without Pillow have the pixels that Pillow gives."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from PIL import Image
from sample_images import encode, rotated, scene

from allmlp.data import direct
from allmlp.data.decode import CorruptImage, Decode, decode_pixels
from allmlp.data.direct import open_direct
from allmlp.data.image_files import ImageFiles, LabeledFile

CROP = (0.3, 0.6, 0.1, 0.2)
GOOD = {
    "usual": encode(scene(), "JPEG", quality=95),
    "progressive": encode(scene(), "JPEG", quality=95, progressive=True),
    "all colors": encode(scene(), "JPEG", quality=95, subsampling=0),
    "large": encode(scene(1601, 1203), "JPEG", quality=95),
    "comment": encode(scene(), "JPEG", quality=95, comment=b"Exif\0\0"),
    "upright": rotated(1, "JPEG"),
    "damaged exif": encode(scene(), "JPEG", quality=95, exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
}
OTHERS = {
    "gray": encode(scene().convert("L"), "JPEG"),
    "four colors": encode(scene().convert("CMYK"), "JPEG"),
    "rotated": rotated(6, "JPEG"),
    "flipped": rotated(2, "JPEG"),
    "rotated by XMP": encode(scene(), "JPEG", xmp=b'<rdf:Description tiff:Orientation="6"/>'),
}


def by_pillow(data: bytes, min_height: int, min_width: int, min_factor: int) -> np.ndarray:
    """What simplejpeg does, with its errors."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            if min_factor > 1:
                image.draft(None, (image.width // min_factor, image.height // min_factor))
            assert image.size == (min_width, min_height)
            return np.array(image)
    except Exception as reason:
        raise ValueError(str(reason)) from reason


@pytest.fixture(params=["like simplejpeg", "simplejpeg"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The decoder, by the package where it is installed; records what it is asked for."""
    found: list[dict[str, int]] = []
    own = SimpleNamespace(decode_jpeg=by_pillow)
    package: Any = own if request.param == "like simplejpeg" else pytest.importorskip("simplejpeg")

    def decode_jpeg(data: bytes, **least: int) -> np.ndarray:
        found.append(least)
        return package.decode_jpeg(data, **least)

    monkeypatch.setattr(direct, "simplejpeg", lambda: SimpleNamespace(decode_jpeg=decode_jpeg))
    return found


def pillow_only(data: bytes, *rest: Any) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "simplejpeg", lambda: None)
        return decode_pixels(data, *rest)


def difference(first: np.ndarray, second: np.ndarray) -> int:
    assert first.shape == second.shape
    return int(np.abs(first.astype(int) - second.astype(int)).max())


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("uniforms", [None, CROP, (0.9, 0.5, 0.5, 0.5)])
def test_a_jpeg_has_the_same_pixels(kind: str, uniforms: Any, calls: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about the damaged block
        found = decode_pixels(GOOD[kind], (30, 40), Decode(), uniforms)
        assert len(calls) == 1
        assert difference(found, pillow_only(GOOD[kind], (30, 40), Decode(), uniforms)) <= 1


def test_a_large_jpeg_is_decoded_at_reduced_size_for_training(calls: list[Any]) -> None:
    decode_pixels(GOOD["large"], (30, 40), Decode(), (0.9, 0.5, 0.5, 0.5))
    decode_pixels(GOOD["large"], (30, 40), Decode())
    assert [(one["min_height"], one["min_width"], one["min_factor"]) for one in calls] == [
        (151, 201, 8),
        (1203, 1601, 1),
    ]


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_unusual_is_left_to_pillow(kind: str, calls: list[Any]) -> None:
    found = decode_pixels(OTHERS[kind], (30, 40), Decode(), CROP)
    assert not calls and np.array_equal(found, pillow_only(OTHERS[kind], (30, 40), Decode(), CROP))


def test_limits_and_other_colors_are_those_of_pillow(calls: list[Any]) -> None:
    with pytest.raises(CorruptImage, match="64 x 48 pixels exceed max_pixels=3,000"):
        decode_pixels(GOOD["usual"], (8, 8), Decode(max_pixels=3000))
    assert decode_pixels(GOOD["usual"], (8, 8), Decode(color="gray")).shape == (8, 8, 1)
    assert not calls


@pytest.mark.usefixtures("calls")
def test_a_broken_jpeg_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(GOOD["usual"][:-200])
    split = ImageFiles(tmp_path, [LabeledFile("broken.jpg", 0)], (8, 8), Decode(on_corrupt="error"))
    with pytest.raises(CorruptImage, match=r"broken\.jpg: image file is truncated"):
        split.fetch(split.labels)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=some.integers(0, 10**6), junk=some.binary(min_size=1, max_size=8), end=some.integers(0, 100))
def test_damaged_bytes_give_pixels_or_an_error(calls: list[Any], cuts: int, junk: bytes, end: int) -> None:
    data = bytearray(GOOD["upright"])
    place = cuts % len(data)
    data[place : place + len(junk)] = junk
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(CorruptImage):
            assert decode_pixels(bytes(data[: len(data) - end]), (8, 8), Decode()).shape == (8, 8, 3)


def test_without_the_package_pillow_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    direct.simplejpeg.cache_clear()
    monkeypatch.setattr(importlib, "import_module", absent)
    try:
        assert direct.simplejpeg() is None and open_direct(GOOD["usual"]) is None
    finally:
        direct.simplejpeg.cache_clear()


# --- PPM ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uniforms", [None, CROP])
@pytest.mark.parametrize("size", [(30, 40), (48, 64)])
def test_raw_pixels(size: tuple[int, int], uniforms: Any) -> None:
    data = encode(scene(), "PPM")
    assert open_direct(data) is not None
    found = decode_pixels(data, size, Decode(crop_pct=1.0), uniforms)
    assert np.array_equal(found, decode_pixels(encode(scene()), size, Decode(crop_pct=1.0), uniforms))


def test_other_and_damaged_ppm_files_are_left_to_pillow() -> None:
    data = encode(scene(), "PPM")
    plain = b"P3\n2 1\n255\n0 0 0 9 9 9\n"
    assert open_direct(plain) is None and decode_pixels(plain, (1, 2), Decode(crop_pct=1.0))[0].tolist() == [
        [0] * 3,
        [9] * 3,
    ]
    assert open_direct(data[:-1]) is None and open_direct(b"P6\n0 0\n255\n") is None
    with pytest.raises(CorruptImage, match="truncated"):
        decode_pixels(data[:-1], (8, 8), Decode())
