"""Channel MLPs in fp8 on a GPU.

In fp8 (e4m3: 3 mantissa bits, maximum 448) a channel MLP after LayerNorm needs no calibration data to find its scales.
For a normalized token x, without weight and bias, |x| <= sqrt(c) as a vector and thus in every channel, so

    448 / sqrt(c) x        and        448 / (|U_j| sqrt(c) + |a_j|) act(U_j x + a_j)        never overflow.

After Affine, the same holds with the length of each token instead of sqrt(c), see `allmlp.kernels.unit_rows`. The bound
is far above a typical value, but rounding to e4m3 is as fine at 2^-6 as at 448.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.inference.encoder import Conversion, scale_rows
from allmlp.inference.gpu import GpuFastEncoder, GpuModule, GpuTokenProduct, as_float, has_few_tokens, norm_weights
from allmlp.kernels.activation.reference import ActivationName
from allmlp.kernels.linear.reference import EPILOGUE_N, LinearEpilogue
from allmlp.kernels.unit_rows.reference import FP8, FP8_MAX
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.context import Context
from allmlp.layers.mixers.attention import TinyAttentionLayer
from allmlp.layers.mixers.gate import SpatialGatingUnitLayer
from allmlp.layers.norm import AffineLayer

FP8_ROUNDING = 1.15
"""Bound on how much rounding two vectors to fp8 can grow their product: (1 + 1/16)^2 and a margin."""


class GpuFp8Encoder(GpuFastEncoder):
    """The channel MLPs run in fp8 and everything else in `dtype`."""

    def channel_mlp(
        self, conversion: Conversion, norm: nn.Module, mix: ChannelMlpLayer, layer_scale: Tensor | None
    ) -> nn.Module:
        return GpuFp8ChannelMlp(conversion, norm, mix, layer_scale)


class GpuFp8ChannelMlp(GpuModule):
    """The fp8 weights are kept as bytes, which can be pickled."""

    def __init__(
        self, conversion: Conversion, norm: nn.Module, mix: ChannelMlpLayer, layer_scale: Tensor | None
    ) -> None:
        super().__init__()
        assert isinstance(norm, (nn.LayerNorm, AffineLayer))
        weight, bias = mix.up.weight.double(), mix.up.bias.double()
        if any(size % 16 for size in (*weight.shape, mix.down.weight.shape[1])):
            raise UserError(f"fp8 needs widths that are multiples of 16, not {tuple(weight.shape)}")
        self.normalizes, self.eps = isinstance(norm, nn.LayerNorm), getattr(norm, "eps", 0.0)
        if isinstance(norm, nn.LayerNorm):
            length = weight.shape[1] ** 0.5
            bias = bias + weight @ norm.bias.double()
            weight = weight * norm.weight.double()
            bound = FP8_ROUNDING * weight.norm(dim=1) * length + bias.abs()
            input_scale = FP8_MAX / length
            self.norm_weight, self.norm_bias = nn.Buffer(torch.full_like(conversion.deferred_bias, input_scale)), None
            weight = weight / input_scale
        else:
            # Tokens in units in which the map and its bias are of the same size.
            unit = (bias.norm() / weight.norm().clamp(min=1e-30)).clamp(1e-6, 1e6)
            weight = weight * unit
            bound = torch.hypot(FP8_ROUNDING * weight.norm(dim=1), bias) * FP8_MAX
            self.norm_weight, self.norm_bias = as_float(norm.alpha / unit), as_float(norm.beta / unit)
        self.deferred_bias = nn.Buffer(conversion.deferred_bias.clone())
        scale = FP8_MAX / bound.clamp(min=1e-30)
        self.up: nn.Module
        self.attention: nn.Module | None = None
        if mix.inner is None:
            self.up = GpuFp8Linear(conversion, weight, bias, scale, conversion.act("channel"))
        else:
            assert isinstance(mix.inner, SpatialGatingUnitLayer)
            self.up = GpuFp8Gate(conversion, weight, bias, scale, mix.inner)
            scale = self.up.scale.double()
            if isinstance(mix.inner.attention, TinyAttentionLayer):
                self.attention = GpuAttention(conversion, norm, mix.inner.attention)
        self.down = GpuFp8Linear(conversion, scale_rows(mix.down.weight, layer_scale) / scale)

    def forward(self, z: Tensor) -> Tensor:
        kernels, flat = self.kernels, z.view(-1, z.shape[2])
        if self.normalizes:
            x, row_scale = kernels.norm(flat, self.norm_weight, None, self.eps, self.deferred_bias, FP8), None
        else:
            x, row_scale = kernels.unit_rows(flat, self.norm_weight, self.norm_bias, self.deferred_bias)
        attended = () if self.attention is None else (self.attention(z),)
        hidden = self.up(x.view(z.shape), row_scale, *attended)
        return self.down(hidden, row_scale, flat).view_as(z)


class GpuFp8Linear(GpuModule):
    """act(W x + bias) * scale + residual, for x (b s c) in fp8, and the result in fp8 if there is a scale."""

    def __init__(
        self,
        conversion: Conversion,
        weight: Tensor,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
        act: ActivationName = "none",
    ) -> None:
        super().__init__()
        quantized, dequant_scale = quantize_fp8(weight)
        self.weight, self.dequant_scale = nn.Buffer(quantized.view(torch.uint8)), as_float(dequant_scale)
        self.bias, self.quant_scale, self.act = as_float(bias), as_float(scale), act
        self.dtype = conversion.dtype

    def forward(self, x: Tensor, row_scale: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        epilogue = LinearEpilogue(self.dequant_scale, self.bias, self.quant_scale, residual, row_scale)
        dtype = self.dtype if self.quant_scale is None else FP8
        y = self.kernels.linear(x.flatten(0, 1), self.weight.view(FP8), epilogue, self.act, dtype)
        return y.view(*x.shape[:2], -1)

    def with_stats(
        self, x: Tensor, row_scale: Tensor | None, eps: float
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Like `forward`, with the LayerNorm statistics of the result where the kernel has them and they save time."""
        if len(self.weight) % EPILOGUE_N or has_few_tokens(x):
            return self(x, row_scale), None
        epilogue = LinearEpilogue(self.dequant_scale, self.bias, row_scale=row_scale)
        x, shape = x.flatten(0, 1), x.shape[:2]
        y, *stats = self.kernels.linear_stats(x, self.weight.view(FP8), epilogue, self.act, eps, 0, self.dtype)
        mean, rstd = (stat.view(shape) for stat in stats)
        return y.view(*shape, -1), (mean, rstd)


