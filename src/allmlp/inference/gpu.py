"""On a GPU: products by cuBLAS with all that its epilogues take, or by kernels of ours where they are quicker, the rest
in few kernels, replayed as one CUDA graph.

LayerNorm is one pass, or only its statistics where a fused product over tokens follows. Biases of channel MLPs wait in
`lift`, which every kernel that reads z adds.

In 8 bits (e4m3: three bits after the leading one, up to 448) a channel MLP behind LayerNorm needs no look at the data
to find its scales. With x the normalised token, without weight and bias, |x| <= sqrt(c) in all and in every channel, so

    448 / sqrt(c) x        and        448 / (|U_j| sqrt(c) + |a_j|) act(U_j x + a_j)        never leave the range.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.inference.lowered import Lowered, Step
from allmlp.kernels import has_gluon
from allmlp.kernels.activation.reference import activate
from allmlp.kernels.linear import reference as plain_linear
from allmlp.kernels.linear.reference import PART, Beside
from allmlp.kernels.row_norm import reference as plain_norm
from allmlp.kernels.token_mix import reference as plain_mix
from allmlp.kernels.token_mix.reference import Act, Around
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.mixers.gate import SpatialGateLayer
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import AffineLayer
from allmlp.models.encoder import EncoderModel

EIGHT = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT).max
SHORT, MANY = 384, 16384
"""Channels up to which, and tokens from which, our linear map with an activation is quicker than cuBLAS's on a H200."""
ROUNDING = 1.15
"""How much longer two vectors may get when they are rounded to 8 bits: (1 + 1/16)^2 and a little."""


class Kernels(NamedTuple):
    """Where the operations come from: kernels in Triton and Gluon, or their definitions."""

    stats: Callable[..., tuple[Tensor, Tensor]]
    norm: Callable[..., Tensor]
    turned: Callable[..., Tensor]
    mix: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linear_stats: Callable[..., tuple[Tensor, Tensor, Tensor]]
    matrix: Callable[[Tensor], Any]
    """A matrix over tokens as `mix` reads it."""
    fused: bool


def kernels(device: torch.device) -> Kernels:
    if device.type != "cuda":
        norm, mix, linear, matrix = plain_norm, plain_mix, plain_linear, lambda weight: weight
    else:
        from allmlp.kernels.linear import triton as linear
        from allmlp.kernels.row_norm import triton as norm
        from allmlp.kernels.token_mix.triton import Matrix

        mix = import_module(f"allmlp.kernels.token_mix.{'hopper' if has_gluon(device) else 'triton'}")
        matrix = Matrix.of
    norms = norm.row_stats, norm.row_norm, norm.row_norm_turned
    linears = linear.linear, linear.linear_stats
    return Kernels(*norms, mix.token_mix, *linears, matrix=matrix, fused=device.type == "cuda")


