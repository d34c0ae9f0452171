"""Image models on another grid of patches: weights over tokens are resized to the new number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from allmlp.errors import UserError, lookup
from allmlp.layers.stem import PatchEmbed
from allmlp.layers.token_roles import TokenRole, token_parameters
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.model import Model, ModelSpec, check_merged, follow_mode, take_over

Rule = Literal["interpolate", "tile"]
RULES: tuple[Rule, ...] = ("interpolate", "tile")
RESIZED: tuple[TokenRole, ...] = ("square", "into hidden", "hidden", "out of hidden", "in", "out")
"""The roles of weights that have a row or a column per token and can be resized."""
MAX_CACHED_SIZES = 8
"""Image sizes for which a dynamic model caches its resized weights."""


def image_encoder(spec: ModelSpec) -> Encoder:
    """`spec`, if it is an image model of this library."""
    if not isinstance(spec, Encoder) or not isinstance(spec.stem, PatchEmbed):
        raise UserError(f"only this library's image models can be resized (input: {spec.input_spec})")
    return spec


def with_img_size(spec: ModelSpec, img_size: int | tuple[int, int], rule: Rule = "interpolate") -> Encoder:
    """The spec at another image size. A token MLP keeps its hidden width, times the number of tiles with `tile`."""
    lookup(rule, dict.fromkeys(RULES), "rule")
    spec = image_encoder(spec)
    new = spec.configure(img_size=img_size)
    if new == spec:
        return new
    blocks = []
    for stage, before, after in zip(spec.all_stages, spec.build_contexts, new.build_contexts, strict=True):
        assert before.grid is not None and after.grid is not None
        tiles = 1 if rule == "interpolate" else count_tiles(before.grid, after.grid)
        token = stage.block.token and stage.block.token.keep_width(before.tokens, tiles)
        blocks.append(stage.block.replace(token=token))
    later = [stage.replace(block=block) for stage, block in zip(new.stages, blocks[1:], strict=True)]
    return new.replace(block=blocks[0], stages=tuple(later))


class GridResize:
    """A differentiable map from the weights of `old` to those of `new`, the same model at another image size.

        W' = sum over p of U_p W D_p,   U_p: from the old grid to the new one,   D_p: from the new grid to the old one

    interpolate  One U and one D: resample the tokens to the old grid, mix them with W, resample them back. Both are
                 bilinear (with antialiasing where the grid becomes smaller), and their rows sum to one.
    tile         The new grid is cut into tiles of the old grid's size; D_p extracts tile p, U_p = D_p^T inserts it.
                 Each tile is mixed separately: W' is block-diagonal with copies of W. The hidden width of a token MLP
                 is multiplied too, W1' = [W1 D_p]_p, W2' = [U_p W2]_p. Source: MLP-Mixer, appendix on fine-tuning at
                 higher resolution.

    For equal grids both are the identity. Weights of a class token are kept; with tiles, it reads their mean. Weights
    that do not depend on the number of tokens are returned unchanged.
    """

    def __init__(
        self, old: ModelSpec, new: ModelSpec, device: torch.device | str = "cpu", rule: Rule = "interpolate"
    ) -> None:
        old, new = image_encoder(old), image_encoder(new)
        assert new.input_size is not None
        with torch.device("meta"):
            self.roles = resizable_roles(new.build())
            check_roles(old.shallow()[0].build(), with_img_size(old, new.input_size, rule).shallow()[0].build())
        self.spec = new
        self.matrices: list[tuple[Tensor, Tensor]] = []
        """U and D of every stage."""
        for before, after in zip(old.build_contexts, new.build_contexts, strict=True):
            assert before.grid is not None and after.grid is not None
            up, down = resize_matrices(rule, before.grid, after.grid)
            self.matrices.append((up.to(device, torch.get_default_dtype()), down.to(device, torch.get_default_dtype())))

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self.resize(weight, self.roles[name], *self.matrices[stage_number(self.spec, name)])
            if name in self.roles
            else weight
            for name, weight in weights.items()
        }

    def resize(self, weight: Tensor, role: TokenRole, up: Tensor, down: Tensor) -> Tensor:
        if role == "hidden":
            return weight.repeat(len(up)) if len(up) > 1 else weight
        extra = weight.shape[1 if role in ("in", "into hidden") else 0] - up.shape[2]
        value = weight.to(torch.promote_types(weight.dtype, up.dtype))
        up, down = up.to(value.dtype), down.to(value.dtype)
        if extra:
            # A class token reads the mean of the tiles.
            up, down = with_class_token(up, extra, 1 / len(up)), with_class_token(down, extra, 1.0)
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


def stage_number(spec: Encoder, name: str) -> int:
    """The stage whose token grid the layer at this path uses."""
    part, number, *_ = [*name.split("."), ""]
    return spec.stage_of(int(number)) if part == "blocks" else 0 if part == "stem" else len(spec.stages)


def resizable_roles(model: nn.Module) -> dict[str, TokenRole]:
    """The weights that run over tokens, by name."""
    roles: dict[str, TokenRole] = {}
    for parameter in token_parameters(model):
        if parameter.role == "square parameters":
            raise UserError(f"{parameter.full_name}: only dense token weights can be resized to another grid")
        if parameter.role in RESIZED:
            roles[parameter.full_name] = parameter.role
    return roles


def check_roles(old: nn.Module, new: nn.Module) -> None:
    """Raise UserError if a weight depends on the number of tokens and no layer declares how."""
    roles, shapes = resizable_roles(new), {name: weight.shape for name, weight in new.state_dict().items()}
    for name, weight in old.state_dict().items():
        if name not in roles and shapes.get(name) != weight.shape:
            layer = type(old.get_submodule(name.rpartition(".")[0])).__name__
            raise UserError(
                f"{name} depends on the number of tokens, but {layer} does not declare its role in `token_roles`: "
                f"it cannot be resized to another grid"
            )


def tensors(model: nn.Module, network: nn.Module) -> dict[str, Tensor]:
    """What `model` computes with, which LoRA and quantization change, by the names of parameters and buffers of the
    plain `network`: the statistics of BatchNorm are used, and updated in training, at every size.
    """
    names = [*dict(network.named_parameters()), *dict(network.named_buffers())]
    return {name: attrgetter(name)(model) for name in names}


class ForwardAtSize:
    """Calls a model at another image size; each call resizes the current weights, so gradients reach them."""

    def __init__(self, model: Model, img_size: tuple[int, int]) -> None:
        spec = with_img_size(model.spec, img_size)
        self.resize = GridResize(model.spec, spec, model.device)
        with torch.device("meta"):
            self.network = spec.build().train(model.training)
        self.network.borrows_weights = True
        self.model, self.device = model, model.device

    def __call__(self, images: Tensor) -> Tensor:
        return functional_call(self.network, self.resize(tensors(self.model, self.network)), (images,))

    def follow_mode(self) -> None:
        follow_mode(self.network, self.model)


class DynamicEncoderModel(EncoderModel):
    """An image encoder that accepts every image size that is a multiple of its patch size.

    At other sizes than its own, the weights over tokens are resized by `GridResize`, and gradients reach the original
    weights. The resize matrices of recent sizes are cached; without gradients, so are the resized weights, until one of
    the weights changes (a write through `.data` is not detected).
    """

    def __init__(self, spec: Encoder, rule: Rule = "interpolate") -> None:
        super().__init__(image_encoder(spec))
        self.rule: Rule = rule
        self.variants: dict[tuple[Encoder, tuple[int, int], torch.device], SizeVariant] = {}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.at_size("forward", x, *args, **kwargs)

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.at_size("forward_features", x, *args, **kwargs)

    def forward_activations(self, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return self.at_size("forward_activations", x, *args, **kwargs)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.at_size("forward_intermediates", x, *args, **kwargs)

    def at_size(self, method: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call a method of `EncoderModel` at the size of the images `x`."""
        variant = self.variant(x)
        if variant is None:
            return getattr(super(), method)(x, *args, **kwargs)
        return variant.call(self, method, x, *args, **kwargs)

    def variant(self, images: Tensor) -> SizeVariant | None:
        """The model at the size of `images`; None at its own size, or if they are not a batch of images."""
        size = images.shape[2:]
        if images.dim() != 4 or tuple(size) == self.spec.input_size:
            return None
        key = self.spec, (int(size[0]), int(size[1])), self.device
        variant = self.variants.pop(key, None) or SizeVariant(*key, self.rule)
        self.variants[key] = variant  # least recently used first
        if len(self.variants) > MAX_CACHED_SIZES:
            del self.variants[next(iter(self.variants))]
        return variant


