"""Attention: what the all-MLP models are measured against, and the tiny one of aMLP."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.context import Context, Site
from allmlp.layers.init import Normal
from allmlp.layers.linear import Embedding, Linear
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.spec import Count, Rate, Spec


class RelativePositions(Spec):
    """T5's learned score per head and bucketed distance, one table for all layers of the stack.

        bias[h, i, j] = table[bucket(j - i), h]

    Half of the buckets are exact distances, the rest grow logarithmically up to `distance`.
    Parameters buckets x H.
    """

    buckets: Count = 32
    distance: Count = 128

    def check(self) -> None:
        if self.buckets % 4 or self.distance <= self.buckets // 2:
            raise UserError("RelativePositions needs buckets divisible by 4 and distance above buckets / 2")

    def build(self, heads: int, causal: bool) -> RelativeBias:
        return RelativeBias(self, heads, causal)


class RelativeBias(Embedding):
    def __init__(self, spec: RelativePositions, heads: int, causal: bool) -> None:
        super().__init__(spec.buckets, heads, Normal(0.02))
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

    `bias` adds T5's relative positions; scores="bias" leaves only them, A_h = softmax(bias_h), with
    neither queries nor keys (gMLP's "BERT + rel pos - attn"). Parameters 4C^2 + 4C (scores="bias":
    2C^2 + 2C), multiply-adds 4SC^2 + 2S^2 C.
    """

    heads: Count
    causal: bool = False
    bias: RelativePositions | None = None
    scores: Literal["content", "bias"] = "content"
    dropout: Rate = 0.0

    def check(self) -> None:
        if self.scores == "bias" and self.bias is None:
            raise UserError("Attention with scores='bias' needs bias=RelativePositions()")

    def build(self, site: Site) -> nn.Module:
        divide(site.channels, self.heads)
        return AttentionLayer(self, site) if self.scores == "content" else BiasAttentionLayer(self, site)


def divide(channels: int, heads: int) -> int:
    if channels % heads:
        raise UserError(f"{channels} channels cannot be split into {heads} heads")
    return channels // heads


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # b h s d


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # b s c


def attend(
    q: Tensor, kv: Tensor, heads: int, mask: Tensor | None, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V with all tensors b s c, keys and values side by side in `kv`."""
    k, v = kv.chunk(2, dim=-1)
    q, k, v = (split_heads(t, heads) for t in (q, k, v))
    return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal))


def allowed(context: Context, causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Which key each query may read (True), broadcastable to b h s t; None where all may."""
    mask = None if context.mask is None else context.mask[:, None, None, :]
    if causal and queries > 1:
        lower = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        mask = lower if mask is None else mask & lower
    return mask


def join(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Relative scores and a boolean mask as one attention mask."""
    if bias is None:
        return mask
    bias = bias.to(dtype)
    return bias if mask is None else torch.where(mask, bias, torch.finfo(dtype).min)


class AttentionLayer(nn.Module):
    def __init__(self, spec: Attention, site: Site) -> None:
        super().__init__()
        self.spec = spec
        self.qkv = Linear(site.channels, 3 * site.channels, site.init, parts=3)
        self.out = Linear(site.channels, site.channels, site.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, kv = self.qkv(x).tensor_split([x.shape[-1]], dim=-1)
        if context.cache is not None:
            kv = context.cache.extend(self, kv)
        dropout = self.spec.dropout if self.training else 0.0
        if context.mask is None and context.cache is None and context.bias is None:
            # Without an explicit mask torch can pick its fastest kernel.
            return self.out(attend(q, kv, self.spec.heads, None, dropout, self.spec.causal))
        mask = allowed(context, self.spec.causal, q.shape[1], kv.shape[1], x.device)
        return self.out(attend(q, kv, self.spec.heads, join(context.bias, mask, x.dtype), dropout))


class BiasAttentionLayer(nn.Module):
    """Attention whose scores do not depend on the content."""

    def __init__(self, spec: Attention, site: Site) -> None:
        super().__init__()
        self.spec = spec
        self.value = Linear(site.channels, site.channels, site.init)
        self.out = Linear(site.channels, site.channels, site.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        v = self.value(x)
        if context.cache is not None:
            v = context.cache.extend(self, v)
        scores = join(context.bias, allowed(context, self.spec.causal, x.shape[1], v.shape[1], x.device), x.dtype)
        assert scores is not None, "the stack hands the relative bias down"
        weights = F.dropout(scores.softmax(dim=-1), self.spec.dropout, self.training)
        return self.out(merge_heads(weights @ split_heads(v, self.spec.heads)))


class CrossAttention(Spec):
    """A decoder's attention to the encoder's output M.

        f(X) = [A_1 V_1 ... A_H V_H] O^T,   Q from X,   K and V from M

    Parameters 4C^2 + 4C. Keys and values are computed once per sequence when decoding step by step.
    """

    heads: Count
    dropout: Rate = 0.0

    def build(self, site: Site) -> nn.Module:
        divide(site.channels, self.heads)
        return CrossAttentionLayer(self, site)


class CrossAttentionLayer(nn.Module):
    def __init__(self, spec: CrossAttention, site: Site) -> None:
        super().__init__()
        self.spec = spec
        self.q = Linear(site.channels, site.channels, site.init)
        self.kv = Linear(site.channels, 2 * site.channels, site.init, parts=2)
        self.out = Linear(site.channels, site.channels, site.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        memory = context.memory
        if memory is None:
            raise UserError("a block with cross-attention needs the encoder's output as memory")
        kv = self.kv(memory) if context.cache is None else context.cache.once(self, lambda: self.kv(memory))
        mask = None if context.memory_mask is None else context.memory_mask[:, None, None, :]
        dropout = self.spec.dropout if self.training else 0.0
        return self.out(attend(self.q(x), kv, self.spec.heads, mask, dropout))


class TinyAttention(Spec):
    """aMLP's single small head; it reads the block's normalised input and adds to the gate.

        attention(X) = softmax(Q K^T / sqrt(D)) V O^T + o,   Q, K, V: S x D,   O: F/2 x D

    Source: gMLP, section 4.3 and its pseudo-code. Parameters 3CD (+ 3D with bias) + D F/2 + F/2,
    multiply-adds S (3CD + D F/2) + 2S^2 D.
    """

    channels: Count = 64
    bias: bool = True

    def build(self, site: Site, width: int, causal: bool) -> nn.Module:
        return TinyAttentionLayer(self, site, width, causal)


class TinyAttentionLayer(nn.Module):
    def __init__(self, spec: TinyAttention, site: Site, width: int, causal: bool) -> None:
        super().__init__()
        self.channels, self.causal = spec.channels, causal
        self.qkv = Linear(site.channels, 3 * spec.channels, site.init, bias=spec.bias, parts=3)
        self.out = Linear(spec.channels, width, site.init)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, kv = self.qkv(x).tensor_split([self.channels], dim=-1)
        if context.cache is not None:
            kv = context.cache.extend(self, kv)
        mask = allowed(context, self.causal, q.shape[1], kv.shape[1], x.device)
        return self.out(attend(q, kv, heads=1, mask=mask))
