"""A gated MLP as it is defined.

    H = X U^T + a,   [Z1 Z2] = act(H),   G = Z1 * (W mask norm(Z2) + b 1^T),   Y = G V^T + c

x: b s i    U: 2c i    W: s s    b: s    norm: LayerNorm over c    mask: b s, 0 where a token is padding    V: o c
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from allmlp.kernels.activation.reference import activate


class Weights(NamedTuple):
    up: Tensor
    a: Tensor
    matrix: Tensor
    b: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    down: Tensor
    c: Tensor


def gated_mlp(x: Tensor, weights: Weights, mask: Tensor | None, act: str, eps: float) -> Tensor:
    up, a, matrix, b, norm_weight, norm_bias, down, c = weights
    z1, z2 = activate(F.linear(x, up, a), act).chunk(2, dim=2)
    n = F.layer_norm(z2, z2.shape[2:], norm_weight, norm_bias, eps)
    n = n if mask is None else n * mask.unsqueeze(2)
    return F.linear(z1 * (matrix @ n + b.unsqueeze(1)), down, c)
