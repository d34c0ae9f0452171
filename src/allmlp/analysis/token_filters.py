"""Token-mixing weights: which tokens each token, or each hidden unit, reads, and with what weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.analysis.toeplitz import Grid, displacements
from allmlp.layers.block import BlockLayer
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.token_roles import TokenRole, token_parameters
from allmlp.models.encoder import EncoderModel
from allmlp.models.grid import stage_number
from allmlp.models.model import Model

CENTER = 6
"""The ResMLP paper shows the rows of the 6 x 6 patches in the center."""
WeightKind = Literal["matrix", "units", "class row", "kernels"]
KINDS: dict[TokenRole, WeightKind] = {
    "square": "matrix",
    "square parameters": "matrix",
    "into hidden": "units",
    "in": "class row",
    "kernel": "kernels",
}
Direction = Literal["forward", "backward", "two-sided", "own token"]


class TokenWeights(NamedTuple):
    """The token-mixing weights of one layer, on the CPU."""

    name: str
    kind: WeightKind
    """matrix: row i is what token i reads (ResMLP's A, gMLP's W). units: row i is what hidden unit i of a Mixer reads.
    class row: what Class-MLP's class token reads. kernels: those of a convolution, n k k.
    """
    weight: Tensor
    grid: Grid | None = None
    """Rows and columns of patches in an image; the column of a class token is removed."""
    causal: bool = False

    @property
    def maps(self) -> Tensor:
        """Every row as a map over the image, n h w; over text, n 1 s."""
        return self.weight if self.kind == "kernels" else self.weight.unflatten(1, self.grid or (1, -1))


def token_weights(model: Model) -> Iterator[TokenWeights]:
    """The weights with which a model's layers read tokens, from the first layer to the last; attention stores none."""
    parameters = [parameter for parameter in token_parameters(model) if parameter.role in KINDS]
    paths = [parameter.path for parameter in parameters]
    for parameter in parameters:
        kind, weight = KINDS[parameter.role], parameter.weight().detach().cpu()
        name = parameter.path if paths.count(parameter.path) == 1 else parameter.full_name
        if kind == "kernels":
            yield TokenWeights(name, kind, weight.flatten(0, 1))
        else:
            spec = model.spec if isinstance(model, EncoderModel) else None
            context = spec.build_contexts[stage_number(spec, name)] if spec else None
            grid = context.grid if context else None
            tokens = grid[0] * grid[1] if grid else context.tokens if context else None
            patches = slice(None if tokens is None else -tokens, None)  # class tokens come first
            weight = weight[patches, patches] if kind == "matrix" else weight[:, patches]
            yield TokenWeights(name, kind, weight, grid, getattr(parameter.layer, "causal", False))


def undescribed_mixers(model: nn.Module) -> list[str]:
    """Class names of token-mixing layers without declared `token_roles`, in themselves or in any submodule."""
    mixers: list[nn.Module | None] = []
    for module in model.modules():
        if isinstance(module, BlockLayer):
            mixers += [residual.mix for slot, residual in module.residuals() if slot != "channel"]
        elif isinstance(module, ChannelMlpLayer):
            mixers.append(module.inner)
    names = (
        type(mixer).__name__
        for mixer in mixers
        if mixer is not None and not any(hasattr(part, "token_roles") for part in mixer.modules())
    )
    return list(dict.fromkeys(names))


def frequencies(maps: Tensor) -> Tensor:
    """The mean spatial frequency of each map, in cycles per token: n.

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


class UnitPair(NamedTuple):
    """Two hidden units of opposing phase; the last one of an odd number is alone."""

    units: tuple[int, ...]
    frequency: float
    """Cycles per token, the mean of both."""
    cosine: float | None
    """Between their weights: -1 if one is the other's negative."""


def opposing_pairs(units: TokenWeights) -> list[UnitPair]:
    """A Mixer's hidden units, paired and sorted by frequency as in figure 5 of its paper.

    Greedy: the pair of the smallest cosine is taken first, then the next among the remaining units.
    """
    rows = torch.nn.functional.normalize(units.weight.double(), dim=1)
    frequency = frequencies(units.maps).tolist()
    cosine = rows @ rows.T
    first, second = torch.triu_indices(len(rows), len(rows), offset=1)
    order = cosine[first, second].argsort(stable=True)
    free, pairs = [True] * len(rows), []
    for i, j in zip(first[order].tolist(), second[order].tolist()):
        if free[i] and free[j]:
            free[i] = free[j] = False
            pairs.append(UnitPair((i, j), (frequency[i] + frequency[j]) / 2, float(cosine[i, j])))
    pairs += [UnitPair((i,), frequency[i], None) for i, alone in enumerate(free) if alone]
    return sorted(pairs, key=lambda pair: (pair.frequency, pair.units))


def direction(line: Tensor) -> tuple[Direction, float | None]:
    """The direction of a filter over text, w[d] for d = 1-S .. S-1, and the fraction of its energy on later tokens.

        ahead = sum_{d>0} w[d]^2 / sum_{d!=0} w[d]^2

    forward if at least 3/4 is on later tokens, backward if at most 1/4 is, two-sided in between; own token if less than
    5 % of the whole energy is outside d = 0. The kinds are those that the gMLP paper names; the limits are ours.
    """
    energy = line.double().square()
    middle = len(line) // 2
    behind, ahead = float(energy[:middle].sum()), float(energy[middle + 1 :].sum())
    others = behind + ahead
    if others <= 0.05 * float(energy.sum()):
        return "own token", ahead / others if others else None
    fraction = ahead / others
    return "forward" if fraction >= 0.75 else "backward" if fraction <= 0.25 else "two-sided", fraction


def distances(tokens: int, grid: Grid | None) -> Tensor:
    """The distance between tokens, in tokens or (Euclidean) in patches: s s, float64."""
    if grid is None:
        return (displacements(tokens) - tokens + 1).abs().double()
    index = torch.arange(tokens)
    position = torch.stack([index // grid[1], index % grid[1]], dim=1).double()
    return torch.cdist(position, position, compute_mode="donot_use_mm_for_euclid_dist")


def reach(matrix: Tensor, grid: Grid | None = None) -> float | None:
    """The mean distance over which tokens read, weighted by the squared weights; None if all are zero.

    reach = sum_ij |i - j| M[i, j]^2 / sum_ij M[i, j]^2
    """
    energy = matrix.double().square()
    total = float(energy.sum())
    return float((energy * distances(len(matrix), grid)).sum()) / total if total else None


def center_patches(grid: Grid) -> list[int]:
    """The indices of the patches in the center, at most CENTER x CENTER, row by row."""
    starts = [(size - min(size, CENTER)) // 2 for size in grid]
    rows, columns = (range(start, start + min(size, CENTER)) for start, size in zip(starts, grid))
    return [row * grid[1] + column for row in rows for column in columns]


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0 .. count-1, evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return torch.linspace(0, count - 1, most, dtype=torch.float64).round().long().tolist()
