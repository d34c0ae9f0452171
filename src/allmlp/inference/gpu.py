"""Fast inference on a GPU: cuBLAS products with fused epilogues, or kernels of this library where they are faster, all
replayed as one CUDA graph.

LayerNorm is one pass, or only its statistics where a fused product over many tokens follows. The last biases of channel
MLPs are deferred: every kernel that reads z adds `deferred_bias`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.inference.encoder import Conversion, FastEncoder, scale_rows
from allmlp.kernels import has_gluon, has_tma
from allmlp.kernels.activation.reference import ActivationName, activate
from allmlp.kernels.launch import num_sms
from allmlp.kernels.layer_norm import reference as reference_norm
from allmlp.kernels.linear import reference as reference_linear
from allmlp.kernels.linear.reference import EPILOGUE_N, LinearEpilogue
from allmlp.kernels.token_mix import reference as reference_mix
from allmlp.kernels.token_mix.reference import Combine, PackedMatrix, TokenMixEpilogue
from allmlp.kernels.unit_rows import reference as reference_rows
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.mixers.gate import SpatialGatingUnitLayer
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import AffineLayer
from allmlp.layers.pool import MeanPoolLayer
from allmlp.layers.stem import PatchEmbedLayer, patch_view

LINEAR_MAX_CHANNELS, LINEAR_MIN_TOKENS = 384, 16384
"""Limits within which our linear kernel with an activation is faster than cuBLAS on an H200."""
FEW_TOKENS = 4096
"""Tokens of a batch up to which LayerNorm is a pass of its own: fewer kernels are then faster than fewer bytes."""
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
    norm_mean: Callable[..., Tensor]
    token_mix: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linear_stats: Callable[..., tuple[Tensor, Tensor, Tensor]]
    unit_rows: Callable[..., tuple[Tensor, Tensor]]


def select_kernels(device: torch.device) -> Kernels:
    if device.type == "cuda":
        from allmlp.kernels.layer_norm import triton as norm
        from allmlp.kernels.linear import triton as linear
        from allmlp.kernels.unit_rows import triton as rows

        mix = import_module(f"allmlp.kernels.token_mix.{'hopper' if has_gluon(device) else 'triton'}")
    else:
        norm, mix, linear, rows = reference_norm, reference_mix, reference_linear, reference_rows
    norms = norm.layer_norm_stats, norm.layer_norm, norm.layer_norm_transposed, norm.layer_norm_mean
    return Kernels(*norms, mix.token_mix, linear.linear, linear.linear_stats, rows.unit_rows)


def cublas_fuses(act: ActivationName, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuBLAS applies the activation in its epilogue.

    It has GELU only in the tanh form, which in bfloat16 nearly always rounds to the same value, but not in float32.
    """
    return device.type == "cuda" and (act != "gelu" or dtype.itemsize <= 2)


def has_few_tokens(x: Tensor) -> bool:
    """Whether launching a kernel takes longer than what it computes, for tokens b s c."""
    return x.shape[0] * x.shape[1] <= FEW_TOKENS


