"""On a GPU: products by cuBLAS with all that its epilogues take, the rest in few kernels, replayed as one CUDA graph.

LayerNorm is one pass, or only its statistics where a fused product over tokens follows. Biases of channel MLPs wait in
`lift`, which every kernel that reads z adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.inference.lowered import Lowered, Step
from allmlp.kernels.activation.reference import activate
from allmlp.kernels.row_norm import reference as plain_norm
from allmlp.kernels.token_mix import reference as plain_mix
from allmlp.kernels.token_mix.reference import Act, Around
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.mixers.gate import SpatialGateLayer
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import AffineLayer
from allmlp.models.encoder import EncoderModel


class Kernels(NamedTuple):
    """Where the operations come from: Triton's, or their definitions."""

    stats: Callable[..., tuple[Tensor, Tensor]]
    norm: Callable[..., Tensor]
    turned: Callable[..., Tensor]
    mix: Callable[..., Tensor]
    matrix: Callable[[Tensor], Any]
    """A matrix over tokens as `mix` reads it."""
    fused: bool


def kernels(device: torch.device) -> Kernels:
    if device.type != "cuda":
        plain = plain_norm.row_stats, plain_norm.row_norm, plain_norm.row_norm_turned, plain_mix.token_mix
        return Kernels(*plain, matrix=lambda weight: weight, fused=False)
    from allmlp.kernels.row_norm import triton as fused_norm
    from allmlp.kernels.token_mix import triton as fused_mix

    norms = fused_norm.row_stats, fused_norm.row_norm, fused_norm.row_norm_turned
    return Kernels(*norms, fused_mix.token_mix, matrix=fused_mix.Matrix.of, fused=True)


class FastOnGpu(Lowered):
    def __init__(self, model: EncoderModel, dtype: torch.dtype) -> None:
        self.use = kernels(model.device)
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
        weight, bias = mix.up.weight.double(), mix.up.bias.double()
        affine = isinstance(norm, AffineLayer)
        if isinstance(norm, AffineLayer):
            bias = bias + weight @ (norm.beta.double() + norm.alpha.double() * self.lift.double())
            weight = weight * norm.alpha.double()
        lift, cast = self.lift.clone(), self.cast
        up, a = cast(weight).T, cast(bias)
        down = cast(mix.down.weight.double() if gain is None else gain[:, None] * mix.down.weight.double()).T
        act, gate, eps = self.act("channel"), self.gate(mix.inner), getattr(norm, "eps", 0.0)
        scale, shift = (norm.weight.float(), norm.bias.float()) if isinstance(norm, nn.LayerNorm) else (None, None)
        run, in_epilogue = self.use.norm, self.in_epilogue(act)
        self.wait(mix.down.bias, gain)

        def step(z: Tensor) -> Tensor:
            x = (z if affine else run(z, scale, shift, eps, lift)).flatten(0, 1)
            if in_epilogue:
                hidden = torch._addmm_activation(a, x, up, use_gelu=act != "relu")
            else:
                hidden = activate(torch.addmm(a, x, up), act)
            hidden = gate(hidden.view(*z.shape[:2], -1)).flatten(0, 1)
            flat = z.view(-1, z.shape[2])
            return torch.addmm(flat, hidden, down, out=flat).view_as(z)

        return step

    def gate(self, inner: nn.Module | None) -> Step:
        """The four versions of gMLP's spatial gate."""
        if inner is None:
            return lambda hidden: hidden
        assert isinstance(inner, SpatialGateLayer)
        combine, matrix, run = inner.combine, self.matrix(inner.proj.matrix()), self.use.mix
        around = self.prologue(inner.norm, lifted=False)._replace(bias=inner.proj.bias.float())
        stats = self.stats(inner.norm, lifted=False)

        def step(hidden: Tensor) -> Tensor:
            u, v = hidden.chunk(2, dim=2) if combine == "split" else (hidden, hidden)
            ways = {"split": "multiply", "multiply": "multiply", "add": "add", "linear": "none"}
            return run(v, matrix, around._replace(**stats(v), other=u), combine=ways[combine])

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
        return self.replay(x) if x.is_cuda else super().compute(x)

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
