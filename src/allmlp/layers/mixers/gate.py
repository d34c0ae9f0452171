"""gMLP's spatial gating unit in its four variants, and aMLP's, to which a tiny attention is added."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.layers.context import BuildContext, Context
from allmlp.layers.init import Constant, Init, Normal
from allmlp.layers.linear import has_hooks
from allmlp.layers.mixers.attention import TinyAttention
from allmlp.layers.mixers.projection import Dense, Projection, TokenProjection
from allmlp.layers.norm import LayerNorm, Norm, build_norm
from allmlp.spec import Spec


class SpatialGatingUnit(Spec):
    """The token operation inside gMLP's channel MLP; Z is the hidden activation, S x F.

        f(Z) = W norm(Z) + b 1^T   (+ attention(X) in aMLP, X the block's normed input)
        split:     Z1 * f(Z2),  Z = [Z1 Z2]       multiplicative:  Z * f(Z)
        additive:  Z + f(Z)                       linear:          f(Z)

    Source: gMLP, eq. 2-4 and table 3. W is initialized near 0 and b to 1, so that a gated block starts
    as a plain channel MLP. Parameters of split with a dense W: S^2 + S + F; multiply-adds S^2 F / 2.
    """

    variant: Literal["split", "multiplicative", "additive", "linear"] = "split"
    projection: Projection = Dense()
    causal: bool = False
    norm: Norm | None = LayerNorm()
    attention: TinyAttention | None = None
    init: Init = Init(Normal(1e-6), Constant(1.0))

    def width(self, hidden: int) -> int:
        """Output channels of the gate for `hidden` input channels."""
        return hidden // 2 if self.variant == "split" else hidden

    @property
    def is_plain(self) -> bool:
        """Whether it is the paper's own: split, with LayerNorm and without attention."""
        return self.variant == "split" and self.attention is None and isinstance(self.norm, LayerNorm)

    def build(self, ctx: BuildContext, hidden: int) -> nn.Module:
        return SpatialGatingUnitLayer(self, ctx, hidden)


class SpatialGatingUnitLayer(nn.Module):
    def __init__(self, spec: SpatialGatingUnit, ctx: BuildContext, hidden: int) -> None:
        super().__init__()
        if spec.variant == "split" and hidden % 2:
            raise UserError(f"SpatialGatingUnit('split') needs an even number of hidden channels, not {hidden}")
        width = spec.width(hidden)
        self.spec, self.variant = spec, spec.variant
        self.norm = build_norm(spec.norm, width)
        self.proj = TokenProjection(spec.projection, ctx.tokens, spec.causal, spec.init)
        self.attention = spec.attention.build(ctx, width, spec.causal) if spec.attention else None

    @property
    def is_plain(self) -> bool:
        """Whether the fused operator of gMLP's block computes this gate."""
        return self.spec.is_plain and not has_hooks(self, self.norm, self.proj)

    def forward(self, z: Tensor, x: Tensor, context: Context) -> Tensor:
        u, v = z.chunk(2, dim=-1) if self.variant == "split" else (z, z)
        f = self.proj(self.norm(v), context)
        if self.attention is not None:
            f = f + self.attention(x, context)
        if self.variant == "linear":
            return f
        return u + f if self.variant == "additive" else u * f
