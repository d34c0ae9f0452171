"""Mixing of the variates of a multivariate series, which are otherwise processed separately."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import BuildContext, Context
from allmlp.layers.dropout import dropout
from allmlp.layers.linear import Linear
from allmlp.layers.token_roles import TokenRole
from allmlp.spec import NonNegative, Rate, Spec


class VariateMixer(Spec, abstract=True):
    """Fits the `variate` slot of a block. The variates of an example are consecutive rows of the batch, (b v) s c."""

    def build(self, ctx: BuildContext) -> nn.Module:
        raise NotImplementedError


class VariateMlp(VariateMixer):
    """The same two-layer MLP over the V variates is applied to each token and channel.

        f(X) = W2 act(W1 (X * softmax_variates(G X + g)) + b1) + b2,   X: V x SC       (without gate: W1 X)

    The hidden width D is `expansion` times V. Source: PatchTSMixer, mode "mix_channel".
    Parameters 2VD + D + V, V^2 + V for the gate; multiply-adds of an example (2VD + V^2) SC.
    """

    expansion: NonNegative = 2.0
    act: Act = "gelu"
    gate: bool = True
    dropout: Rate = 0.0

    def build(self, ctx: BuildContext) -> nn.Module:
        return VariateMlpLayer(self, ctx)


class VariateMlpLayer(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = {}

    def __init__(self, spec: VariateMlp, ctx: BuildContext) -> None:
        super().__init__()
        self.act, self.dropout, self.variates = spec.act, spec.dropout, ctx.variates
        hidden = max(round(spec.expansion * ctx.variates), 1)
        self.gate = Linear(ctx.variates, ctx.variates, ctx.init) if spec.gate else None
        self.up = Linear(ctx.variates, hidden, ctx.init)
        self.down = Linear(hidden, ctx.variates, ctx.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        z = x.reshape(-1, self.variates, x.shape[1] * x.shape[2]).transpose(1, 2)  # b (s c) v
        if self.gate is not None:
            z = z * self.gate(z).softmax(-1)
        h = dropout(ACTS[self.act](self.up(z)), self.dropout, self.training)  # b (s c) d
        return self.down(h).transpose(1, 2).reshape(x.shape)
