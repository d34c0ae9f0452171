"""Convolution over the grid of patches: ResMLP's ablation with local mixing, ConvMixer's depthwise convolution."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import BuildContext, Context, as_grid
from allmlp.layers.linear import Conv2d
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.token_roles import TokenRole
from allmlp.spec import Count


class TokenConv(TokenMixer):
    """Tokens as an image of C channels, convolved with zero padding.

        full:       f(X) = act(conv_kxk(X)), all channels to all channels
        depthwise:  f(X) = act(conv_kxk(X)), each channel alone
        separable:  f(X) = act(conv_1x1(depthwise(X)))

    The activation is optional. Source: ResMLP, patch-communication ablation; ConvMixer has "depthwise" with an
    activation. Parameters k^2 C^2 + C, k^2 C + C and (k^2 + 1) C + C^2 + C; multiply-adds S times the weights.
    """

    variant: Literal["full", "depthwise", "separable"] = "full"
    kernel: Count = 3
    act: Act | None = None

    def check(self) -> None:
        if self.kernel % 2 == 0:
            raise UserError(f"TokenConv.kernel must be odd, not {self.kernel}")

    def build(self, ctx: BuildContext) -> nn.Module:
        return TokenConvLayer(self, ctx, ctx.require_grid("TokenConv"))


class TokenConvLayer(nn.Module):
    def __init__(self, spec: TokenConv, ctx: BuildContext, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid, self.act = grid, spec.act
        channels = ctx.channels
        groups = 1 if spec.variant == "full" else channels
        self.conv = Conv2d(channels, channels, spec.kernel, ctx.init, padding=spec.kernel // 2, groups=groups)
        self.pointwise = Conv2d(channels, channels, 1, ctx.init) if spec.variant == "separable" else None
        self.token_roles: dict[str, TokenRole] = {"conv.weight": "kernel"}
        if self.pointwise is not None:
            self.token_roles["pointwise.weight"] = "channel"

    def forward(self, x: Tensor, context: Context) -> Tensor:
        image = as_grid(context.zero_padding(x), self.grid).permute(0, 3, 1, 2)  # b c h w
        y = self.conv(image)
        if self.pointwise is not None:
            y = self.pointwise(y)
        y = ACTS[self.act](y) if self.act else y
        return y.flatten(2).transpose(1, 2)
