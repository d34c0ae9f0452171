"""The product over tokens with its fused prologue and epilogue: the definition.

    P(X) = norm_weight * (X + deferred_bias - mean) * rstd + norm_bias     LayerNorm; Affine without mean and rstd
    Z    = act(A P(X) + bias 1^T)
    Y    = Z,   other * layer_scale * Z,   or   other + layer_scale * Z

x: b k c    matrix: m k    bias: m    deferred_bias, norm_weight, norm_bias, layer_scale: c    mean, rstd: b k
other: b m c

ResMLP's token branch is Affine, product, LayerScale and residual; a spatial gating unit is LayerNorm, product and gate;
a token MLP is two products, the first with an activation and the second with the residual. `deferred_bias` is the sum
of the biases that earlier layers did not add to X. Y has the dtype of `other`: for a gate in fp8, `layer_scale` holds
the ratio of their scales.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from allmlp.kernels.activation.reference import ActivationName, activate
from allmlp.kernels.unit_rows.reference import FP8, saturate

Combine = Literal["none", "multiply", "add"]


class TokenMixEpilogue(NamedTuple):
    """Operands of the fused prologue and epilogue; None leaves one out."""

    bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    deferred_bias: Tensor | None = None
    other: Tensor | None = None
    layer_scale: Tensor | None = None


class PackedMatrix(NamedTuple):
    """A matrix over tokens as the kernels read it: rows aligned to 16 bytes, and their sums."""

    weight: Tensor
    row_sum: Tensor

    @classmethod
    def pack(cls, weight: Tensor) -> PackedMatrix:
        rows, cols = weight.shape
        storage = weight.new_zeros(rows, -(-cols // 16) * 16)
        storage[:, :cols] = weight
        return cls(storage[:, :cols], storage.float().sum(1))


def prologue(x: Tensor, epilogue: TokenMixEpilogue) -> Tensor:
    """P(X), b k c."""
    if epilogue.deferred_bias is not None:
        x = x + epilogue.deferred_bias
    if epilogue.mean is not None and epilogue.rstd is not None:
        x = (x - epilogue.mean.unsqueeze(2)) * epilogue.rstd.unsqueeze(2)
    if epilogue.norm_weight is not None:
        x = x * epilogue.norm_weight
    return x if epilogue.norm_bias is None else x + epilogue.norm_bias


def token_mix(
    x: Tensor,
    matrix: PackedMatrix | Tensor,
    epilogue: TokenMixEpilogue,
    act: ActivationName = "none",
    combine: Combine = "none",
) -> Tensor:
    weight = matrix.weight if isinstance(matrix, PackedMatrix) else matrix
    z = torch.matmul(weight, prologue(x, epilogue))
    if epilogue.bias is not None:
        z = z + epilogue.bias[:, None]
    z = activate(z, act)
    if combine == "none" or epilogue.other is None:
        return z
    z, other = (z if epilogue.layer_scale is None else epilogue.layer_scale * z), epilogue.other
    if other.dtype == FP8:
        return saturate(other.to(z.dtype) * z if combine == "multiply" else other.to(z.dtype) + z, FP8)
    return other * z if combine == "multiply" else other + z
