"""A model on another grid of patches: the weights over tokens are brought to the new number of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.mixers.mlp import TokenMlp, TokenMlpLayer
from allmlp.layers.mixers.projection import Dense, TokenProjection
from allmlp.layers.pool import ClassGather
from allmlp.layers.stem import LearnedPositions, Patches
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.model import Model, ModelSpec

Rule = Literal["interpolate", "tile"]
RULES: tuple[Rule, ...] = ("interpolate", "tile")
Role = Literal["square", "out", "in", "into hidden", "hidden", "out of hidden"]
"""What a weight does: tokens to tokens, something for each token, a row over tokens, the parts of Mixer's MLP."""
KEPT = 8
"""Sizes for which a model of any size keeps what it needs."""


def at_image(spec: ModelSpec, image: int | tuple[int, int], rule: Rule = "interpolate") -> Encoder:
    """The spec at another image size. Token MLPs are as wide as their weights then are: the width they have now, times
    the number of tiles.
    """
    grid(spec)
    assert isinstance(spec, Encoder)
    new, token = spec.configure(image=image), spec.block.token
    if new == spec or not isinstance(token, TokenMlp):
        return new
    width = token.width(spec.stem.tokens) * len(ways(rule, grid(spec), grid(new))[0])
    return new.replace(block=new.block.replace(token=token.replace(hidden=width, expansion=None)))


class Resize:
    """A differentiable map from the weights of `old` to those of `new`, the same model at another image size.

        W' = sum over p of U_p W D_p,   U_p: from the old grid to the new one,   D_p: from the new grid to the old one

    interpolate  one U and one D: bring the tokens to the old grid, mix them with W, bring them back. Both interpolate
                 bilinearly (with area averaging where the grid becomes smaller), and their rows sum to one.
    tile         the new grid is cut into tiles of the old one's size; D_p takes tile p out, U_p = D_p^T puts it back.
                 Each tile is mixed alone: W' is block-diagonal with copies of W. Mixer's MLP has its hidden width
                 multiplied too, W1' = [W1 D_p]_p, W2' = [U_p W2]_p. Source: MLP-Mixer, appendix on fine-tuning at
                 higher resolution.

    For equal grids both are the identity. A class token is mixed as before; where it reads tiles, it reads their mean.
    What does not run over tokens is taken as it is.
    """

    def __init__(
        self, old: ModelSpec, new: ModelSpec, device: torch.device | str = "cpu", rule: Rule = "interpolate"
    ) -> None:
        before, after = grid(old), grid(new)
        with torch.device("meta"):
            self.roles = token_roles(new.build())
        self.cells = before[0] * before[1]
        self.up, self.down = (part.to(device, torch.float32) for part in ways(rule, before, after))

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self.resample(weight, self.roles[name]) if name in self.roles else weight
            for name, weight in weights.items()
        }

    def resample(self, weight: Tensor, role: Role) -> Tensor:
        if role == "hidden":
            return weight.repeat(len(self.up)) if len(self.up) > 1 else weight
        extra = weight.shape[1 if role in ("in", "into hidden") else 0] - self.cells
        value = weight.to(torch.promote_types(weight.dtype, self.up.dtype))
        up, down = self.up.to(value.dtype), self.down.to(value.dtype)
        if extra:
            # A class token gets the tiles' mean: each gives it a share.
            up, down = beside_class_token(up, extra, 1 / len(up)), beside_class_token(down, extra, 1.0)
        if role == "square":
            value = reduce(torch.add, (u @ value @ d for u, d in zip(up, down)))
        elif role == "out":
            value = reduce(torch.add, (u @ value for u in up))
        elif role == "in":
            value = reduce(torch.add, (value @ d for d in down)) / len(down)
        elif role == "into hidden":
            value = torch.cat([value @ d for d in down])
        else:
            value = torch.cat([u @ value for u in up], dim=1)
        return value.to(weight.dtype)


