"""No communication between tokens: ResMLP's control."""

from __future__ import annotations

from torch import Tensor, nn

from allmlp.layers.context import Context, Site
from allmlp.layers.mixers.mixer import TokenMixer


class NoMixing(TokenMixer):
    """The identity in the token slot: its norm and scale stay, as in ResMLP's "linear -> none".

        f(X) = X

    Parameters 0. To leave the whole slot out, norm and scale included, use token=None.
    """

    def build(self, site: Site) -> nn.Module:
        return NoMixingLayer()

    @property
    def is_causal(self) -> bool:
        return True


class NoMixingLayer(nn.Module):
    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x
