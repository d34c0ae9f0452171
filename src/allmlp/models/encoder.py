"""Stem, blocks, norm, pool, head: the model that every sentence of the grammar describes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from allmlp.errors import UserError, lookup
from allmlp.layers.block import Block, BlockLayer
from allmlp.layers.context import Cache, Context, Site
from allmlp.layers.head import Classes, Head, Pair
from allmlp.layers.init import Init
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.norm import LayerNorm, Norm
from allmlp.layers.pool import Pool
from allmlp.layers.scale import DropPath
from allmlp.layers.stem import Patches, Stem, Tokens, TokenStem
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Count, Depth


class Encoder(ModelSpec):
    """A stack of equal blocks between a stem and a head.

    X0 = stem(input),   Xl = block_l(Xl-1),   features = norm(XL),   output = head(pool(features))
    """

    width: Count
    depth: Depth
    block: Block
    stem: Stem
    norm: Norm | None = LayerNorm()
    pool: Pool | None = None
    head: Head | None = None
    drop_path: DropPath = DropPath()
    init: Init = Init()

    def check(self) -> None:
        if self.head is not None and self.head.pooled != (self.pool is not None):
            need = "a pool such as Mean()" if self.head.pooled else "pool=None"
            raise UserError(f"a {type(self.head).__name__} head needs {need}")

    def build(self) -> EncoderModel:
        return EncoderModel(self)

    @property
    def site(self) -> Site:
        return Site(self.stem.tokens, self.width, self.init, self.stem.grid)

    @property
    def image_size(self) -> tuple[int, int] | None:
        return self.stem.image if isinstance(self.stem, Patches) else None

    @property
    def reads(self) -> str:
        if isinstance(self.stem, Patches):
            return "x".join(map(str, self.stem.image)) + " image"
        return f"{self.stem.tokens} tokens"

    def configure(self, **options: Any) -> Self:
        changes: dict[str, Any] = {}
        if "classes" in options:
            changes["head"] = self.with_classes(options.pop("classes"))
        if "drop_path" in options:
            changes["drop_path"] = self.drop_path.replace(rate=options.pop("drop_path"))
        fields = ("image", "patch", "in_channels") if isinstance(self.stem, Patches) else ("vocabulary", "length")
        for name in options:
            if name not in fields:
                raise UserError(f"the model reads {self.reads}: it takes no {name!r}, only {', '.join(fields)}")
        return self.replace(stem=self.stem.replace(**options), **changes)

    def with_classes(self, classes: int) -> Head:
        if isinstance(self.head, (Classes, Pair)):
            return self.head.replace(classes=classes)
        if self.pool is None:
            raise UserError("the model answers at every token; to classify, override its pool and head")
        return Classes(classes)


class EncoderModel(Model[Encoder]):
    """`table=False` leaves the token table out: a decoder that shares the encoder's."""

    def __init__(self, spec: Encoder, table: bool = True) -> None:
        super().__init__()
        self.spec = spec
        self.checkpointing = False
        site = spec.site
        self.stem = spec.stem.build(site, table) if isinstance(spec.stem, Tokens) else spec.stem.build(site)
        token = spec.block.token
        relative = token.bias if isinstance(token, Attention) else None
        self.relative = relative.build(token.heads, token.causal) if relative else None  # type: ignore[union-attr]
        self.blocks = nn.ModuleList(spec.block.build(site, spec.drop_path.at(i, spec.depth)) for i in range(spec.depth))
        self.norm = spec.norm.build(spec.width) if spec.norm else nn.Identity()
        self.pool = spec.pool.build(site, spec.block) if spec.pool else None
        self.head = self.build_head()

    def build_head(self) -> nn.Module | None:
        stem = self.spec.stem
        vocabulary = stem.vocabulary if isinstance(stem, Tokens) else None
        return self.spec.head.build(self.spec.site, vocabulary) if self.spec.head else None

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: Cache | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """Scores for images [B, 3, H, W] or token ids [B, S].

        mask [B, S] is True at real tokens. With a `cache`, x continues what the cache has read.
        """
        features = self.forward_features(
            x, mask, segments=segments, memory=memory, memory_mask=memory_mask, cache=cache, table=table
        )
        return self.forward_head(features, mask, table)

    def forward_features(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: Cache | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """Tokens after the last norm, [B, S, C]."""
        context = self.context(x, mask, memory, memory_mask, cache)
        x = self.embed(x, segments, context, table)
        for block in self.blocks:
            x = checkpoint(block, x, context, use_reentrant=False) if self.checkpointing else block(x, context)
        if cache is not None:
            cache.length += x.shape[1]
        return self.norm(x if self.pool is None else self.pool.prepare(x, context))

    def forward_head(self, features: Tensor, mask: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        """Pooled features where there is no head; features where there is no pool either."""
        x = features if self.pool is None else self.pool(features, mask)
        if self.head is None:
            return x
        return self.head(x, self.table if table is None else table)

    @property
    def table(self) -> Tensor | None:
        """The token embedding, which a tied head shares."""
        stem = self.stem
        return stem.embedding.weight if isinstance(stem, TokenStem) and stem.embedding is not None else None

    def forward_intermediates(
        self, x: Tensor, names: Iterable[str] | None = None, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Activations by name: stem, blocks.0.token, blocks.0.channel, blocks.0, ..., norm, pool, head."""
        kept: dict[str, Tensor] = {}
        context = self.context(x, mask, None, None, None)
        x = kept["stem"] = self.embed(x, segments, context, None)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, BlockLayer)
            for slot, residual in block.residuals():
                x = kept[f"blocks.{i}.{slot}"] = residual(x, context)
            kept[f"blocks.{i}"] = x
        x = kept["norm"] = self.norm(x if self.pool is None else self.pool.prepare(x, context))
        if self.pool is not None:
            kept["pool"] = self.pool(x, mask)
        if self.head is not None:
            kept["head"] = self.forward_head(x, mask)
        return kept if names is None else {name: lookup(name, kept, "intermediate") for name in names}

    def context(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: Tensor | None,
        memory_mask: Tensor | None,
        cache: Cache | None,
    ) -> Context:
        if cache is not None and not self.spec.block.causal:
            raise UserError("only a causal model can read step by step with a cache")
        if mask is not None and tuple(mask.shape) != tuple(x.shape[:2]):
            raise UserError(f"mask {list(mask.shape)} does not fit tokens {list(x.shape)}")
        if cache is not None and mask is not None:
            mask = cache.extend(self, mask)
        start = 0 if cache is None else cache.length
        bias = None if self.relative is None else self.relative(start, start + x.shape[1])
        return Context(mask, memory, memory_mask, bias, cache)

    def embed(self, x: Tensor, segments: Tensor | None, context: Context, table: Tensor | None) -> Tensor:
        if isinstance(self.stem, TokenStem):
            return self.stem(x, segments, context.start, table)
        return self.stem(x)

    def reset_head(self, head: int | Head) -> Self:
        """Replace the head with a fresh one: a number of classes, or any head's spec."""
        if isinstance(head, int):
            head = self.spec.with_classes(head)
        self.spec = self.spec.replace(head=head)
        with self.device:
            fresh = self.build_head()
        self.head = None if fresh is None else fresh.to(self.dtype)
        return self

    def set_grad_checkpointing(self, enable: bool = True) -> Self:
        self.checkpointing = enable
        return self

    def example(self, batch: int = 1) -> tuple[Tensor, ...]:
        stem = self.spec.stem
        if isinstance(stem, Patches):
            return (torch.randn(batch, stem.in_channels, *stem.image, device=self.device, dtype=self.dtype),)
        assert isinstance(stem, Tokens)
        return (torch.randint(stem.vocabulary, (batch, stem.length), device=self.device),)
