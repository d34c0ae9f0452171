"""gMLP's channel MLP with its spatial gating unit: the definition.

    H = X U^T + a,   [Z1 Z2] = act(H),   G = Z1 * (W mask norm(Z2) + b 1^T),   Y = G V^T + c

x: b s i    U: 2c i    W: s s    b: s    norm: LayerNorm over c    mask: b s, 0 at padding tokens    V: o c
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from allmlp.kernels.activation.reference import activate


class GatedMlpWeights(NamedTuple):
    """U, a, W, b, weight and bias of the norm, V, c."""

    up: Tensor
    up_bias: Tensor
    matrix: Tensor
    token_bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    down: Tensor
    down_bias: Tensor


def gated_mlp(x: Tensor, weights: GatedMlpWeights, mask: Tensor | None, act: str, eps: float) -> Tensor:
    z1, z2 = activate(F.linear(x, weights.up, weights.up_bias), act).chunk(2, dim=2)
    n = F.layer_norm(z2, z2.shape[2:], weights.norm_weight, weights.norm_bias, eps)
    n = n if mask is None else n * mask.unsqueeze(2)
    return F.linear(z1 * (weights.matrix @ n + weights.token_bias.unsqueeze(1)), weights.down, weights.down_bias)
