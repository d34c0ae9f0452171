"""Planted colors: they go along with the class in training only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from allmlp.data.cifar import Cifar10
from allmlp.data.planted_colors import PlantedColors, color_of, palette


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, noise = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    for part in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = noise.integers(0, 256, (200, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(200) % 10
        (path / f"{part}.bin").write_bytes(rows.tobytes())
    return path


def colors(tinted: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """The color that explains the tint of each image best."""
    tint = ((tinted.float() - 0.7 * plain) / 0.3).mean((2, 3))
    return torch.cdist(tint, palette(10)).argmin(1)


@pytest.mark.parametrize("correlation", [0.95, 0.1, 1.0])
def test_colors_go_along_with_the_class_in_training_only(folder: Path, correlation: float) -> None:
    plain, planted = Cifar10(str(folder)).load(), PlantedColors(str(folder), correlation=correlation).load()
    for split, expected in (("train", correlation), ("test", 0.1)):
        (before, _), (after, labels) = getattr(plain, split).examples, getattr(planted, split).examples
        agree = (colors(after, before) == labels).float().mean().item()
        assert agree == pytest.approx(expected, abs=0.04 if split == "train" else 0.08)
        assert torch.equal(labels, getattr(plain, split).examples.labels) and after.dtype == torch.uint8
    again = PlantedColors(str(folder), correlation=correlation).load()
    assert again.checksum() == planted.checksum() != PlantedColors(str(folder), color_seed=1).load().checksum()


def test_other_colors_are_equally_likely() -> None:
    labels = torch.zeros(9000, dtype=torch.long)
    counts = color_of(labels, 0.0, 10, torch.Generator().manual_seed(0)).bincount(minlength=10)
    assert counts[0] == 0 and (counts[1:] - 1000).abs().max() < 150
