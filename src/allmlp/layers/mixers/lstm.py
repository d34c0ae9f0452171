"""Recurrence over tokens: the baseline that reads one token after the other."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from allmlp.layers.context import BuildContext, Context
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.token_roles import TokenRole


class TokenLstm(TokenMixer):
    """A long short-term memory over tokens, causal.

        [i f g o] = X[t] W^T + a + H[t-1] R^T + r,   W, R: 4C x C
        M[t] = sigmoid(f) * M[t-1] + sigmoid(i) * tanh(g)
        f(X)[t] = H[t] = sigmoid(o) * tanh(M[t]),   H[-1] = M[-1] = 0

    Source: Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000: torch.nn.LSTM and its
    initialization. Padding has to follow the text. Parameters 8C^2 + 8C, multiply-adds 8SC^2, S of them in a row.
    """

    causal: ClassVar[bool] = True

    def build(self, ctx: BuildContext) -> nn.Module:
        return TokenLstmLayer(ctx)


class TokenLstmLayer(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = {}

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.lstm = nn.LSTM(ctx.channels, ctx.channels, batch_first=True)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        cache, state = context.cache, None
        if cache is not None and self in cache.seen:
            hidden, memory = cache.seen[self].transpose(0, 1).contiguous().chunk(2, dim=2)  # 1 b c
            state = hidden.contiguous(), memory.contiguous()
        y, last = self.lstm(x, state)
        if cache is not None:
            cache.seen[self] = torch.cat(last, dim=2).transpose(0, 1)  # b 1 2c
        return y
