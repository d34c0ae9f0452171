"""Initialization: named distributions, and the pair of them that a linear layer needs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from allmlp.spec import NonNegative, Spec


class Distribution(Spec, abstract=True):
    """Fills one tensor; `fan_in` is the number of inputs of its linear layer."""

    def fill(self, tensor: Tensor, fan_in: int) -> None:
        raise NotImplementedError


class Constant(Distribution):
    """Every entry is `value`."""

    value: float

    def fill(self, tensor: Tensor, fan_in: int) -> None:
        nn.init.constant_(tensor, self.value)


class Zeros(Distribution):
    """Every entry is 0."""

    def fill(self, tensor: Tensor, fan_in: int) -> None:
        nn.init.zeros_(tensor)


class Normal(Distribution):
    """N(0, std^2)."""

    std: NonNegative

    def fill(self, tensor: Tensor, fan_in: int) -> None:
        if not tensor.is_meta:  # there normal_ would only import torch._dynamo, which takes seconds
            nn.init.normal_(tensor, std=self.std)


@torch.no_grad()
def truncated_normal(tensor: Tensor, std: float, limit: float) -> None:
    """nn.init.trunc_normal_, but resampling only the values outside the limits instead of all of them."""
    if tensor.is_meta or limit < std:
        nn.init.trunc_normal_(tensor, std=std, a=-limit, b=limit)
        return
    flat = tensor.view(-1).normal_(0, std)
    outside = (flat.abs() > limit).nonzero().squeeze(1)
    while len(outside):
        fresh = torch.empty_like(outside, dtype=flat.dtype).normal_(0, std)
        flat[outside] = fresh
        outside = outside[fresh.abs() > limit]


class TruncatedNormal(Distribution):
    """N(0, std^2), resampled outside [-limit, limit]."""

    std: NonNegative = 0.02
    limit: NonNegative = 2.0

    def fill(self, tensor: Tensor, fan_in: int) -> None:
        truncated_normal(tensor, self.std, self.limit)


class LecunNormal(Distribution):
    """Variance 1 / fan_in, truncated at two standard deviations (Flax's default)."""

    def fill(self, tensor: Tensor, fan_in: int) -> None:
        # 0.8796... is the standard deviation of a unit normal truncated to [-2, 2].
        std = math.sqrt(1 / fan_in) / 0.87962566103423978
        truncated_normal(tensor, std, 2 * std)


class XavierUniform(Distribution):
    """U(-a, a) with a = gain * sqrt(6 / (fan_in + fan_out))."""

    gain: NonNegative = 1.0

    def fill(self, tensor: Tensor, fan_in: int) -> None:
        limit = self.gain * math.sqrt(6 / (fan_in + tensor.shape[0]))
        nn.init.uniform_(tensor, -limit, limit)


class TorchDefault(Distribution):
    """U(-a, a) with a = 1 / sqrt(fan_in), the default of torch.nn.Linear and Conv2d."""

    def fill(self, tensor: Tensor, fan_in: int) -> None:
        nn.init.uniform_(tensor, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


class Init(Spec):
    """The initialization of a linear layer: its weight and its bias."""

    weight: Distribution = XavierUniform()
    bias: Distribution = Zeros()
