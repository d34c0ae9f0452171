"""The first layer: from pixels or token ids to tokens of `width` channels."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import BuildContext
from allmlp.layers.init import Distribution, Init, Normal, TruncatedNormal
from allmlp.layers.linear import Embedding, Linear, is_standard
from allmlp.layers.norm import Norm, build_norm
from allmlp.layers.token_roles import TokenRole
from allmlp.spec import MAX_COUNT, Count, Rate, Size, Spec


class Positions(Spec, abstract=True):
    def build(self, tokens: int, channels: int) -> nn.Module:
        raise NotImplementedError


class LearnedPositions(Positions):
    """A learned vector per position, added to the token.

        X[i] += P[i]

    Parameters SC.
    """

    init: Distribution = Normal(0.02)

    def build(self, tokens: int, channels: int) -> nn.Module:
        return LearnedPositionsLayer(tokens, channels, self.init)


class LearnedPositionsLayer(Embedding):
    token_roles: ClassVar[dict[str, TokenRole]] = {"weight": "out"}

    def forward(self, x: Tensor, start: int) -> Tensor:  # type: ignore[override]
        return x + self.weight[start : start + x.shape[1]]


class SinusoidalPositions(Positions):
    """Fixed sine waves, added to the token.

        X[i, 2k] += sin(i / 10000^(2k/C)),   X[i, 2k+1] += cos(i / 10000^(2k/C))

    Source: the original Transformer (Vaswani et al., 2017). No parameters.
    """

    def build(self, tokens: int, channels: int) -> nn.Module:
        return SinusoidalPositionsLayer()


class SinusoidalPositionsLayer(nn.Module):
    def forward(self, x: Tensor, start: int) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        position = torch.arange(start, start + x.shape[1], device=x.device, dtype=dtype).unsqueeze(1)
        even = torch.arange(0, x.shape[2], 2, device=x.device, dtype=dtype)
        angle = position * torch.exp(even * (-math.log(10_000) / x.shape[2]))  # s c/2
        wave = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, : x.shape[2]]
        return x + wave.to(x.dtype)


class Stem(Spec, abstract=True):
    @property
    def tokens(self) -> int:
        raise NotImplementedError

    @property
    def grid(self) -> tuple[int, int] | None:
        return None

    def build(self, ctx: BuildContext) -> nn.Module:
        raise NotImplementedError


class PatchEmbed(Stem):
    """Splits an image into non-overlapping patches and embeds each with one linear layer.

        X[i] = norm(act(W patch_i + b))         act and norm optional (ConvMixer)

    Patches are ordered row by row; a patch is flattened as (color, height, width). With `kernel` K the patches overlap:
    each is the K x K window around it, a convolution of stride P whose zero padding keeps the grid (CycleMLP).
    Parameters 3P^2 C + C for P x P patches of RGB (3K^2 C + C with a kernel), and the norm's.
    """

    img_size: Size = (224, 224)
    patch_size: Size = (16, 16)
    in_chans: Count = 3
    class_token: bool = False
    positions: Positions | None = None
    init: Init | None = None
    act: Act | None = None
    norm: Norm | None = None
    kernel: Count | None = None

    def check(self) -> None:
        (height, width), (rows, columns) = self.img_size, self.patch_size
        check_kernel(self.kernel, self.patch_size)
        if height % rows or width % columns:
            raise UserError(
                f"a {rows}x{columns} patch does not divide a {height}x{width} image; "
                f"the nearest size that works is {fit(height, rows)}x{fit(width, columns)}"
            )
        if self.tokens > MAX_COUNT:
            raise UserError(f"{self.tokens} patches are too many; use larger patches")

    @property
    def grid(self) -> tuple[int, int]:
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] + self.class_token

    def build(self, ctx: BuildContext) -> nn.Module:
        return PatchEmbedLayer(self, ctx)


def fit(size: int, patch_size: int) -> int:
    return max(round(size / patch_size), 1) * patch_size


def check_kernel(kernel: int | None, patch_size: tuple[int, int]) -> None:
    if kernel is None:
        return
    if kernel < max(patch_size):
        raise UserError(f"a {kernel}x{kernel} kernel does not cover patches of {patch_size[0]}x{patch_size[1]}")
    if kernel % 2 == 0 and 1 in patch_size:
        raise UserError(f"a kernel on patches of {patch_size[0]}x{patch_size[1]} must be odd, not {kernel}")


def split_patches(images: Tensor, patch_size: tuple[int, int], kernel: int | None) -> Tensor:
    """The patches of b c h w, or their windows, row by row and flattened: b s (c ph pw)."""
    if kernel is not None:
        padding = window_padding(patch_size, kernel)
        return F.unfold(images, kernel, padding=padding, stride=patch_size).transpose(1, 2)
    return patch_view(images, patch_size).flatten(3).flatten(1, 2)


def patch_view(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """The patches of b c h w as a view: b gh gw c ph pw."""
    (ph, pw), (height, width) = patch_size, images.shape[2:]
    x = images.unflatten(3, (width // pw, pw)).unflatten(2, (height // ph, ph))  # b c gh ph gw pw
    return x.permute(0, 2, 4, 1, 3, 5)


def embed_patches(images: Tensor, proj: Linear, patch_size: tuple[int, int], kernel: int | None) -> Tensor:
    """W patch_i + b: b s c."""
    if kernel is None or not is_standard(proj):
        return proj(split_patches(images, patch_size, kernel))
    weight = proj.weight.unflatten(1, (images.shape[1], kernel, kernel))
    padding = window_padding(patch_size, kernel)
    x = F.conv2d(images, weight, proj.bias, stride=patch_size, padding=padding)  # b c gh gw
    return x.flatten(2).transpose(1, 2).contiguous()  # the blocks add to it, in its memory layout


def window_padding(patch_size: tuple[int, int], kernel: int) -> tuple[int, int]:
    """Zero padding before the first row and column that gives as many windows as patches."""
    return (kernel - patch_size[0] + 1) // 2, (kernel - patch_size[1] + 1) // 2


class PatchEmbedLayer(nn.Module):
    def __init__(self, spec: PatchEmbed, ctx: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        pixels = spec.kernel**2 if spec.kernel else spec.patch_size[0] * spec.patch_size[1]
        self.proj = Linear(spec.in_chans * pixels, ctx.channels, spec.init or ctx.init)
        self.norm = build_norm(spec.norm, ctx.channels)
        self.token = nn.Parameter(torch.empty(ctx.channels)) if spec.class_token else None
        self.positions = spec.positions.build(ctx.tokens, ctx.channels) if spec.positions else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.token is not None:
            nn.init.zeros_(self.token)

    def forward(self, images: Tensor) -> Tensor:
        self.validate(images)
        refuse_double(images, self)
        return self.complete(embed_patches(images, self.proj, self.spec.patch_size, self.spec.kernel))

    def embed_grid(self, grid: Tensor) -> Tensor:
        """Like `forward`, but takes the `patch_view` of the images."""
        return self.complete(self.proj(grid.flatten(3).flatten(1, 2)))

    def complete(self, x: Tensor) -> Tensor:
        """Apply activation and norm to the embedded patches, b s c; add class token and positions."""
        x = self.norm(ACTS[self.spec.act](x) if self.spec.act else x)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], 1, -1), x], dim=1)
        return x if self.positions is None else self.positions(x, 0)

    def validate(self, images: Tensor) -> None:
        height, width = self.spec.img_size
        if images.dim() != 4 or not images.is_floating_point():
            raise UserError(
                f"expected float images of shape [B, {self.spec.in_chans}, {height}, {width}], "
                f"got {str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
            )
        if images.shape[1] != self.spec.in_chans:
            raise UserError(f"expected images with {self.spec.in_chans} channels, got {images.shape[1]}")
        if tuple(images.shape[2:]) != self.spec.img_size:
            size = f"{images.shape[2]}x{images.shape[3]}"
            raise UserError(
                f"the model is built for {height}x{width} images, got {size}; resize the images, or the model: "
                f"allmlp resize FOLDER TARGET --img-size {size}, or create and load with dynamic=True"
            )


def refuse_double(x: Tensor, module: nn.Module) -> None:
    """Refuse float64, which numpy makes, in a module of float32."""
    if x.dtype == torch.float64 and next(module.parameters()).dtype == torch.float32:
        raise UserError("the input is float64 and the model float32: convert the input, x.float()")


class TokenEmbed(Stem):
    """Token embeddings; `seq_len` is the longest sequence the model can read.

        X[i] = E[id_i]  (+ segment[i])  (+ position[i]),   times sqrt(C) first with scale=True

    Parameters VC, segments x C, SC for learned positions, and the norm's.
    """

    vocab_size: Count = 32_000
    seq_len: Count = 128
    positions: Positions | None = None
    segments: Count | None = None
    norm: Norm | None = None
    scale: bool = False
    dropout: Rate = 0.0
    init: Distribution = TruncatedNormal(0.02)

    @property
    def tokens(self) -> int:
        return self.seq_len

    def build(self, ctx: BuildContext, embedding: bool = True) -> nn.Module:
        return TokenEmbedLayer(self, ctx, embedding)


class TokenEmbedLayer(nn.Module):
    """With embedding=False the weight is passed to `forward`: a decoder that shares the encoder's embedding."""

    def __init__(self, spec: TokenEmbed, ctx: BuildContext, embedding: bool) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(spec.vocab_size, ctx.channels, spec.init) if embedding else None
        self.segments = Embedding(spec.segments, ctx.channels, spec.init) if spec.segments else None
        self.positions = spec.positions.build(ctx.tokens, ctx.channels) if spec.positions else None
        self.norm = build_norm(spec.norm, ctx.channels)

    def forward(
        self, ids: Tensor, segments: Tensor | None, start: int, embedding: Tensor | None, embedded: bool = False
    ) -> Tensor:
        """With `embedded`, `ids` are embedding vectors already, b s c."""
        self.validate(ids, start, embedded)
        if self.spec.segments and segments is not None:
            self.validate_segments(segments, ids)
        weight = embedding if self.embedding is None else self.embedding.weight
        assert weight is not None, "a stem without an embedding is called with one"
        x = ids if embedded else F.embedding(ids, weight)
        if self.spec.scale:
            x = x * math.sqrt(x.shape[-1])
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        if self.positions is not None:
            x = self.positions(x, start)
        return F.dropout(self.norm(x), self.spec.dropout, self.training)

    def validate(self, ids: Tensor, start: int, embedded: bool) -> None:
        if embedded and (ids.dim() != 3 or not ids.is_floating_point()):
            raise UserError(
                f"expected embedded tokens of shape [B, S, C], got {str(ids.dtype).removeprefix('torch.')} "
                f"{list(ids.shape)}"
            )
        if not embedded and (ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
            raise UserError(
                f"expected token ids of shape [B, S], got {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
            )
        if start + ids.shape[1] > self.spec.seq_len:
            seq_len = start + ids.shape[1]
            raise UserError(
                f"{seq_len} tokens are longer than the {self.spec.seq_len} the model is built for; shorten the input, "
                f"or resize the model: allmlp resize FOLDER TARGET --seq-len {seq_len}"
            )
        if not embedded and (bad := outside(ids, self.spec.vocab_size)) is not None:
            raise UserError(f"token id {bad} is outside the vocabulary of {self.spec.vocab_size}")

    def validate_segments(self, segments: Tensor, ids: Tensor) -> None:
        if segments.shape != ids.shape[:2]:
            raise UserError(f"the segments {list(segments.shape)} do not match the tokens {list(ids.shape)}")
        if (bad := outside(segments, self.spec.segments or 0)) is not None:
            raise UserError(f"segment {bad} is outside the {self.spec.segments} of the model, numbered from 0")


def outside(ids: Tensor, count: int) -> int | None:
    """An index below 0 or not below `count`, if there is one.

    On a GPU this would synchronize and in tracing there are no values: there the embedding itself raises.
    """
    if ids.device.type != "cpu" or not ids.numel() or torch.compiler.is_compiling():
        return None
    try:
        low, high = map(int, ids.aminmax())
    except RuntimeError:  # torch.func.vmap has no values either
        return None
    return low if low < 0 else high if high >= count else None
