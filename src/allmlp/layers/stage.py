"""A stage of a pyramid: tokens are merged into fewer, wider ones, then mixed by the blocks of the stage."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.layers.block import Block
from allmlp.layers.context import BuildContext
from allmlp.layers.init import Init
from allmlp.layers.linear import Linear
from allmlp.layers.norm import Norm, build_norm
from allmlp.layers.stem import check_kernel, embed_patches
from allmlp.spec import Count, Depth, Size, Spec


class PatchMerge(Spec):
    """Every P x P group of tokens becomes one, by a linear layer over all their channels.

        Y[i] = W [norm(X[j]) for j in group_i] + b

    With `kernel` K the groups overlap: K x K windows of stride P. Grids that P does not divide are padded with zeros.
    Source: Swin; CycleMLP has a kernel of 3 and no norm. Parameters P^2 C C' + C' (K^2 C C' + C' with a kernel) from C
    to C' channels, and the norm's.
    """

    patch_size: Size = (2, 2)
    kernel: Count | None = None
    norm: Norm | None = None
    init: Init | None = None

    def check(self) -> None:
        check_kernel(self.kernel, self.patch_size)

    def merged(self, grid: tuple[int, int]) -> tuple[int, int]:
        """The grid after merging."""
        return -(-grid[0] // self.patch_size[0]), -(-grid[1] // self.patch_size[1])

    def build(self, before: BuildContext, after: BuildContext) -> nn.Module:
        assert before.grid is not None, "the encoder checks that there is one"
        return PatchMergeLayer(self, before, before.grid, after.channels)


class PatchMergeLayer(nn.Module):
    def __init__(self, spec: PatchMerge, ctx: BuildContext, grid: tuple[int, int], channels: int) -> None:
        super().__init__()
        self.spec, self.grid = spec, grid
        tokens = spec.kernel**2 if spec.kernel else spec.patch_size[0] * spec.patch_size[1]
        self.norm = build_norm(spec.norm, ctx.channels)
        self.proj = Linear(tokens * ctx.channels, channels, spec.init or ctx.init)

    def forward(self, x: Tensor) -> Tensor:
        image = self.norm(x).transpose(1, 2).unflatten(2, self.grid)  # b c h w
        rows, columns = (-size % patch for size, patch in zip(self.grid, self.spec.patch_size, strict=True))
        image = F.pad(image, (0, columns, 0, rows)) if rows or columns else image
        return embed_patches(image, self.proj, self.spec.patch_size, self.spec.kernel)


class Stage(Spec):
    """`depth` equal blocks of `width` channels, on the merged tokens of the stage before.

        X0 = merge(Y),   Xl = block_l(Xl-1)

    merge=None keeps tokens and width: blocks of another kind.
    """

    width: Count
    depth: Depth
    block: Block
    merge: PatchMerge | None = PatchMerge()
