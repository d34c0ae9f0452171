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

from allmlp.inference.encoder import FastEncoder, TensorFn
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
    def token_linear(self, norm: nn.Module, mix: TokenProjection, layer_scale: Tensor | None) -> TensorFn:
        matrix, bias = self.cast(mix.matrix()), mix.bias.double()[:, None]
        if not isinstance(norm, AffineLayer):
            normalize, token_bias = self.norm(norm), self.cast(bias)
            scale = None if layer_scale is None else self.cast(layer_scale)

            def forward(z: Tensor) -> Tensor:
                y = token_baddbmm(matrix, normalize(z), token_bias)
                return z.add_(y) if scale is None else z.addcmul_(y, scale)

            return forward
        # gamma (A (alpha (z + deferred_bias) + beta) + b) = A (gamma alpha z) + a constant
        gamma = 1 if layer_scale is None else layer_scale
        shift = norm.beta.double() + norm.alpha.double() * self.deferred_bias
        weight = self.cast(gamma * norm.alpha)
        constant = self.cast(gamma * (matrix.double().sum(1)[:, None] * shift + bias))

        def folded(z: Tensor) -> Tensor:
            x = z * weight
            z.add_(constant)
            return token_baddbmm(matrix, x, z, out=z)

        return folded

    def token_mlp(self, norm: nn.Module, mix: TokenMlpLayer, layer_scale: Tensor | None) -> TensorFn:
        up, down = self.cast(mix.up.weight), self.cast(mix.down.weight)
        up_bias, down_bias = self.cast(mix.up.bias)[:, None], self.cast(mix.down.bias)[:, None]
        normalize, act, bias_cancels = (
            self.norm(norm),
            INPLACE_ACTS[self.act("token")],
            self.token_bias_cancels(layer_scale),
        )
        scale = None if layer_scale is None else self.cast(layer_scale)

        def forward(z: Tensor) -> Tensor:
            hidden = act(token_baddbmm(up, normalize(z), up_bias))  # b d c
            if scale is not None:
                return z.addcmul_(token_baddbmm(down, hidden, down_bias), scale)
            token_baddbmm(down, hidden, z, out=z)
            return z if bias_cancels else z.add_(down_bias)

        return forward

    def channel_mlp(self, norm: nn.Module, mix: ChannelMlpLayer, layer_scale: Tensor | None) -> TensorFn:
        weight, bias, down = mix.up.weight.double(), mix.up.bias.double(), mix.down.weight.double()
        down_bias = None
        if isinstance(norm, AffineLayer):
            bias = bias + weight @ (norm.beta.double() + norm.alpha.double() * self.deferred_bias)
            weight = weight * norm.alpha.double()
            normalize: TensorFn = lambda z: z  # noqa: E731
            self.defer_bias(mix.down.bias, layer_scale)
        else:
            # LayerNorm would have to add `deferred_bias` to all of z, so nothing is gained by deferring.
            normalize = self.norm(norm)
            down_bias = self.cast(mix.down.bias if layer_scale is None else layer_scale * mix.down.bias)
        down = self.cast((down if layer_scale is None else layer_scale[:, None] * down).T)
        hidden = self.hidden(weight, bias, mix.inner)

        def forward(z: Tensor) -> Tensor:
            flat = z.view(-1, z.shape[2])
            torch.addmm(flat, hidden(normalize(z)).flatten(0, 1), down, out=flat)
            return z if down_bias is None else z.add_(down_bias)

        return forward

    def hidden(self, weight: Tensor, bias: Tensor, inner: nn.Module | None) -> TensorFn:
        """inner(act(U x + a)), without inner or with one of its four variants."""
        act = INPLACE_ACTS[self.act("channel")]

        def linear_act(rows: slice) -> TensorFn:
            up, up_bias = self.cast(weight[rows].T), self.cast(bias[rows])
            return lambda x: act(torch.addmm(up_bias, x.flatten(0, 1), up)).view(*x.shape[:2], len(up_bias))

        full = linear_act(slice(None))
        if inner is None:
            return full
        assert isinstance(inner, SpatialGatingUnitLayer)
        matrix, token_bias = self.cast(inner.proj.matrix()), self.cast(inner.proj.bias)[:, None]
        normalize = self.norm(inner.norm)
        if inner.variant == "split":
            middle = len(weight) // 2
            left, right = linear_act(slice(middle)), linear_act(slice(middle, None))
            return lambda x: token_baddbmm(matrix, normalize(right(x)), token_bias).mul_(left(x))

        def gated(x: Tensor) -> Tensor:
            z = full(x)
            f = token_baddbmm(matrix, normalize(z), token_bias)
            return f if inner.variant == "linear" else f.add_(z) if inner.variant == "additive" else f.mul_(z)

        return gated

    def norm(self, norm: nn.Module) -> TensorFn:
        if isinstance(norm, AffineLayer):
            alpha, beta = self.cast(norm.alpha), self.cast(norm.beta + norm.alpha * self.deferred_bias)
            return lambda z: torch.addcmul(beta, alpha, z)
        assert isinstance(norm, nn.LayerNorm)
        weight, bias, eps = self.cast(norm.weight), self.cast(norm.bias), norm.eps
        return lambda z: F.layer_norm(z, weight.shape, weight, bias, eps)
