"""Token-mixing weights: which tokens each token, or each hidden unit, reads and how much of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.toeplitz import Grid, displacements
from allmlp.layers.mixers.conv import TokenConvLayer
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.pool import ClassGather
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model

MIDDLE = 6
"""ResMLP's paper shows the rows of the 6 x 6 patches in the middle."""
Kind = Literal["matrix", "units", "class row", "kernels"]
Direction = Literal["forward", "backward", "two-sided", "own token"]


class TokenWeights(NamedTuple):
    """The weights of one place where tokens mix; nothing is copied before it is asked for."""

    name: str
    kind: Kind
    """matrix: row i is what token i reads (ResMLP's A, gMLP's W). units: row i is what hidden unit i of a Mixer reads.
    class row: what Class-MLP's class token reads. kernels: those of a convolution, n k k.
    """
    weight: Tensor
    grid: Grid | None = None
    """How the tokens lie in the picture; a class token in front of them is left out."""
    causal: bool = False

    @property
    def maps(self) -> Tensor:
        """Every row as a map over the picture, n h w; over text, n 1 s."""
        return self.weight if self.kind == "kernels" else self.weight.unflatten(1, self.grid or (1, -1))


def token_weights(model: Model) -> Iterator[TokenWeights]:
    """Every fixed mixing of tokens in a model, from the first layer to the last. Attention has none."""
    grid = model.spec.site.grid if isinstance(model, EncoderModel) else None
    cells = grid[0] * grid[1] if grid else 0
    for name, module in model.named_modules():
        if isinstance(module, TokenProjection):
            matrix = module.matrix().detach()
            inner = slice(-cells, None) if grid else slice(None)
            yield TokenWeights(name, "matrix", matrix[inner, inner], grid, module.causal)
        elif isinstance(module, TokenMlpLayer):
            yield TokenWeights(name, "units", module.up.weight.detach()[:, -cells:], grid)
        elif isinstance(module, ClassGather):
            # Text has no cells: there the first column, the class token's own, is cut off.
            yield TokenWeights(name, "class row", module.mix.weight.detach()[:, -cells if cells else 1 :], grid)
        elif isinstance(module, TokenConvLayer):
            yield TokenWeights(name, "kernels", module.space.weight.detach().flatten(0, 1))


def frequencies(maps: Tensor) -> Tensor:
    """How fast each map changes from token to token, in cycles per token: n.

        frequency = sum_k |k| P(k) / sum_k P(k),   P = |DFT|^2 of the map, k = (k_y, k_x)

    The map is mirrored at its edges first, so that the jump from one edge to the other does not count. A constant map
    has 0, a checkerboard nearly 0.7.
    """
    mirrored = torch.cat([maps, maps.flip(1)], dim=1) if maps.shape[1] > 1 else maps
    mirrored = torch.cat([mirrored, mirrored.flip(2)], dim=2).double()
    power = torch.fft.fft2(mirrored).abs().square()
    down, right = (torch.fft.fftfreq(size, dtype=torch.float64) for size in mirrored.shape[1:])
    radius = torch.hypot(down[:, None], right[None, :])
    total = power.sum((1, 2))
    return torch.where(total > 0, (power * radius).sum((1, 2)) / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)


class Pair(NamedTuple):
    """Two hidden units of opposing phase; the one left over where their number is odd stands alone."""

    units: tuple[int, ...]
    frequency: float
    """Cycles per token, the mean of both."""
    cosine: float | None
    """Between their weights: -1 where one is the other's negative."""


def opposing_pairs(units: TokenWeights) -> list[Pair]:
    """A Mixer's hidden units, paired and sorted by frequency as in its paper's figure 5.

    Of all pairs the one whose weights have the smallest cosine is taken first, then the next among the units left.
    """
    rows = torch.nn.functional.normalize(units.weight.double(), dim=1)
    speed = frequencies(units.maps).tolist()
    cosine = rows @ rows.T
    first, second = torch.triu_indices(len(rows), len(rows), offset=1)
    order = cosine[first, second].argsort(stable=True)
    free, pairs = [True] * len(rows), []
    for i, j in zip(first[order].tolist(), second[order].tolist()):
        if free[i] and free[j]:
            free[i] = free[j] = False
            pairs.append(Pair((i, j), (speed[i] + speed[j]) / 2, float(cosine[i, j])))
    pairs += [Pair((i,), speed[i], None) for i, alone in enumerate(free) if alone]
    return sorted(pairs, key=lambda pair: (pair.frequency, pair.units))


def direction(line: Tensor) -> tuple[Direction, float | None]:
    """Where a filter over text looks, w[d] for d = 1-S .. S-1, and the share of its energy that lies ahead.

        ahead = sum_{d>0} w[d]^2 / sum_{d!=0} w[d]^2

    forward where three quarters or more lie ahead (later tokens), backward where a quarter or less does, two-sided in
    between; own token where under 5 % of the whole energy lies beside d = 0. The kinds are those that gMLP's paper
    names of its filters; where one ends and the next begins is ours.
    """
    energy = line.double().square()
    middle = len(line) // 2
    behind, ahead = float(energy[:middle].sum()), float(energy[middle + 1 :].sum())
    beside = behind + ahead
    if beside <= 0.05 * float(energy.sum()):
        return "own token", ahead / beside if beside else None
    share = ahead / beside
    return "forward" if share >= 0.75 else "backward" if share <= 0.25 else "two-sided", share


def distances(tokens: int, grid: Grid | None) -> Tensor:
    """How far tokens are from each other, in tokens or (straight) in patches: s s, float64."""
    if grid is None:
        return (displacements(tokens) - tokens + 1).abs().double()
    places = torch.arange(tokens)
    at = torch.stack([places // grid[1], places % grid[1]], dim=1).double()
    return torch.cdist(at, at, compute_mode="donot_use_mm_for_euclid_dist")


def reach(matrix: Tensor, grid: Grid | None = None) -> float | None:
    """How far tokens read: the mean distance, weighted by the squared weights; None where all are zero.

    reach = sum_ij |i - j| M[i, j]^2 / sum_ij M[i, j]^2
    """
    energy = matrix.double().square()
    total = float(energy.sum())
    return float((energy * distances(len(matrix), grid)).sum()) / total if total else None


def centre(grid: Grid, side: int = MIDDLE) -> list[int]:
    """The patches in the middle, at most side x side of them, row by row."""
    starts = [(size - min(size, side)) // 2 for size in grid]
    rows, columns = (range(start, start + min(size, side)) for start, size in zip(starts, grid))
    return [row * grid[1] + column for row in rows for column in columns]


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 .. count-1, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return torch.linspace(0, count - 1, most, dtype=torch.float64).round().long().tolist()
