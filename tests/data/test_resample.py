"""torch and Pillow resize alike."""

from __future__ import annotations

import numpy as np
import pytest

from allmlp.data import resample
from allmlp.data.resample import center_crop, crop_box, crop_center, is_vectorized, resize_short_side

SIZES = [(375, 500), (500, 333), (64, 64), (31, 47)]


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    # Not from 0 to 255: Pillow clips between its two passes, and their order depends on the sizes.
    return np.random.default_rng(0).integers(90, 166, (height, width, channels), dtype=np.uint8)


def both(monkeypatch: pytest.MonkeyPatch, call: object, *arguments: object) -> int:
    """The largest difference of the pixels."""
    found = []
    for vectorized in (True, False):
        monkeypatch.setattr(resample, "is_vectorized", lambda vectorized=vectorized: vectorized)
        found.append(call(*arguments).astype(int))  # type: ignore[operator]
    return int(np.abs(found[0] - found[1]).max())


@pytest.mark.skipif(not is_vectorized(), reason="elsewhere torch rounds in another way, and is not used")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixels_differ_by_at_most_two(height: int, width: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(height, width, channels)
    box = (3, 5, width - 10, height - 12)
    # Each of two passes rounds.
    for size in ((24, 24), (32, 48), (140, 130)):
        # Beyond a fourth of the size, Pillow is told to begin with means over blocks.
        is_large = max(box[3] / size[0], box[2] / size[1]) >= 4
        assert both(monkeypatch, crop_box, image, (height, width), box, size) <= (3 if is_large else 2)
        assert both(monkeypatch, crop_center, image, size, 0.875) <= 2


def test_a_crop_sees_nothing_outside_of_its_box(monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.full((40, 40, 3), 255, dtype=np.uint8)
    image[10:30, 10:30] = 7
    for vectorized in (is_vectorized(), False):
        monkeypatch.setattr(resample, "is_vectorized", lambda vectorized=vectorized: vectorized)
        assert (crop_box(image, (40, 40), (10, 10, 20, 20), (16, 48)) == 7).all()


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_an_image_that_was_resized_before_is_evaluated_alike(height: int, width: int) -> None:
    """Where the short side is that of evaluation: 32 of a crop of 28."""
    image = noise(height, width)
    smaller = resize_short_side(image, 32)
    assert min(smaller.shape[:2]) == min(32, height, width)
    assert np.array_equal(resize_short_side(smaller, 32), smaller)
    if min(height, width) >= 32:
        assert smaller.shape[:2] == center_crop(height, width, (28, 28), 0.875)[0]
        found, wanted = crop_center(smaller, (28, 28), 0.875), crop_center(image, (28, 28), 0.875)
        # Pillow chooses the order of its two passes, and each rounds.
        assert np.abs(found.astype(int) - wanted.astype(int)).max() <= (0 if is_vectorized() else 3)
