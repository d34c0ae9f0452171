"""What happens to a residual branch before it is added: learned scale, stochastic depth."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from allmlp.spec import Rate, Spec


class LayerScale(Spec):
    """A learned factor per channel that starts small, so deep stacks start near the identity.

        scale(y) = gamma * y            (+ beta with shift=True)

    Source: CaiT; ResMLP eq. 2-3 print it with beta, its released code has gamma alone.
    Parameters C. Starts at gamma = value, beta = 0.
    """

    value: float = 0.1
    shift: bool = False

    def build(self, channels: int) -> nn.Module:
        return LayerScaleLayer(self, channels)


class LayerScaleLayer(nn.Module):
    def __init__(self, spec: LayerScale, channels: int) -> None:
        super().__init__()
        self.value = spec.value
        self.gamma = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels)) if spec.shift else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.value)
        if self.beta is not None:
            nn.init.zeros_(self.beta)

    def forward(self, y: Tensor) -> Tensor:
        return self.gamma * y if self.beta is None else torch.addcmul(self.beta, self.gamma, y)


class DropPath(Spec):
    """Stochastic depth: in training, a whole branch of an example is dropped.

        drop_path(y) = y * keep / (1 - rate),   keep ~ Bernoulli(1 - rate)

    One draw per example.
    `linear` grows the rate from 0 at the first block to `rate` at the last (Mixer, DeiT, gMLP);
    `flat` uses `rate` in every block (ResMLP).
    """

    rate: Rate = 0.0
    schedule: Literal["linear", "flat"] = "linear"

    def at(self, block: int, depth: int) -> float:
        """The rate of one block of `depth`."""
        return self.rate if self.schedule == "flat" else self.rate * block / max(depth - 1, 1)


class DropPathLayer(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, y: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return y
        keep = torch.rand(y.shape[0], *[1] * (y.dim() - 1), device=y.device) >= self.rate
        # At rate 1 nothing is kept and nothing must be rescaled.
        return y * keep.to(y.dtype) / (1 - self.rate if self.rate < 1 else 1.0)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"
