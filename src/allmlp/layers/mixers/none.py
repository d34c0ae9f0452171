"""No communication between tokens: ResMLP's ablation."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from allmlp.layers.context import BuildContext, Context
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.token_roles import TokenRole


class NoMixing(TokenMixer):
    """The identity in the token slot; the branch keeps its norm and scale, as in ResMLP's "linear -> none".

        f(X) = X

    Parameters 0. To leave the whole slot out, norm and scale included, use token=None.
    """

    separates_documents: ClassVar[bool] = True
    causal: ClassVar[bool] = True

    def build(self, ctx: BuildContext) -> nn.Module:
        return NoMixingLayer()


class NoMixingLayer(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = {}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x
