"""The channel MLP: the same two linear maps at every token, with room for a token operation inside."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.kernels import training_type
from allmlp.kernels.channel_mlp.op import channel_mlp
from allmlp.kernels.gated_mlp.op import gated_mlp
from allmlp.kernels.gated_mlp.reference import Weights
from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import Context, Site
from allmlp.layers.linear import Linear
from allmlp.layers.mixers.gate import SpatialGate, SpatialGateLayer
from allmlp.spec import Count, Rate, Spec


class ChannelMlp(Spec):
    """Mixes channels inside each token.

        Y = inner(act(X U^T + a)) V^T + c

    Mixer eq. 1 (second line), ResMLP eq. 3; with a spatial gate as `inner` it is gMLP's block.
    Parameters CF + F + FC + C (without inner), multiply-adds 2SCF.
    """

    hidden: Count
    act: Act = "gelu"
    inner: SpatialGate | None = None
    dropout: Rate = 0.0

    def build(self, site: Site) -> nn.Module:
        return ChannelMlpLayer(self, site)


class ChannelMlpLayer(nn.Module):
    def __init__(self, spec: ChannelMlp, site: Site) -> None:
        super().__init__()
        self.act = spec.act
        self.dropout = spec.dropout
        self.up = Linear(site.channels, spec.hidden, site.init)
        self.inner = spec.inner.build(site, spec.hidden) if spec.inner else None
        width = spec.inner.width(spec.hidden) if spec.inner else spec.hidden
        self.down = Linear(width, site.channels, site.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        dtype = training_type(x)
        if dtype is not None and not (self.dropout and self.training):
            if self.inner is None:
                return channel_mlp(
                    x.to(dtype), self.up.weight, self.up.bias, self.down.weight, self.down.bias, self.act
                )
            if isinstance(self.inner, SpatialGateLayer) and self.inner.is_plain and context.cache is None:
                return self.gated(x.to(dtype), self.inner, context)
        h = ACTS[self.act](self.up(x))  # b s f
        h = F.dropout(h, self.dropout, self.training)
        if self.inner is not None:
            h = self.inner(h, x, context)
        return self.down(h)

    def gated(self, x: Tensor, gate: SpatialGateLayer, context: Context) -> Tensor:
        """The whole of gMLP's block after its first norm, as one operator."""
        tokens, norm = x.shape[1], gate.norm
        assert isinstance(norm, nn.LayerNorm)
        weights = Weights(
            up=self.up.weight,
            a=self.up.bias,
            matrix=gate.proj.matrix(0, tokens),
            b=gate.proj.bias[:tokens],
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            down=self.down.weight,
            c=self.down.bias,
        )
        return gated_mlp(x, weights, context.mask, self.act, norm.eps)