class FastOnGpu(Lowered):
    """With `eight` the channel MLPs of a Mixer multiply 8-bit numbers; all else is in `dtype`."""

    def __init__(self, model: EncoderModel, dtype: torch.dtype, eight: bool = False) -> None:
        self.use, self.eight = kernels(model.device), eight
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        super().__init__(model, dtype)

    def token_linear(self, norm: nn.Module, mix: TokenProjection, gain: Tensor | None) -> Step:
        """z + gain * (A norm(z + lift) + b 1^T)."""
        around = self.prologue(norm)._replace(bias=mix.bias.float(), gain=None if gain is None else gain.float())
        matrix, stats, run = self.matrix(mix.matrix()), self.stats(norm), self.use.mix

        def step(z: Tensor) -> Tensor:
            return run(z, matrix, around._replace(**stats(z), other=z), combine="add")

        return step

    def token_mlp(self, norm: nn.Module, mix: TokenMlpLayer, gain: Tensor | None) -> Step:
        """z + gain * (W2 act(W1 norm(z + lift) + b1 1^T) + b2 1^T)."""
        act, unseen = self.act("token"), self.forgets(gain)
        if unseen and self.in_epilogue(act):
            return self.turned_token_mlp(norm, mix, act)
        up, down = self.matrix(mix.up.weight), self.matrix(mix.down.weight)
        first = self.prologue(norm)._replace(bias=mix.up.bias.float())
        last = Around(bias=None if unseen else mix.down.bias.float(), gain=None if gain is None else gain.float())
        stats, run = self.stats(norm), self.use.mix

        def step(z: Tensor) -> Tensor:
            hidden = run(z, up, first._replace(**stats(z)), act=act)  # b d c
            if unseen:
                return torch.baddbmm(z, down.expand(len(z), -1, -1), hidden, out=z)
            return run(hidden, down, last._replace(other=z), combine="add")

        return step

    def turned_token_mlp(self, norm: nn.Module, mix: TokenMlpLayer, act: Act) -> Step:
        """The same with channels as rows in between: both products are cuBLAS's, with all that stands around them."""
        width = -(-mix.up.in_features // 8) * 8
        up, bias = self.cast(F.pad(mix.up.weight, (0, width - mix.up.in_features))).T, self.cast(mix.up.bias)
        down, around, run = self.cast(mix.down.weight), self.prologue(norm), self.use.turned
        eps = getattr(norm, "eps", 0.0)

        def step(z: Tensor) -> Tensor:
            x = run(z, around.scale, around.shift, eps, around.lift, width)  # b c s
            hidden = torch._addmm_activation(bias, x.flatten(0, 1), up, use_gelu=act != "relu").view(*x.shape[:2], -1)
            return torch.baddbmm(z, down.expand(len(z), -1, -1), hidden.transpose(1, 2), out=z)

        return step

    def channel_mlp(self, norm: nn.Module, mix: ChannelMlpLayer, gain: Tensor | None) -> Step:
        """z + gain * V inner(act(U norm(z + lift) + a)), without its last bias."""
        if self.eight:
            return self.channel_mlp_in_8_bits(norm, mix, gain)
        weight, bias = mix.up.weight.double(), mix.up.bias.double()
        affine = isinstance(norm, AffineLayer)
        if isinstance(norm, AffineLayer):
            bias = bias + weight @ (norm.beta.double() + norm.alpha.double() * self.lift.double())
            weight = weight * norm.alpha.double()
        lift, down = self.lift.clone(), self.cast(scaled(mix.down.weight, gain)).T
        eps = getattr(norm, "eps", 0.0)
        scale, shift = (norm.weight.float(), norm.bias.float()) if isinstance(norm, nn.LayerNorm) else (None, None)
        run, middle = self.use.norm, self.middle(weight, bias, mix.inner)
        self.wait(mix.down.bias, gain)

        def step(z: Tensor) -> Tensor:
            hidden = middle(z if affine else run(z, scale, shift, eps, lift)).flatten(0, 1)
            flat = z.view(-1, z.shape[2])
            return torch.addmm(flat, hidden, down, out=flat).view_as(z)

        return step

    def middle(self, weight: Tensor, bias: Tensor, inner: nn.Module | None) -> Step:
        """inner(act(U x + a))."""
        act = self.act("channel")
        up, a = self.cast(weight), self.cast(bias)
        beside = Beside(bias=bias.to(self.lift.dtype))
        # Our linear map multiplies by the matrix units, which float32 numbers would be rounded for, and the copy engine
        # moves its rows.
        can = (self.dtype.itemsize <= 2 and up.shape[1] % 8 == 0 and len(up) % 8 == 0) or not self.use.fused
        if inner is None:
            own, short = self.use.linear, can and up.shape[1] <= SHORT

            def ungated(x: Tensor) -> Tensor:
                if short and x.shape[0] * x.shape[1] >= MANY:
                    return own(x.flatten(0, 1), up, beside, act).view(*x.shape[:2], len(up))
                return self.linear_act(x, up.T, a, act)

            return ungated
        gate = self.gate(inner)
        assert isinstance(inner, SpatialGateLayer)
        in_parts = isinstance(inner.norm, nn.LayerNorm) and inner.combine == "split" and len(up) % (2 * PART) == 0
        if not (in_parts and can):
            stats, half = self.stats(inner.norm, lifted=False), inner.combine == "split"

            def plain(x: Tensor) -> Tensor:
                hidden = self.linear_act(x, up.T, a, act)
                return gate(hidden, **stats(hidden.chunk(2, dim=2)[1] if half else hidden))

            return plain
        run, eps = self.use.linear_stats, inner.norm.eps

        def step(x: Tensor) -> Tensor:
            hidden, mean, rstd = run(x.flatten(0, 1), up, beside, act, eps)
            sizes = x.shape[:2]
            return gate(hidden.view(*sizes, -1), mean=mean.view(sizes), rstd=rstd.view(sizes))

        return step

    def linear_act(self, x: Tensor, weight: Tensor, bias: Tensor, act: Act) -> Tensor:
        flat = x.flatten(0, 1)
        if self.in_epilogue(act):
            hidden = torch._addmm_activation(bias, flat, weight, use_gelu=act != "relu")
        else:
            hidden = activate(torch.addmm(bias, flat, weight), act)
        return hidden.view(*x.shape[:2], len(bias))

    def gate(self, inner: nn.Module) -> Callable[..., Tensor]:
        """The four versions of gMLP's spatial gate, given what its norm must know of each token."""
        assert isinstance(inner, SpatialGateLayer)
        combine, matrix, run = inner.combine, self.matrix(inner.proj.matrix()), self.use.mix
        around = self.prologue(inner.norm, lifted=False)._replace(bias=inner.proj.bias.float())
        ways = {"split": "multiply", "multiply": "multiply", "add": "add", "linear": "none"}

        def step(hidden: Tensor, **stats: Tensor) -> Tensor:
            u, v = hidden.chunk(2, dim=2) if combine == "split" else (hidden, hidden)
            return run(v, matrix, around._replace(**stats, other=u), combine=ways[combine])

        return step

    def channel_mlp_in_8_bits(self, norm: nn.Module, mix: ChannelMlpLayer, gain: Tensor | None) -> Step:
        if not isinstance(norm, nn.LayerNorm) or mix.inner is not None:
            raise UserError(
                "8 bits are for channel MLPs behind LayerNorm, as in a Mixer: leave the type out for bfloat16"
            )
        if len(mix.up.weight) % 16 or len(norm.weight) % 16:
            raise UserError(f"8 bits need widths in multiples of 16, not {tuple(mix.up.weight.shape)}")
        channels, wide = len(norm.weight), self.lift.dtype
        weight = mix.up.weight.double() * norm.weight.double()
        bias = mix.up.bias.double() + mix.up.weight.double() @ norm.bias.double()
        unit = LARGEST / channels**0.5
        reach = LARGEST / (ROUNDING * weight.norm(dim=1) * channels**0.5 + bias.abs()).clamp(min=1e-30)
        up, out = in_8_bits(weight)
        down, last = in_8_bits(scaled(mix.down.weight, gain) / reach)
        first = Beside((out / unit).to(wide), bias.to(wide), reach.to(wide))
        lift, units = self.lift.clone(), torch.full_like(self.lift, unit)
        act, eps, run, linear = self.act("channel"), norm.eps, self.use.norm, self.use.linear
        last = last.to(wide)
        self.wait(mix.down.bias, gain)

        def step(z: Tensor) -> Tensor:
            x = run(z, units, None, eps, lift, EIGHT).flatten(0, 1)
            hidden = linear(x, up, first, act)
            return linear(hidden, down, Beside(last, other=z.view(-1, channels))).view_as(z)

        return step

    # --- what they share -------------------------------------------------------------------------------------

    def in_epilogue(self, act: Act) -> bool:
        """Whether cuBLAS applies the activation: it has GELU in its tanh form, which rounds to the same numbers but for
        a few in bfloat16, and in float32 does not.
        """
        return self.use.fused and (act != "gelu" or self.dtype.itemsize <= 2)

    def matrix(self, weight: Tensor) -> Any:
        return self.use.matrix(self.cast(weight))

    def prologue(self, norm: nn.Module, lifted: bool = True) -> Around:
        """What a norm does to each channel."""
        lift = self.lift.clone() if lifted else None
        if isinstance(norm, AffineLayer):
            return Around(scale=norm.alpha.float(), shift=norm.beta.float(), lift=lift)
        assert isinstance(norm, nn.LayerNorm)
        return Around(scale=norm.weight.float(), shift=norm.bias.float(), lift=lift)

    def stats(self, norm: nn.Module, lifted: bool = True) -> Callable[[Tensor], dict[str, Tensor]]:
        """What a norm must know of each token."""
        if not isinstance(norm, nn.LayerNorm):
            return lambda z: {}
        lift, eps, run = self.lift.clone() if lifted else None, norm.eps, self.use.stats
        return lambda z: dict(zip(("mean", "rstd"), run(z, eps, lift)))

    def compute(self, x: Tensor) -> Tensor:
        return self.replay(x) if x.is_cuda and len(x) else super().compute(x)

    def replay(self, x: Tensor) -> Tensor:
        """One graph for each size of batch; the first call with a size records it."""
        key = tuple(x.shape)
        if key not in self.graphs:
            own = x.clone()
            super().compute(own)  # tunes and compiles what is not yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                answer = super().compute(own)
            self.graphs[key] = graph, own, answer
        graph, own, answer = self.graphs[key]
        own.copy_(x)
        graph.replay()
        return answer.clone()


def scaled(weight: Tensor, gain: Tensor | None) -> Tensor:
    return weight.double() if gain is None else gain[:, None] * weight.double()


def in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that fill the range, and the factors that bring them back."""
    back = weight.abs().amax(1).clamp(min=1e-30) / LARGEST
    return (weight / back[:, None]).to(EIGHT), back
