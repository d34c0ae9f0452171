"""ResMLP's token mixer: one linear map over tokens, no hidden layer."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import BuildContext, Context
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.mixers.projection import Dense, Projection, TokenProjection
from allmlp.layers.token_roles import TokenRole


class TokenLinear(TokenMixer):
    """The same matrix mixes the tokens of each channel.

        f(X) = A X + b 1^T          act: f(X) = act(A X + b 1^T)

    Source: ResMLP, eq. 2; causal=True is the triangular A of its decoder; with act="relu" TSMixer's time mixing.
    Sequences shorter than S use the leading submatrix. Parameters S^2 + S, multiply-adds S^2 C.
    """

    separates_documents: ClassVar[bool] = True
    projection: Projection = Dense()
    causal: bool = False
    act: Act | None = None

    def build(self, ctx: BuildContext) -> nn.Module:
        if self.act is not None:
            return ActivatedProjection(self, ctx)
        return TokenProjection(self.projection, ctx.tokens, self.causal, ctx.init)


class ActivatedProjection(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = {}

    def __init__(self, spec: TokenLinear, ctx: BuildContext) -> None:
        super().__init__()
        assert spec.act is not None
        self.act = spec.act
        self.proj = TokenProjection(spec.projection, ctx.tokens, spec.causal, ctx.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return ACTS[self.act](self.proj(x, context))
