"""Attention: the baseline of the all-MLP models, and the tiny attention of aMLP."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.context import BuildContext, Context
from allmlp.layers.init import Normal
from allmlp.layers.linear import Embedding, Linear
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.mixers.rotary import RotaryPositions
from allmlp.layers.token_roles import TokenRole
from allmlp.spec import Count, Rate, Spec


class RelativePositionBias(Spec):
    """T5's learned score per head and bucketed distance, one table for all layers of the stack.

        bias[h, i, j] = w[bucket(j - i), h]

    Half of the buckets are exact distances, the rest grow logarithmically up to `distance`.
    Parameters buckets x H.
    """

    buckets: Count = 32
    distance: Count = 128

    def check(self) -> None:
        if self.buckets % 4 or self.distance <= self.buckets // 2:
            raise UserError("RelativePositionBias needs buckets divisible by 4 and distance above buckets / 2")

    def build(self, num_heads: int, causal: bool) -> RelativePositionBiasLayer:
        return RelativePositionBiasLayer(self, num_heads, causal)


class RelativePositionBiasLayer(Embedding):
    def __init__(self, spec: RelativePositionBias, num_heads: int, causal: bool) -> None:
        super().__init__(spec.buckets, num_heads, Normal(0.02))
        self.spec, self.causal = spec, causal

    def forward(self, start: int, stop: int) -> Tensor:  # type: ignore[override]
        keys = torch.arange(stop, device=self.weight.device)
        offset = keys[None, :] - keys[start:, None]  # s t
        return self.weight[self.bucket(offset)].permute(2, 0, 1)  # h s t

    def bucket(self, offset: Tensor) -> Tensor:
        if self.causal:
            buckets, side, distance = self.spec.buckets, 0, (-offset).clamp(min=0)
        else:
            buckets = self.spec.buckets // 2
            side, distance = (offset > 0) * buckets, offset.abs()
        exact = buckets // 2
        log = torch.log(distance.clamp(min=1) / exact) / math.log(self.spec.distance / exact)
        far = (exact + (log * (buckets - exact)).long()).clamp(max=buckets - 1)
        return side + torch.where(distance < exact, distance, far)


class Attention(TokenMixer):
    """Multi-head self-attention.

        f(X) = [A_1 V_1 ... A_H V_H] O^T,   A_h = softmax(Q_h K_h^T / sqrt(C/H) + bias_h)

    `bias` adds T5's relative positions; scores="bias" uses them alone, A_h = softmax(bias_h), without
    queries and keys (gMLP's "BERT + rel pos - attn"). `rotary` rotates queries and keys by their positions. With
    `num_kv_heads` G, each of G heads of keys and values serves H/G heads of queries: V_h and K_h are those of head
    h G/H, rounded down (grouped-query attention). linear_bias=False leaves the biases of the four maps out. With
    `talking_heads` the heads are mixed linearly before and after the softmax (Shazeer et al., 2020; CaiT):
    A_g = sum_h W2[g, h] softmax_h(sum_h' W1[h, h'] S_h' + b1[h]) + b2[g], S the scores; 2H^2 + 2H parameters more.
    Parameters 4C^2 + 4C (scores="bias": 2C^2 + 2C; grouped: 2C^2 + 2C^2 G/H without biases), multiply-adds
    4SC^2 + 2S^2 C.
    """

    separates_documents: ClassVar[bool] = True
    num_heads: Count
    causal: bool = False
    bias: RelativePositionBias | None = None
    scores: Literal["content", "bias"] = "content"
    dropout: Rate = 0.0
    num_kv_heads: Count | None = None
    rotary: RotaryPositions | None = None
    linear_bias: bool = True
    talking_heads: bool = False

    def check(self) -> None:
        if self.talking_heads and (self.scores == "bias" or self.num_kv_heads or self.rotary):
            raise UserError("Attention with talking_heads takes neither scores='bias' nor num_kv_heads nor rotary")
        if self.scores == "bias" and self.bias is None:
            raise UserError("Attention with scores='bias' needs bias=RelativePositionBias()")
        if self.scores == "bias" and (self.num_kv_heads or self.rotary):
            raise UserError("Attention with scores='bias' has no keys: it takes neither num_kv_heads nor rotary")
        if self.num_heads % (self.num_kv_heads or 1):
            raise UserError(f"num_kv_heads must divide the {self.num_heads} heads, which {self.num_kv_heads} does not")

    def build(self, ctx: BuildContext) -> nn.Module:
        self.check_channels(ctx.channels)
        if self.talking_heads:
            return TalkingHeadsLayer(self, ctx)
        return AttentionLayer(self, ctx) if self.scores == "content" else BiasAttentionLayer(self, ctx)

    def check_channels(self, channels: int) -> None:
        """Raise UserError if the heads do not divide the channels, or are of an odd size with rotary positions."""
        if divide(channels, self.num_heads) % 2 and self.rotary:
            raise UserError(f"rotary positions need heads of an even size, not {channels // self.num_heads}")

    def kv_channels(self, channels: int) -> int:
        """Channels of the keys, and of the values."""
        return channels // self.num_heads * (self.num_kv_heads or self.num_heads)


def divide(channels: int, num_heads: int) -> int:
    if channels % num_heads:
        raise UserError(f"{channels} channels cannot be split into {num_heads} heads: num_heads must divide them")
    return channels // num_heads


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # b h s d


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # b s c


def attend(
    q: Tensor, kv: Tensor, num_heads: int, mask: Tensor | None, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V with all tensors b s c, keys and values side by side in `kv`.

    Keys and values may have fewer heads, each shared by several query heads.
    """
    size = q.shape[-1] // num_heads
    k, v = kv.chunk(2, dim=-1)
    if k.shape[-1] < q.shape[-1]:
        # Before heads are moved to the front: torch.export would otherwise fix the length of the cache.
        k, v = (t.unflatten(-1, (-1, size)).repeat_interleave(q.shape[-1] // t.shape[-1], 2).flatten(2) for t in (k, v))
    q, k, v = (split_heads(t, num_heads) for t in (q, k, v))
    return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal))


def rotated(
    q: Tensor, kv: Tensor, rotary: RotaryPositions | None, size: int, context: Context
) -> tuple[Tensor, Tensor]:
    """Queries and keys of heads of `size` channels, rotated by their positions; values as they are."""
    if rotary is None:
        return q, kv
    k, v = kv.chunk(2, dim=-1)
    q, k = (rotary.rotate(t, size, context.start()) for t in (q, k))
    return q, torch.cat([k, v], dim=-1)


def weights_of(q: Tensor, kv: Tensor, num_heads: int, mask: Tensor | None) -> Tensor:
    """Attention weights of `attend`, softmax(Q K^T / sqrt(d) + mask): b h s t."""
    size = q.shape[-1] // num_heads
    q, k = (split_heads(t, t.shape[-1] // size) for t in (q, kv.chunk(2, dim=-1)[0]))
    scores = q @ k.repeat_interleave(num_heads // k.shape[1], dim=1).transpose(2, 3) / math.sqrt(size)
    return masked_softmax(scores, mask)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the keys, with a mask as for `attend`; uniform in a row without any key, which is padding."""
    if mask is not None:
        is_bool, lowest = mask.dtype == torch.bool, torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if is_bool else scores + mask
    return scores.softmax(dim=-1)


def allowed(context: Context, causal: bool, q: Tensor, kv: Tensor) -> Tensor | None:
    """Which keys each query may attend to (True), broadcastable to b h s t; None if all."""
    queries, keys = q.shape[1], kv.shape[1]
    mask = None if context.mask is None else context.mask[:, None, None, :]
    if (same_document := context.same_document()) is not None:
        mask = same_document.unsqueeze(1)
    if causal and queries > 1:
        lower = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        mask = lower if mask is None else mask & lower
    return mask


def join(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Relative scores and a boolean mask as one attention mask."""
    if bias is None:
        return mask
    bias = bias.to(dtype)
    return bias if mask is None else torch.where(mask, bias, torch.finfo(dtype).min)


class AttentionLayer(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = {"qkv.weight": "attention", "out.weight": "attention"}

    def __init__(self, spec: Attention, ctx: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        parts = [ctx.channels, *[spec.kv_channels(ctx.channels)] * 2]
        self.qkv = Linear(ctx.channels, sum(parts), ctx.init, spec.linear_bias, parts)
        self.out = Linear(ctx.channels, ctx.channels, ctx.init, spec.linear_bias)

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Queries, and keys and values side by side."""
        q, kv = self.qkv(x).tensor_split([x.shape[-1]], dim=-1)
        return rotated(q, kv, self.spec.rotary, x.shape[-1] // self.spec.num_heads, context)

    def attention_weights(self, x: Tensor, context: Context) -> Tensor:
        """A_1 .. A_H for the input of `forward`: b h s t."""
        q, kv = self.project(x, context)
        mask = allowed(context, self.spec.causal, q, kv)
        return weights_of(q, kv, self.spec.num_heads, join(context.bias, mask, x.dtype))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, kv = self.project(x, context)
        if context.cache is not None:
            kv = context.cache.extend(self, kv)
        dropout = self.spec.dropout if self.training else 0.0
        if context.mask is None and context.cache is None and context.bias is None:
            # Without an explicit mask PyTorch can choose its fastest kernel.
            return self.out(attend(q, kv, self.spec.num_heads, None, dropout, self.spec.causal))
        mask = allowed(context, self.spec.causal, q, kv)
        return self.out(attend(q, kv, self.spec.num_heads, join(context.bias, mask, x.dtype), dropout))


class TalkingHeadsLayer(nn.Module):
    """Attention whose heads are mixed before and after the softmax."""

    token_roles: ClassVar[dict[str, TokenRole]] = dict.fromkeys(
        ("qkv.weight", "before.weight", "after.weight", "out.weight"), "attention"
    )

    def __init__(self, spec: Attention, ctx: BuildContext) -> None:
        super().__init__()
        self.spec, heads = spec, spec.num_heads
        self.qkv = Linear(ctx.channels, 3 * ctx.channels, ctx.init, spec.linear_bias, [ctx.channels] * 3)
        self.before, self.after = Linear(heads, heads, ctx.init), Linear(heads, heads, ctx.init)
        self.out = Linear(ctx.channels, ctx.channels, ctx.init, spec.linear_bias)

    def weights(self, q: Tensor, kv: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        """Softmax of the mixed scores, before heads are mixed again: b h s t."""
        q, k = (split_heads(t, self.spec.num_heads) for t in (q, kv.chunk(2, dim=-1)[0]))
        scores = mix_heads(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), self.before)
        return masked_softmax(scores, join(bias, mask, scores.dtype))

    def attention_weights(self, x: Tensor, context: Context) -> Tensor:
        """Softmax of the mixed scores for the input of `forward`: b h s t. Mixed again, rows do not sum to 1."""
        q, kv = self.qkv(x).tensor_split([x.shape[-1]], dim=-1)
        mask = allowed(context, self.spec.causal, q, kv)
        return self.weights(q, kv, mask, context.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, kv = self.qkv(x).tensor_split([x.shape[-1]], dim=-1)
        if context.cache is not None:
            kv = context.cache.extend(self, kv)
        v = split_heads(kv.chunk(2, dim=-1)[1], self.spec.num_heads)
        mask = allowed(context, self.spec.causal, q, kv)
        weights = mix_heads(self.weights(q, kv, mask, context.bias), self.after)
        if mask is not None:  # the bias added after the softmax must not reach masked tokens
            weights = weights * mask
        weights = F.dropout(weights, self.spec.dropout, self.training)
        return self.out(merge_heads(weights.to(v.dtype) @ v))


def mix_heads(scores: Tensor, proj: Linear) -> Tensor:
    """A linear map over the heads of b h s t."""
    return proj(scores.movedim(1, -1)).movedim(-1, 1)


class BiasAttentionLayer(nn.Module):
    """Attention whose scores do not depend on the content."""

    token_roles: ClassVar[dict[str, TokenRole]] = {"value.weight": "attention", "out.weight": "attention"}

    def __init__(self, spec: Attention, ctx: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        self.value = Linear(ctx.channels, ctx.channels, ctx.init, spec.linear_bias)
        self.out = Linear(ctx.channels, ctx.channels, ctx.init, spec.linear_bias)

    def weights(self, x: Tensor, v: Tensor, context: Context) -> Tensor:
        scores = join(context.bias, allowed(context, self.spec.causal, x, v), x.dtype)
        assert scores is not None, "the encoder passes the relative bias"
        return scores.softmax(dim=-1)

    def attention_weights(self, x: Tensor, context: Context) -> Tensor:
        """A_1 .. A_H for the input of `forward`: b h s t."""
        return self.weights(x, x, context).expand(len(x), self.spec.num_heads, -1, -1)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        v = self.value(x)
        if context.cache is not None:
            v = context.cache.extend(self, v)
        weights = F.dropout(self.weights(x, v, context), self.spec.dropout, self.training)
        return self.out(merge_heads(weights @ split_heads(v, self.spec.num_heads)))


class CrossAttention(Spec):
    """A decoder's attention to the encoder's output M.

        f(X) = [A_1 V_1 ... A_H V_H] O^T,   Q from X,   K and V from M

    Parameters 4C^2 + 4C. Keys and values are computed once per sequence when decoding step by step.
    """

    num_heads: Count
    dropout: Rate = 0.0

    def build(self, ctx: BuildContext) -> nn.Module:
        divide(ctx.channels, self.num_heads)
        return CrossAttentionLayer(self, ctx)


class CrossAttentionLayer(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = dict.fromkeys(("q.weight", "kv.weight", "out.weight"), "attention")

    def __init__(self, spec: CrossAttention, ctx: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        self.q = Linear(ctx.channels, ctx.channels, ctx.init)
        self.kv = Linear(ctx.channels, 2 * ctx.channels, ctx.init, parts=[ctx.channels] * 2)
        self.out = Linear(ctx.channels, ctx.channels, ctx.init)

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of the memory, and the mask of its real tokens."""
        memory = context.memory
        if memory is None:
            raise UserError("a block with cross-attention needs `memory`, the encoder's output")
        kv = self.kv(memory) if context.cache is None else context.cache.once(self, lambda: self.kv(memory))
        mask = None if context.memory_mask is None else context.memory_mask[:, None, None, :]
        return self.q(x), kv, mask

    def attention_weights(self, x: Tensor, context: Context) -> Tensor:
        """A_1 .. A_H for the input of `forward`, over the encoder's tokens: b h s m."""
        q, kv, mask = self.project(x, context)
        return weights_of(q, kv, self.spec.num_heads, mask)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, kv, mask = self.project(x, context)
        dropout = self.spec.dropout if self.training else 0.0
        return self.out(attend(q, kv, self.spec.num_heads, mask, dropout))


class TinyAttention(Spec):
    """aMLP's single small head; it reads the block's normalized input and is added to the gate.

        attention(X) = softmax(Q K^T / sqrt(D)) V O^T + o,   Q, K, V: S x D,   O: F/2 x D

    `rotary` rotates queries and keys by their positions. Source: gMLP, section 4.3 and its pseudo-code. Parameters
    3CD (+ 3D with bias) + D F/2 + F/2, multiply-adds S (3CD + D F/2) + 2S^2 D.
    """

    channels: Count = 64
    bias: bool = True
    rotary: RotaryPositions | None = None

    def check(self) -> None:
        if self.channels % 2 and self.rotary:
            raise UserError(f"rotary positions need an even number of channels, not {self.channels}")

    def build(self, ctx: BuildContext, width: int, causal: bool) -> nn.Module:
        return TinyAttentionLayer(self, ctx, width, causal)


class TinyAttentionLayer(nn.Module):
    token_roles: ClassVar[dict[str, TokenRole]] = {"qkv.weight": "attention", "out.weight": "attention"}

    def __init__(self, spec: TinyAttention, ctx: BuildContext, width: int, causal: bool) -> None:
        super().__init__()
        self.spec, self.causal = spec, causal
        self.qkv = Linear(ctx.channels, 3 * spec.channels, ctx.init, spec.bias, [spec.channels] * 3)
        self.out = Linear(spec.channels, width, ctx.init)

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Queries, and keys and values side by side."""
        q, kv = self.qkv(x).tensor_split([self.spec.channels], dim=-1)
        return rotated(q, kv, self.spec.rotary, self.spec.channels, context)

    def attention_weights(self, x: Tensor, context: Context) -> Tensor:
        """The weights of the one head for the input of `forward`: b 1 s t."""
        q, kv = self.project(x, context)
        return weights_of(q, kv, 1, allowed(context, self.causal, q, kv))

    def attended(self, x: Tensor, context: Context) -> Tensor:
        """The output before the last linear map: b s d."""
        q, kv = self.project(x, context)
        if context.cache is not None:
            kv = context.cache.extend(self, kv)
        return attend(q, kv, num_heads=1, mask=allowed(context, self.causal, q, kv))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.out(self.attended(x, context))