class Resized:
    """A model at another image size; each call resizes the weights it has now, so gradients reach them."""

    def __init__(self, model: Model, image: tuple[int, int], rule: Rule = "interpolate") -> None:
        if not isinstance(model.spec, Encoder):
            raise UserError("only the image encoders of this library can be resized")
        spec = at_image(model.spec, image, rule)
        self.resize = Resize(model.spec, spec, model.device, rule)
        with torch.device("meta"):
            self.shape = spec.build().train(model.training)
        self.model = model

    def __call__(self, images: Tensor) -> Tensor:
        return functional_call(self.shape, self.resize(dict(self.model.named_parameters())), (images,))


class AnySize(EncoderModel):
    """An image encoder that reads pictures of any size that its patches divide.

    At another size than its own it answers as the model that `Resize` makes of it, and gradients reach its own weights.
    What resizing needs is kept for the last sizes seen; where no gradient is asked for, the resized weights are kept
    too, until one of the weights changes (a write through `.data` is not seen).
    """

    def __init__(self, spec: Encoder, rule: Rule = "interpolate") -> None:
        grid(spec)
        super().__init__(spec)
        self.rule: Rule = rule
        self.sizes: dict[tuple[Encoder, torch.device], Size] = {}

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        size = self.size(x)
        return super().forward(x, *rest, **named) if size is None else size.call(self, "forward", x, *rest, **named)

    def forward_features(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        size = self.size(x)
        if size is None:
            return super().forward_features(x, *rest, **named)
        return size.call(self, "forward_features", x, *rest, **named)

    def forward_intermediates(self, x: Tensor, *rest: Any, **named: Any) -> dict[str, Tensor]:
        size = self.size(x)
        if size is None:
            return super().forward_intermediates(x, *rest, **named)
        return size.call(self, "forward_intermediates", x, *rest, **named)

    def size(self, images: Tensor) -> Size | None:
        """What it takes to read these pictures; None where they have the model's own size, or are no pictures."""
        image = images.shape[2:]
        if images.dim() != 4 or tuple(image) == self.spec.image_size:
            return None
        key = at_image(self.spec, (int(image[0]), int(image[1])), self.rule), self.device
        found = self.sizes.pop(key, None) or Size(self.spec, *key, self.rule)
        self.sizes[key] = found  # the last one used stands last
        if len(self.sizes) > KEPT:
            del self.sizes[next(iter(self.sizes))]
        return found


def any_size(model: Model, rule: Rule = "interpolate") -> AnySize:
    """`model` for pictures of any size; both have the same weights."""
    grid(model.spec)
    with torch.device("meta"):
        other = AnySize(model.spec, rule)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return other.train(model.training)


class Size:
    """What a model of any size needs for one of them: the model's shape there, the map, the weights made last."""

    def __init__(self, spec: Encoder, other: Encoder, device: torch.device, rule: Rule) -> None:
        self.resize = Resize(spec, other, device, rule)
        with torch.device("meta"):
            self.shape = other.build()
        self.made: Made | None = None

    def call(self, model: AnySize, method: str, *rest: Any, **named: Any) -> Any:
        """A method of the model with its present weights, resized."""
        self.shape.train(model.training).set_grad_checkpointing(model.checkpointing)
        weights = dict(model.named_parameters())
        weights |= self.token_weights({name: weights[name] for name in self.resize.roles})
        weights = {f"model.{name}": weight for name, weight in weights.items()}
        return functional_call(Method(self.shape, method), weights, rest, named)

    def token_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        # Kept weights have no history: they cannot pass a gradient on. A graph must not keep any of ours.
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or any(w.is_inference() for w in weights.values()):
            return self.resize(weights)
        if self.made is None or not self.made.still_of(weights):
            self.made = Made.of(weights, self.resize(weights))
        return self.made.weights


class Made(NamedTuple):
    """Resized weights, and what they were made of."""

    weights: dict[str, Tensor]
    sources: list[Tensor]
    """The weights themselves, detached: they share memory and count of changes, and keep the memory in use."""
    versions: list[int]

    @classmethod
    def of(cls, sources: dict[str, Tensor], weights: dict[str, Tensor]) -> Made:
        kept = [weight.detach() for weight in sources.values()]
        return cls(weights, kept, [weight._version for weight in kept])

    def still_of(self, sources: dict[str, Tensor]) -> bool:
        return all(
            kept.data_ptr() == now.data_ptr() and kept.dtype == now.dtype and version == now._version
            for kept, version, now in zip(self.sources, self.versions, sources.values(), strict=True)
        )


class Method(nn.Module):
    """A method of a model as a module of its own, so that it can be called with other weights."""

    def __init__(self, model: Model, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *rest: Any, **named: Any) -> Any:
        return getattr(self.model, self.method)(*rest, **named)


def grid(spec: ModelSpec) -> tuple[int, int]:
    if not isinstance(spec, Encoder) or not isinstance(spec.stem, Patches):
        raise UserError(f"the model reads {spec.reads}: only this library's image models have a grid to resize")
    return spec.stem.grid


def token_roles(model: nn.Module) -> dict[str, Role]:
    """The weights that run over tokens, by name."""
    found: dict[str, Role] = {}
    for path, module in model.named_modules():
        if isinstance(module, TokenProjection):
            if not isinstance(module.spec, Dense):
                raise UserError(f"{path}: only dense token weights can be resized to another grid")
            found |= {f"{path}.weight": "square", f"{path}.bias": "out"}
        elif isinstance(module, TokenMlpLayer):
            found |= {f"{path}.up.weight": "into hidden", f"{path}.up.bias": "hidden"}
            found |= {f"{path}.down.weight": "out of hidden", f"{path}.down.bias": "out"}
        elif isinstance(module, LearnedPositions):
            found[f"{path}.weight"] = "out"
        elif isinstance(module, ClassGather):
            found[f"{path}.mix.weight"] = "in"
    return found


def ways(rule: Rule, before: tuple[int, int], after: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """All U_p (p new old) and D_p (p old new) of a rule, float64."""
    if rule == "interpolate":
        return interpolation(before, after).unsqueeze(0), interpolation(after, before).unsqueeze(0)
    down = tiles(before, after)
    return down.transpose(1, 2), down


def interpolation(source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """The matrix that resamples a map on one grid to another: target cells x source cells, float64."""
    cells = source[0] * source[1]
    units = torch.eye(cells, dtype=torch.float64).view(cells, 1, *source)
    return F.interpolate(units, target, mode="bilinear", antialias=True).flatten(1).T.contiguous()


def tiles(tile: tuple[int, int], whole: tuple[int, int]) -> Tensor:
    """The matrices that take each tile out of a grid, row by row: tiles x cells of a tile x cells, float64."""
    if whole[0] % tile[0] or whole[1] % tile[1]:
        raise UserError(
            f"a grid of {tile[0]}x{tile[1]} patches does not tile one of {whole[0]}x{whole[1]}: "
            f"the rule 'tile' needs a multiple of the image size; 'interpolate' takes any"
        )
    cells = torch.arange(whole[0] * whole[1]).view(whole[0] // tile[0], tile[0], whole[1] // tile[1], tile[1])
    return F.one_hot(cells.transpose(1, 2).flatten(2).flatten(0, 1), whole[0] * whole[1]).double()


def beside_class_token(matrices: Tensor, extra: int, share: float) -> Tensor:
    """The matrices with `extra` tokens in front, of which each passes on its share."""
    wide = F.pad(matrices, (extra, 0, extra, 0))
    alone = share * torch.eye(extra, device=matrices.device, dtype=matrices.dtype)
    return wide + F.pad(alone, (0, matrices.shape[2], 0, matrices.shape[1]))
