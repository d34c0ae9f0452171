"""The weights of a model for inputs of another size: what runs over tokens is brought to the new number of them.

Pictures are resampled from grid to grid. Text keeps its distances: a shorter model has the first part of a longer one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import Dense, TokenProjection
from allmlp.layers.pool import ClassGather
from allmlp.layers.stem import LearnedPositions, Patches, Tokens
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec

Axes = tuple[int, ...]
"""Which axes of a weight run over tokens: 0 where tokens leave it, 1 where they enter."""


class Resize:
    """A differentiable map from the weights of `old` to those of `new`, the same model at another image size.

        W' = U W D,   U: from the old grid to the new one,   D: from the new grid to the old one

    So mixing with W' is: bring the tokens to the old grid, mix them with W, bring them back. U and D interpolate
    bilinearly (with area averaging where the grid becomes smaller), their rows sum to one, and for equal grids they are
    the identity. A class token keeps its row and column; what does not run over tokens is taken as it is.
    """

    def __init__(self, old: Encoder, new: Encoder, device: torch.device | str = "cpu") -> None:
        before, after = grid(old), grid(new)
        with torch.device("meta"):
            model = new.build()
        self.axes = token_axes(model)
        self.shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
        self.cells = before[0] * before[1]
        self.up, self.down = (
            interpolation(*pair).to(device, torch.float32) for pair in ((before, after), (after, before))
        )

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.resample(weight, self.axes.get(name, ())) for name, weight in weights.items()}

    def resample(self, weight: Tensor, axes: Axes) -> Tensor:
        if not axes:
            return weight
        extra = weight.shape[axes[0]] - self.cells
        value = weight.to(torch.promote_types(weight.dtype, self.up.dtype))
        if 0 in axes:
            value = beside_class_token(self.up, extra).to(value.dtype) @ value
        if 1 in axes:
            value = value @ beside_class_token(self.down, extra).to(value.dtype)
        return value.to(weight.dtype)


class Resized:
    """A model at another image size; each call resizes the weights it has now, so gradients reach them."""

    def __init__(self, model: Model, image: tuple[int, int]) -> None:
        spec = model.spec
        if not isinstance(spec, Encoder):
            raise UserError("only the image encoders of this library can be resized")
        smaller = spec.configure(image=image)
        self.resize = Resize(spec, smaller, model.device)
        with torch.device("meta"):
            self.shape = smaller.build().train(model.training)
        self.model = model

    def __call__(self, images: Tensor) -> Tensor:
        return functional_call(self.shape, self.resize(dict(self.model.named_parameters())), (images,))


def can_resize(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether two models read pictures of different sizes cut into the same patches."""
    if not (isinstance(old, Encoder) and isinstance(new, Encoder)):
        return False
    a, b = old.stem, new.stem
    return isinstance(a, Patches) and isinstance(b, Patches) and a.image != b.image and a.patch == b.patch


def can_crop(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether two encoders read text of different lengths."""
    if not (isinstance(old, Encoder) and isinstance(new, Encoder)):
        return False
    a, b = old.stem, new.stem
    return isinstance(a, Tokens) and isinstance(b, Tokens) and a.length != b.length


def other_length(weights: Mapping[str, Tensor], new: Model) -> dict[str, Tensor]:
    """Weights of a text model for the length of `new`, cut or grown so that the first tokens mix as before.

    Toeplitz: the same number per distance, 0 for distances never seen. Dense: the leading block, 0 beyond it. Biases
    repeat their last value, learned positions start again from the first.
    """
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


def grid(spec: Encoder) -> tuple[int, int]:
    if not isinstance(spec.stem, Patches):
        raise UserError(f"the model reads {spec.reads}: only image models have a grid to resize")
    return spec.stem.grid


def token_axes(model: nn.Module) -> dict[str, Axes]:
    """The weights that run over tokens, by name."""
    found: dict[str, Axes] = {}
    for path, module in model.named_modules():
        if isinstance(module, TokenProjection):
            if not isinstance(module.spec, Dense):
                raise UserError(f"{path}: only dense token weights can be resized to another grid")
            found |= {f"{path}.weight": (0, 1), f"{path}.bias": (0,)}
        elif isinstance(module, TokenMlpLayer):
            found |= {f"{path}.up.weight": (1,), f"{path}.down.weight": (0,), f"{path}.down.bias": (0,)}
        elif isinstance(module, LearnedPositions):
            found[f"{path}.weight"] = (0,)
        elif isinstance(module, ClassGather):
            found[f"{path}.mix.weight"] = (1,)
    return found


def interpolation(source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """The matrix that resamples a map on one grid to another: target cells x source cells, float64."""
    cells = source[0] * source[1]
    units = torch.eye(cells, dtype=torch.float64).view(cells, 1, *source)
    return F.interpolate(units, target, mode="bilinear", antialias=True).flatten(1).T.contiguous()


def beside_class_token(matrix: Tensor, extra: int) -> Tensor:
    """The matrix with `extra` tokens in front that are left as they are."""
    if not extra:
        return matrix
    wide = F.pad(matrix, (extra, 0, extra, 0))
    return wide + F.pad(torch.eye(extra, device=matrix.device), (0, matrix.shape[1], 0, matrix.shape[0]))
