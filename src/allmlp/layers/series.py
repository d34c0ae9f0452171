"""Input and output of time-series models: reversible normalization, stems and heads.

A series is a float tensor x of shape [B, L, V]: L time steps of V variates (the columns of a table). A stem that
processes variates separately moves them into the batch dimension, [(B V), S, C]; the blocks are unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.context import BuildContext
from allmlp.layers.dropout import dropout
from allmlp.layers.init import Init
from allmlp.layers.linear import Linear
from allmlp.layers.stem import Positions, Stem
from allmlp.spec import Count, NonNegative, Rate, Spec

# --- normalization ----------------------------------------------------------------------------------------


class Level(NamedTuple):
    """Shift and scale removed from a window by normalization, b 1 v."""

    shift: Tensor
    scale: Tensor


class SeriesNorm(Spec, abstract=True):
    """Normalization of a window, inverted on the forecast."""

    def build(self, variates: int) -> SeriesNormLayer:
        raise NotImplementedError


class SeriesNormLayer(nn.Module):
    """`forward` returns the normalized window, 0 where a value is missing, and its level; `inverse` undoes it."""

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Level]:
        level = self.level(x, mask)
        z = self.normalize(x, level)
        return (z if mask is None else torch.where(mask, z, 0)), level

    def level(self, x: Tensor, mask: Tensor | None) -> Level:
        raise NotImplementedError

    def normalize(self, x: Tensor, level: Level) -> Tensor:
        return (x - level.shift) / level.scale

    def inverse(self, y: Tensor, level: Level) -> Tensor:
        """y: b h v, or b h v q for quantiles."""
        shift, scale = (part.unsqueeze(-1) if y.dim() == 4 else part for part in level)
        return y * scale + shift


class RevIN(SeriesNorm):
    """Reversible instance normalization: each variate of a window has mean 0 and variance 1.

        z = (x - mean) / sqrt(var + eps) (* w + b with affine),   y = (z' (- b) / w) sqrt(var + eps) + mean

    Missing values are excluded from mean and variance. Source: Kim et al. (2022); PatchTSMixer has no affine map.
    Parameters 0 (affine: 2V, initialized to w = 1, b = 0).
    """

    eps: NonNegative = 1e-5
    affine: bool = False

    def build(self, variates: int) -> SeriesNormLayer:
        return RevINLayer(self, variates)


class RevINLayer(SeriesNormLayer):
    def __init__(self, spec: RevIN, variates: int) -> None:
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.empty(variates)) if spec.affine else None
        self.bias = nn.Parameter(torch.empty(variates)) if spec.affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def level(self, x: Tensor, mask: Tensor | None) -> Level:
        if mask is None:
            variance, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
        else:
            count = mask.sum(1, keepdim=True).clamp(min=1)
            mean = torch.where(mask, x, 0).sum(1, keepdim=True) / count
            variance = torch.where(mask, x - mean, 0).square().sum(1, keepdim=True) / count
        return Level(mean, (variance + self.eps).sqrt())

    def normalize(self, x: Tensor, level: Level) -> Tensor:
        z = super().normalize(x, level)
        return z if self.weight is None or self.bias is None else z * self.weight + self.bias

    def inverse(self, y: Tensor, level: Level) -> Tensor:
        if self.weight is not None and self.bias is not None:
            weight, bias = (part.unsqueeze(-1) if y.dim() == 4 else part for part in (self.weight, self.bias))
            # The released code adds eps^2, so that a weight near zero does not divide by zero.
            y = (y - bias) / (weight + self.eps**2)
        return super().inverse(y, level)


class SubtractLast(SeriesNorm):
    """The last value of each variate is subtracted.

        z = x - x[L],   y = z' + x[L]

    Missing values are skipped: the last observed value is used. Source: NLinear (Zeng et al., 2023). Parameters 0.
    """

    def build(self, variates: int) -> SeriesNormLayer:
        return SubtractLastLayer()


class SubtractLastLayer(SeriesNormLayer):
    def level(self, x: Tensor, mask: Tensor | None) -> Level:
        last = x[:, -1:]
        if mask is not None:
            steps = torch.arange(x.shape[1], device=x.device)[:, None]
            newest = torch.where(mask, steps, -1).amax(1, keepdim=True)  # b 1 v
            last = torch.where(newest < 0, 0, x.gather(1, newest.clamp(min=0)))
        return Level(last, torch.ones_like(last))


# --- stems ------------------------------------------------------------------------------------------------


class SeriesStem(Stem, abstract=True):
    """From a normalized window, b l v, to tokens."""

    seq_len: Count = 512
    """Look-back in time steps."""
    in_chans: Count = 1
    """Number of variates."""

    @property
    def width(self) -> int | None:
        """Channels of a token if the stem determines them, else None."""
        return None

    @property
    def mixes_variates(self) -> bool:
        """Whether the variates are the channels of a token instead of separate examples."""
        return False


class SeriesPatches(SeriesStem):
    """Each variate is cut into patches, each embedded by one linear layer.

        X[i] = W x[start + i stride : start + i stride + patch_size] + b  (+ position[i])

    Patches end with the last time step; the first steps are left out where the stride does not divide the rest.
    Source: PatchTST, PatchTSMixer. Tokens S = (L - patch_size) // stride + 1, parameters PC + C, SC for positions.
    """

    patch_size: Count = 16
    stride: Count = 16
    positions: Positions | None = None
    init: Init | None = None

    def check(self) -> None:
        if self.patch_size > self.seq_len:
            raise UserError(f"a patch of {self.patch_size} steps is longer than the {self.seq_len} of the series")

    @property
    def tokens(self) -> int:
        return (self.seq_len - self.patch_size) // self.stride + 1

    def build(self, ctx: BuildContext) -> nn.Module:
        return SeriesPatchesLayer(self, ctx)


class SeriesPatchesLayer(nn.Module):
    def __init__(self, spec: SeriesPatches, ctx: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        self.proj = Linear(spec.patch_size, ctx.channels, spec.init or ctx.init)
        self.positions = spec.positions.build(ctx.tokens, ctx.channels) if spec.positions else None

    def forward(self, z: Tensor, hidden: Tensor | None = None) -> Tensor:
        """`hidden`, b v s, is True at patches that are replaced by zeros (masked pretraining)."""
        patches = self.split_patches(z)
        if hidden is not None:
            patches = patches.masked_fill(hidden.unsqueeze(-1), 0)
        x = self.proj(patches.flatten(0, 1))
        return x if self.positions is None else self.positions(x, 0)

    def split_patches(self, z: Tensor) -> Tensor:
        """b v s p."""
        spec = self.spec
        start = spec.seq_len - spec.patch_size - spec.stride * (spec.tokens - 1)
        return z.transpose(1, 2)[:, :, start:].unfold(2, spec.patch_size, spec.stride)


class SeriesSteps(SeriesStem):
    """Every time step is a token, unchanged: its channels are the variates, or a single variate if each is processed
    separately.

        X[i] = x[i]

    Source: TSMixer, NLinear. Tokens S = L, channels V (separate: 1), parameters 0.
    """

    separate: bool = False

    @property
    def tokens(self) -> int:
        return self.seq_len

    @property
    def width(self) -> int | None:
        return 1 if self.separate else self.in_chans

    @property
    def mixes_variates(self) -> bool:
        return not self.separate

    def build(self, ctx: BuildContext) -> nn.Module:
        return SeriesStepsLayer(self.separate)


class SeriesStepsLayer(nn.Module):
    def __init__(self, separate: bool) -> None:
        super().__init__()
        self.separate = separate

    def forward(self, z: Tensor) -> Tensor:
        return z.transpose(1, 2).flatten(0, 1).unsqueeze(-1) if self.separate else z


class SeriesTrend(SeriesStem):
    """Every time step of a variate is a token of two channels: a moving average and the remainder.

        trend[i] = mean of x[i - k/2 .. i + k/2], both ends repeated,   X[i] = (trend[i], x[i] - trend[i])

    Source: DLinear (Zeng et al., 2023), which consists of this stem and a head. Tokens S = L, channels 2, parameters 0.
    """

    kernel: Count = 25
    """Steps of the moving average."""

    def check(self) -> None:
        if self.kernel % 2 == 0:
            raise UserError(f"a moving average needs an odd number of steps, not {self.kernel}")

    @property
    def tokens(self) -> int:
        return self.seq_len

    @property
    def width(self) -> int | None:
        return 2

    def build(self, ctx: BuildContext) -> nn.Module:
        return SeriesTrendLayer(self.kernel)


class SeriesTrendLayer(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, z: Tensor) -> Tensor:
        z = z.transpose(1, 2)  # b v l
        side = self.kernel // 2
        ends = z[:, :, :1].expand(-1, -1, side), z[:, :, -1:].expand(-1, -1, side)
        trend = F.avg_pool1d(torch.cat([ends[0], z, ends[1]], dim=2), self.kernel, 1)
        return torch.stack([trend, z - trend], dim=-1).flatten(0, 1)


# --- heads ------------------------------------------------------------------------------------------------


class SeriesHead(Spec, abstract=True):
    def build(self, ctx: BuildContext, stem: SeriesStem) -> nn.Module:
        raise NotImplementedError


class ForecastHead(SeriesHead):
    """The next `horizon` values of each variate from all of its tokens; with `quantiles`, one output per quantile.

        y = W flatten(X) + b

    A model whose channels are the variates has one token of one channel per step: W X + b, the same for every variate.
    Parameters SCH + H (times the number of quantiles).
    """

    horizon: Count = 96
    quantiles: tuple[Rate, ...] = ()
    dropout: Rate = 0.0
    init: Init | None = None

    def check(self) -> None:
        if list(self.quantiles) != sorted(set(self.quantiles)) or not all(0 < q < 1 for q in self.quantiles):
            raise UserError(f"quantiles must increase between 0 and 1, not {', '.join(map(str, self.quantiles))}")

    def build(self, ctx: BuildContext, stem: SeriesStem) -> nn.Module:
        return ForecastHeadLayer(self, ctx, stem)


class ForecastHeadLayer(nn.Module):
    def __init__(self, spec: ForecastHead, ctx: BuildContext, stem: SeriesStem) -> None:
        super().__init__()
        self.spec, self.variates, self.mixes_variates = spec, stem.in_chans, stem.mixes_variates
        inputs = ctx.tokens * (1 if stem.mixes_variates else ctx.channels)
        self.proj = Linear(inputs, spec.horizon * max(len(spec.quantiles), 1), spec.init or ctx.init)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2) if self.mixes_variates else x.reshape(-1, self.variates, x.shape[1] * x.shape[2])
        y = self.proj(dropout(x, self.spec.dropout, self.training))  # b v h or b v (h q)
        if self.spec.quantiles:
            return y.unflatten(2, (self.spec.horizon, -1)).transpose(1, 2)  # b h v q
        return y.transpose(1, 2)


class ReconstructionHead(SeriesHead):
    """Every patch from its token (masked pretraining), in the units of the normalized series.

        patch_i = W X[i] + b

    Source: PatchTSMixer. Parameters CP + P.
    """

    dropout: Rate = 0.0

    def build(self, ctx: BuildContext, stem: SeriesStem) -> nn.Module:
        if not isinstance(stem, SeriesPatches):
            raise UserError("ReconstructionHead needs a SeriesPatches stem")
        return ReconstructionHeadLayer(self, ctx, stem)


class ReconstructionHeadLayer(nn.Module):
    def __init__(self, spec: ReconstructionHead, ctx: BuildContext, stem: SeriesPatches) -> None:
        super().__init__()
        self.dropout, self.variates = spec.dropout, stem.in_chans
        self.proj = Linear(ctx.channels, stem.patch_size, ctx.init)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.proj(dropout(x, self.dropout, self.training))
        return patches.unflatten(0, (-1, self.variates))  # b v s p
