"""Normalisation in front of a residual branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allmlp.spec import NonNegative, Spec


class Norm(Spec, abstract=True):
    def build(self, channels: int) -> nn.Module:
        raise NotImplementedError


class LayerNorm(Norm):
    """Each token is centred and scaled over its channels.

        norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    Parameters 2C. Starts at weight 1, bias 0.
    """

    eps: NonNegative = 1e-6

    def build(self, channels: int) -> nn.Module:
        return nn.LayerNorm(channels, eps=self.eps)


class Affine(Norm):
    """ResMLP's replacement of normalisation: no statistics, so it folds into the next linear map.

        norm(x) = alpha * x + beta

    Source: ResMLP, eq. 1. Parameters 2C. Starts at alpha 1, beta 0.
    """

    def build(self, channels: int) -> nn.Module:
        return AffineLayer(channels)


class AffineLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)
