"""ResMLP's token mixer: one linear map over tokens, no hidden layer."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from allmlp.layers.context import BuildContext
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.mixers.projection import Dense, Projection, TokenProjection


class TokenLinear(TokenMixer):
    """The same matrix mixes the tokens of each channel.

        f(X) = A X + b 1^T

    Source: ResMLP, eq. 2; causal=True is the triangular A of its decoder. Sequences shorter than S
    use the leading submatrix. Parameters S^2 + S, multiply-adds S^2 C.
    """

    separates_documents: ClassVar[bool] = True
    projection: Projection = Dense()
    causal: bool = False

    def build(self, ctx: BuildContext) -> nn.Module:
        return TokenProjection(self.projection, ctx.tokens, self.causal, ctx.init)
