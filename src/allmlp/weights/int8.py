"""8-bit storage of weights, a quarter of float32: matrices as int8 with a scale per row, everything else unchanged.

    q[i] = round(W[i] / s[i]),    s[i] = max_j |W[i, j]| / 127 in bfloat16

A row spans all axes but the first. With s in bfloat16 the products q s are exact in float32, so that loading a model
from 8 bits and saving it in 8 bits again does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from allmlp.errors import UserError

SCALE = ".scale"
"""Suffix of the name of a matrix for its scales. A parameter has no children, so no other tensor has this name."""


def quantize(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with int8 matrices and their scales; other floating-point tensors in float32."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            state[name] = tensor
        elif tensor.ndim < 2 or len(tensor) < 2:
            state[name] = tensor.float()
        else:
            levels, scale = quantize_rows(tensor.flatten(1))
            if not scale.isfinite().all():
                raise UserError(f"{name} has values that are not finite: it cannot be stored in 8 bits")
            state[name], state[name + SCALE] = levels.to(torch.int8).view(tensor.shape), scale
    return state


def quantize_rows(rows: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Levels in float32, and the scales of the rows in bfloat16."""
    rows, largest = rows.float(), 2 ** (bits - 1) - 1
    scale = (rows.abs().amax(1) / largest).bfloat16()
    wide = scale.float()[:, None]
    return torch.where(wide > 0, rows / wide, 0).round().clamp(-largest, largest), scale


def dequantize(levels: Tensor, scale: Tensor) -> Tensor:
    """float32 weights from int8 levels and the scales of their rows."""
    return levels.float() * scale.float().view(-1, *[1] * (levels.ndim - 1))
