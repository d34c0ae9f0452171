"""The grammar: norms, scales, token mixers, channel MLPs, stems, pools, heads and the block.

Letters used in equations and shape comments everywhere:

    B batch    S tokens    C channels    F hidden channels    H heads    K classes    V vocabulary
    X, Y, Z    matrices of one example, S x C (rows are tokens)

A file holds one thing whole: its spec (a frozen value, see `allmlp.spec`) whose docstring gives the
equation, the source, the initialisation and the cost, and the module that the spec builds.
"""

from allmlp.layers.block import Block
from allmlp.layers.channel import ChannelMlp
from allmlp.layers.context import Cache, Context
from allmlp.layers.head import Classes, Pair, Span, Vocabulary
from allmlp.layers.init import (
    Constant,
    Init,
    LecunNormal,
    Normal,
    TorchDefault,
    TruncatedNormal,
    Uniform,
    XavierUniform,
    Zeros,
)
from allmlp.layers.mixers import (
    Attention,
    CrossAttention,
    Dense,
    NoMixing,
    RelativePositions,
    SpatialGate,
    TinyAttention,
    Toeplitz,
    TokenConv,
    TokenLinear,
    TokenMlp,
)
from allmlp.layers.norm import Affine, LayerNorm
from allmlp.layers.pool import ClassMlp, First, Mean
from allmlp.layers.scale import DropPath, LayerScale
from allmlp.layers.stem import Learned, Patches, Sinusoidal, Tokens

__all__ = [
    "Affine",
    "Attention",
    "Block",
    "Cache",
    "ChannelMlp",
    "ClassMlp",
    "Classes",
    "Constant",
    "Context",
    "CrossAttention",
    "Dense",
    "DropPath",
    "First",
    "Init",
    "LayerNorm",
    "LayerScale",
    "Learned",
    "LecunNormal",
    "Mean",
    "NoMixing",
    "Normal",
    "Pair",
    "Patches",
    "RelativePositions",
    "Sinusoidal",
    "Span",
    "SpatialGate",
    "TinyAttention",
    "Toeplitz",
    "TokenConv",
    "TokenLinear",
    "TokenMlp",
    "Tokens",
    "TorchDefault",
    "TruncatedNormal",
    "Uniform",
    "Vocabulary",
    "XavierUniform",
    "Zeros",
]
