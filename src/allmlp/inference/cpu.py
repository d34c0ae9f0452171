"""On a CPU: matrix products take nearly all the time, so what is left is to touch memory seldom between them.

Products add into z, activations and gates write over their input, and the two halves of a gate come from two products,
so that none of them has to be copied to lie side by side. Matrices of channel MLPs lie turned, inputs as rows: products
with them are up to an eighth quicker.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.inference.lowered import Lowered, Step
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.mixers.gate import SpatialGateLayer
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import AffineLayer

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda h: torch.ops.aten.gelu_(h, approximate="tanh"),
    "relu": torch.relu_,
}


def over_tokens(matrix: Tensor, x: Tensor, bias: Tensor, out: Tensor | None = None) -> Tensor:
    """A X + bias for every example, b m c; with `out` and the same as `bias` it adds into it."""
    return torch.baddbmm(bias, matrix.expand(len(x), -1, -1), x, out=out)


class FastOnCpu(Lowered):
    def token_linear(self, norm: nn.Module, mix: TokenProjection, gain: Tensor | None) -> Step:
        matrix, bias = self.cast(mix.matrix()), mix.bias.double()[:, None]
        if not isinstance(norm, AffineLayer):
            read, column = self.norm(norm), self.cast(bias)
            scale = None if gain is None else self.cast(gain)

            def step(z: Tensor) -> Tensor:
                y = over_tokens(matrix, read(z), column)
                return z.add_(y) if scale is None else z.addcmul_(y, scale)

            return step
        # gain (A (alpha (z + lift) + beta) + b) = A (gain alpha z) + what does not depend on z
        factor = 1 if gain is None else gain
        shift = norm.beta.double() + norm.alpha.double() * self.lift
        scaled, fixed = (
            self.cast(factor * norm.alpha),
            self.cast(factor * (matrix.double().sum(1)[:, None] * shift + bias)),
        )

        def folded(z: Tensor) -> Tensor:
            x = z * scaled
            z.add_(fixed)
            return over_tokens(matrix, x, z, out=z)

        return folded

    def token_mlp(self, norm: nn.Module, mix: TokenMlpLayer, gain: Tensor | None) -> Step:
        up, down = self.cast(mix.up.weight), self.cast(mix.down.weight)
        first, last = self.cast(mix.up.bias)[:, None], self.cast(mix.down.bias)[:, None]
        read, act, forgets = self.norm(norm), ACTS[self.act("token")], self.forgets(gain)
        scale = None if gain is None else self.cast(gain)

        def step(z: Tensor) -> Tensor:
            hidden = act(over_tokens(up, read(z), first))  # b d c
            if scale is not None:
                return z.addcmul_(over_tokens(down, hidden, last), scale)
            over_tokens(down, hidden, z, out=z)
            return z if forgets else z.add_(last)

        return step

    def channel_mlp(self, norm: nn.Module, mix: ChannelMlpLayer, gain: Tensor | None) -> Step:
        weight, bias, down = mix.up.weight.double(), mix.up.bias.double(), mix.down.weight.double()
        last = None
        if isinstance(norm, AffineLayer):
            bias = bias + weight @ (norm.beta.double() + norm.alpha.double() * self.lift)
            weight = weight * norm.alpha.double()
            read: Step = lambda z: z  # noqa: E731
            self.wait(mix.down.bias, gain)
        else:
            # LayerNorm would have to add `lift` to all of z: the bias can as well be added at once.
            read, last = self.norm(norm), self.cast(mix.down.bias if gain is None else gain * mix.down.bias)
        into = self.cast((down if gain is None else gain[:, None] * down).T)
        hidden = self.hidden(weight, bias, mix.inner)

        def step(z: Tensor) -> Tensor:
            flat = z.view(-1, z.shape[2])
            torch.addmm(flat, hidden(read(z)).flatten(0, 1), into, out=flat)
            return z if last is None else z.add_(last)

        return step

    def hidden(self, weight: Tensor, bias: Tensor, inner: nn.Module | None) -> Step:
        """inner(act(U x + a)), in its four versions."""
        act = ACTS[self.act("channel")]

        def half(rows: slice) -> Step:
            up, a = self.cast(weight[rows].T), self.cast(bias[rows])
            return lambda x: act(torch.addmm(a, x.flatten(0, 1), up)).view(*x.shape[:2], len(a))

        whole = half(slice(None))
        if inner is None:
            return whole
        assert isinstance(inner, SpatialGateLayer)
        matrix, column, norm = (
            self.cast(inner.proj.matrix()),
            self.cast(inner.proj.bias)[:, None],
            self.norm(inner.norm),
        )
        if inner.combine == "split":
            middle = len(weight) // 2
            left, right = half(slice(middle)), half(slice(middle, None))
            return lambda x: over_tokens(matrix, norm(right(x)), column).mul_(left(x))

        def gated(x: Tensor) -> Tensor:
            z = whole(x)
            f = over_tokens(matrix, norm(z), column)
            return f if inner.combine == "linear" else f.add_(z) if inner.combine == "add" else f.mul_(z)

        return gated

    def norm(self, norm: nn.Module) -> Step:
        if isinstance(norm, AffineLayer):
            alpha, beta = self.cast(norm.alpha), self.cast(norm.beta + norm.alpha * self.lift)
            return lambda z: torch.addcmul(beta, alpha, z)
        assert isinstance(norm, nn.LayerNorm)
        weight, bias, eps = self.cast(norm.weight), self.cast(norm.bias), norm.eps
        return lambda z: F.layer_norm(z, weight.shape, weight, bias, eps)
