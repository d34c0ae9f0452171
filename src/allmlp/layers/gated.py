"""PatchTSMixer's gated attention: the output of a mixer is weighted by a softmax over the mixed axis."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from allmlp.layers.channel import ChannelMixer
from allmlp.layers.context import BuildContext, Context
from allmlp.layers.linear import Linear
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.mixers.projection import Dense, TokenProjection
from allmlp.layers.token_roles import TokenRole


class GatedTokens(TokenMixer):
    """A token mixer whose output is weighted over tokens, for each channel.

        Y = mix(X),   f(X) = Y * softmax_tokens(G Y + g 1^T)

    Source: PatchTSMixer, "gated attention". Parameters S^2 + S and the mixer's, multiply-adds S^2 C and the mixer's.
    """

    mix: TokenMixer

    def build(self, ctx: BuildContext) -> nn.Module:
        return GatedTokensLayer(self, ctx)

    def keep_width(self, tokens: int, times: int = 1) -> Self:
        return self.replace(mix=self.mix.keep_width(tokens, times))


class GatedTokensLayer(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = {}

    def __init__(self, spec: GatedTokens, ctx: BuildContext) -> None:
        super().__init__()
        self.mix = spec.mix.build(ctx)
        self.gate = TokenProjection(Dense(), ctx.tokens, False, ctx.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y = self.mix(x, context)
        scores = self.gate(y, context)
        if context.mask is not None:
            scores = scores.masked_fill(~context.mask.unsqueeze(-1), torch.finfo(scores.dtype).min)
        return y * scores.softmax(1)


class GatedChannels(ChannelMixer):
    """A channel mixer whose output is weighted over channels, for each token.

        Y = mix(X),   f(X) = Y * softmax_channels(Y G^T + g)

    Source: PatchTSMixer, "gated attention". Parameters C^2 + C and the mixer's, multiply-adds S C^2 and the mixer's.
    """

    mix: ChannelMixer

    def build(self, ctx: BuildContext) -> nn.Module:
        return GatedChannelsLayer(self, ctx)

    @property
    def is_causal(self) -> bool:
        return self.mix.is_causal


class GatedChannelsLayer(nn.Module):
    def __init__(self, spec: GatedChannels, ctx: BuildContext) -> None:
        super().__init__()
        self.mix = spec.mix.build(ctx)
        self.gate = Linear(ctx.channels, ctx.channels, ctx.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y = self.mix(x, context)
        return y * self.gate(y).softmax(-1)
