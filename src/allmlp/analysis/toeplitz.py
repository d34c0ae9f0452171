"""How far a matrix over tokens depends on distance alone."""

from __future__ import annotations

import torch
from torch import Tensor

from allmlp.layers.mixers.projection import TokenProjection
from allmlp.models.model import Model


def nearest_toeplitz(matrix: Tensor) -> Tensor:
    """The Toeplitz matrix that is nearest in the sum of squares: every diagonal is its mean, s s.

    T[i, j] = mean of M[k, l] over l - k = j - i
    """
    size = len(matrix)
    offsets = torch.arange(size, device=matrix.device)
    diagonal = offsets[None, :] - offsets[:, None] + size - 1
    sums = torch.zeros(2 * size - 1, dtype=matrix.dtype, device=matrix.device)
    sums.scatter_add_(0, diagonal.flatten(), matrix.flatten())
    counts = size - (torch.arange(2 * size - 1, device=matrix.device) - (size - 1)).abs()
    return (sums / counts)[diagonal]


def toeplitz_share(matrix: Tensor) -> float:
    """The share of a matrix's energy that its diagonal means explain: 1 for a Toeplitz matrix.

    share = |T|^2 / |M|^2,   T the nearest Toeplitz matrix

    A matrix of independent numbers has about 2 / S of it.
    """
    energy = matrix.double().square().sum()
    return float(nearest_toeplitz(matrix.double()).square().sum() / energy) if energy else 1.0


def toeplitz_shares(model: Model) -> dict[str, float]:
    """The share of every matrix over tokens in a model, by its name."""
    with torch.no_grad():
        return {
            name: toeplitz_share(module.matrix())
            for name, module in model.named_modules()
            if isinstance(module, TokenProjection)
        }
