"""The second half of a gMLP layer: spatial gate, linear map, residual sum, and LayerNorm of the layer that follows.

    U, V = the halves of H,    G = U * (A norm(V) + bias 1^T),    Z' = Z + G W^T,    X = standardise(Z' + lift)

H: b s 2c    A: s s    bias: s    W: d c    Z, X: b s d

The gate's LayerNorm comes with its statistics; the next one is without weight and bias, which go into the map that
reads X.
"""

from __future__ import annotations

from torch import Tensor

from allmlp.kernels.row_norm.reference import row_norm
from allmlp.kernels.token_mix.reference import Around, token_mix

WIDTHS = (64, 128, 256)
"""Channels of a token whose sums one program can hold: it makes them all."""
MOST_TOKENS = 320


def fits(tokens: int, width: int, hidden: int) -> bool:
    """Whether the kernel takes a layer of `width` channels, `hidden` of them behind the gate."""
    return 16 <= tokens <= MOST_TOKENS and width in WIDTHS and hidden % 8 == 0


def gate_linear(
    hidden: Tensor, matrix: Tensor, around: Around, weight: Tensor, z: Tensor, lift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Z' and X; `around` has what stands around the gate's product."""
    u, v = hidden.chunk(2, dim=2)
    gated = token_mix(v, matrix, around._replace(other=u), combine="multiply")
    z = z + gated @ weight.T
    return z, row_norm(z, None, None, eps, lift)
