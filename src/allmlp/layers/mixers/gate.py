"""gMLP's spatial gating unit in its four versions, and aMLP's with a tiny attention beside it."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.layers.context import Context, Site
from allmlp.layers.init import Constant, Init, Normal
from allmlp.layers.mixers.attention import TinyAttention
from allmlp.layers.mixers.projection import Dense, Projection, TokenProjection
from allmlp.layers.norm import LayerNorm, Norm
from allmlp.spec import Spec


class SpatialGate(Spec):
    """The token operation inside gMLP's channel MLP; Z is the hidden activation, S x F.

        f(Z) = W norm(Z) + b 1^T   (+ attention(X) in aMLP, X the block's normed input)
        split:    Z1 * f(Z2),  Z = [Z1 Z2]        multiply:  Z * f(Z)
        add:      Z + f(Z)                        linear:    f(Z)

    Source: gMLP, eq. 2-4 and table 3. W starts near 0 and b at 1, so a gated block starts as a plain
    channel MLP. Parameters of split with a dense W: S^2 + S + F; multiply-adds S^2 F / 2.
    """

    combine: Literal["split", "multiply", "add", "linear"] = "split"
    project: Projection = Dense()
    causal: bool = False
    norm: Norm = LayerNorm()
    side: TinyAttention | None = None
    init: Init = Init(Normal(1e-6), Constant(1.0))

    def width(self, hidden: int) -> int:
        """Channels that leave the gate when `hidden` enter it."""
        return hidden // 2 if self.combine == "split" else hidden

    @property
    def is_plain(self) -> bool:
        """Whether it is the papers' own: split, with LayerNorm, and nothing beside it."""
        return self.combine == "split" and self.side is None and isinstance(self.norm, LayerNorm)

    def build(self, site: Site, hidden: int) -> nn.Module:
        if self.combine == "split" and hidden % 2:
            raise UserError(f"a split gate needs an even number of hidden channels, not {hidden}")
        return SpatialGateLayer(self, site, hidden)


class SpatialGateLayer(nn.Module):
    def __init__(self, spec: SpatialGate, site: Site, hidden: int) -> None:
        super().__init__()
        width = spec.width(hidden)
        self.combine, self.is_plain = spec.combine, spec.is_plain
        self.norm = spec.norm.build(width)
        self.proj = TokenProjection(spec.project, site.tokens, spec.causal, spec.init)
        self.side = spec.side.build(site, width, spec.causal) if spec.side else None

    def forward(self, z: Tensor, x: Tensor, context: Context) -> Tensor:
        u, v = z.chunk(2, dim=-1) if self.combine == "split" else (z, z)
        f = self.proj(self.norm(v), context)
        if self.side is not None:
            f = f + self.side(x, context)
        if self.combine == "linear":
            return f
        return u + f if self.combine == "add" else u * f
