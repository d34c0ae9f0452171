"""A trained model made ready to answer quickly: the same numbers, fewer passes over memory.

    z = X - lift,   lift (c): the biases of all channel MLPs so far

A channel MLP's last product adds straight into z, so its bias is not added there: it waits in `lift`, and what reads z
adds it, where it costs nothing. Affine and LayerScale are folded into the matrices beside them. LayerNorm is one pass,
or only its statistics where a product over tokens follows. A token MLP's last bias is the same for all channels of a
token: where LayerNorm reads it next it has no effect and is left out. On a GPU all of it is replayed as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.kernels.row_norm import reference as plain_norm
from allmlp.kernels.token_mix import reference as plain_mix
from allmlp.kernels.token_mix.reference import Act, Around
from allmlp.layers.block import Block, BlockLayer, Residual
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.context import Context
from allmlp.layers.mixers.gate import SpatialGateLayer
from allmlp.layers.mixers.linear import TokenLinear
from allmlp.layers.mixers.mlp import TokenMlp, TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import AffineLayer, LayerNorm
from allmlp.layers.scale import LayerScaleLayer
from allmlp.layers.stem import Tokens
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.model import Model

Step = Callable[[Tensor], Tensor]
"""From z to z; it may write over its input."""


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


def fast(model: Model, dtype: torch.dtype | None = None) -> nn.Module:
    """A module that answers as `model` does, for inference: bfloat16 on a GPU and float32 on a CPU unless told.

    Its weights are copies of the model's as they are now. The blocks of Mixer, ResMLP and gMLP are rewritten; other
    models keep theirs and are compiled on a GPU.
    """
    if not isinstance(model, EncoderModel):
        raise UserError(f"fast() takes an encoder of this library, not a {type(model).__name__}")
    dtype = dtype or (torch.bfloat16 if model.device.type == "cuda" else torch.float32)
    if not can_lower(model.spec):
        copy: Any = duplicate(model, dtype)
        compiled: Any = torch.compile(copy, mode="max-autotune")
        return compiled if model.device.type == "cuda" else copy
    return FastEncoder(model, dtype)


def can_lower(spec: Encoder) -> bool:
    """Whether the blocks are of a kind that is rewritten here."""
    block, channel = spec.block, spec.block.channel
    token = block.token is None or isinstance(block.token, (TokenMlp, TokenLinear))
    inner = channel is not None and (channel.inner is None or channel.inner.side is None)
    return block.order == "pre" and block.cross is None and token and inner


@torch.no_grad()
def duplicate(model: EncoderModel, dtype: torch.dtype) -> EncoderModel:
    with torch.device("meta"):
        copy = model.spec.build()
    copy.load_state_dict({name: value.to(dtype) for name, value in model.state_dict().items()}, assign=True)
    assert isinstance(copy, EncoderModel)
    return copy.eval().requires_grad_(False)


class FastEncoder(nn.Module):
    """Stem, rewritten blocks, norm, pool and head."""

    @torch.no_grad()
    def __init__(self, model: EncoderModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = model.spec, dtype
        self.ends = duplicate(model, dtype)
        self.use = kernels(model.device)
        self.lift = torch.zeros(model.spec.width, device=model.device)
        self.steps: list[Step] = []
        for block in model.blocks:
            assert isinstance(block, BlockLayer)
            for _, residual in block.residuals():
                self.add(residual)
        self.ends.blocks = nn.ModuleList()
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def add(self, residual: Residual) -> None:
        """The steps of one residual branch; what its last bias is goes into `lift`."""
        mix, gain = residual.mix, None
        if isinstance(residual.scale, LayerScaleLayer):
            if residual.scale.beta is not None:
                raise UserError("fast() does not know LayerScale with a shift")
            gain = residual.scale.gamma.double()
        if isinstance(mix, TokenProjection):
            self.steps.append(self.token_linear(residual.norm, mix, gain))
        elif isinstance(mix, TokenMlpLayer):
            self.steps.append(self.token_mlp(residual.norm, mix, gain))
        else:
            assert isinstance(mix, ChannelMlpLayer)
            self.steps.append(self.channel_mlp(residual.norm, mix, gain))
            self.lift = self.lift + (mix.down.bias if gain is None else gain * mix.down.bias).float()

    # --- the three kinds of branches ----------------------------------------------------------------------

    def token_linear(self, norm: nn.Module, mix: TokenProjection, gain: Tensor | None) -> Step:
        """z + gain * (A norm(z + lift) + b 1^T)."""
        around = self.prologue(norm)._replace(bias=mix.bias.float(), gain=None if gain is None else gain.float())
        matrix, stats, run = self.matrix(mix.matrix()), self.stats(norm), self.use.mix

        def step(z: Tensor) -> Tensor:
            return run(z, matrix, around._replace(**stats(z), other=z), combine="add")

        return step

    def token_mlp(self, norm: nn.Module, mix: TokenMlpLayer, gain: Tensor | None) -> Step:
        """z + gain * (W2 act(W1 norm(z + lift) + b1 1^T) + b2 1^T)."""
        act = act_name(self.spec.block, "token")
        unseen = gain is None and isinstance(self.spec.block.norm, LayerNorm) and isinstance(self.spec.norm, LayerNorm)
        if unseen and self.use.fused:
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
        act, gate, eps = act_name(self.spec.block, "channel"), self.gate(mix.inner), getattr(norm, "eps", 0.0)
        scale, shift = (norm.weight.float(), norm.bias.float()) if isinstance(norm, nn.LayerNorm) else (None, None)
        run, fused = self.use.norm, self.use.fused

        def step(z: Tensor) -> Tensor:
            x = (z if affine else run(z, scale, shift, eps, lift)).flatten(0, 1)
            # cuBLAS has the tanh form in its epilogue; in bfloat16 it rounds to the same numbers but for a few.
            if fused:
                hidden = torch._addmm_activation(a, x, up, use_gelu=act != "relu")
            else:
                hidden = plain_mix.activate(torch.addmm(a, x, up), act)
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

    def cast(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype).contiguous()

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

    # --- running it --------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        x = x if isinstance(self.spec.stem, Tokens) else x.to(self.dtype)
        return self.replay(x) if x.is_cuda else self.compute(x)

    @torch.inference_mode()
    def compute(self, x: Tensor) -> Tensor:
        # The stem's output may be a view of its input's buffer elsewhere: z is written over, so it must be ours.
        z = self.ends.embed(x, None, Context(), None).contiguous()
        for step in self.steps:
            z = step(z)
        return self.ends.forward_head(self.ends.norm((z + self.lift).to(z.dtype)))

    def replay(self, x: Tensor) -> Tensor:
        """One graph for each size of batch; the first call with a size records it."""
        key = tuple(x.shape)
        if key not in self.graphs:
            own = x.clone()
            self.compute(own)  # tunes and compiles what is not yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                answer = self.compute(own)
            self.graphs[key] = graph, own, answer
        graph, own, answer = self.graphs[key]
        own.copy_(x)
        graph.replay()
        return answer.clone()


def act_name(block: Block, slot: str) -> Act:
    mixer: Any = getattr(block, slot)
    return mixer.act
