"""Resize trained weights to another image size (`models.grid`), sequence length or look-back.

The tokens of a text are aligned at the first one. Those of a look-back are aligned at the last one, which ends with the
newest time step: weights of older tokens are cropped or start at zero, so that the newest tokens are mixed and read as
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import Dense, TokenProjection
from allmlp.layers.norm import TokenBatchNormLayer
from allmlp.layers.pool import ClassGather
from allmlp.layers.series import ForecastHead, ForecastHeadLayer
from allmlp.layers.stem import LearnedPositionsLayer, PatchEmbed, TokenEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.grid import GridResize, Rule, with_img_size
from allmlp.models.model import Model, ModelSpec, check_merged, take_over, uncompiled
from allmlp.models.series_encoder import SeriesEncoder

MIN_LENGTH = 3
T = TypeVar("T", Encoder, SeriesEncoder)
UNSEEN = 10.0
"""Initial score of a new token in a softmax over tokens, relative to the lowest: this much below."""


def resize_model(
    model: Model,
    img_size: int | tuple[int, int] | None = None,
    seq_len: int | None = None,
    rule: Rule | None = None,
    *,
    copy: bool = True,
) -> Model:
    """Return the trained `model` resized to another image size, sequence length or look-back.

    >>> larger = allmlp.resize_model(allmlp.load("runs/cifar10"), img_size=64)

    The mode and precision of the model stay the same. `rule` is "interpolate", or MLP-Mixer's "tile" for multiples of
    the size. With `copy=False` both models share the weights that stay the same.
    """
    model = uncompiled(model)
    check_merged(model)
    if seq_len is not None and rule is not None:
        raise UserError("the rules 'interpolate' and 'tile' apply to images, not to a sequence length")
    if img_size is not None and seq_len is None:
        spec: ModelSpec = with_img_size(model.spec, img_size, rule or "interpolate")
        weights = GridResize(model.spec, spec, model.device, rule or "interpolate")(model.state_dict())
    elif seq_len is not None and img_size is None:
        if isinstance(model.spec, SeriesEncoder):
            spec = with_length(model.spec, seq_len)
            weights = resize_look_back(model.state_dict(), model.spec, spec)
        else:
            spec = with_seq_len(model.spec, seq_len)
            weights = resize_length(model.state_dict(), spec)
    else:
        raise UserError("give either img_size or seq_len")
    with torch.device("meta"):
        new = spec.build()
    return take_over(new, model, {name: weight.clone() for name, weight in weights.items()} if copy else weights)


def differs_in_img_size(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether two image models have different image sizes and the same patch size."""
    a, b = getattr(old, "stem", None), getattr(new, "stem", None)
    both = isinstance(a, PatchEmbed) and isinstance(b, PatchEmbed)
    return both and a.img_size != b.img_size and a.patch_size == b.patch_size


