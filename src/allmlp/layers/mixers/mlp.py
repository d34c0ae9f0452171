"""MLP-Mixer's token mixer: an MLP over tokens, shared by all channels."""

from __future__ import annotations

from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.kernels import training_type
from allmlp.kernels.token_product.op import token_product
from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import Context, Site
from allmlp.layers.linear import Linear
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.spec import Count, NonNegative


class TokenMlp(TokenMixer):
    """Each channel is one input of the same two-layer MLP over tokens.

        f(X) = W2 act(W1 X + b1 1^T) + b2 1^T,   W1: D x S,   W2: S x D

    The hidden width D is `hidden`, or `expansion` times the number of tokens.
    Source: MLP-Mixer, eq. 1. Parameters 2SD + D + S, multiply-adds 2SDC.
    """

    hidden: Count | None = None
    expansion: NonNegative | None = None
    act: Act = "gelu"

    def check(self) -> None:
        if (self.hidden is None) == (self.expansion is None):
            raise UserError("TokenMlp needs either hidden or expansion")

    def build(self, site: Site) -> nn.Module:
        return TokenMlpLayer(self, site)

    def width(self, tokens: int) -> int:
        return self.hidden or max(round((self.expansion or 0) * tokens), 1)


class TokenMlpLayer(nn.Module):
    def __init__(self, spec: TokenMlp, site: Site) -> None:
        super().__init__()
        self.act = spec.act
        hidden = spec.width(site.tokens)
        self.up = Linear(site.tokens, hidden, site.init)
        self.down = Linear(hidden, site.tokens, site.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, tokens = context.hide(x), x.shape[1]
        up, down, shift = self.up.weight[:, :tokens], self.down.weight[:tokens], self.down.bias[:tokens, None]
        dtype = training_type(x)
        if dtype is not None:
            # The sum of residuals stays as narrow as the products: a float32 bias would widen it.
            return token_product(down, token_product(up, x.to(dtype)), self.up.bias, self.act) + shift.to(dtype)
        # W X with X as stored (b s c): no transpose is needed on either side.
        h = ACTS[self.act](up @ x + self.up.bias[:, None])  # b d c
        return down @ h + shift
