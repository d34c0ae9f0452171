"""Resize a trained model of time series to another look-back.

Tokens are aligned at the last one, which ends with the newest time step: weights of older tokens are cropped or start
at zero, so that the newest tokens are mixed and read as before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import Dense, TokenProjection
from allmlp.layers.norm import TokenBatchNormLayer
from allmlp.layers.series import ForecastHead, ForecastHeadLayer
from allmlp.layers.stem import LearnedPositionsLayer
from allmlp.models.model import ModelSpec
from allmlp.models.series_encoder import SeriesEncoder

UNSEEN = 10.0
"""Initial score of a new token in a softmax over tokens, relative to the lowest: this much below."""


def differs_in_look_back(old: ModelSpec, new: ModelSpec) -> bool:
    series = isinstance(old, SeriesEncoder) and isinstance(new, SeriesEncoder)
    return series and type(old.stem) is type(new.stem) and old.stem.seq_len != new.stem.seq_len


def with_look_back(spec: SeriesEncoder, seq_len: int) -> SeriesEncoder:
    """The spec at another look-back. Token MLPs keep their hidden width."""
    new, token = spec.configure(seq_len=seq_len), spec.block.token
    if new == spec or token is None:
        return new
    return new.replace(block=new.block.replace(token=token.keep_width(spec.stem.tokens)))


def resize_look_back(weights: Mapping[str, Tensor], old: SeriesEncoder, new: SeriesEncoder) -> dict[str, Tensor]:
    """Resize the weights of `old` to the look-back of `new`.

    Matrices over tokens are padded with zeros. Biases, positions and statistics of new tokens repeat those of the
    oldest token; in a softmax over tokens, new tokens start with almost no weight.
    """
    before, after = old.stem.tokens, new.stem.tokens
    changed = dict(weights)
    with torch.device("meta"):
        layers = new.build()
    for path, layer in layers.named_modules():
        own = {name: weights[f"{path}.{name}"] for name, _ in layer.named_parameters() if f"{path}.{name}" in weights}
        if isinstance(layer, TokenProjection):
            dense = isinstance(layer.spec, Dense)
            square = keep_newest(keep_newest(own["weight"], after), after, 1) if dense else None
            own["weight"] = layer.spec.crop(own["weight"], after, layer.causal) if square is None else square
            is_gate = path.endswith("token.mix.gate")
            own["bias"] = keep_newest(
                own["bias"], after, fill=own["bias"].min() - UNSEEN if is_gate else own["bias"][0]
            )
        elif isinstance(layer, TokenMlpLayer):
            own["up.weight"] = keep_newest(own["up.weight"], after, 1)
            own["down.weight"] = keep_newest(own["down.weight"], after)
            own["down.bias"] = keep_newest(own["down.bias"], after, fill=own["down.bias"][0])
        elif isinstance(layer, LearnedPositionsLayer):
            own["weight"] = keep_newest(own["weight"], after, fill=own["weight"][0])
        elif isinstance(layer, TokenBatchNormLayer):
            own = {name: weights[f"{path}.{name}"] for name in ("weight", "bias", "running_mean", "running_var")}
            rows = {name: value.unflatten(0, (before, -1)) for name, value in own.items()}
            own = {name: keep_newest(value, after, fill=value[0]).flatten() for name, value in rows.items()}
        elif isinstance(layer, ForecastHeadLayer) and isinstance(old.head, ForecastHead):
            own["proj.weight"] = keep_newest(own["proj.weight"].unflatten(1, (before, -1)), after, 1).flatten(1)
        else:
            continue
        changed |= {f"{path}.{name}": value for name, value in own.items()}
    return changed


def keep_newest(weight: Tensor, size: int, axis: int = 0, fill: Tensor | float = 0.0) -> Tensor:
    """The last `size` entries of an axis, padded with `fill` in front if there are fewer."""
    kept = weight.narrow(axis, max(weight.shape[axis] - size, 0), min(size, weight.shape[axis]))
    shape = list(kept.shape)
    shape[axis] = size - kept.shape[axis]
    new = torch.as_tensor(fill, dtype=kept.dtype, device=kept.device).expand(shape)
    return torch.cat([new, kept], axis)
