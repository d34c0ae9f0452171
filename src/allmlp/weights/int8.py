"""8-bit storage of weights, a quarter of float32: matrices as int8 with a scale per row, everything else unchanged.

    q[i] = round(W[i] / s[i]),    s[i] = max_j |W[i, j]| / 127 in bfloat16

A row has all axes but the first. With s in bfloat16 the products q s are exact in float32, so that a model that was
loaded from 8 bits and saved in 8 bits again is the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from allmlp.errors import UserError

SCALE = ".scale"
"""Appended to the name of a matrix: its scales. A parameter has no children, so no other tensor has this name."""
LARGEST = 127


def quantize(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with int8 matrices and their scales; other floating-point tensors in float32."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            state[name] = tensor
        elif tensor.ndim < 2 or len(tensor) < 2:
            state[name] = tensor.float()
        else:
            rows = tensor.float().flatten(1)
            scale = (rows.abs().amax(1) / LARGEST).bfloat16()
            if not scale.isfinite().all():
                raise UserError(f"{name} has values that are not finite: it cannot be stored in 8 bits")
            wide = scale.float()[:, None]
            levels = torch.where(wide > 0, rows / wide, 0).round().clamp(-LARGEST, LARGEST)
            state[name], state[name + SCALE] = levels.to(torch.int8).view(tensor.shape), scale
    return state


def dequantize(levels: Tensor, scale: Tensor) -> Tensor:
    """float32 weights from int8 levels and the scales of their rows."""
    return levels.float() * scale.float().view(-1, *[1] * (levels.ndim - 1))
