"""The nearest Toeplitz matrix and the fraction of the energy it has."""

from __future__ import annotations

import pytest
import torch

import allmlp
from allmlp.analysis.mixing import locality
from allmlp.analysis.toeplitz import chance_fraction, mean_filter, nearest_toeplitz, toeplitz_fraction
from allmlp.analysis.token_filters import token_weights
from allmlp.layers import Toeplitz


def test_diagonals_become_their_means() -> None:
    matrix = torch.randn(6, 6, dtype=torch.float64)
    nearest = nearest_toeplitz(matrix)
    for offset in range(-5, 6):
        assert torch.allclose(nearest.diagonal(offset), matrix.diagonal(offset).mean())
    for _ in range(20):
        other = Toeplitz().matrix(torch.randn(11, dtype=torch.float64), 0, 6, False)
        assert (matrix - nearest).square().sum() <= (matrix - other).square().sum()


def test_the_fraction_of_a_toeplitz_matrix_is_one_and_of_noise_small() -> None:
    striped = Toeplitz().matrix(torch.randn(2 * 64 - 1), 0, 64, False)
    assert toeplitz_fraction(striped) == pytest.approx(1.0)
    fractions = [toeplitz_fraction(torch.randn(64, 64)) for _ in range(20)]
    assert sum(fractions) / 20 == pytest.approx(127 / 64**2, rel=0.2)
    assert toeplitz_fraction(torch.zeros(3, 3)) == 1.0


def test_every_toeplitz_matrix_of_a_model_has_fraction_one() -> None:
    toeplitz, dense = (list(token_weights(allmlp.create(name, seed=0))) for name in ("gmlp_mlm_tiny", "gmlp_nano"))
    assert len(dense) == 10 and all(toeplitz_fraction(one.weight) < 0.1 for one in dense)
    assert all(one.name.endswith("inner.proj") for one in toeplitz)
    assert [toeplitz_fraction(one.weight) for one in toeplitz] == pytest.approx([1.0] * len(toeplitz))


def test_on_a_grid_the_mean_is_over_displacements_in_rows_and_columns() -> None:
    matrix = torch.randn(6, 6, dtype=torch.float64)
    positions = [(row, column) for row in range(2) for column in range(3)]
    groups: dict[tuple[int, int], list[float]] = {}
    for i, (y, x) in enumerate(positions):
        for j, (v, u) in enumerate(positions):
            groups.setdefault((v - y, u - x), []).append(float(matrix[i, j]))
    found = mean_filter(matrix, (2, 3))
    assert found.shape == (3, 5) and len(groups) == 15
    for (down, right), values in groups.items():
        assert found[down + 1, right + 2].item() == pytest.approx(sum(values) / len(values))
    energy = sum(len(values) * (sum(values) / len(values)) ** 2 for values in groups.values())
    assert toeplitz_fraction(matrix, (2, 3)) == pytest.approx(energy / matrix.square().sum().item())
    assert toeplitz_fraction(matrix, (2, 3)) >= toeplitz_fraction(matrix)


def test_a_convolution_is_toeplitz_on_the_grid_only() -> None:
    kernel = torch.randn(1, 1, 3, 3)
    cells = torch.eye(20).view(20, 1, 4, 5)
    matrix = torch.nn.functional.conv2d(cells, kernel, padding=1).view(20, 20).T
    assert toeplitz_fraction(matrix, (4, 5)) == pytest.approx(1.0)
    assert toeplitz_fraction(matrix) < 0.99
    assert torch.allclose(mean_filter(matrix, (4, 5))[2:5, 3:6], kernel[0, 0], atol=1e-6)


def test_chance_is_what_noise_has() -> None:
    fractions = [toeplitz_fraction(torch.randn(64, 64), (8, 8)) for _ in range(20)]
    assert sum(fractions) / 20 == pytest.approx(chance_fraction(64, (8, 8)), rel=0.1)
    assert chance_fraction(64) == 127 / 64**2
    causal = [toeplitz_fraction(torch.randn(6, 6).tril()) for _ in range(2000)]
    assert sum(causal) / 2000 == pytest.approx(chance_fraction(6, causal=True), rel=0.02)
    assert chance_fraction(6, causal=True) < 0.95 * chance_fraction(6), "half of the entries and of the displacements"


def test_causal_layers_are_compared_with_causal_chance() -> None:
    for name, causal in (("gmlp_causal_tiny", True), ("gmlp_mlm_tiny", False)):
        matrices = [one for one in token_weights(allmlp.create(name, seed=0)) if one.kind == "matrix"]
        for one in matrices:
            assert one.causal == causal and locality(one).chance == chance_fraction(len(one.weight), causal=causal)
