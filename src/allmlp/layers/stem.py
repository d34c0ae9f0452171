"""The first layer: from pixels or token ids to tokens of `width` channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.context import Site
from allmlp.layers.init import Distribution, Init, Normal, TruncatedNormal
from allmlp.layers.linear import Embedding, Linear
from allmlp.layers.norm import Norm
from allmlp.spec import LARGEST, Count, Rate, Size, Spec


class Positions(Spec, abstract=True):
    def build(self, tokens: int, channels: int) -> nn.Module:
        raise NotImplementedError


class Learned(Positions):
    """A learned vector per position, added to the token.

        X[i] += P[i]

    Parameters SC.
    """

    init: Distribution = Normal(0.02)

    def build(self, tokens: int, channels: int) -> nn.Module:
        return LearnedPositions(tokens, channels, self.init)


class LearnedPositions(Embedding):
    def forward(self, x: Tensor, start: int) -> Tensor:  # type: ignore[override]
        return x + self.weight[start : start + x.shape[1]]


class Sinusoidal(Positions):
    """Fixed waves of the first Transformer, added to the token.

    X[i, 2k] += sin(i / 10000^(2k/C)),   X[i, 2k+1] += cos(i / 10000^(2k/C))
    """

    def build(self, tokens: int, channels: int) -> nn.Module:
        return SinusoidalPositions()


class SinusoidalPositions(nn.Module):
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

    def build(self, site: Site) -> nn.Module:
        raise NotImplementedError


class Patches(Stem):
    """Cuts an image into non-overlapping patches and embeds each with one linear map.

        X[i] = W patch_i + b

    Patches run row by row; a patch is flattened as (colour, height, width).
    Parameters 3P^2 C + C for P x P patches of RGB.
    """

    image: Size = (224, 224)
    patch: Size = (16, 16)
    in_channels: Count = 3
    class_token: bool = False
    positions: Positions | None = None
    init: Init | None = None

    def check(self) -> None:
        (height, width), (rows, columns) = self.image, self.patch
        if height % rows or width % columns:
            raise UserError(
                f"a {rows}x{columns} patch does not divide a {height}x{width} image; "
                f"the nearest size that works is {fit(height, rows)}x{fit(width, columns)}"
            )
        if self.tokens > LARGEST:
            raise UserError(f"{self.tokens} patches are too many; use larger patches")

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] + self.class_token

    def build(self, site: Site) -> nn.Module:
        return PatchStem(self, site)


def fit(length: int, patch: int) -> int:
    return max(round(length / patch), 1) * patch


class PatchStem(nn.Module):
    def __init__(self, spec: Patches, site: Site) -> None:
        super().__init__()
        self.spec = spec
        self.proj = Linear(spec.in_channels * spec.patch[0] * spec.patch[1], site.channels, spec.init or site.init)
        self.token = nn.Parameter(torch.empty(site.channels)) if spec.class_token else None
        self.positions = spec.positions.build(site.tokens, site.channels) if spec.positions else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.token is not None:
            nn.init.zeros_(self.token)

    def forward(self, images: Tensor) -> Tensor:
        self.validate(images)
        (gh, gw), (ph, pw) = self.spec.grid, self.spec.patch
        x = images.unflatten(3, (gw, pw)).unflatten(2, (gh, ph))  # b c gh ph gw pw
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # b s (c ph pw)
        x = self.proj(x)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], 1, -1), x], dim=1)
        return x if self.positions is None else self.positions(x, 0)

    def validate(self, images: Tensor) -> None:
        height, width = self.spec.image
        if images.dim() != 4 or not images.is_floating_point():
            raise UserError(
                f"expected float images of shape [B, {self.spec.in_channels}, {height}, {width}], "
                f"got {str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
            )
        if images.shape[1] != self.spec.in_channels:
            raise UserError(f"the model reads {self.spec.in_channels}-channel images, got {images.shape[1]} channels")
        if tuple(images.shape[2:]) != self.spec.image:
            size = f"{images.shape[2]}x{images.shape[3]}"
            raise UserError(
                f"the model is built for {height}x{width} images, got {size}; resize the images, or the model: "
                f"allmlp resize FOLDER TARGET --image {size}, or create and load with dynamic=True"
            )


class Tokens(Stem):
    """Looks token ids up in a table; `length` is the longest sequence the model can read.

        X[i] = E[id_i]  (+ segment[i])  (+ position[i]),   times sqrt(C) first with scale=True

    Parameters VC, and segments C, S C for learned positions, norm.
    """

    vocabulary: Count = 32_000
    length: Count = 128
    positions: Positions | None = None
    segments: Count | None = None
    norm: Norm | None = None
    scale: bool = False
    dropout: Rate = 0.0
    init: Distribution = TruncatedNormal(0.02)

    @property
    def tokens(self) -> int:
        return self.length

    def build(self, site: Site, table: bool = True) -> nn.Module:
        return TokenStem(self, site, table)


class TokenStem(nn.Module):
    """With table=False the rows come from elsewhere: a decoder that shares the encoder's embedding."""

    def __init__(self, spec: Tokens, site: Site, table: bool) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(spec.vocabulary, site.channels, spec.init) if table else None
        self.segments = Embedding(spec.segments, site.channels, spec.init) if spec.segments else None
        self.positions = spec.positions.build(site.tokens, site.channels) if spec.positions else None
        self.norm = spec.norm.build(site.channels) if spec.norm else None

    def forward(self, ids: Tensor, segments: Tensor | None, start: int, table: Tensor | None) -> Tensor:
        self.validate(ids, start)
        weight = table if self.embedding is None else self.embedding.weight
        assert weight is not None, "a stem without a table is called with one"
        x = F.embedding(ids, weight)
        if self.spec.scale:
            x = x * math.sqrt(x.shape[-1])
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        if self.positions is not None:
            x = self.positions(x, start)
        if self.norm is not None:
            x = self.norm(x)
        return F.dropout(x, self.spec.dropout, self.training)

    def validate(self, ids: Tensor, start: int) -> None:
        if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise UserError(
                f"expected token ids of shape [B, S], got {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
            )
        if start + ids.shape[1] > self.spec.length:
            length = start + ids.shape[1]
            raise UserError(
                f"{length} tokens are longer than the {self.spec.length} the model is built for; shorten the input, "
                f"or resize the model: allmlp resize FOLDER TARGET --length {length}"
            )
        # Reading values back would stall a GPU and break tracing: there the embedding itself refuses.
        if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
            low, high = ids.aminmax()
            if low < 0 or high >= self.spec.vocabulary:
                bad = int(low if low < 0 else high)
                raise UserError(f"token id {bad} is outside the vocabulary of {self.spec.vocabulary}")
