"""Distance alone: the nearest Toeplitz matrix, and how near it is."""

from __future__ import annotations

import pytest
import torch

import allmlp
from allmlp.analysis.toeplitz import nearest_toeplitz, toeplitz_share, toeplitz_shares
from allmlp.layers import Toeplitz


def test_diagonals_become_their_means() -> None:
    matrix = torch.randn(6, 6, dtype=torch.float64)
    nearest = nearest_toeplitz(matrix)
    for offset in range(-5, 6):
        assert torch.allclose(nearest.diagonal(offset), matrix.diagonal(offset).mean())
    for _ in range(20):
        other = Toeplitz().matrix(torch.randn(11, dtype=torch.float64), 0, 6, False)
        assert (matrix - nearest).square().sum() <= (matrix - other).square().sum()


def test_the_share_of_a_toeplitz_matrix_is_one_and_of_noise_small() -> None:
    striped = Toeplitz().matrix(torch.randn(2 * 64 - 1), 0, 64, False)
    assert toeplitz_share(striped) == pytest.approx(1.0)
    shares = [toeplitz_share(torch.randn(64, 64)) for _ in range(20)]
    assert sum(shares) / 20 == pytest.approx(127 / 64**2, rel=0.2)
    assert toeplitz_share(torch.zeros(3, 3)) == 1.0


def test_every_matrix_of_a_model() -> None:
    assert len(toeplitz_shares(allmlp.create("gmlp_nano"))) == 10
    striped = toeplitz_shares(allmlp.create("gmlp_mlm_tiny"))
    assert set(map(round, striped.values())) == {1} and all(name.endswith("inner.proj") for name in striped)
