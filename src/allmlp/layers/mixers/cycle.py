"""CycleMLP's token mixer: each channel is read from a neighbor at its own offset, along rows and along columns."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.layers.context import BuildContext, Context, as_grid
from allmlp.layers.linear import Linear
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.token_roles import TokenRole
from allmlp.spec import Count


class TokenCycle(TokenMixer):
    """Channels are shifted by a staircase of steps along the rows and along the columns, then mixed by linear layers.

        H[y, x] = Wh [X[y, x + d(c), c] for c] + bh,   V[y, x] = Wv [X[y + d(c), x, c] for c] + bv,   U = X Wu^T
        d(c) = (c + k // 2) mod k - k // 2                                (zeros outside the grid)
        f(X) = (a1 * H + a2 * V + a3 * U) O^T + o
        [a1 a2 a3] = softmax over the three of R2 gelu(R1 mean over tokens of (H + V + U) + r1) + r2

    R1 has C / `reduction` rows. Source: CycleMLP, and its released code for the weights a. No weight depends on the
    number of tokens. Parameters 4C^2 + 3C + 4C^2 / reduction, and the biases of R; multiply-adds 4SC^2.
    """

    kernel: Count = 3
    reduction: Count = 4

    def build(self, ctx: BuildContext) -> nn.Module:
        return TokenCycleLayer(self, ctx, ctx.require_grid("TokenCycle"))


class TokenCycleLayer(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = {
        "horizontal.weight": "channel",
        "vertical.weight": "channel",
        "unmoved.weight": "channel",
        "reweight_up.weight": "channel",
        "reweight_down.weight": "channel",
        "out.weight": "channel",
    }

    def __init__(self, spec: TokenCycle, ctx: BuildContext, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid, self.kernel = grid, spec.kernel
        channels, hidden = ctx.channels, max(ctx.channels // spec.reduction, 1)
        self.horizontal = Linear(channels, channels, ctx.init)
        self.vertical = Linear(channels, channels, ctx.init)
        self.unmoved = Linear(channels, channels, ctx.init, bias=False)
        self.reweight_up = Linear(channels, hidden, ctx.init)
        self.reweight_down = Linear(hidden, 3 * channels, ctx.init)
        self.out = Linear(channels, channels, ctx.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        image = as_grid(context.zero_padding(x), self.grid)  # b h w c
        h, v = self.horizontal(self.shift(image, 2)), self.vertical(self.shift(image, 1))
        u = self.unmoved(image)
        pooled = (h + v + u).mean((1, 2))  # b c
        scores = self.reweight_down(F.gelu(self.reweight_up(pooled)))
        a = scores.unflatten(1, (-1, 3)).softmax(dim=2)[:, None, None].unbind(-1)  # three of b 1 1 c
        return self.out(h * a[0] + v * a[1] + u * a[2]).flatten(1, 2)

    def shift(self, image: Tensor, axis: int) -> Tensor:
        """Shift channel c by d(c): each token reads it from the token d(c) places further along the axis."""
        size, before = image.shape[axis], self.kernel // 2
        padding = (before, self.kernel - 1 - before)
        padded = F.pad(image, (0, 0, *padding) if axis == 2 else (0, 0, 0, 0, *padding))
        step = (torch.arange(image.shape[3], device=image.device) + before) % self.kernel
        shifted = padded.narrow(axis, 0, size)
        for number in range(1, self.kernel):
            shifted = torch.where(step == number, padded.narrow(axis, number, size), shifted)
        return shifted
