"""Every model of the zoo, small enough for exhaustive tests: the same configuration with small sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allmlp.layers import (
    Attention,
    ChannelMlp,
    ClassAttention,
    ClassifierHead,
    CrossAttention,
    ForecastHead,
    LayerScale,
    Normal,
    PatchEmbed,
    PooledHead,
    RelativePositionBias,
    SeriesPatches,
    SeriesSteps,
    SeriesTrend,
    Stage,
    TinyAttention,
    TokenConv,
    TokenEmbed,
    TokenMlp,
)
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import Model
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.models.zoo import presets
from allmlp.spec import Spec, hints

SMALL: dict[type[Spec], dict[str, Any]] = {
    Encoder: {"width": 16, "depth": 2},
    Stage: {"width": 20, "depth": 1},
    PatchEmbed: {"img_size": (6, 8), "patch_size": (2, 2)},
    TokenEmbed: {"vocab_size": 31, "seq_len": 12, "init": Normal(0.02)},
    LayerScale: {"init_value": 0.1},
    ChannelMlp: {"hidden": 24},
    Attention: {"num_heads": 2},
    CrossAttention: {"num_heads": 2},
    ClassAttention: {"num_heads": 2},
    TinyAttention: {"channels": 4},
    TokenConv: {"kernel": 3},
    RelativePositionBias: {"buckets": 8, "distance": 16},
    ClassifierHead: {"num_classes": 5},
    PooledHead: {"num_classes": 3},
    SeriesPatches: {"seq_len": 12, "in_chans": 3, "patch_size": 4, "stride": 2},
    SeriesSteps: {"seq_len": 12, "in_chans": 3},
    SeriesTrend: {"seq_len": 12, "in_chans": 3, "kernel": 5},
    ForecastHead: {"horizon": 5},
}


def tiny(spec: Any) -> Any:
    """`spec` with every size small."""
    if isinstance(spec, tuple):
        return tuple(tiny(part) for part in spec)
    if not isinstance(spec, Spec):
        return spec
    changes = {name: tiny(getattr(spec, name)) for name in hints(type(spec))}
    if isinstance(spec, TokenMlp) and spec.hidden:
        changes["hidden"] = 10
    if isinstance(spec, Attention) and spec.num_kv_heads:
        changes["num_kv_heads"] = 1
    if isinstance(spec, PatchEmbed) and spec.kernel:
        changes["kernel"] = 9  # covers every patch that is tried
    if isinstance(spec, SeriesEncoder):
        changes |= {"width": changes["stem"].width or 16, "depth": min(spec.depth, 2)}
    return spec.replace(**changes | SMALL.get(type(spec), {}))


def tiny_specs(*kinds: type[Spec]) -> dict[str, Any]:
    """The distinct tiny models of our own zoo, each under the first name that has it."""
    found: dict[Any, str] = {}
    for name, preset in presets().items():
        if isinstance(preset.spec, kinds):
            found.setdefault(tiny(preset.spec), name)
    return {name: spec for spec, name in found.items()}


TINY_SPECS = tiny_specs(Encoder, EncoderDecoder)
TINY_SERIES = tiny_specs(SeriesEncoder)
IMAGES = [name for name, spec in TINY_SPECS.items() if isinstance(spec, Encoder) and isinstance(spec.stem, PatchEmbed)]
TEXTS = [name for name, spec in TINY_SPECS.items() if isinstance(spec, Encoder) and isinstance(spec.stem, TokenEmbed)]
CAUSAL = [name for name in TEXTS if TINY_SPECS[name].block.causal]
TRANSLATORS = [name for name, spec in TINY_SPECS.items() if isinstance(spec, EncoderDecoder)]


def randomize(model: nn.Module, seed: int = 0, spread: float = 0.3) -> None:
    """Add noise to every parameter, so that none is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((spread * noise).to(parameter.dtype))


def tiny_model(name: str, dtype: torch.dtype = torch.float64, shallow: bool = False) -> Model:
    """A tiny model with random weights, in evaluation mode; with one block instead of two if `shallow`."""
    spec = (TINY_SPECS | TINY_SERIES)[name]
    model = (spec.shallow()[0] if shallow else spec).build().to(dtype)
    randomize(model)
    return model.eval()


def text_model(name: str, dtype: torch.dtype = torch.float64) -> EncoderModel:
    model = tiny_model(name, dtype)
    assert isinstance(model, EncoderModel)
    return model
