"""Token mixers: one file is one way for tokens to exchange information."""

from allmlp.layers.mixers.attention import Attention, CrossAttention, RelativePositions, TinyAttention
from allmlp.layers.mixers.conv import TokenConv
from allmlp.layers.mixers.gate import SpatialGate
from allmlp.layers.mixers.linear import TokenLinear
from allmlp.layers.mixers.mlp import TokenMlp
from allmlp.layers.mixers.none import NoMixing
from allmlp.layers.mixers.projection import Dense, Toeplitz
from allmlp.spec import discover

__all__ = [
    "Attention",
    "CrossAttention",
    "Dense",
    "NoMixing",
    "RelativePositions",
    "SpatialGate",
    "TinyAttention",
    "Toeplitz",
    "TokenConv",
    "TokenLinear",
    "TokenMlp",
]

# A new file beside this one is a new mixer.
discover(__name__)