class GpuFp8Gate(GpuModule):
    """The spatial gating unit of act(W x + bias) = [u v]: u and the result in fp8, v in 16 bits.

    The bound of the result is too loose to be of use: for the norm of v it is sqrt(c), and all tokens would have to
    agree in sign. Its scale is for a typical gate and an eighth of the bound of u, which leaves a factor of 448 until
    it saturates and another of 64 until it is a subnormal number.
    """

    def __init__(
        self, conversion: Conversion, weight: Tensor, bias: Tensor, scale: Tensor, inner: SpatialGatingUnitLayer
    ) -> None:
        super().__init__()
        if inner.variant != "split" or not isinstance(inner.norm, nn.LayerNorm):
            raise UserError("fp8 is only for gates that split the channels, with LayerNorm: omit dtype for bfloat16")
        act, width = conversion.act("channel"), len(weight) // 2
        self.u = GpuFp8Linear(conversion, weight[:width], bias[:width], scale[:width], act)
        self.v = GpuFp8Linear(conversion, weight[width:], bias[width:], act=act)
        matrix, norm = inner.proj.matrix().double(), inner.norm
        token_bias = inner.proj.bias.double()
        offset = matrix.sum(1)[:, None] * norm.bias.double() + token_bias[:, None]
        gate = torch.hypot(matrix.norm(dim=1)[:, None] * norm.weight.double(), offset).square().mean(0).sqrt()
        self.eps = norm.eps
        attention = inner.attention
        if attention is None:
            self.out, self.out_bias = None, None
            factor = 8 / FP8_MAX / gate.clamp(min=1e-6)
            self.product = GpuTokenProduct(conversion, matrix, token_bias, norm, layer_scale=factor, combine="multiply")
        else:
            # The last map of the attention adds the product over tokens and multiplies by u.
            assert isinstance(attention, TinyAttentionLayer)
            out, out_bias = attention.out.weight.double(), attention.out.bias.double()
            value = attention.qkv.weight[-out.shape[1] :].double().norm(dim=1).square().mean().sqrt()
            gate = torch.hypot(gate, torch.hypot(value * out.norm(dim=1), out_bias)).square().mean().sqrt()
            factor = 8 / FP8_MAX / gate.clamp(min=1e-6)
            self.product = GpuTokenProduct(conversion, factor * matrix, factor * token_bias, norm)
            self.out, self.out_bias = nn.Buffer(conversion.cast(factor * out)), as_float(factor * out_bias)
        self.scale = nn.Buffer((factor * scale[:width]).float())

    def forward(self, x: Tensor, row_scale: Tensor | None, attended: Tensor | None = None) -> Tensor:
        """`attended` is the output of the attention before its last map."""
        u = self.u(x, row_scale)
        v, stats = self.v.with_stats(x, row_scale, self.eps)
        if attended is None:
            return self.product(v, u, stats)
        epilogue = LinearEpilogue(
            bias=self.out_bias, residual=self.product(v, stats=stats).flatten(0, 1), gate=u.flatten(0, 1)
        )
        return self.kernels.linear(attended.flatten(0, 1), self.out, epilogue).view_as(u)


class GpuAttention(GpuModule):
    """aMLP's attention of a block's normed input, in 16 bits, without its last map."""

    def __init__(self, conversion: Conversion, norm: nn.Module, attention: TinyAttentionLayer) -> None:
        super().__init__()
        if not isinstance(norm, nn.LayerNorm) or attention.out.in_features % 16:
            raise UserError(
                "fp8 of an aMLP needs LayerNorm and an attention of a multiple of 16 channels: omit dtype for bfloat16"
            )
        self.norm_weight, self.norm_bias = norm_weights(norm)
        self.deferred_bias, self.eps = nn.Buffer(conversion.deferred_bias.clone()), norm.eps
        self.attention = copy.deepcopy(attention).to(conversion.dtype).requires_grad_(False)
        del self.attention.out

    def forward(self, z: Tensor) -> Tensor:
        x = self.kernels.norm(z, self.norm_weight, self.norm_bias, self.eps, self.deferred_bias)
        return self.attention.attended(x, Context())


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to the full fp8 range; returns the rows and their scales."""
    scale = weight.abs().amax(1).clamp(min=1e-30) / FP8_MAX
    return (weight / scale[:, None]).to(FP8), scale
