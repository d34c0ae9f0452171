"""Channel mixing, the same for every token: an MLP, with an optional token operation inside, or one linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allmlp.kernels import training_dtype
from allmlp.kernels.channel_mlp.op import channel_mlp
from allmlp.kernels.gated_mlp.op import gated_mlp
from allmlp.kernels.gated_mlp.reference import GatedMlpWeights
from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import BuildContext, Context
from allmlp.layers.dropout import dropout
from allmlp.layers.linear import Linear, is_standard
from allmlp.layers.mixers.gate import SpatialGatingUnit, SpatialGatingUnitLayer
from allmlp.layers.norm import AffineLayer
from allmlp.spec import Count, Rate, Spec


class ChannelMixer(Spec, abstract=True):
    """Base class of specs for the `channel` slot of a block. The module's call is `forward(x, context)`."""

    def build(self, ctx: BuildContext) -> nn.Module:
        raise NotImplementedError

    @property
    def is_causal(self) -> bool:
        """Whether no token can see a later one."""
        return True


class ChannelLinear(ChannelMixer):
    """One linear layer over channels, a 1x1 convolution.

        f(X) = act(X W^T + b)

    Source: ConvMixer's pointwise convolution. Parameters C^2 + C, multiply-adds SC^2.
    """

    act: Act | None = None

    def build(self, ctx: BuildContext) -> nn.Module:
        return ChannelLinearLayer(self, ctx)


class ChannelLinearLayer(nn.Module):
    def __init__(self, spec: ChannelLinear, ctx: BuildContext) -> None:
        super().__init__()
        self.act = spec.act
        self.proj = Linear(ctx.channels, ctx.channels, ctx.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y = self.proj(x)
        return ACTS[self.act](y) if self.act else y


class ChannelMlp(ChannelMixer):
    """Mixes channels inside each token.

        Y = inner(act(X U^T + a)) V^T + c
        glu:  Y = inner(act(X G^T + g) * (X U^T + a)) V^T + c

    Mixer eq. 1 (second line), ResMLP eq. 3; with a spatial gating unit as `inner` it is gMLP's block. With `glu` the
    hidden channels are gated by others of the same token (Shazeer, 2020): SwiGLU with act="silu", GEGLU with "gelu",
    GLU with "sigmoid". linear_bias=False leaves a, c and g out. Parameters CF + F + FC + C (without inner; + CF + F
    with glu), multiply-adds 2SCF (glu: 3SCF).
    """

    hidden: Count
    act: Act = "gelu"
    inner: SpatialGatingUnit | None = None
    dropout: Rate = 0.0
    glu: bool = False
    linear_bias: bool = True

    def build(self, ctx: BuildContext) -> nn.Module:
        return ChannelMlpLayer(self, ctx)

    @property
    def is_causal(self) -> bool:
        return self.inner is None or self.inner.causal


class ChannelMlpLayer(nn.Module):
    def __init__(self, spec: ChannelMlp, ctx: BuildContext) -> None:
        super().__init__()
        self.act, self.glu = spec.act, spec.glu
        self.dropout = spec.dropout
        parts = [spec.hidden] * (1 + spec.glu)  # gate, up
        self.up = Linear(ctx.channels, sum(parts), ctx.init, spec.linear_bias, parts)
        self.inner = spec.inner.build(ctx, spec.hidden) if spec.inner else None
        width = spec.inner.width(spec.hidden) if spec.inner else spec.hidden
        self.down = Linear(width, ctx.channels, ctx.init, spec.linear_bias)
        self.linear_bias = spec.linear_bias

    @property
    def is_plain(self) -> bool:
        """Whether the fused operators compute these layers."""
        return not self.glu and self.linear_bias and is_standard(self.up) and is_standard(self.down)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        dtype = training_dtype(x, self.act)
        if dtype is not None and self.is_plain and not (self.dropout and self.training):
            if self.inner is None:
                return channel_mlp(
                    x.to(dtype), self.up.weight, self.up.bias, self.down.weight, self.down.bias, self.act
                )
            gate = self.inner
            if isinstance(gate, SpatialGatingUnitLayer) and gate.is_plain and not context.is_special():
                return self.gated(x.to(dtype), gate, context)
        h = self.up(x)  # b s f
        if self.glu:
            gate, h = h.chunk(2, dim=-1)
            h = ACTS[self.act](gate) * h
        else:
            h = ACTS[self.act](h)
        h = dropout(h, self.dropout, self.training)
        if self.inner is not None:
            h = self.inner(h, x, context)
        return self.down(h)

    def folded(self, x: Tensor, context: Context, norm: AffineLayer, gamma: Tensor) -> Tensor | None:
        """gamma * f(norm(x)) in training on a GPU, with norm and gamma as operations on the weights alone:

            gamma (V act(U (alpha x + beta) + a) + c) = (gamma V) act((U alpha) x + (a + U beta)) + gamma c

        None where the MLP is not fused, and in float16, where weights scaled by a gamma of 1e-6 would underflow.
        """
        dtype = training_dtype(x, self.act)
        if dtype in (None, torch.float16) or self.inner or not self.is_plain or (self.dropout and self.training):
            return None
        up, down = self.up.weight, self.down.weight
        up_bias = self.up.bias + (up * norm.beta).sum(1)  # a product would be in 16 bits under autocast
        return channel_mlp(
            x.to(dtype), up * norm.alpha, up_bias, gamma[:, None] * down, gamma * self.down.bias, self.act
        )

    def gated(self, x: Tensor, gate: SpatialGatingUnitLayer, context: Context) -> Tensor:
        """gMLP's block after its first norm, as one operator."""
        tokens, norm = x.shape[1], gate.norm
        assert isinstance(norm, nn.LayerNorm)
        weights = GatedMlpWeights(
            up=self.up.weight,
            up_bias=self.up.bias,
            matrix=gate.proj.matrix(0, tokens),
            token_bias=gate.proj.bias[:tokens],
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            down=self.down.weight,
            down_bias=self.down.bias,
        )
        return gated_mlp(x, weights, context.mask, self.act, norm.eps)
