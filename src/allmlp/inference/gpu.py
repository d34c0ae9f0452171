"""Fast inference on a GPU: cuBLAS products with fused epilogues, or kernels of this library where they are faster, all
replayed as one CUDA graph.

LayerNorm is one pass, or only its statistics where a fused product over tokens follows. The last biases of channel MLPs
are deferred: every kernel that reads z adds `deferred_bias`.

In fp8 (e4m3: 3 mantissa bits, maximum 448) a channel MLP after LayerNorm needs no calibration data to find its scales.
For a normalized token x, without weight and bias, |x| <= sqrt(c) as a vector and thus in every channel, so

    448 / sqrt(c) x        and        448 / (|U_j| sqrt(c) + |a_j|) act(U_j x + a_j)        never overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.inference.encoder import FastEncoder, TensorFn
from allmlp.kernels import has_gluon
from allmlp.kernels.activation.reference import ActivationName, activate
from allmlp.kernels.layer_norm import reference as reference_norm
from allmlp.kernels.linear import reference as reference_linear
from allmlp.kernels.linear.reference import EPILOGUE_N, LinearEpilogue
from allmlp.kernels.token_mix import reference as reference_mix
from allmlp.kernels.token_mix.reference import Combine, TokenMixEpilogue
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.mixers.gate import SpatialGatingUnitLayer
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import AffineLayer
from allmlp.models.encoder import EncoderModel

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_ROUNDING = 1.15
"""Bound on how much rounding two vectors to fp8 can grow their product: (1 + 1/16)^2 and a margin."""
LINEAR_MAX_CHANNELS, LINEAR_MIN_TOKENS = 384, 16384
"""Where our linear kernel with an activation is faster than cuBLAS on an H200."""
GATE_COMBINE: dict[str, Combine] = {
    "split": "multiply",
    "multiplicative": "multiply",
    "additive": "add",
    "linear": "none",
}


class Kernels(NamedTuple):
    """The ops to use: Triton and Gluon kernels, or their reference implementations."""

    norm_stats: Callable[..., tuple[Tensor, Tensor]]
    norm: Callable[..., Tensor]
    norm_transposed: Callable[..., Tensor]
    token_mix: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linear_stats: Callable[..., tuple[Tensor, Tensor, Tensor]]
    pack: Callable[[Tensor], Any]
    """Brings a matrix over tokens into the format that `token_mix` reads."""
    on_gpu: bool


def select_kernels(device: torch.device) -> Kernels:
    on_gpu = device.type == "cuda"
    if on_gpu:
        from allmlp.kernels.layer_norm import triton as norm
        from allmlp.kernels.linear import triton as linear
        from allmlp.kernels.token_mix.triton import PackedMatrix

        mix = import_module(f"allmlp.kernels.token_mix.{'hopper' if has_gluon(device) else 'triton'}")
        pack = PackedMatrix.pack
    else:
        norm, mix, linear, pack = reference_norm, reference_mix, reference_linear, lambda weight: weight
    norms = norm.layer_norm_stats, norm.layer_norm, norm.layer_norm_transposed
    return Kernels(*norms, mix.token_mix, linear.linear, linear.linear_stats, pack, on_gpu)


class GpuFastEncoder(FastEncoder):
    """With `fp8` the channel MLPs of a Mixer run in fp8 and everything else in `dtype`."""

    def __init__(self, model: EncoderModel, dtype: torch.dtype, fp8: bool = False) -> None:
        self.kernels, self.fp8 = select_kernels(model.device), fp8
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        super().__init__(model, dtype)

    def token_linear(self, norm: nn.Module, mix: TokenProjection, layer_scale: Tensor | None) -> TensorFn:
        epilogue = self.norm_epilogue(norm)._replace(bias=mix.bias.float(), layer_scale=as_float(layer_scale))
        matrix, stats, token_mix = self.pack(mix.matrix()), self.norm_stats(norm), self.kernels.token_mix

        def forward(z: Tensor) -> Tensor:
            return token_mix(z, matrix, epilogue._replace(**stats(z), other=z), combine="add")

        return forward

    def token_mlp(self, norm: nn.Module, mix: TokenMlpLayer, layer_scale: Tensor | None) -> TensorFn:
        act, bias_cancels = self.act("token"), self.token_bias_cancels(layer_scale)
        if bias_cancels and self.fuses_act(act):
            return self.transposed_token_mlp(norm, mix, act)
        up, down = self.pack(mix.up.weight), self.pack(mix.down.weight)
        up_epilogue = self.norm_epilogue(norm)._replace(bias=mix.up.bias.float())
        down_bias = None if bias_cancels else mix.down.bias.float()
        down_epilogue = TokenMixEpilogue(bias=down_bias, layer_scale=as_float(layer_scale))
        stats, token_mix = self.norm_stats(norm), self.kernels.token_mix

        def forward(z: Tensor) -> Tensor:
            hidden = token_mix(z, up, up_epilogue._replace(**stats(z)), act=act)  # b d c
            if bias_cancels:
                return torch.baddbmm(z, down.expand(len(z), -1, -1), hidden, out=z)
            return token_mix(hidden, down, down_epilogue._replace(other=z), combine="add")

        return forward

    def transposed_token_mlp(self, norm: nn.Module, mix: TokenMlpLayer, act: ActivationName) -> TensorFn:
        """The token MLP on transposed activations: both products are cuBLAS GEMMs with fused epilogues."""
        width = -(-mix.up.in_features // 8) * 8
        up, bias = self.cast(F.pad(mix.up.weight, (0, width - mix.up.in_features))).T, self.cast(mix.up.bias)
        down, epilogue, norm_transposed = (
            self.cast(mix.down.weight),
            self.norm_epilogue(norm),
            self.kernels.norm_transposed,
        )
        eps = getattr(norm, "eps", 0.0)

        def forward(z: Tensor) -> Tensor:
            x = norm_transposed(
                z, epilogue.norm_weight, epilogue.norm_bias, eps, epilogue.deferred_bias, width
            )  # b c s
            hidden = torch._addmm_activation(bias, x.flatten(0, 1), up, use_gelu=act != "relu").view(*x.shape[:2], -1)
            return torch.baddbmm(z, down.expand(len(z), -1, -1), hidden.transpose(1, 2), out=z)

        return forward

    def channel_mlp(self, norm: nn.Module, mix: ChannelMlpLayer, layer_scale: Tensor | None) -> TensorFn:
        """The branch without its last bias, which is deferred."""
        if self.fp8:
            return self.channel_mlp_fp8(norm, mix, layer_scale)
        weight, bias = mix.up.weight.double(), mix.up.bias.double()
        affine = isinstance(norm, AffineLayer)
        if isinstance(norm, AffineLayer):
            bias = bias + weight @ (norm.beta.double() + norm.alpha.double() * self.deferred_bias.double())
            weight = weight * norm.alpha.double()
        deferred_bias, down = self.deferred_bias.clone(), self.cast(scale_rows(mix.down.weight, layer_scale)).T
        eps = getattr(norm, "eps", 0.0)
        scale, shift = (norm.weight.float(), norm.bias.float()) if isinstance(norm, nn.LayerNorm) else (None, None)
        normalize, hidden = self.kernels.norm, self.hidden(weight, bias, mix.inner)
        self.defer_bias(mix.down.bias, layer_scale)

        def forward(z: Tensor) -> Tensor:
            h = hidden(z if affine else normalize(z, scale, shift, eps, deferred_bias)).flatten(0, 1)
            flat = z.view(-1, z.shape[2])
            return torch.addmm(flat, h, down, out=flat).view_as(z)

        return forward

    def hidden(self, weight: Tensor, bias: Tensor, inner: nn.Module | None) -> TensorFn:
        """inner(act(U x + a))."""
        act = self.act("channel")
        up, up_bias = self.cast(weight), self.cast(bias)
        epilogue = LinearEpilogue(bias=bias.to(self.deferred_bias.dtype))
        # Our linear kernel uses tensor cores, which would round float32 inputs, and TMA, which needs aligned rows.
        aligned = up.shape[1] % 8 == 0 and len(up) % 8 == 0
        supported = (self.dtype.itemsize <= 2 and aligned) or not self.kernels.on_gpu
        if inner is None:
            linear, small = self.kernels.linear, supported and up.shape[1] <= LINEAR_MAX_CHANNELS

            def ungated(x: Tensor) -> Tensor:
                if small and x.shape[0] * x.shape[1] >= LINEAR_MIN_TOKENS:
                    return linear(x.flatten(0, 1), up, epilogue, act).view(*x.shape[:2], len(up))
                return self.linear_act(x, up.T, up_bias, act)

            return ungated
        gate = self.gate(inner)
        assert isinstance(inner, SpatialGatingUnitLayer)
        split = inner.variant == "split"
        if not (supported and split and isinstance(inner.norm, nn.LayerNorm) and len(up) % (2 * EPILOGUE_N) == 0):
            stats = self.norm_stats(inner.norm, deferred=False)

            def gated(x: Tensor) -> Tensor:
                h = self.linear_act(x, up.T, up_bias, act)
                return gate(h, **stats(h.chunk(2, dim=2)[1] if split else h))

            return gated
        linear_stats, eps = self.kernels.linear_stats, inner.norm.eps

        def gated_with_stats(x: Tensor) -> Tensor:
            h, mean, rstd = linear_stats(x.flatten(0, 1), up, epilogue, act, eps)
            shape = x.shape[:2]
            return gate(h.view(*shape, -1), mean=mean.view(shape), rstd=rstd.view(shape))

        return gated_with_stats

    def linear_act(self, x: Tensor, weight: Tensor, bias: Tensor, act: ActivationName) -> Tensor:
        flat = x.flatten(0, 1)
        if self.fuses_act(act):
            hidden = torch._addmm_activation(bias, flat, weight, use_gelu=act != "relu")
        else:
            hidden = activate(torch.addmm(bias, flat, weight), act)
        return hidden.view(*x.shape[:2], len(bias))

    def gate(self, inner: nn.Module) -> Callable[..., Tensor]:
        """A spatial gating unit of any variant, as a function of the hidden features and its norm's statistics."""
        assert isinstance(inner, SpatialGatingUnitLayer)
        variant, matrix, token_mix = inner.variant, self.pack(inner.proj.matrix()), self.kernels.token_mix
        epilogue = self.norm_epilogue(inner.norm, deferred=False)._replace(bias=inner.proj.bias.float())

        def forward(hidden: Tensor, **stats: Tensor) -> Tensor:
            u, v = hidden.chunk(2, dim=2) if variant == "split" else (hidden, hidden)
            return token_mix(v, matrix, epilogue._replace(**stats, other=u), combine=GATE_COMBINE[variant])

        return forward

    def channel_mlp_fp8(self, norm: nn.Module, mix: ChannelMlpLayer, layer_scale: Tensor | None) -> TensorFn:
        if not isinstance(norm, nn.LayerNorm) or mix.inner is not None:
            raise UserError("fp8 is only for channel MLPs after LayerNorm, as in a Mixer: omit dtype to use bfloat16")
        if len(mix.up.weight) % 16 or len(norm.weight) % 16:
            raise UserError(f"fp8 needs widths that are multiples of 16, not {tuple(mix.up.weight.shape)}")
        channels, wide = len(norm.weight), self.deferred_bias.dtype
        weight = mix.up.weight.double() * norm.weight.double()
        bias = mix.up.bias.double() + mix.up.weight.double() @ norm.bias.double()
        input_scale = FP8_MAX / channels**0.5
        hidden_bound = FP8_ROUNDING * weight.norm(dim=1) * channels**0.5 + bias.abs()
        hidden_scale = FP8_MAX / hidden_bound.clamp(min=1e-30)
        up, up_scale = quantize_fp8(weight)
        down, down_scale = quantize_fp8(scale_rows(mix.down.weight, layer_scale) / hidden_scale)
        up_epilogue = LinearEpilogue((up_scale / input_scale).to(wide), bias.to(wide), hidden_scale.to(wide))
        down_epilogue = LinearEpilogue(down_scale.to(wide))
        deferred_bias, norm_weight = self.deferred_bias.clone(), torch.full_like(self.deferred_bias, input_scale)
        act, eps, normalize, linear = self.act("channel"), norm.eps, self.kernels.norm, self.kernels.linear
        self.defer_bias(mix.down.bias, layer_scale)

        def forward(z: Tensor) -> Tensor:
            x = normalize(z, norm_weight, None, eps, deferred_bias, FP8).flatten(0, 1)
            hidden = linear(x, up, up_epilogue, act)
            return linear(hidden, down, down_epilogue._replace(residual=z.view(-1, channels))).view_as(z)

        return forward

    # --- shared by the branches ------------------------------------------------------------------------------

    def fuses_act(self, act: ActivationName) -> bool:
        """Whether cuBLAS applies the activation in its epilogue.

        It has GELU only in the tanh form, which in bfloat16 nearly always rounds to the same value, but not in float32.
        """
        return self.kernels.on_gpu and (act != "gelu" or self.dtype.itemsize <= 2)

    def pack(self, weight: Tensor) -> Any:
        return self.kernels.pack(self.cast(weight))

    def norm_epilogue(self, norm: nn.Module, deferred: bool = True) -> TokenMixEpilogue:
        """The per-channel operands of a norm."""
        assert isinstance(norm, (AffineLayer, nn.LayerNorm))
        weight, bias = (norm.alpha, norm.beta) if isinstance(norm, AffineLayer) else (norm.weight, norm.bias)
        deferred_bias = self.deferred_bias.clone() if deferred else None
        return TokenMixEpilogue(norm_weight=weight.float(), norm_bias=bias.float(), deferred_bias=deferred_bias)

    def norm_stats(self, norm: nn.Module, deferred: bool = True) -> Callable[[Tensor], dict[str, Tensor]]:
        """A function that computes the per-token operands of a norm."""
        if not isinstance(norm, nn.LayerNorm):
            return lambda z: {}
        deferred_bias, eps, stats = self.deferred_bias.clone() if deferred else None, norm.eps, self.kernels.norm_stats
        return lambda z: dict(zip(("mean", "rstd"), stats(z, eps, deferred_bias)))

    def compute(self, x: Tensor) -> Tensor:
        return self.replay(x) if x.is_cuda and len(x) else super().compute(x)

    def replay(self, x: Tensor) -> Tensor:
        """Replay the CUDA graph of this input shape; the first call with a shape captures it."""
        key = tuple(x.shape)
        if key not in self.graphs:
            graph_input = x.clone()
            super().compute(graph_input)  # warm-up: autotunes and compiles kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                graph_output = super().compute(graph_input)
            self.graphs[key] = graph, graph_input, graph_output
        graph, graph_input, graph_output = self.graphs[key]
        graph_input.copy_(x)
        graph.replay()
        return graph_output.clone()


def as_float(layer_scale: Tensor | None) -> Tensor | None:
    return None if layer_scale is None else layer_scale.float()


def scale_rows(weight: Tensor, layer_scale: Tensor | None) -> Tensor:
    return weight.double() if layer_scale is None else layer_scale[:, None] * weight.double()


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to the full fp8 range; returns the rows and their scales."""
    scale = weight.abs().amax(1).clamp(min=1e-30) / FP8_MAX
    return (weight / scale[:, None]).to(FP8), scale
