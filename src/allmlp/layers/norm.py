"""Normalization over channels (LayerNorm, RMSNorm), over the batch (BatchNorm) or none at all (Affine)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.spec import NonNegative, Rate, Spec


class Norm(Spec, abstract=True):
    def build(self, channels: int) -> nn.Module:
        raise NotImplementedError


def build_norm(norm: Norm | None, channels: int, tokens: int | None = None) -> nn.Module:
    """Build a norm; the identity for None. `tokens` is the number of tokens, if it is fixed."""
    if isinstance(norm, BatchNorm) and norm.per_token:
        if tokens is None:
            raise UserError("BatchNorm(per_token=True) is for the norm of a block")
        return TokenBatchNormLayer(tokens * channels, eps=norm.eps, momentum=norm.momentum)
    return norm.build(channels) if norm else nn.Identity()


class LayerNorm(Norm):
    """Each token is centered and scaled over its channels.

        norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    Parameters 2C. Initialized to weight 1, bias 0.
    """

    eps: NonNegative = 1e-6

    def build(self, channels: int) -> nn.Module:
        return nn.LayerNorm(channels, eps=self.eps)


class RMSNorm(Norm):
    """Each token is scaled over its channels, without centering and bias.

        norm(x) = x / sqrt(mean(x^2) + eps) * weight

    Source: Zhang and Sennrich (2019); the norm of Llama. Parameters C. Initialized to weight 1.
    """

    eps: NonNegative = 1e-6

    def build(self, channels: int) -> nn.Module:
        return nn.RMSNorm(channels, eps=self.eps)


class Affine(Norm):
    """ResMLP's replacement for normalization: no statistics, so it folds into the next linear map.

        norm(x) = alpha * x + beta

    Source: ResMLP, eq. 1. Parameters 2C. Initialized to alpha 1, beta 0.
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


class BatchNorm(Norm):
    """Each channel is centered and scaled over the batch and the tokens.

        norm(x) = (x - mean) / sqrt(var + eps) * weight + bias

    Training uses mean and var of the batch and updates their running averages with `momentum` (twice per step with
    gradient checkpointing, which runs a block twice); evaluation uses the running averages. Padding counts as tokens.
    With `per_token`, in a block, each token has its own statistics and weights, and the number of tokens is fixed
    (TSMixer).
    Source: ConvMixer. Parameters 2C, buffers 2C + 1 (per_token: 2SC, 2SC + 1). Initialized to weight 1, bias 0.
    """

    eps: NonNegative = 1e-5
    momentum: Rate = 0.1
    per_token: bool = False

    def build(self, channels: int) -> nn.Module:
        return BatchNormLayer(channels, eps=self.eps, momentum=self.momentum)


class BatchNormLayer(nn.BatchNorm1d):
    """nn.BatchNorm1d for channels in the last dimension."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(0, -2)).view_as(input)


class TokenBatchNormLayer(nn.BatchNorm1d):
    """nn.BatchNorm1d over the flattened tokens and channels."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1)).view_as(input)