def make_dynamic(model: Model, rule: Rule = "interpolate") -> DynamicEncoderModel:
    """A copy of `model` for images of any size that shares its weights."""
    check_merged(model)
    with torch.device("meta"):
        dynamic = DynamicEncoderModel(model.spec, rule)
    return take_over(dynamic, model, model.state_dict(keep_vars=True))


class SizeVariant:
    """A dynamic model at one image size: the network on the meta device, the resize map, and cached weights."""

    def __init__(self, spec: Encoder, img_size: tuple[int, int], device: torch.device, rule: Rule) -> None:
        other = with_img_size(spec, img_size, rule)
        self.resize = GridResize(spec, other, device, rule)
        with torch.device("meta"):
            self.network = other.build()
        self.network.borrows_weights = True
        self.cached: CachedWeights | None = None

    def call(self, model: DynamicEncoderModel, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the network with the current weights of `model`, resized."""
        follow_mode(self.network, model)
        weights = tensors(model, self.network)
        weights |= self.token_weights({name: weights[name] for name in self.resize.roles})
        weights = {f"model.{name}": weight for name, weight in weights.items()}
        return functional_call(MethodModule(self.network, method), weights, args, kwargs)

    def token_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        # Cached weights do not propagate gradients, and a compiled graph must not keep references to them.
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or any(w.is_inference() for w in weights.values()):
            return self.resize(weights)
        if self.cached is None or not self.cached.is_current(weights):
            self.cached = CachedWeights.store(weights, self.resize(weights))
        return self.cached.resized


class CachedWeights(NamedTuple):
    """Resized weights, and the version of the weights they were computed from."""

    resized: dict[str, Tensor]
    sources: list[Tensor]
    """The weights, detached: they share memory and version counter, and keep the memory from being reused."""
    versions: list[int]

    @classmethod
    def store(cls, sources: dict[str, Tensor], resized: dict[str, Tensor]) -> CachedWeights:
        detached = [weight.detach() for weight in sources.values()]
        return cls(resized, detached, [weight._version for weight in detached])

    def is_current(self, sources: dict[str, Tensor]) -> bool:
        return all(
            old.data_ptr() == new.data_ptr() and old.dtype == new.dtype and version == new._version
            for old, version, new in zip(self.sources, self.versions, sources.values(), strict=True)
        )


class MethodModule(nn.Module):
    """A method of a model as a module, so that `functional_call` can call it with other weights."""

    def __init__(self, model: Model, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self.method)(*args, **kwargs)


def resize_matrices(rule: Rule, before: tuple[int, int], after: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """U_p (p new old) and D_p (p old new) of a resize rule, float64."""
    if rule == "interpolate":
        return interpolation_matrix(before, after).unsqueeze(0), interpolation_matrix(after, before).unsqueeze(0)
    down = tile_matrices(before, after)
    return down.transpose(1, 2), down


def interpolation_matrix(source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """The matrix that resamples a map from one grid to another: target cells x source cells, float64."""
    cells = source[0] * source[1]
    units = torch.eye(cells, dtype=torch.float64).view(cells, 1, *source)
    return F.interpolate(units, target, mode="bilinear", antialias=True).flatten(1).T.contiguous()


def count_tiles(tile: tuple[int, int], whole: tuple[int, int]) -> int:
    """How many tiles make up a grid."""
    if whole[0] % tile[0] or whole[1] % tile[1]:
        raise UserError(
            f"a grid of {whole[0]}x{whole[1]} patches cannot be tiled by {tile[0]}x{tile[1]}: the rule 'tile' needs a "
            f"multiple of the image size; use 'interpolate'"
        )
    return (whole[0] // tile[0]) * (whole[1] // tile[1])


def tile_matrices(tile: tuple[int, int], whole: tuple[int, int]) -> Tensor:
    """The matrices that extract each tile of a grid, row by row: tiles x cells of a tile x cells, float64."""
    count_tiles(tile, whole)  # which raises UserError if they do not fit
    cells = torch.arange(whole[0] * whole[1]).view(whole[0] // tile[0], tile[0], whole[1] // tile[1], tile[1])
    return F.one_hot(cells.transpose(1, 2).flatten(2).flatten(0, 1), whole[0] * whole[1]).double()


def with_class_token(matrices: Tensor, extra: int, weight: float) -> Tensor:
    """The matrices extended by `extra` class tokens in front, which are copied with this weight."""
    wide = F.pad(matrices, (extra, 0, extra, 0))
    diagonal = weight * torch.eye(extra, device=matrices.device, dtype=matrices.dtype)
    return wide + F.pad(diagonal, (0, matrices.shape[2], 0, matrices.shape[1]))
