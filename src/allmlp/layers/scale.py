"""Applied to a residual branch before it is added: learned scale, stochastic depth."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from allmlp.spec import Rate, Spec


class LayerScale(Spec):
    """A learned factor per channel, initialized to a small value so that deep stacks start near the identity.

        scale(y) = gamma * y            (+ beta with shift=True)

    Source: CaiT; ResMLP eq. 2-3 print it with beta, its released code has gamma alone.
    Parameters C (2C with shift). Initialized to gamma = init_value, beta = 0.
    """

    init_value: float = 0.1
    shift: bool = False

    def build(self, channels: int) -> nn.Module:
        return LayerScaleLayer(self, channels)


class LayerScaleLayer(nn.Module):
    def __init__(self, spec: LayerScale, channels: int) -> None:
        super().__init__()
        self.init_value = spec.init_value
        self.gamma = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels)) if spec.shift else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init_value)
        if self.beta is not None:
            nn.init.zeros_(self.beta)

    def forward(self, y: Tensor) -> Tensor:
        return self.gamma * y if self.beta is None else torch.addcmul(self.beta, self.gamma, y)


class DropPath(Spec):
    """Stochastic depth: in training, the whole branch of an example is dropped at random.

        drop_path(y) = y * keep / (1 - rate),   keep ~ Bernoulli(1 - rate)

    One draw per example. With `linear` the rate grows from 0 at the first block to `rate` at the last (Mixer, DeiT,
    gMLP); with `flat` it is `rate` in every block (ResMLP).
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
        # At rate 1 nothing is kept: avoid a division by zero.
        self.threshold: float | Tensor = rate
        self.keep_prob: float | Tensor = 1 - rate if rate < 1 else 1.0
        self.active = rate > 0

    def rate_as_tensor(self, device: torch.device) -> None:
        """Let a compiled block read its rate as a tensor: as a number it would be a constant of the block's graph."""
        self.threshold, self.keep_prob = (torch.tensor(n, device=device) for n in (self.threshold, self.keep_prob))

    def forward(self, y: Tensor) -> Tensor:
        if not self.training or not self.active:
            return y
        keep = torch.rand(y.shape[0], *[1] * (y.dim() - 1), device=y.device) >= self.threshold
        return y * keep.to(y.dtype) / self.keep_prob

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"
