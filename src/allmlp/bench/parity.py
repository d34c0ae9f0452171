"""Parity check: a backend is timed only if its outputs agree with a float64 reference.

    error(Y) = max over parts i of |Y_i - R_i| / |R_i|

R is computed in float64. A part is the output for one example, so that a single wrong row is seen; for a training step
it is the gradient of all weights. Two rules:

    same model:      error in float64 <= 1e-5
    same numerics:   error <= 2 max over such packages of error(eager in the same precision)

FP8 is 16 times coarser than bfloat16, and its allowed error is as many times larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

Outputs = Sequence[Tensor]

SAME_MODEL_ERROR = 1e-5
"""In float64; losses are computed in float32."""
ERROR_FLOOR = {torch.float32: 1e-4}
"""Always allowed: in float32 the order of summation is free."""


def error(outputs: Outputs, reference: Outputs) -> float:
    """Largest relative error of a part; infinite if shapes differ or a value is not finite."""
    if [part.shape for part in outputs] != [part.shape for part in reference]:
        return math.inf
    sizes = torch.stack([part.double().norm() for part in reference])
    gaps = torch.stack([(a.to(b.device).double() - b.double()).norm() for a, b in zip(outputs, reference)])
    worst = (gaps / sizes.clamp(min=1e-30)).max().item()
    return worst if math.isfinite(worst) else math.inf


def allowed(eager: Sequence[float], precision: torch.dtype) -> float:
    return max([2 * one for one in eager] + [ERROR_FLOOR.get(precision, 0.0)])


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Draw all weights, including those that start at zero or one, which would hide a missing branch."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator(parameter.device).manual_seed(number)
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        sizes = [size for size in parameter.shape if size > 1]
        if len(sizes) > 1:
            parameter.copy_(noise / math.prod(sizes[1:]) ** 0.5)
        else:
            parameter.copy_(0.3 * noise + (0.0 if name.endswith(("bias", "beta")) else 0.5))
