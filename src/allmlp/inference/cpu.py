"""Fast inference on a CPU, where matrix products take nearly all the time: few passes over memory between them.

Products accumulate into z, activations and gates work in place, and the two halves of a gate come from two products so
that neither has to be copied to be contiguous. The matrices of channel MLPs are stored transposed, as (in, out), which
makes products with them up to 12 % faster.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.inference.encoder import Conversion, FastEncoder, scale_rows
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.mixers.gate import SpatialGatingUnitLayer
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import AffineLayer

INPLACE_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda h: torch.ops.aten.gelu_(h, approximate="tanh"),
    "relu": torch.relu_,
}


def token_baddbmm(matrix: Tensor, x: Tensor, bias: Tensor, out: Tensor | None = None) -> Tensor:
    """A X + bias for every example, b m c; accumulates in place if `out` is `bias`."""
    return torch.baddbmm(bias, matrix.expand(len(x), -1, -1), x, out=out)


class CpuFastEncoder(FastEncoder):
    def fuse(self, conversion: Conversion, norm: nn.Module, mix: nn.Module, layer_scale: Tensor | None) -> nn.Module:
        if isinstance(mix, TokenProjection) and isinstance(norm, AffineLayer):
            return CpuAffineTokenLinear(conversion, norm, mix, layer_scale)
        if isinstance(mix, TokenProjection):
            return CpuTokenLinear(conversion, norm, mix, layer_scale)
        if isinstance(mix, TokenMlpLayer):
            return CpuTokenMlp(conversion, norm, mix, layer_scale)
        assert isinstance(mix, ChannelMlpLayer)
        return CpuChannelMlp(conversion, norm, mix, layer_scale)


class CpuNorm(nn.Module):
    """LayerNorm, or Affine with the deferred bias folded in."""

    def __init__(self, conversion: Conversion, norm: nn.Module, deferred_bias: Tensor | None = None) -> None:
        super().__init__()
        if isinstance(norm, AffineLayer):
            weight, bias = norm.alpha, norm.beta if deferred_bias is None else norm.beta + norm.alpha * deferred_bias
        else:
            assert isinstance(norm, nn.LayerNorm)
            weight, bias = norm.weight, norm.bias
        self.weight, self.bias = nn.Buffer(conversion.cast(weight)), nn.Buffer(conversion.cast(bias))
        self.eps: float | None = getattr(norm, "eps", None)

    def forward(self, z: Tensor) -> Tensor:
        if self.eps is None:
            return torch.addcmul(self.bias, self.weight, z)
        return F.layer_norm(z, self.weight.shape, self.weight, self.bias, self.eps)


class CpuTokenLinear(nn.Module):
    def __init__(
        self, conversion: Conversion, norm: nn.Module, mix: TokenProjection, layer_scale: Tensor | None
    ) -> None:
        super().__init__()
        self.matrix = nn.Buffer(conversion.cast(mix.matrix()))
        self.bias = nn.Buffer(conversion.cast(mix.bias.double()[:, None]))
        self.scale = None if layer_scale is None else nn.Buffer(conversion.cast(layer_scale))
        self.norm = CpuNorm(conversion, norm, conversion.deferred_bias)

    def forward(self, z: Tensor) -> Tensor:
        y = token_baddbmm(self.matrix, self.norm(z), self.bias)
        return z.add_(y) if self.scale is None else z.addcmul_(y, self.scale)


class CpuAffineTokenLinear(nn.Module):
    """gamma (A (alpha (z + deferred_bias) + beta) + b) = A (gamma alpha z) + a constant."""

    def __init__(
        self, conversion: Conversion, norm: AffineLayer, mix: TokenProjection, layer_scale: Tensor | None
    ) -> None:
        super().__init__()
        matrix, bias = conversion.cast(mix.matrix()), mix.bias.double()[:, None]
        gamma = 1 if layer_scale is None else layer_scale
        shift = norm.beta.double() + norm.alpha.double() * conversion.deferred_bias
        self.matrix, self.weight = nn.Buffer(matrix), nn.Buffer(conversion.cast(gamma * norm.alpha))
        self.constant = nn.Buffer(conversion.cast(gamma * (matrix.double().sum(1)[:, None] * shift + bias)))

    def forward(self, z: Tensor) -> Tensor:
        x = z * self.weight
        z.add_(self.constant)
        return token_baddbmm(self.matrix, x, z, out=z)


class CpuTokenMlp(nn.Module):
    def __init__(self, conversion: Conversion, norm: nn.Module, mix: TokenMlpLayer, layer_scale: Tensor | None) -> None:
        super().__init__()
        bias_cancels = conversion.token_bias_cancels(layer_scale)
        self.up, self.down = nn.Buffer(conversion.cast(mix.up.weight)), nn.Buffer(conversion.cast(mix.down.weight))
        self.up_bias = nn.Buffer(conversion.cast(mix.up.bias)[:, None])
        self.down_bias = None if bias_cancels else nn.Buffer(conversion.cast(mix.down.bias)[:, None])
        self.scale = None if layer_scale is None else nn.Buffer(conversion.cast(layer_scale))
        self.norm = CpuNorm(conversion, norm, conversion.deferred_bias)
        self.act = conversion.act("token")

    def forward(self, z: Tensor) -> Tensor:
        hidden = INPLACE_ACTS[self.act](token_baddbmm(self.up, self.norm(z), self.up_bias))  # b d c
        if self.scale is not None:
            assert self.down_bias is not None
            return z.addcmul_(token_baddbmm(self.down, hidden, self.down_bias), self.scale)
        token_baddbmm(self.down, hidden, z, out=z)
        return z if self.down_bias is None else z.add_(self.down_bias)


class CpuChannelMlp(nn.Module):
    def __init__(
        self, conversion: Conversion, norm: nn.Module, mix: ChannelMlpLayer, layer_scale: Tensor | None
    ) -> None:
        super().__init__()
        self.down = nn.Buffer(conversion.cast(scale_rows(mix.down.weight, layer_scale).T))
        if isinstance(norm, AffineLayer):
            weight, bias = conversion.fold(norm, mix)
            self.norm, self.down_bias = nn.Identity(), None
            conversion.defer_bias(mix.down.bias, layer_scale)
        else:
            weight, bias = mix.up.weight.double(), mix.up.bias.double()
            # LayerNorm would have to add `deferred_bias` to all of z, so nothing is gained by deferring.
            self.norm = CpuNorm(conversion, norm)
            down_bias = mix.down.bias if layer_scale is None else layer_scale * mix.down.bias
            self.down_bias = nn.Buffer(conversion.cast(down_bias))
        if mix.inner is None:
            self.hidden: nn.Module = CpuLinearAct(conversion, weight, bias)
        else:
            assert isinstance(mix.inner, SpatialGatingUnitLayer)
            self.hidden = CpuGate(conversion, weight, bias, mix.inner)

    def forward(self, z: Tensor) -> Tensor:
        flat = z.view(-1, z.shape[2])
        torch.addmm(flat, self.hidden(self.norm(z)).flatten(0, 1), self.down, out=flat)
        return z if self.down_bias is None else z.add_(self.down_bias)


class CpuLinearAct(nn.Module):
    """act(U x + a)."""

    def __init__(self, conversion: Conversion, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Buffer(conversion.cast(weight.T)), nn.Buffer(conversion.cast(bias))
        self.act = conversion.act("channel")

    def forward(self, x: Tensor) -> Tensor:
        hidden = INPLACE_ACTS[self.act](torch.addmm(self.bias, x.flatten(0, 1), self.weight))
        return hidden.view(*x.shape[:2], len(self.bias))


class CpuGate(nn.Module):
    """The spatial gating unit, in any variant, of act(U x + a)."""

    def __init__(self, conversion: Conversion, weight: Tensor, bias: Tensor, inner: SpatialGatingUnitLayer) -> None:
        super().__init__()
        self.matrix = nn.Buffer(conversion.cast(inner.proj.matrix()))
        self.token_bias = nn.Buffer(conversion.cast(inner.proj.bias)[:, None])
        self.variant = inner.variant
        self.norm = CpuNorm(conversion, inner.norm)
        parts = 2 if inner.variant == "split" else 1
        self.up = nn.ModuleList(
            CpuLinearAct(conversion, *part) for part in zip(weight.chunk(parts), bias.chunk(parts), strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        # The product comes first, and the left half of a split gate last: fewer large tensors at a time.
        right = self.up[-1](x)
        f = token_baddbmm(self.matrix, self.norm(right), self.token_bias)
        if self.variant == "split":
            return f.mul_(self.up[0](x))
        return f if self.variant == "linear" else f.add_(right) if self.variant == "additive" else f.mul_(right)
