"""From tokens to one vector per example."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.layers.block import Block, Residual
from allmlp.layers.channel import ChannelMlp
from allmlp.layers.context import BuildContext, Context
from allmlp.layers.linear import Linear, is_standard
from allmlp.layers.mixers.attention import attend, divide, weights_of
from allmlp.layers.norm import build_norm
from allmlp.layers.token_roles import TokenRole
from allmlp.spec import Count, Spec


class Pool(Spec, abstract=True):
    def build(self, ctx: BuildContext, block: Block) -> PoolLayer:
        raise NotImplementedError


class PoolLayer(nn.Module):
    """`prepare` runs before the final norm and may add tokens; `forward` returns one vector per example after it."""

    def prepare(self, x: Tensor, context: Context) -> Tensor:
        return x

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError


class MeanPool(Pool):
    """The average of all tokens.

        y = 1/S sum_i X[i]

    Padding is left out, and not counted in S. No parameters.
    """

    def build(self, ctx: BuildContext, block: Block) -> PoolLayer:
        return MeanPoolLayer()


class MeanPoolLayer(PoolLayer):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return x.mean(dim=1)
        weight = mask.to(x.dtype)
        return torch.einsum("bsc,bs->bc", x, weight) / weight.sum(dim=1, keepdim=True).clamp(min=1)


class FirstTokenPool(Pool):
    """The first token.

        y = X[0]

    Source: ViT's class token, BERT's [CLS]. No parameters.
    """

    def build(self, ctx: BuildContext, block: Block) -> PoolLayer:
        return FirstTokenPoolLayer()


class FirstTokenPoolLayer(PoolLayer):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x[:, 0]


class ClassMlp(Pool):
    """ResMLP's Class-MLP: after the last block a class token reads the patch tokens, which are not changed.

        u = c + scale(a^T norm([c; X]) + b),   c' = u + scale(mlp(norm(u)))       `layers` times
        y = c

    Only the class row of the token matrix exists; norm, scale and channel MLP are those of the block (where it has
    one, else 4C hidden channels).
    Source: ResMLP, "average pooling -> Class-MLP" (17.7 M parameters for S12 confirm the single row).
    Parameters C + layers (S + 2 + channel MLP + norms + scales).
    """

    layers: Count = 2

    def build(self, ctx: BuildContext, block: Block) -> PoolLayer:
        return ClassMlpLayer(self, ctx, block)


class ClassAttention(Pool):
    """CaiT's class attention: as Class-MLP, but the class token attends to itself and to the patch tokens.

        u = c + scale(attention(q = norm(c), k = v = norm([c; X]))),   c' = u + scale(mlp(norm(u)))       `layers` times
        y = c

    Source: CaiT, eq. 2-6. Parameters C + layers (4C^2 + 4C + channel MLP + norms + scales).
    """

    num_heads: Count
    layers: Count = 2

    def build(self, ctx: BuildContext, block: Block) -> PoolLayer:
        divide(ctx.channels, self.num_heads)
        return ClassMlpLayer(self, ctx, block)


class ClassMlpLayer(PoolLayer):
    def __init__(self, spec: ClassMlp | ClassAttention, ctx: BuildContext, block: Block) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(ctx.channels))
        block_mlp = block.channel.replace(inner=None) if isinstance(block.channel, ChannelMlp) else None
        channel = block_mlp or ChannelMlp(4 * ctx.channels)
        self.gathers = nn.ModuleList(
            ClassGather(block, ctx) if isinstance(spec, ClassMlp) else ClassAttentionGather(block, ctx, spec.num_heads)
            for _ in range(spec.layers)
        )
        self.channels = nn.ModuleList(Residual(block, channel.build(ctx), ctx, 0.0) for _ in range(spec.layers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.token, std=0.02)

    def prepare(self, x: Tensor, context: Context) -> Tensor:
        c = self.token.expand(x.shape[0], 1, -1)
        for gather, channel in zip(self.gathers, self.channels, strict=True):
            c = channel(gather(c, x, context), Context())
        return torch.cat([c, x], dim=1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x[:, 0]


class ClassGather(nn.Module):
    """One row of token mixing over the class token and the patches."""

    token_roles: ClassVar[dict[str, TokenRole]] = {"mix.weight": "in"}

    def __init__(self, block: Block, ctx: BuildContext) -> None:
        super().__init__()
        self.norm = build_norm(block.norm, ctx.channels)
        self.mix = Linear(1 + ctx.tokens, 1, ctx.init)
        self.scale = block.scale.build(ctx.channels) if block.scale else nn.Identity()

    def forward(self, c: Tensor, x: Tensor, context: Context) -> Tensor:
        tokens = torch.cat([self.norm(c), context.zero_padding(self.norm(x))], dim=1)
        if is_standard(self.mix):
            row = self.mix.weight[:, : tokens.shape[1]] @ tokens + self.mix.bias
        else:  # replaced by another library
            missing = self.mix.in_features - tokens.shape[1]
            row = self.mix(F.pad(tokens.transpose(1, 2), (0, missing))).transpose(1, 2)
        return c + self.scale(row)


class ClassAttentionGather(nn.Module):
    """The class token as the only query over itself and the patches."""

    token_roles: ClassVar[dict[str, TokenRole]] = dict.fromkeys(("q.weight", "kv.weight", "out.weight"), "attention")

    def __init__(self, block: Block, ctx: BuildContext, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = build_norm(block.norm, ctx.channels)
        self.q = Linear(ctx.channels, ctx.channels, ctx.init)
        self.kv = Linear(ctx.channels, 2 * ctx.channels, ctx.init, parts=[ctx.channels] * 2)
        self.out = Linear(ctx.channels, ctx.channels, ctx.init)
        self.scale = block.scale.build(ctx.channels) if block.scale else nn.Identity()

    def project(self, c: Tensor, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """The query, keys and values of class token and patches, and the mask of the real ones."""
        token = self.norm(c)
        mask = None
        if context.mask is not None:
            mask = F.pad(context.mask, (1, 0), value=True)[:, None, None, :]
        return self.q(token), self.kv(torch.cat([token, self.norm(x)], dim=1)), mask

    def attention_weights(self, c: Tensor, x: Tensor, context: Context) -> Tensor:
        """The weights of the class token over itself and the patches: b h 1 (1 + s)."""
        q, kv, mask = self.project(c, x, context)
        return weights_of(q, kv, self.num_heads, mask)

    def forward(self, c: Tensor, x: Tensor, context: Context) -> Tensor:
        q, kv, mask = self.project(c, x, context)
        return c + self.scale(self.out(attend(q, kv, self.num_heads, mask)))
