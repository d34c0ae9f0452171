"""Fewer weights over tokens: the papers find most of them near zero (ResMLP, figure 3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import Dense, TokenProjection
from allmlp.models.model import Model


def token_matrices(model: Model) -> dict[str, Tensor]:
    """The matrices over tokens by name; of a causal one the lower triangle is all there is."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, TokenProjection) and isinstance(module.spec, Dense):
            found[f"{path}.weight"] = module.matrix().detach()
        elif isinstance(module, TokenMlpLayer):
            found |= {f"{path}.{part}.weight": getattr(module, part).weight.detach() for part in ("up", "down")}
    if not found:
        raise UserError("the model has no matrices over tokens to prune")
    return found


@torch.no_grad()
def prune(model: Model, share: float) -> None:
    """Set this share of the weights of every matrix over tokens to zero, the smallest ones; biases stay.

    Each matrix loses the same share. One threshold for all of them costs as little at 0.5 and more at 0.8, where the
    CIFAR-10 model that comes along keeps 92.2 % accuracy this way and 86.8 % that way (500 test pictures).
    """
    if not 0 <= share < 1:
        raise UserError(f"the share of weights to remove is at least 0 and below 1, not {share:g}")
    state = dict(model.named_parameters())
    for name, matrix in token_matrices(model).items():
        weights = matrix != 0
        removed = round(share * int(weights.sum()))
        state[name].copy_(without_smallest(matrix, removed + int((~weights).sum())))


def without_smallest(matrix: Tensor, count: int) -> Tensor:
    """The matrix with its `count` smallest entries set to zero."""
    kept = matrix.flatten().clone()
    kept[matrix.abs().flatten().argsort(stable=True)[:count]] = 0
    return kept.view_as(matrix)


def without_blocks(matrix: Tensor, share: float, side: int) -> Tensor:
    """The matrix with this share of its side x side blocks set to zero, those with the smallest sums of squares."""
    rows, columns = (-(-size // side) for size in matrix.shape)
    wide = F.pad(matrix, (0, columns * side - matrix.shape[1], 0, rows * side - matrix.shape[0]))
    energy = wide.unflatten(1, (columns, side)).unflatten(0, (rows, side)).square().sum((1, 3))
    kept = without_smallest(energy, round(share * energy.numel())) > 0
    mask = kept.repeat_interleave(side, 0).repeat_interleave(side, 1)
    return matrix * mask[: matrix.shape[0], : matrix.shape[1]]


def of_rank(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of this rank.

    M_R = sum over r < R of s_r u_r v_r^T
    """
    u, s, v = torch.linalg.svd(matrix.float(), full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ v[:rank]).to(matrix.dtype)