def differs_in_seq_len(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether two text models have different sequence lengths."""
    if isinstance(old, EncoderDecoder) and isinstance(new, EncoderDecoder):
        return differs_in_seq_len(old.encoder, new.encoder) or differs_in_seq_len(old.decoder, new.decoder)
    a, b = getattr(old, "stem", None), getattr(new, "stem", None)
    return isinstance(a, TokenEmbed) and isinstance(b, TokenEmbed) and a.seq_len != b.seq_len


def differs_in_look_back(old: ModelSpec, new: ModelSpec) -> bool:
    series = isinstance(old, SeriesEncoder) and isinstance(new, SeriesEncoder)
    return series and type(old.stem) is type(new.stem) and old.stem.seq_len != new.stem.seq_len


def with_seq_len(spec: ModelSpec, seq_len: int) -> ModelSpec:
    """The spec at another sequence length (of encoder and decoder). Token MLPs keep their hidden width."""
    if isinstance(spec, EncoderDecoder):
        return spec.replace(encoder=with_seq_len(spec.encoder, seq_len), decoder=with_seq_len(spec.decoder, seq_len))
    if not isinstance(spec, Encoder) or not isinstance(spec.stem, TokenEmbed):
        kinds = "this library's models of texts and series"
        raise UserError(f"only {kinds} have a sequence length (input: {spec.input_spec})")
    if seq_len < MIN_LENGTH:
        raise UserError(f"seq_len must be at least {MIN_LENGTH}: [CLS], one token of the text, [SEP]")
    return with_length(spec, seq_len)


def with_length(spec: T, seq_len: int) -> T:
    """The spec at another look-back or sequence length. Token MLPs keep their hidden width."""
    new, token = spec.configure(seq_len=seq_len), spec.block.token
    if new == spec or token is None:
        return new
    return new.replace(block=new.block.replace(token=token.keep_width(spec.stem.tokens)))


# --- sequence length ----------------------------------------------------------------------------------------


def resize_length(weights: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Crop or pad the weights of a text model to the length of `spec`, so that the first tokens are mixed as before.

    Toeplitz: the weight of each distance, 0 for new distances. Dense: the leading block, 0 outside. Biases repeat their
    last value, learned positions repeat from the first.
    """
    with torch.device("meta"):
        new = spec.build()
    shapes = {name: weight.shape for name, weight in new.state_dict().items()}
    changed = dict(weights)
    for path, module in new.named_modules():
        if isinstance(module, TokenProjection):
            name = f"{path}.weight"
            changed[name] = module.spec.crop(weights[name], module.tokens, module.causal)
            changed[f"{path}.bias"] = extend_bias(weights[f"{path}.bias"], module.tokens)
        elif isinstance(module, TokenMlpLayer):
            for part, axis in ((f"{path}.up.weight", 1), (f"{path}.down.weight", 0)):
                changed[part] = crop_or_pad(weights[part], axis, shapes[part][axis])
            changed[f"{path}.down.bias"] = extend_bias(weights[f"{path}.down.bias"], shapes[f"{path}.down.bias"][0])
        elif isinstance(module, ClassGather):
            name = f"{path}.mix.weight"
            changed[name] = crop_or_pad(weights[name], 1, shapes[name][1])
        elif isinstance(module, LearnedPositionsLayer):
            table, rows = weights[f"{path}.weight"], shapes[f"{path}.weight"][0]
            changed[f"{path}.weight"] = table.repeat(-(-rows // len(table)), 1)[:rows]
    for name, shape in shapes.items():
        # Head and pool may be new or task-specific.
        if not name.startswith(("head.", "pool.")) and changed[name].shape != shape:
            layer = type(new.get_submodule(name.rpartition(".")[0])).__name__
            raise UserError(f"{name} depends on the number of tokens, and resizing {layer} is not supported")
    return changed


def crop_or_pad(weight: Tensor, axis: int, size: int) -> Tensor:
    """Crop an axis to `size`, or pad it with zeros."""
    kept = weight.narrow(axis, 0, min(size, weight.shape[axis]))
    padding = [0, 0] * (weight.dim() - 1 - axis) + [0, size - kept.shape[axis]]
    return F.pad(kept, padding)


def extend_bias(bias: Tensor, size: int) -> Tensor:
    """Crop a bias over tokens to `size`, or repeat its last value."""
    return bias[:size] if size <= len(bias) else torch.cat([bias, bias[-1:].expand(size - len(bias))])


# --- look-back ----------------------------------------------------------------------------------------------


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
        tensors = {
            name: weights[f"{path}.{name}"] for name, _ in layer.named_parameters() if f"{path}.{name}" in weights
        }
        if isinstance(layer, TokenProjection):
            if isinstance(layer.spec, Dense):
                tensors["weight"] = keep_newest(keep_newest(tensors["weight"], after), after, 1)
            else:
                tensors["weight"] = layer.spec.crop(tensors["weight"], after, layer.causal)
            fill = tensors["bias"].min() - UNSEEN if path.endswith("token.mix.gate") else tensors["bias"][0]
            tensors["bias"] = keep_newest(tensors["bias"], after, fill=fill)
        elif isinstance(layer, TokenMlpLayer):
            tensors["up.weight"] = keep_newest(tensors["up.weight"], after, 1)
            tensors["down.weight"] = keep_newest(tensors["down.weight"], after)
            tensors["down.bias"] = keep_newest(tensors["down.bias"], after, fill=tensors["down.bias"][0])
        elif isinstance(layer, LearnedPositionsLayer):
            tensors["weight"] = keep_newest(tensors["weight"], after, fill=tensors["weight"][0])
        elif isinstance(layer, TokenBatchNormLayer):
            tensors = {name: weights[f"{path}.{name}"] for name in ("weight", "bias", "running_mean", "running_var")}
            rows = {name: value.unflatten(0, (before, -1)) for name, value in tensors.items()}
            tensors = {name: keep_newest(value, after, fill=value[0]).flatten() for name, value in rows.items()}
        elif isinstance(layer, ForecastHeadLayer) and isinstance(old.head, ForecastHead):
            tensors["proj.weight"] = keep_newest(tensors["proj.weight"].unflatten(1, (before, -1)), after, 1).flatten(1)
        else:
            continue
        changed |= {f"{path}.{name}": value for name, value in tensors.items()}
    return changed


def keep_newest(weight: Tensor, size: int, axis: int = 0, fill: Tensor | float = 0.0) -> Tensor:
    """The last `size` entries of an axis, padded with `fill` in front if there are fewer."""
    kept = weight.narrow(axis, max(weight.shape[axis] - size, 0), min(size, weight.shape[axis]))
    shape = list(kept.shape)
    shape[axis] = size - kept.shape[axis]
    new = torch.as_tensor(fill, dtype=kept.dtype, device=kept.device).expand(shape)
    return torch.cat([new, kept], axis)
