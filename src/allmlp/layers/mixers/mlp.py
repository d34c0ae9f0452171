"""MLP-Mixer's token mixer: an MLP over tokens, shared by all channels."""

from __future__ import annotations

from typing import ClassVar, Self

from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.kernels import training_dtype
from allmlp.kernels.token_matmul.op import token_matmul
from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import BuildContext, Context, check_tokens
from allmlp.layers.dropout import dropout
from allmlp.layers.linear import Linear, is_standard
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.token_roles import TokenRole
from allmlp.spec import Count, NonNegative, Rate


class TokenMlp(TokenMixer):
    """The same two-layer MLP over tokens is applied to each channel.

        f(X) = W2 act(W1 X + b1 1^T) + b2 1^T,   W1: D x S,   W2: S x D

    The hidden width D is `hidden`, or `expansion` times the number of tokens.
    Source: MLP-Mixer, eq. 1. Parameters 2SD + D + S, multiply-adds 2SDC.
    """

    hidden: Count | None = None
    expansion: NonNegative | None = None
    act: Act = "gelu"
    dropout: Rate = 0.0
    """After the activation."""

    def check(self) -> None:
        if (self.hidden is None) == (self.expansion is None):
            raise UserError("TokenMlp needs either hidden or expansion")

    def build(self, ctx: BuildContext) -> nn.Module:
        return TokenMlpLayer(self, ctx)

    def width(self, tokens: int) -> int:
        return self.hidden or max(round((self.expansion or 0) * tokens), 1)

    def keep_width(self, tokens: int, times: int = 1) -> Self:
        return self.replace(hidden=times * self.width(tokens), expansion=None)


class TokenMlpLayer(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = {
        "up.weight": "into hidden",
        "up.bias": "hidden",
        "down.weight": "out of hidden",
        "down.bias": "out",
    }

    def __init__(self, spec: TokenMlp, ctx: BuildContext) -> None:
        super().__init__()
        self.act, self.dropout = spec.act, spec.dropout
        hidden = spec.width(ctx.tokens)
        self.up = Linear(ctx.tokens, hidden, ctx.init)
        self.down = Linear(hidden, ctx.tokens, ctx.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, tokens = context.zero_padding(x), x.shape[1]
        if not (is_standard(self.up) and is_standard(self.down)):
            return self.through_modules(x)
        check_tokens(tokens, self.up.weight.shape[1])
        up, down, shift = self.up.weight[:, :tokens], self.down.weight[:tokens], self.down.bias[:tokens]
        dtype = training_dtype(x, self.act)
        if dtype is not None and not (self.dropout and self.training):
            # A float32 bias would promote the residual stream to float32.
            return token_matmul(down, token_matmul(up, x.to(dtype)), self.up.bias, self.act) + shift[:, None].to(dtype)
        # A product with the matrix on the left would transpose X too, and add the bias in a pass of its own.
        h = ACTS[self.act](F.linear(x.transpose(1, 2), up, self.up.bias))  # b c d
        h = dropout(h, self.dropout, self.training)
        return F.linear(h, down, shift).transpose(1, 2)

    def through_modules(self, x: Tensor) -> Tensor:
        """The same where another library has replaced `up` or `down`: zeros take the place of missing tokens."""
        tokens, size = x.shape[1], self.up.in_features
        check_tokens(tokens, size)
        h = ACTS[self.act](self.up(F.pad(x.transpose(1, 2), (0, size - tokens))))
        return self.down(dropout(h, self.dropout, self.training))[..., :tokens].transpose(1, 2)
