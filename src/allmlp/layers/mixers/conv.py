"""3x3 convolution over the patch grid: ResMLP's comparison with local mixing."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.layers.context import Context, Site
from allmlp.layers.linear import Conv2d
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.spec import Count


class TokenConv(TokenMixer):
    """Tokens as a picture of C channels, convolved with zero padding.

        full:       f(X) = conv_kxk(X), all channels to all channels
        depthwise:  f(X) = conv_kxk(X), each channel alone
        separable:  f(X) = conv_1x1(depthwise(X))

    Source: ResMLP, patch-communication ablation. Parameters k^2 C^2 + C, k^2 C + C and
    (k^2 + 1) C + C^2 + C; multiply-adds S times the weights.
    """

    variant: Literal["full", "depthwise", "separable"] = "full"
    kernel: Count = 3

    def check(self) -> None:
        if self.kernel % 2 == 0:
            raise UserError(f"TokenConv.kernel must be odd, not {self.kernel}")

    def build(self, site: Site) -> nn.Module:
        if site.grid is None or site.grid[0] * site.grid[1] != site.tokens:
            raise UserError("TokenConv needs a plain grid of patches: an image stem without a class token")
        return TokenConvLayer(self, site, site.grid)


class TokenConvLayer(nn.Module):
    def __init__(self, spec: TokenConv, site: Site, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        channels = site.channels
        groups = 1 if spec.variant == "full" else channels
        self.space = Conv2d(channels, channels, spec.kernel, site.init, padding=spec.kernel // 2, groups=groups)
        self.point = Conv2d(channels, channels, 1, site.init) if spec.variant == "separable" else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        picture = context.hide(x).transpose(1, 2).unflatten(2, self.grid)  # b c h w
        y = self.space(picture)
        if self.point is not None:
            y = self.point(y)
        return y.flatten(2).transpose(1, 2)
