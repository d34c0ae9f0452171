"""Any model of the zoo, small enough for exhaustive tests: same sentence, small numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allmlp.layers import (
    Attention,
    ChannelMlp,
    Classes,
    CrossAttention,
    LayerScale,
    Normal,
    Pair,
    Patches,
    RelativePositions,
    TinyAttention,
    TokenMlp,
    Tokens,
)
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import Model
from allmlp.models.zoo import presets
from allmlp.spec import Spec, hints

SMALL: dict[type[Spec], dict[str, Any]] = {
    Encoder: {"width": 16, "depth": 2},
    Patches: {"image": (6, 8), "patch": (2, 2)},
    Tokens: {"vocabulary": 31, "length": 12, "init": Normal(0.02)},
    LayerScale: {"value": 0.1},
    ChannelMlp: {"hidden": 24},
    Attention: {"heads": 2},
    CrossAttention: {"heads": 2},
    TinyAttention: {"channels": 4},
    RelativePositions: {"buckets": 8, "distance": 16},
    Classes: {"classes": 5},
    Pair: {"classes": 3},
}


def tiny(spec: Any) -> Any:
    """`spec` with every size small."""
    if not isinstance(spec, Spec):
        return spec
    changes = {name: tiny(getattr(spec, name)) for name in hints(type(spec))}
    if isinstance(spec, TokenMlp) and spec.hidden:
        changes["hidden"] = 10
    return spec.replace(**changes | SMALL.get(type(spec), {}))


def sentences() -> dict[str, Any]:
    """The distinct tiny models of our own zoo, each under the first name that has it."""
    found: dict[Any, str] = {}
    for name, preset in presets().items():
        if isinstance(preset.spec, (Encoder, EncoderDecoder)):
            found.setdefault(tiny(preset.spec), name)
    return {name: spec for spec, name in found.items()}


SENTENCES = sentences()
IMAGES = [name for name, spec in SENTENCES.items() if isinstance(spec, Encoder) and isinstance(spec.stem, Patches)]
TEXTS = [name for name, spec in SENTENCES.items() if isinstance(spec, Encoder) and isinstance(spec.stem, Tokens)]
CAUSAL = [name for name in TEXTS if SENTENCES[name].block.causal]
TRANSLATORS = [name for name, spec in SENTENCES.items() if isinstance(spec, EncoderDecoder)]


def randomise(model: nn.Module, seed: int = 0, spread: float = 0.3) -> None:
    """Give every parameter a value that matters, those that start at zero too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((spread * noise).to(parameter.dtype))


def tiny_model(name: str, dtype: torch.dtype = torch.float64) -> Model:
    """A randomised tiny model in evaluation mode."""
    model = SENTENCES[name].build().to(dtype)
    randomise(model)
    return model.eval()


def text_model(name: str, dtype: torch.dtype = torch.float64) -> EncoderModel:
    model = tiny_model(name, dtype)
    assert isinstance(model, EncoderModel)
    return model
