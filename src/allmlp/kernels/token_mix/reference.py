"""The product over tokens with everything that stands around it, as it is defined.

    P(X) = scale * (X + lift - mean) * rstd + shift        LayerNorm with its statistics; Affine without them
    Z    = act(A P(X) + bias 1^T)
    Y    = Z,   other * Z,   or   other + gain * Z

x: b k c    matrix: m k    bias: m    lift, scale, shift, gain: c    mean, rstd: b k    other: b m c

ResMLP's token branch is Affine, product, LayerScale and residual; a spatial gate is LayerNorm, product and gate; a
token MLP is two of them, the first with an activation and the second with the residual. `lift` is what earlier layers
have left out of X: biases, which a product that adds into X does not have.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from allmlp.kernels.activation.reference import activate

Act = Literal["none", "gelu", "gelu_tanh", "relu"]
Combine = Literal["none", "multiply", "add"]


class Around(NamedTuple):
    """What stands around the product; what is None is left out."""

    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    lift: Tensor | None = None
    other: Tensor | None = None
    gain: Tensor | None = None


def prepare(x: Tensor, around: Around) -> Tensor:
    """P(X), b k c."""
    if around.lift is not None:
        x = x + around.lift
    if around.mean is not None and around.rstd is not None:
        x = (x - around.mean.unsqueeze(2)) * around.rstd.unsqueeze(2)
    if around.scale is not None:
        x = x * around.scale
    return x if around.shift is None else x + around.shift


def token_mix(x: Tensor, matrix: Tensor, around: Around, act: Act = "none", combine: Combine = "none") -> Tensor:
    z = torch.matmul(matrix, prepare(x, around))
    if around.bias is not None:
        z = z + around.bias[:, None]
    z = activate(z, act)
    if combine == "none" or around.other is None:
        return z
    if combine == "multiply":
        return around.other * z
    return around.other + (z if around.gain is None else around.gain * z)
