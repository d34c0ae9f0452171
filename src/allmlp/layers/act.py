"""Activations by name."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Act = Literal["gelu", "gelu_tanh", "relu", "silu", "sigmoid"]

SLOW_BACKWARD = platform.machine() in ("aarch64", "arm64")


def gelu(x: Tensor) -> Tensor:
    """F.gelu. On ARM CPUs, where torch does not vectorize its backward pass, `Gelu` is used in training: it is three
    times as fast (Neoverse N1).
    """
    if SLOW_BACKWARD and x.device.type == "cpu" and torch.is_grad_enabled() and x.requires_grad:
        return F.gelu(x) if torch.compiler.is_compiling() else Gelu.apply(x)
    return F.gelu(x)


class Gelu(torch.autograd.Function):
    """GELU(x) = x P(x) and its derivative P(x) + x p(x), in vectorized operations.

    P is the cumulative distribution function and p the density of the standard normal distribution.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.gelu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), (grad,) = ctx.saved_tensors, grads
        if torch.is_grad_enabled():  # for a second derivative
            return torch.ops.aten.gelu_backward(grad, x)
        slope = x.square().mul_(-0.5).exp_().mul_(x).mul_(1 / math.sqrt(2 * math.pi))
        return slope.add_((x * math.sqrt(0.5)).erf_(), alpha=0.5).add_(0.5).mul_(grad)


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    # x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the default of Flax and so of Google's Mixer.
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
