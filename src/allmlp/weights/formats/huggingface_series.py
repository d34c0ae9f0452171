"""Hugging Face's format of PatchTSMixer: the part of `huggingface` about time series."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from allmlp.errors import UserError
from allmlp.layers.block import Block
from allmlp.layers.channel import ChannelMixer, ChannelMlp
from allmlp.layers.gated import GatedChannels, GatedTokens
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.mixers.mlp import TokenMlp
from allmlp.layers.norm import LayerNorm
from allmlp.layers.series import ForecastHead, ReconstructionHead, RevIN, SeriesHead, SeriesPatches
from allmlp.layers.stem import LearnedPositions
from allmlp.layers.variate import VariateMlp
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.weights.formats.format import NativeName, Shapes, Signatures, check_sizes, check_supported, count_blocks

STACK = "encoder.mlp_mixer_encoder.mixers."
SIGNATURES: Signatures = {
    "PatchTSMixer": {
        "encoder.patcher.weight": 2,
        f"{STACK}0.patch_mixer.mlp.fc1.weight": 2,
        f"{STACK}0.feature_mixer.mlp.fc1.weight": 2,
    }
}
ARCHITECTURES = {ForecastHead: "PatchTSMixerForPrediction", ReconstructionHead: "PatchTSMixerForPretraining"}
PREFIXES = dict.fromkeys(ARCHITECTURES.values(), "model.")
"""Prefix of the body's keys."""
HEADS = {"head.base_forecast_block": ForecastHead, "head.base_pt_block": ReconstructionHead}
PARTS = {"variate": "channel_feature_mixer", "token": "patch_mixer", "channel": "feature_mixer"}
LAYERS = {
    "norm": "norm.norm",
    "mix.gate": "gating_block.attn_layer",
    **{
        f"mix{inner}.{ours}": f"mlp.{theirs}"
        for inner in ("", ".mix")
        for ours, theirs in (("up", "fc1"), ("down", "fc2"))
    },
}
"""Native module, relative to its branch -> its name in transformers."""
POSITIONS = "encoder.positional_encoder.position_enc"
REQUIRED = {"norm_mlp": "LayerNorm", "self_attn": False, "loss": "mse", "prediction_channel_indices": None}
"""Required values of settings, which are the defaults."""


def normalize_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the prefix of a model with a head and the batch counter of BatchNorm."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def keys(name: str, spec: SeriesEncoder) -> tuple[str, ...]:
    block, module, parameter = NativeName.of(name)
    if name == "stem.positions.weight":
        return (POSITIONS,)
    if module == "head.proj":
        return (f"{next(path for path, head in HEADS.items() if isinstance(spec.head, head))}.{parameter}",)
    if not block:
        return (f"{({'stem.proj': 'encoder.patcher'})[module]}.{parameter}",)
    part, _, layer = module.partition(".")
    return (f"{STACK}{block}.{PARTS[part]}.{LAYERS[layer]}.{parameter}",)


def infer_spec(shapes: Shapes, config: Mapping[str, Any]) -> SeriesEncoder:
    check_supported(config, REQUIRED)
    if "context_length" not in config or "patch_stride" not in config or "num_input_channels" not in config:
        raise UserError("a PatchTSMixer needs its config.json next to the weights, which do not show its input")
    if config.get("scaling", "std") not in ("std", True, None, False):
        raise UserError(f"its configuration has scaling {config['scaling']!r}; only 'std' and none are supported")
    width, patch_size = shapes["encoder.patcher.weight"]
    hidden, tokens = shapes[f"{STACK}0.patch_mixer.mlp.fc1.weight"]
    expansion = hidden / tokens if tokens else 0.0
    depth = count_blocks(shapes, rf"{re.escape(STACK)}(\d+)\.")
    check_sizes(config, {"d_model": width, "patch_length": patch_size, "num_layers": depth})
    stem = SeriesPatches(
        seq_len=config["context_length"],
        in_chans=config["num_input_channels"],
        patch_size=patch_size,
        stride=config["patch_stride"],
        positions=LearnedPositions() if POSITIONS in shapes else None,
    )
    dropout = config.get("dropout", 0.2)
    gate = f"{STACK}0.patch_mixer.gating_block.attn_layer.weight" in shapes
    token: TokenMixer = TokenMlp(expansion=expansion, dropout=dropout)
    channel: ChannelMixer = ChannelMlp(shapes[f"{STACK}0.feature_mixer.mlp.fc1.weight"][0], dropout=dropout)
    mixes = f"{STACK}0.channel_feature_mixer.mlp.fc1.weight" in shapes
    block = Block(
        GatedTokens(token) if gate else token,
        channel=GatedChannels(channel) if gate else channel,
        norm=LayerNorm(config.get("norm_eps", 1e-5)),
        dropout=dropout,
        variate=VariateMlp(expansion, gate=gate, dropout=dropout) if mixes else None,
    )
    scaled = config.get("scaling", "std") in ("std", True)
    head, series_norm = infer_head(shapes, config), RevIN() if scaled else None
    return SeriesEncoder(width, depth, block, stem, head, series_norm=series_norm, norm=None)


def infer_head(shapes: Shapes, config: Mapping[str, Any]) -> SeriesHead:
    dropout = config.get("head_dropout", 0.2)
    if "head.base_forecast_block.weight" in shapes:
        return ForecastHead(shapes["head.base_forecast_block.weight"][0], dropout=dropout)
    if "head.base_pt_block.weight" in shapes:
        return ReconstructionHead(dropout)
    raise UserError("it has no head for forecasting or pretraining: save PatchTSMixerForPrediction")


def configuration(spec: SeriesEncoder) -> dict[str, Any]:
    """The config.json of a PatchTSMixer."""
    stem, norm, head = spec.stem, spec.block.norm, spec.head
    token = spec.block.token.mix if isinstance(spec.block.token, GatedTokens) else spec.block.token
    if not (isinstance(stem, SeriesPatches) and isinstance(norm, LayerNorm) and isinstance(token, TokenMlp)):
        raise UserError("it is not made of patches, LayerNorm and token MLPs")
    if not isinstance(head, (ForecastHead, ReconstructionHead)) or getattr(head, "quantiles", ()):
        raise UserError("transformers has no head of quantiles")
    if isinstance(spec.series_norm, RevIN) and spec.series_norm != RevIN():
        raise UserError("transformers has RevIN with eps 1e-5 and without an affine map only")
    return {
        "architectures": [ARCHITECTURES[type(head)]],
        "model_type": "patchtsmixer",
        "context_length": stem.seq_len,
        "num_input_channels": stem.in_chans,
        "patch_length": stem.patch_size,
        "patch_stride": stem.stride,
        "d_model": spec.width,
        "num_layers": spec.depth,
        "expansion_factor": round(token.width(stem.tokens) / stem.tokens),
        "mode": "mix_channel" if spec.block.variate else "common_channel",
        "gated_attn": isinstance(spec.block.token, GatedTokens),
        "use_positional_encoding": stem.positions is not None,
        "positional_encoding_type": "random",
        "scaling": "std" if spec.series_norm else None,
        "norm_eps": norm.eps,
        "dropout": spec.block.dropout,
        "head_dropout": head.dropout,
        **({"prediction_length": head.horizon} if isinstance(head, ForecastHead) else {}),
    }
