"""The residual branch, and the block that stacks one branch per slot."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from allmlp.layers.channel import ChannelMixer, ChannelMlpLayer
from allmlp.layers.context import BuildContext, Context
from allmlp.layers.dropout import dropout
from allmlp.layers.linear import has_hooks
from allmlp.layers.mixers.attention import CrossAttention
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import AffineLayer, LayerNorm, Norm, build_norm
from allmlp.layers.scale import DropPathLayer, LayerScale, LayerScaleLayer
from allmlp.layers.variate import VariateMixer
from allmlp.spec import Rate, Spec

FOLDS = ChannelMlpLayer, TokenProjection
"""Mixers with a method `folded(x, context, norm, gamma)`, which computes the branch with norm and scale in training."""


class Block(Spec):
    """One residual branch per filled slot, in the order variate, token, cross, channel.

        pre:       Y = X + drop_path(scale(f(norm(X))))       f = token mixing, cross-attention, channel MLP
        post:      Y = norm(X + drop_path(scale(f(X))))       (BERT, the original Transformer)
        res-post:  Y = X + drop_path(scale(norm(f(X))))       (Swin v2, ConvMixer)

    With residual="token" only the token slot has the skip connection `X +` (ConvMixer); the others replace X.
    """

    token: TokenMixer | None = None
    cross: CrossAttention | None = None
    channel: ChannelMixer | None = None
    norm: Norm | None = LayerNorm()
    scale: LayerScale | None = None
    dropout: Rate = 0.0
    order: Literal["pre", "post", "res-post"] = "pre"
    residual: Literal["all", "token"] = "all"
    variate: VariateMixer | None = None

    def build(self, ctx: BuildContext, drop_path: float = 0.0) -> nn.Module:
        return BlockLayer(self, ctx, drop_path)

    @property
    def causal(self) -> bool:
        """Whether no token can see a later one."""
        return all(part is None or part.is_causal for part in (self.token, self.channel))


class Residual(nn.Module):
    """The branch of one slot; without `skip` it replaces its input."""

    def __init__(self, block: Block, mix: nn.Module, ctx: BuildContext, drop_path: float, skip: bool = True) -> None:
        super().__init__()
        self.order = block.order
        self.dropout = block.dropout
        self.skip = skip
        self.norm = build_norm(block.norm, ctx.channels, ctx.tokens)
        self.mix = mix
        self.scale = block.scale.build(ctx.channels) if block.scale else None
        # A dropped branch needs the skip connection: without it nothing would be left.
        self.drop_path = DropPathLayer(drop_path if skip else 0.0)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y = self.folded(x, context)
        if y is None:
            y = self.branch(self.norm(x) if self.order == "pre" else x, context)
        y = x + y if self.skip else y
        return self.norm(y) if self.order == "post" else y

    def folded(self, x: Tensor, context: Context) -> Tensor | None:
        """The branch with Affine and LayerScale folded into the weights of its mixer; None where they cannot be."""
        if self.order != "pre" or self.dropout or not isinstance(self.mix, FOLDS):
            return None
        if not isinstance(self.norm, AffineLayer) or not isinstance(self.scale, LayerScaleLayer):
            return None
        if has_hooks(self.norm, self.mix, self.scale):
            return None
        y = None if self.scale.beta is not None else self.mix.folded(x, context, self.norm, self.scale.gamma)
        return None if y is None else self.drop_path(y)

    def branch(self, x: Tensor, context: Context) -> Tensor:
        y = dropout(self.mix(x, context), self.dropout, self.training)
        y = self.norm(y) if self.order == "res-post" else y
        return self.drop_path(y if self.scale is None else self.scale(y))


class BlockLayer(nn.Module):
    def __init__(self, spec: Block, ctx: BuildContext, drop_path: float) -> None:
        super().__init__()
        self.slots = [slot for slot in ("variate", "token", "cross", "channel") if getattr(spec, slot) is not None]
        for slot in self.slots:
            mix, skip = getattr(spec, slot).build(ctx), spec.residual in ("all", slot)
            self.add_module(slot, Residual(spec, mix, ctx, drop_path, skip))

    def residuals(self) -> list[tuple[str, Residual]]:
        return [(slot, getattr(self, slot)) for slot in self.slots]

    def forward(self, x: Tensor, context: Context, outputs: dict[str, Tensor] | None = None) -> Tensor:
        """Output of the block; the outputs of its branches are stored by slot in `outputs`."""
        for slot, residual in self.residuals():
            x = residual(x, context)
            if outputs is not None:
                outputs[slot] = x
        return x
