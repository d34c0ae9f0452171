"""Rotary positions (RoPE), for the queries and keys of attention."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from allmlp.errors import UserError
from allmlp.spec import Count, Range, Spec

Positive = Annotated[float, Range(1e-6, 1e9)]


class RotaryScaling(Spec):
    """Llama 3.1's frequency scaling, for sequences longer than the `seq_len` tokens of the original pretraining.

        w' = w (r + (1 - r) / factor),   r = clamp((seq_len w / 2 pi - low) / (high - low), 0, 1)

    Waves that fit less than `low` times into `seq_len` become `factor` times longer, those that fit more than `high`
    times stay.
    """

    factor: Positive = 8.0
    low: Positive = 1.0
    high: Positive = 4.0
    seq_len: Count = 8192

    def check(self) -> None:
        if self.low >= self.high:
            raise UserError(f"RotaryScaling needs low below high, not {self.low:g} and {self.high:g}")

    def scale(self, frequency: Tensor) -> Tensor:
        waves = frequency * (self.seq_len / (2 * math.pi))
        kept = ((waves - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


class RotaryPositions(Spec):
    """Each pair of channels (k, k + D/2) of a head of D channels is rotated by an angle that grows with the position i.

        rotate(x)[k]       = x[k] cos(i w_k) - x[k + D/2] sin(i w_k),   w_k = theta^(-2k/D)
        rotate(x)[k + D/2] = x[k + D/2] cos(i w_k) + x[k] sin(i w_k)

    The product of a rotated query and a rotated key depends on their distance only. Source: Su et al. (2021), with the
    channel order of Llama in transformers. No parameters.
    """

    theta: Positive = 10_000.0
    scaling: RotaryScaling | None = None

    def rotate(self, x: Tensor, size: int, start: int) -> Tensor:
        """Rotate `x` (b s c) with heads of `size` channels; its first token is at position `start`."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        frequency = self.theta ** (torch.arange(0, size, 2, device=x.device, dtype=dtype) / -size)
        frequency = frequency if self.scaling is None else self.scaling.scale(frequency)
        position = torch.arange(start, start + x.shape[1], device=x.device, dtype=dtype)
        angle = (position[:, None] * frequency).unsqueeze(1)  # s 1 d/2
        cos, sin = angle.cos(), angle.sin()
        a, b = x.unflatten(-1, (-1, size)).to(dtype).chunk(2, dim=-1)  # b s h d/2
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(2).to(x.dtype)
