"""How far a matrix over tokens depends on distance alone."""

from __future__ import annotations

import torch
from torch import Tensor

from allmlp.layers.mixers.projection import TokenProjection
from allmlp.models.model import Model

Grid = tuple[int, int]
"""Rows and columns of patches; without one, tokens stand in a line."""


def displacements(tokens: int, grid: Grid | None = None, device: torch.device | None = None) -> Tensor:
    """Which displacement leads from token i to token j, as a number from 0: s s.

    In a line j - i + S - 1; on a grid (dy + h - 1) (2w - 1) + dx + w - 1 for dy rows down and dx columns right.
    """
    places = torch.arange(tokens, device=device)
    if grid is None:
        return places[None, :] - places[:, None] + tokens - 1
    rows, columns = places // grid[1], places % grid[1]
    down, right = (at[None, :] - at[:, None] for at in (rows, columns))
    return (down + grid[0] - 1) * (2 * grid[1] - 1) + right + grid[1] - 1


def mean_filter(matrix: Tensor, grid: Grid | None = None) -> Tensor:
    """The mean weight at every displacement: 2s-1 numbers in a line, (2h-1) (2w-1) on a grid; 0 is in the middle.

    w[d] = mean of M[i, j] over j - i = d
    """
    size = len(matrix)
    which = displacements(size, grid, matrix.device).flatten()
    shape = (2 * size - 1,) if grid is None else (2 * grid[0] - 1, 2 * grid[1] - 1)
    sums, counts = (torch.zeros(shape, dtype=matrix.dtype, device=matrix.device).flatten() for _ in range(2))
    sums.scatter_add_(0, which, matrix.flatten())
    counts.scatter_add_(0, which, torch.ones_like(matrix).flatten())
    return (sums / counts).view(shape)


def nearest_toeplitz(matrix: Tensor, grid: Grid | None = None) -> Tensor:
    """The Toeplitz matrix that is nearest in the sum of squares: every diagonal is its mean, s s.

    T[i, j] = mean of M[k, l] over l - k = j - i

    On a grid, tokens are equally far when they are so in rows and in columns: the matrix of a convolution.
    """
    return mean_filter(matrix, grid).flatten()[displacements(len(matrix), grid, matrix.device)]


def toeplitz_share(matrix: Tensor, grid: Grid | None = None) -> float:
    """The share of a matrix's energy that its diagonal means explain: 1 for a Toeplitz matrix.

    share = |T|^2 / |M|^2,   T the nearest Toeplitz matrix

    A matrix of independent numbers has about 2 / S of it, 4 / S on a grid (`chance_share`).
    """
    energy = matrix.double().square().sum()
    return float(nearest_toeplitz(matrix.double(), grid).square().sum() / energy) if energy else 1.0


def chance_share(tokens: int, grid: Grid | None = None) -> float:
    """What independent numbers of mean 0 have of it: one number per displacement, of S^2."""
    displaced = 2 * tokens - 1 if grid is None else (2 * grid[0] - 1) * (2 * grid[1] - 1)
    return displaced / tokens**2


def toeplitz_shares(model: Model) -> dict[str, float]:
    """The share of every matrix over tokens in a model, by its name; tokens taken as a line."""
    with torch.no_grad():
        return {
            name: toeplitz_share(module.matrix())
            for name, module in model.named_modules()
            if isinstance(module, TokenProjection)
        }
