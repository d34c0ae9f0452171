"""Forecasting models: TSMixer, PatchTSMixer, gMLP and ResMLP over patches of a series, DLinear and NLinear.

The presets have the sizes for seven variates (the ETT datasets), a look-back of 512 steps and a horizon of 96;
`configure(seq_len=..., in_chans=..., horizon=...)` gives others. Linear layers are initialized as in torch.nn, like in
all released implementations except TSMixer's (Keras), which uses Xavier uniform with zero biases.
"""

from __future__ import annotations

from allmlp.layers import (
    Affine,
    BatchNorm,
    Block,
    ChannelMlp,
    ForecastHead,
    GatedChannels,
    GatedTokens,
    Init,
    LayerNorm,
    LayerScale,
    RevIN,
    SeriesPatches,
    SeriesSteps,
    SeriesTrend,
    SpatialGatingUnit,
    SubtractLast,
    TokenLinear,
    TokenMlp,
    VariateMlp,
)
from allmlp.layers.series import SeriesStem
from allmlp.models.preset import Preset
from allmlp.models.series_encoder import SeriesEncoder

VARIATES = 7


def tsmixer(dropout: float = 0.7) -> SeriesEncoder:
    """Chen et al. (2023), with reversible normalization: time steps are the tokens, variates the channels."""
    return SeriesEncoder(
        width=VARIATES,
        depth=2,
        stem=SeriesSteps(512, VARIATES),
        block=Block(
            TokenLinear(act="relu"),
            channel=ChannelMlp(64, "relu", dropout=dropout),
            norm=BatchNorm(eps=1e-3, momentum=0.01, per_token=True),
            dropout=dropout,
        ),
        norm=None,
        head=ForecastHead(96),
        series_norm=RevIN(affine=True),
        init=Init(),
    )


def patchtsmixer(
    depth: int = 3,
    width: int = 48,
    expansion: int = 3,
    dropout: float = 0.5,
    head_dropout: float = 0.7,
    seq_len: int = 512,
    in_chans: int = VARIATES,
    horizon: int = 96,
    patch_size: int = 8,
    stride: int = 8,
    mix_variates: bool = False,
) -> SeriesEncoder:
    """Ekambaram et al. (2023), as in transformers, except that the dropout of a branch comes after its gate."""
    return SeriesEncoder(
        width=width,
        depth=depth,
        stem=SeriesPatches(seq_len, in_chans, patch_size, stride),
        block=Block(
            GatedTokens(TokenMlp(expansion=expansion, dropout=dropout)),
            channel=GatedChannels(ChannelMlp(expansion * width, dropout=dropout)),
            norm=LayerNorm(1e-5),
            dropout=dropout,
            variate=VariateMlp(expansion, dropout=dropout) if mix_variates else None,
        ),
        norm=None,
        head=ForecastHead(horizon, dropout=head_dropout),
    )


def gmlp_series(depth: int = 4, width: int = 64, dropout: float = 0.3, head_dropout: float = 0.5) -> SeriesEncoder:
    return SeriesEncoder(
        width=width,
        depth=depth,
        stem=patches(),
        block=Block(channel=ChannelMlp(4 * width, inner=SpatialGatingUnit(), dropout=dropout), dropout=dropout),
        head=ForecastHead(dropout=head_dropout),
    )


def resmlp_series(depth: int = 4, width: int = 64, dropout: float = 0.3, head_dropout: float = 0.5) -> SeriesEncoder:
    return SeriesEncoder(
        width=width,
        depth=depth,
        stem=patches(),
        block=Block(
            TokenLinear(),
            channel=ChannelMlp(4 * width, dropout=dropout),
            norm=Affine(),
            scale=LayerScale(0.1),
            dropout=dropout,
        ),
        norm=Affine(),
        head=ForecastHead(dropout=head_dropout),
    )


def patches() -> SeriesPatches:
    return SeriesPatches(512, VARIATES, 16, 8)


def linear(stem: SeriesStem, series_norm: SubtractLast | None) -> SeriesEncoder:
    """Zeng et al. (2023). The biases of DLinear's two linear layers are merged into one."""
    return SeriesEncoder(width=stem.width or 1, depth=0, stem=stem, block=Block(), series_norm=series_norm, norm=None)


PRESETS = {
    "tsmixer": Preset(tsmixer(), "TSMixer"),
    "patchtsmixer": Preset(patchtsmixer(), "PatchTSMixer", about="one variate at a time"),
    "patchtsmixer_mix": Preset(patchtsmixer(mix_variates=True), "PatchTSMixer", about="with mixing of variates"),
    "gmlp_series": Preset(gmlp_series(), "gMLP"),
    "resmlp_series": Preset(resmlp_series(), "ResMLP"),
    "dlinear": Preset(linear(SeriesTrend(512, VARIATES), None), "DLinear"),
    "nlinear": Preset(linear(SeriesSteps(512, VARIATES, separate=True), SubtractLast()), "NLinear"),
}
