"""The two verbs of the grammar: the residual branch, and the block that lines branches up."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.layers.channel import ChannelMlp
from allmlp.layers.context import Context, Site
from allmlp.layers.mixers.attention import CrossAttention
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.norm import LayerNorm, Norm
from allmlp.layers.scale import DropPathLayer, LayerScale
from allmlp.spec import Rate, Spec


class Block(Spec):
    """One residual branch per filled slot, in the order token, cross, channel.

    pre:   Y = X + drop_path(scale(f(norm(X))))       f = token mixing, cross-attention, channel MLP
    post:  Y = norm(X + drop_path(scale(f(X))))       (BERT, the first Transformer)
    """

    token: TokenMixer | None = None
    cross: CrossAttention | None = None
    channel: ChannelMlp | None = None
    norm: Norm = LayerNorm()
    scale: LayerScale | None = None
    dropout: Rate = 0.0
    order: Literal["pre", "post"] = "pre"

    def build(self, site: Site, drop_path: float = 0.0) -> nn.Module:
        return BlockLayer(self, site, drop_path)

    @property
    def causal(self) -> bool:
        """Whether no token can see a later one."""
        gate = self.channel.inner if self.channel else None
        return (self.token is None or self.token.is_causal) and (gate is None or gate.causal)


class Residual(nn.Module):
    def __init__(self, block: Block, mix: nn.Module, site: Site, drop_path: float) -> None:
        super().__init__()
        self.order = block.order
        self.dropout = block.dropout
        self.norm = block.norm.build(site.channels)
        self.mix = mix
        self.scale = block.scale.build(site.channels) if block.scale else None
        self.drop_path = DropPathLayer(drop_path)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.order == "post":
            return self.norm(x + self.branch(x, context))
        return x + self.branch(self.norm(x), context)

    def branch(self, x: Tensor, context: Context) -> Tensor:
        y = F.dropout(self.mix(x, context), self.dropout, self.training)
        return self.drop_path(y if self.scale is None else self.scale(y))


class BlockLayer(nn.Module):
    def __init__(self, spec: Block, site: Site, drop_path: float) -> None:
        super().__init__()
        self.slots = [slot for slot in ("token", "cross", "channel") if getattr(spec, slot) is not None]
        for slot in self.slots:
            mix = getattr(spec, slot).build(site)
            self.add_module(slot, Residual(spec, mix, site, drop_path))

    def residuals(self) -> list[tuple[str, Residual]]:
        return [(slot, getattr(self, slot)) for slot in self.slots]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        for _, residual in self.residuals():
            x = residual(x, context)
        return x
