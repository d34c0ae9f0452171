"""Trained weights for inputs of another size.

Pictures are resampled from grid to grid (`models.grid`). Text keeps its distances: a shorter model has the first part
of a longer one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.mixers.mlp import TokenMlp, TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.stem import LearnedPositions, Patches, Tokens
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.grid import Resize, Rule, at_image
from allmlp.models.model import Model, ModelSpec


def resized(
    model: Model,
    image: int | tuple[int, int] | None = None,
    length: int | None = None,
    rule: Rule | None = None,
) -> Model:
    """The trained `model` for pictures of another size, or text of another length; its mode and precision stay."""
    if length is not None and rule is not None:
        raise UserError("the rules 'interpolate' and 'tile' are for pictures; text is cut or grown in one way")
    if image is not None and length is None:
        spec: ModelSpec = at_image(model.spec, image, rule or "interpolate")
        weights = Resize(model.spec, spec, model.device, rule or "interpolate")(model.state_dict())
    elif length is not None and image is None:
        spec = at_length(model.spec, length)
        weights = other_length(model.state_dict(), spec)
    else:
        raise UserError("name one new size: an image's, or a length in tokens")
    with torch.device("meta"):
        new = spec.build()
    new.load_state_dict(weights, assign=True)
    return new.train(model.training)


def can_resize(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether two models read pictures of different sizes cut into the same patches."""
    if not (isinstance(old, Encoder) and isinstance(new, Encoder)):
        return False
    a, b = old.stem, new.stem
    return isinstance(a, Patches) and isinstance(b, Patches) and a.image != b.image and a.patch == b.patch


def can_crop(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether two models of one kind read text of different lengths."""
    if isinstance(old, EncoderDecoder) and isinstance(new, EncoderDecoder):
        return can_crop(old.encoder, new.encoder) or can_crop(old.decoder, new.decoder)
    if not (isinstance(old, Encoder) and isinstance(new, Encoder)):
        return False
    a, b = old.stem, new.stem
    return isinstance(a, Tokens) and isinstance(b, Tokens) and a.length != b.length


def at_length(spec: ModelSpec, length: int) -> ModelSpec:
    """The spec for text of another length, on both sides of a translation. Token MLPs keep the width they have."""
    if isinstance(spec, EncoderDecoder):
        return spec.replace(encoder=at_length(spec.encoder, length), decoder=at_length(spec.decoder, length))
    if not isinstance(spec, Encoder) or not isinstance(spec.stem, Tokens):
        raise UserError(f"the model reads {spec.reads}: only this library's text models have a length")
    new, token = spec.configure(length=length), spec.block.token
    if new == spec or not isinstance(token, TokenMlp):
        return new
    kept = token.replace(hidden=token.width(spec.stem.tokens), expansion=None)
    return new.replace(block=new.block.replace(token=kept))


def other_length(weights: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Weights of a text model for the length of `spec`, cut or grown so that the first tokens mix as before.

    Toeplitz: the same number per distance, 0 for distances never seen. Dense: the leading block, 0 beyond it. Biases
    repeat their last value, learned positions start again from the first.
    """
    with torch.device("meta"):
        new = spec.build()
    shapes = {name: weight.shape for name, weight in new.state_dict().items()}
    changed = dict(weights)
    for path, module in new.named_modules():
        if isinstance(module, TokenProjection):
            name = f"{path}.weight"
            changed[name] = module.spec.crop(weights[name], module.tokens, module.causal)
            changed[f"{path}.bias"] = grow(weights[f"{path}.bias"], module.tokens)
        elif isinstance(module, TokenMlpLayer):
            for part, axis in ((f"{path}.up.weight", 1), (f"{path}.down.weight", 0)):
                changed[part] = cut(weights[part], axis, shapes[part][axis])
            changed[f"{path}.down.bias"] = grow(weights[f"{path}.down.bias"], shapes[f"{path}.down.bias"][0])
        elif isinstance(module, LearnedPositions):
            table, rows = weights[f"{path}.weight"], shapes[f"{path}.weight"][0]
            changed[f"{path}.weight"] = table.repeat(-(-rows // len(table)), 1)[:rows]
    return changed


def cut(weight: Tensor, axis: int, size: int) -> Tensor:
    """The first `size` entries along an axis, zeros where there are none."""
    kept = weight.narrow(axis, 0, min(size, weight.shape[axis]))
    padding = [0, 0] * (weight.dim() - 1 - axis) + [0, size - kept.shape[axis]]
    return F.pad(kept, padding)


def grow(bias: Tensor, size: int) -> Tensor:
    return bias[:size] if size <= len(bias) else torch.cat([bias, bias[-1:].expand(size - len(bias))])
