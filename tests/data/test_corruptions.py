"""Corruptions: what they change, how much, and that a seed decides."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import avg_pool2d

from allmlp.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt

NOISE = torch.rand(8, 3, 34, 34, generator=torch.Generator().manual_seed(0))
IMAGES = (avg_pool2d(NOISE, 3, 1) * 255).round() / 255
"""Smooth, with a spectrum that falls as that of photographs does."""

SEEDS = range(8)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corruption_changes_images_within_range(kind: str) -> None:
    changes = []
    for severity in SEVERITIES:
        changed = corrupt(IMAGES, kind, severity, SEEDS)
        assert changed.shape == IMAGES.shape and changed.min() >= 0 and changed.max() <= 1
        assert torch.equal(changed, (changed * 255).round() / 255), "as stored in eight bits"
        assert torch.equal(changed, corrupt(IMAGES, kind, severity, SEEDS))
        changes.append((changed - IMAGES).square().mean().sqrt().item())
    assert min(changes) > 0.005 and (kind == "saturation" or changes[0] < changes[2] < changes[4]), changes


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_an_image_is_corrupted_the_same_in_every_batch(kind: str) -> None:
    whole = corrupt(IMAGES, kind, 3, SEEDS)
    parts = [corrupt(IMAGES[start : start + 3], kind, 3, SEEDS[start : start + 3]) for start in (0, 3, 6)]
    assert torch.equal(torch.cat(parts), whole)
    assert corrupt(IMAGES[:0], kind, 3, []).shape == (0, 3, 32, 32)


def test_noise_depends_on_the_seed_and_differs_between_images() -> None:
    flat = torch.full((2, 3, 32, 32), 0.5)
    noise = corrupt(flat, "gaussian_noise", 3, [0, 1]) - flat
    assert noise.std() == pytest.approx(0.08, rel=0.05) and not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise, corrupt(flat, "gaussian_noise", 3, [2, 3]) - flat)
    shot = corrupt(flat, "shot_noise", 3, [0, 1]) - flat
    assert shot.std() == pytest.approx((0.5 / 100) ** 0.5, rel=0.05)
    hit = corrupt(flat, "impulse_noise", 5, [0, 1])
    assert (hit == 1).float().mean() == pytest.approx(0.035, rel=0.3) == (hit == 0).float().mean()
