"""Toeplitz fraction: how much of a token matrix depends only on the distance between tokens."""

from __future__ import annotations

import torch
from torch import Tensor

Grid = tuple[int, int]
"""Rows and columns of patches; None for a sequence."""


def displacements(tokens: int, grid: Grid | None = None, device: torch.device | None = None) -> Tensor:
    """The index of the displacement from token i to token j, counted from 0: s s.

    In a sequence j - i + S - 1; on a grid (dy + h - 1) (2w - 1) + dx + w - 1 for dy rows down and dx columns right.
    """
    index = torch.arange(tokens, device=device)
    if grid is None:
        return index[None, :] - index[:, None] + tokens - 1
    rows, columns = index // grid[1], index % grid[1]
    down, right = (at[None, :] - at[:, None] for at in (rows, columns))
    return (down + grid[0] - 1) * (2 * grid[1] - 1) + right + grid[1] - 1


def mean_filter(matrix: Tensor, grid: Grid | None = None) -> Tensor:
    """The mean weight at every displacement: 2s-1 numbers in a sequence, (2h-1) (2w-1) on a grid; 0 is in the middle.

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
    """The Toeplitz matrix nearest in the Frobenius norm, which has the mean of every diagonal: s s.

    T[i, j] = mean of M[k, l] over l - k = j - i

    On a grid, displacements are counted in rows and columns: the result is the matrix of a convolution.
    """
    return mean_filter(matrix, grid).flatten()[displacements(len(matrix), grid, matrix.device)]


def toeplitz_fraction(matrix: Tensor, grid: Grid | None = None) -> float:
    """The fraction of a matrix's energy (squared Frobenius norm) in its nearest Toeplitz matrix, at most 1.

    fraction = |T|^2 / |M|^2,   T the nearest Toeplitz matrix

    A matrix of independent entries has about 2 / S, 4 / S on a grid (`chance_fraction`).
    """
    energy = matrix.double().square().sum()
    return float(nearest_toeplitz(matrix.double(), grid).square().sum() / energy) if energy else 1.0


def chance_fraction(tokens: int, grid: Grid | None = None, causal: bool = False) -> float:
    """The expected Toeplitz fraction of independent entries of mean 0: one number per displacement, of S^2; of a causal
    matrix S, of S (S + 1) / 2.
    """
    if causal:
        return 2 / (tokens + 1)
    displaced = 2 * tokens - 1 if grid is None else (2 * grid[0] - 1) * (2 * grid[1] - 1)
    return displaced / tokens**2