class GpuFastEncoder(FastEncoder):
    def fuse(self, conversion: Conversion, norm: nn.Module, mix: nn.Module, layer_scale: Tensor | None) -> nn.Module:
        """The last bias of a channel MLP is deferred."""
        if isinstance(mix, TokenProjection):
            return GpuTokenLinear(conversion, norm, mix, layer_scale)
        if isinstance(mix, TokenMlpLayer):
            fused = cublas_fuses(conversion.act("token"), self.dtype, mix.up.weight.device)
            if fused and conversion.token_bias_cancels(layer_scale):
                return GpuTransposedTokenMlp(conversion, norm, mix)
            return GpuTokenMlp(conversion, norm, mix, layer_scale)
        assert isinstance(mix, ChannelMlpLayer)
        branch = self.channel_mlp(conversion, norm, mix, layer_scale)
        conversion.defer_bias(mix.down.bias, layer_scale)
        return branch

    def channel_mlp(
        self, conversion: Conversion, norm: nn.Module, mix: ChannelMlpLayer, layer_scale: Tensor | None
    ) -> nn.Module:
        return GpuChannelMlp(conversion, norm, mix, layer_scale)

    def view(self, x: Tensor) -> Tensor:
        """Patches as a view of the images: the copy into the buffer of the CUDA graph, made anyway, sorts them."""
        stem = self.stem_and_head.stem
        if not isinstance(stem, PatchEmbedLayer) or stem.spec.kernel is not None:
            return x
        stem.validate(x)
        return patch_view(x, stem.spec.patch_size)

    def embed(self, x: Tensor) -> Tensor:
        stem = self.stem_and_head.stem
        return stem.embed_grid(x) if isinstance(stem, PatchEmbedLayer) and x.dim() == 6 else super().embed(x)

    def compute(self, x: Tensor) -> Tensor:
        if x.is_cuda and not self.graphs.groups and not torch.cuda.is_current_stream_capturing():
            # First call: compile and tune all kernels, so that later batch sizes do not have to.
            for batch_size in self.tuned_batch_sizes():
                super().compute(x.new_zeros(batch_size, *x.shape[1:]))
        return super().compute(x)

    def finish(self, z: Tensor) -> Tensor:
        """The mean of normalized tokens reads z once."""
        model = self.stem_and_head
        if not isinstance(model.pool, MeanPoolLayer) or not len(z):
            return super().finish(z)
        norm, wide = model.norm, self.deferred_bias.dtype
        if isinstance(norm, AffineLayer):  # commutes with the mean
            alpha, beta = norm.alpha.to(wide), norm.beta.to(wide)
            pooled = torch.addcmul(beta, alpha, z.mean(1, dtype=wide) + self.deferred_bias).to(z.dtype)
        elif isinstance(norm, nn.LayerNorm):
            kernel = select_kernels(z.device).norm_mean
            pooled = kernel(z, norm.weight, norm.bias, norm.eps, self.deferred_bias)
        else:
            return super().finish(z)
        return pooled if model.head is None else model.head(pooled, model.embedding)

    def tuned_batch_sizes(self) -> list[int]:
        """Numbers of examples that use every kernel there is for this model, with few and with many of them."""
        sms, sizes = num_sms(self.device), {1}
        for ctx in self.spec.build_contexts:
            few = FEW_TOKENS // ctx.tokens
            tiles = -(-ctx.tokens // 256) * -(-ctx.channels // 128)
            large = max(-(-max(LINEAR_MIN_TOKENS, 128 * sms) // ctx.tokens), -(-sms // tiles))
            sizes |= {max(few, 1), few + 1, large}
        return sorted(sizes)


class GpuModule(nn.Module):
    """A part of a branch, with the kernels for the device it is on."""

    @property
    def kernels(self) -> Kernels:
        return select_kernels(next(self.buffers()).device)


class GpuTokenProduct(GpuModule):
    """act(A norm(x) + b 1^T), combined with `other`."""

    def __init__(
        self,
        conversion: Conversion,
        weight: Tensor,
        bias: Tensor | None,
        norm: nn.Module | None = None,
        deferred_bias: Tensor | None = None,
        layer_scale: Tensor | None = None,
        act: ActivationName = "none",
        combine: Combine = "none",
    ) -> None:
        super().__init__()
        matrix = PackedMatrix.pack(conversion.cast(weight))
        self.weight, self.row_sum = nn.Buffer(matrix.weight), nn.Buffer(matrix.row_sum)
        self.bias, self.layer_scale = as_float(bias), as_float(layer_scale)
        self.norm_weight, self.norm_bias = norm_weights(norm)
        self.deferred_bias = None if deferred_bias is None else nn.Buffer(deferred_bias)
        self.act, self.combine = act, combine
        self.eps = norm.eps if isinstance(norm, nn.LayerNorm) else None

    def forward(self, x: Tensor, other: Tensor | None = None, stats: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """`stats` are mean and rstd of LayerNorm, if known."""
        if stats is None and self.eps is not None and has_few_tokens(x):
            x = self.kernels.norm(x, self.norm_weight, self.norm_bias, self.eps, self.deferred_bias)
            epilogue = TokenMixEpilogue(self.bias, other=other, layer_scale=self.layer_scale)
        else:
            if stats is None and self.eps is not None:
                stats = self.kernels.norm_stats(x, self.eps, self.deferred_bias)
            mean, rstd = stats or (None, None)
            epilogue = TokenMixEpilogue(
                self.bias, self.norm_weight, self.norm_bias, mean, rstd, self.deferred_bias, other, self.layer_scale
            )
        return self.kernels.token_mix(x, PackedMatrix(self.weight, self.row_sum), epilogue, self.act, self.combine)


class GpuTokenLinear(GpuModule):
    def __init__(
        self, conversion: Conversion, norm: nn.Module, mix: TokenProjection, layer_scale: Tensor | None
    ) -> None:
        super().__init__()
        deferred_bias = conversion.deferred_bias.clone()
        self.product = GpuTokenProduct(
            conversion, mix.matrix(), mix.bias, norm, deferred_bias, layer_scale, combine="add"
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.product(z, other=z)


class GpuTokenMlp(GpuModule):
    def __init__(self, conversion: Conversion, norm: nn.Module, mix: TokenMlpLayer, layer_scale: Tensor | None) -> None:
        super().__init__()
        bias_cancels = conversion.token_bias_cancels(layer_scale)
        self.down_weight = nn.Buffer(conversion.cast(mix.down.weight)) if bias_cancels else None
        act, deferred_bias = conversion.act("token"), conversion.deferred_bias.clone()
        self.up = GpuTokenProduct(conversion, mix.up.weight, mix.up.bias, norm, deferred_bias, act=act)
        self.down = None
        if not bias_cancels:
            self.down = GpuTokenProduct(
                conversion, mix.down.weight, mix.down.bias, layer_scale=layer_scale, combine="add"
            )

    def forward(self, z: Tensor) -> Tensor:
        hidden = self.up(z)  # b d c
        if self.down is not None:
            return self.down(hidden, other=z)
        assert self.down_weight is not None
        return torch.baddbmm(z, self.down_weight.expand(len(z), -1, -1), hidden, out=z)


class GpuTransposedTokenMlp(GpuModule):
    """The token MLP on transposed activations: both products are cuBLAS GEMMs with fused epilogues."""

    def __init__(self, conversion: Conversion, norm: nn.Module, mix: TokenMlpLayer) -> None:
        super().__init__()
        self.norm_weight, self.norm_bias = norm_weights(norm)
        self.deferred_bias = nn.Buffer(conversion.deferred_bias.clone())
        self.up = nn.Buffer(conversion.cast(F.pad(mix.up.weight, (0, -mix.up.in_features % 8))))
        self.up_bias = nn.Buffer(conversion.cast(mix.up.bias))
        self.down = nn.Buffer(conversion.cast(mix.down.weight))
        self.act, self.eps = conversion.act("token"), getattr(norm, "eps", 0.0)

    def forward(self, z: Tensor) -> Tensor:
        width = self.up.shape[1]
        x = self.kernels.norm_transposed(
            z, self.norm_weight, self.norm_bias, self.eps, self.deferred_bias, width
        )  # b c s
        hidden = torch._addmm_activation(self.up_bias, x.flatten(0, 1), self.up.T, use_gelu=self.act != "relu")
        hidden = hidden.view(*x.shape[:2], -1).transpose(1, 2)
        return torch.baddbmm(z, self.down.expand(len(z), -1, -1), hidden, out=z)


class GpuChannelMlp(GpuModule):
    def __init__(
        self, conversion: Conversion, norm: nn.Module, mix: ChannelMlpLayer, layer_scale: Tensor | None
    ) -> None:
        super().__init__()
        folds = isinstance(norm, AffineLayer)
        weight, bias = conversion.fold(norm, mix) if folds else (mix.up.weight.double(), mix.up.bias.double())
        self.norm_weight, self.norm_bias = norm_weights(None if folds else norm)
        self.deferred_bias = nn.Buffer(conversion.deferred_bias.clone())
        self.down = nn.Buffer(conversion.cast(scale_rows(mix.down.weight, layer_scale)))
        self.eps = getattr(norm, "eps", 0.0)
        up = GpuLinearAct(conversion, weight, bias)
        if mix.inner is None:
            self.hidden: nn.Module = up
        else:
            assert isinstance(mix.inner, SpatialGatingUnitLayer)
            self.hidden = GpuGate(conversion, up, mix.inner)

    def forward(self, z: Tensor) -> Tensor:
        x = z
        if self.norm_weight is not None:
            x = self.kernels.norm(z, self.norm_weight, self.norm_bias, self.eps, self.deferred_bias)
        flat = z.view(-1, z.shape[2])
        return torch.addmm(flat, self.hidden(x).flatten(0, 1), self.down.T, out=flat).view_as(z)


class GpuLinearAct(GpuModule):
    """act(U x + a), by our kernel where there are few channels and many tokens, else by cuBLAS."""

    def __init__(self, conversion: Conversion, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Buffer(conversion.cast(weight)), nn.Buffer(conversion.cast(bias))
        self.wide_bias = nn.Buffer(bias.to(conversion.deferred_bias.dtype, copy=True))
        self.act = conversion.act("channel")
        # Our linear kernel uses tensor cores, which would round float32 inputs, and TMA, which needs aligned rows.
        is_aligned = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
        can_load = is_aligned and has_tma(weight.device)
        self.has_kernel = (conversion.dtype.itemsize <= 2 and can_load) or not weight.is_cuda

    def forward(self, x: Tensor) -> Tensor:
        is_small = self.has_kernel and self.weight.shape[1] <= LINEAR_MAX_CHANNELS
        if not (is_small and x.shape[0] * x.shape[1] >= LINEAR_MIN_TOKENS):
            return self.cublas(x)
        hidden = self.kernels.linear(x.flatten(0, 1), self.weight, LinearEpilogue(bias=self.wide_bias), self.act)
        return hidden.view(*x.shape[:2], len(self.weight))

    def cublas(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        if cublas_fuses(self.act, x.dtype, x.device):
            hidden = torch._addmm_activation(self.bias, flat, self.weight.T, use_gelu=self.act != "relu")
        else:
            hidden = activate(torch.addmm(self.bias, flat, self.weight.T), self.act)
        return hidden.view(*x.shape[:2], len(self.bias))

    def with_stats(self, x: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Like `forward`, with the LayerNorm statistics of the second half of the channels."""
        epilogue, shape = LinearEpilogue(bias=self.wide_bias), x.shape[:2]
        start = len(self.weight) // 2
        hidden, mean, rstd = self.kernels.linear_stats(x.flatten(0, 1), self.weight, epilogue, self.act, eps, start)
        return hidden.view(*shape, -1), (mean.view(shape), rstd.view(shape))


class GpuGate(GpuModule):
    """The spatial gating unit, in any variant, of act(U x + a)."""

    def __init__(self, conversion: Conversion, up: GpuLinearAct, inner: SpatialGatingUnitLayer) -> None:
        super().__init__()
        assert inner.attention is None
        self.is_split, combine = inner.variant == "split", GATE_COMBINE[inner.variant]
        self.up = up
        self.product = GpuTokenProduct(conversion, inner.proj.matrix(), inner.proj.bias, inner.norm, combine=combine)
        self.fuses_stats = up.has_kernel and self.is_split and len(up.weight) % (2 * EPILOGUE_N) == 0

    def forward(self, x: Tensor) -> Tensor:
        if self.fuses_stats and self.product.eps is not None and not has_few_tokens(x):
            hidden, stats = self.up.with_stats(x, self.product.eps)
        else:
            hidden, stats = self.up.cublas(x), None
        u, v = hidden.chunk(2, dim=2) if self.is_split else (hidden, hidden)
        return self.product(v, u, stats)


# --- weights of the branches ------------------------------------------------------------------------------------


def norm_weights(norm: nn.Module | None) -> tuple[nn.Buffer | None, nn.Buffer | None]:
    """Weight and bias per channel of LayerNorm or Affine."""
    if norm is None:
        return None, None
    assert isinstance(norm, (AffineLayer, nn.LayerNorm))
    weight, bias = (norm.alpha, norm.beta) if isinstance(norm, AffineLayer) else (norm.weight, norm.bias)
    return as_float(weight), as_float(bias)


def as_float(weight: Tensor | None) -> nn.Buffer | None:
    return None if weight is None else nn.Buffer(weight.to(torch.float32, copy=True))
