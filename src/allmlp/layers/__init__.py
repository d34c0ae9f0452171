"""The grammar: norms, scales, token mixers, channel MLPs, stems, pools, heads and the block.

Letters used in equations and shape comments:

    B batch    S tokens    C channels    F hidden channels    H heads    K classes    V vocabulary
    X, Y, Z    matrices of one example, S x C (rows are tokens)

One file holds one thing: its spec (a frozen value, see `allmlp.spec`), whose docstring gives the equation, the source,
the initialization and the cost, and the module `...Layer` that the spec builds.
"""

from allmlp.layers.block import Block
from allmlp.layers.channel import ChannelLinear, ChannelMixer, ChannelMlp
from allmlp.layers.context import BuildContext, Cache, Context
from allmlp.layers.gated import GatedChannels, GatedTokens
from allmlp.layers.head import ClassifierHead, LMHead, PooledHead, QAHead
from allmlp.layers.init import Constant, Init, LecunNormal, Normal, TorchDefault, TruncatedNormal, XavierUniform, Zeros
from allmlp.layers.mixers.attention import Attention, CrossAttention, RelativePositionBias, TinyAttention
from allmlp.layers.mixers.conv import TokenConv
from allmlp.layers.mixers.cycle import TokenCycle
from allmlp.layers.mixers.gate import SpatialGatingUnit
from allmlp.layers.mixers.linear import TokenLinear
from allmlp.layers.mixers.lstm import TokenLstm
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.mixers.mlp import TokenMlp
from allmlp.layers.mixers.none import NoMixing
from allmlp.layers.mixers.projection import Dense, Toeplitz
from allmlp.layers.mixers.rotary import RotaryPositions, RotaryScaling
from allmlp.layers.norm import Affine, BatchNorm, LayerNorm, RMSNorm
from allmlp.layers.pool import ClassAttention, ClassMlp, FirstTokenPool, MeanPool
from allmlp.layers.scale import DropPath, LayerScale
from allmlp.layers.series import (
    ForecastHead,
    ReconstructionHead,
    RevIN,
    SeriesPatches,
    SeriesSteps,
    SeriesTrend,
    SubtractLast,
)
from allmlp.layers.stage import PatchMerge, Stage
from allmlp.layers.stem import LearnedPositions, PatchEmbed, SinusoidalPositions, TokenEmbed
from allmlp.layers.variate import VariateMlp

__all__ = [
    "Affine",
    "Attention",
    "BatchNorm",
    "Block",
    "BuildContext",
    "Cache",
    "ChannelLinear",
    "ChannelMixer",
    "ChannelMlp",
    "ClassAttention",
    "ClassMlp",
    "ClassifierHead",
    "Constant",
    "Context",
    "CrossAttention",
    "Dense",
    "DropPath",
    "FirstTokenPool",
    "ForecastHead",
    "GatedChannels",
    "GatedTokens",
    "Init",
    "LMHead",
    "LayerNorm",
    "LayerScale",
    "LearnedPositions",
    "LecunNormal",
    "MeanPool",
    "NoMixing",
    "Normal",
    "PatchEmbed",
    "PatchMerge",
    "PooledHead",
    "QAHead",
    "RMSNorm",
    "ReconstructionHead",
    "RelativePositionBias",
    "RevIN",
    "RotaryPositions",
    "RotaryScaling",
    "SeriesPatches",
    "SeriesSteps",
    "SeriesTrend",
    "SinusoidalPositions",
    "SpatialGatingUnit",
    "Stage",
    "SubtractLast",
    "TinyAttention",
    "Toeplitz",
    "TokenConv",
    "TokenCycle",
    "TokenEmbed",
    "TokenLinear",
    "TokenLstm",
    "TokenMixer",
    "TokenMlp",
    "TorchDefault",
    "TruncatedNormal",
    "VariateMlp",
    "XavierUniform",
    "Zeros",
]
