"""The encoder: stem, blocks, norm, pool, head. Every model of one stack is a configuration of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from allmlp.errors import UserError, lookup
from allmlp.layers.block import Block, BlockLayer, Residual
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.context import BuildContext, Cache, Context, check_mask
from allmlp.layers.head import ClassifierHead, Head, PooledHead
from allmlp.layers.init import Init
from allmlp.layers.mixers.attention import Attention, RelativePositionBias
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.norm import LayerNorm, Norm
from allmlp.layers.pool import Pool
from allmlp.layers.scale import DropPath
from allmlp.layers.stage import Stage
from allmlp.layers.stem import PatchEmbed, Stem, TokenEmbed, TokenEmbedLayer
from allmlp.models.model import Model, ModelSpec
from allmlp.models.timm_protocol import TimmProtocol
from allmlp.spec import Count, Depth


class Encoder(ModelSpec):
    """A stack of identical blocks between a stem and a head.

        X0 = stem(input),   Xl = block_l(Xl-1),   features = norm(XL),   output = head(pool(features))

    `width`, `depth` and `block` are those of the first stage, `stages` are the following ones: a pyramid, each stage
    with fewer and wider tokens. Blocks are numbered across all stages.
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
    stages: tuple[Stage, ...] = ()

    def check(self) -> None:
        self.check_stages()
        self.check_relative_bias()
        if self.head is not None and self.head.pooled != (self.pool is not None):
            need = "a pool such as MeanPool()" if self.head.pooled else "pool=None"
            raise UserError(f"{type(self.head).__name__} needs {need}")

    def check_stages(self) -> None:
        if self.stages and (self.stem.grid is None or self.num_prefix_tokens):
            raise UserError("stages need a plain grid of patches: an image stem without a class token")
        for before, stage in pairwise(self.all_stages):
            if stage.merge is None and stage.width != before.width:
                raise UserError(f"a stage without a merge keeps {before.width} channels: it cannot have {stage.width}")

    def check_relative_bias(self) -> None:
        supported = not self.stages and isinstance(self.block.token, Attention)
        if not supported and any(isinstance(part, RelativePositionBias) for part in self.children()):
            raise UserError("RelativePositionBias is one table for the stack: it needs Attention, and no stages")

    def build(self) -> EncoderModel:
        return EncoderModel(self)

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        return (Stage(self.width, self.depth, self.block, merge=None), *self.stages)

    @property
    def build_contexts(self) -> list[BuildContext]:
        """The build context of the blocks of each stage."""
        contexts = [BuildContext(self.stem.tokens, self.width, self.init, self.stem.grid)]
        for stage in self.stages:
            tokens, grid = contexts[-1].tokens, contexts[-1].grid
            if stage.merge is not None and grid is not None:
                grid = stage.merge.merged(grid)
                tokens = grid[0] * grid[1]
            contexts.append(BuildContext(tokens, stage.width, self.init, grid))
        return contexts

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all stages."""
        return sum(stage.depth for stage in self.all_stages)

    @property
    def num_features(self) -> int:
        """Channels after the last block."""
        return self.all_stages[-1].width

    @property
    def num_prefix_tokens(self) -> int:
        """Class tokens before the patches."""
        return int(isinstance(self.stem, PatchEmbed) and self.stem.class_token)

    @property
    def blocks_by_stage(self) -> list[range]:
        """Block numbers of each stage."""
        ends = accumulate((stage.depth for stage in self.all_stages), initial=0)
        return [range(*bounds) for bounds in pairwise(ends)]

    def stage_of(self, block: int) -> int:
        return next(number for number, blocks in enumerate(self.blocks_by_stage) if block in blocks)

    @property
    def input_size(self) -> tuple[int, int] | None:
        return self.stem.img_size if isinstance(self.stem, PatchEmbed) else None

    @property
    def input_channels(self) -> int | None:
        return self.stem.in_chans if isinstance(self.stem, PatchEmbed) else None

    @property
    def has_head(self) -> bool:
        return self.head is not None

    @property
    def input_spec(self) -> str:
        return super().input_spec if isinstance(self.stem, PatchEmbed) else f"{self.stem.tokens} tokens"

    def configure(self, **options: Any) -> Self:
        changes: dict[str, Any] = {}
        if "num_classes" in options:
            changes["head"] = self.with_classes(options.pop("num_classes"))
        if "drop_path" in options:
            changes["drop_path"] = self.drop_path.replace(rate=options.pop("drop_path"))
        fields = (
            ("img_size", "patch_size", "in_chans") if isinstance(self.stem, PatchEmbed) else ("vocab_size", "seq_len")
        )
        for name in options:
            if name not in fields:
                raise UserError(f"the model has no {name!r} (input: {self.input_spec}); it has {', '.join(fields)}")
        return self.replace(stem=self.stem.replace(**options), **changes)

    def shallow(self) -> tuple[Encoder, dict[str, range]]:
        shallow = self.replace(depth=1, stages=tuple(stage.replace(depth=1) for stage in self.stages))
        stages = list(enumerate(self.blocks_by_stage))
        merges = {f"merges.{number}": blocks[:1] for number, blocks in stages if self.all_stages[number].merge}
        return shallow, {f"blocks.{number}": blocks for number, blocks in stages} | merges

    def first(self, count: int) -> Encoder:
        """The model with only its first `count` blocks, which keep their drop path rates."""
        last = self.stage_of(count - 1)
        depths = [len(blocks) for blocks in self.blocks_by_stage[:last]]
        depths.append(count - sum(depths))
        kept = [stage.replace(depth=depth) for stage, depth in zip(self.stages, depths[1:])]
        rate = self.drop_path.replace(rate=self.drop_path.at(count - 1, self.num_blocks))
        return self.replace(depth=depths[0], stages=tuple(kept), drop_path=rate)

    def with_classes(self, num_classes: int) -> Head | None:
        """The head for this many classes; none for 0, so that the model returns pooled features."""
        if num_classes == 0:
            return None
        if isinstance(self.head, (ClassifierHead, PooledHead)):
            return self.head.replace(num_classes=num_classes)
        if self.pool is None:
            raise UserError("the model has an output per token; to classify, override its pool and head")
        return ClassifierHead(num_classes)


class EncoderModel(TimmProtocol, Model[Encoder]):
    """`embedding=False` leaves out the token embedding, for a decoder that uses the encoder's."""

    def __init__(self, spec: Encoder, embedding: bool = True) -> None:
        super().__init__()
        self.spec = spec
        contexts, stages = spec.build_contexts, spec.all_stages
        first, last = contexts[0], contexts[-1]
        self.stem = spec.stem.build(first, embedding) if isinstance(spec.stem, TokenEmbed) else spec.stem.build(first)
        token = spec.block.token
        relative = token.bias if isinstance(token, Attention) else None
        self.relative = relative.build(token.num_heads, token.causal) if relative else None  # type: ignore[union-attr]
        self.blocks = nn.ModuleList()
        for stage, ctx in zip(stages, contexts, strict=True):
            for _ in range(stage.depth):
                self.blocks.append(stage.block.build(ctx, spec.drop_path.at(len(self.blocks), spec.num_blocks)))
        self.merges = nn.ModuleDict()  # by the number of the block that follows
        for stage, blocks, around in zip(stages[1:], spec.blocks_by_stage[1:], pairwise(contexts), strict=True):
            if stage.merge:
                self.merges[str(blocks[0])] = stage.merge.build(*around)
        self.norm = spec.norm.build(last.channels) if spec.norm else nn.Identity()
        self.pool = spec.pool.build(last, stages[-1].block) if spec.pool else None
        self.head = self.build_head()

    def build_head(self) -> nn.Module | None:
        stem = self.spec.stem
        vocab_size = stem.vocab_size if isinstance(stem, TokenEmbed) else None
        return self.spec.head.build(self.spec.build_contexts[-1], vocab_size) if self.spec.head else None

    def forward(
        self,
        x: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: Cache | None = None,
        embedding: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        documents: Tensor | None = None,
        pre_logits: bool = False,
    ) -> Tensor:
        """Logits for images [B, C, H, W] or token ids [B, S]; with `pre_logits` the features that the head reads.

        mask [B, S] is True at real tokens, False at padding. For rows of several documents that do not see each other,
        pass `documents` [B, S] instead: document numbers from 1, 0 at padding. With a `cache`, x holds the tokens after
        the cached ones. A text model takes embedded tokens `inputs_embeds` [B, S, C] instead of x; positions and
        segments are added.
        """
        features = self.forward_features(
            x,
            mask,
            segments=segments,
            memory=memory,
            memory_mask=memory_mask,
            cache=cache,
            embedding=embedding,
            inputs_embeds=inputs_embeds,
            documents=documents,
        )
        return self.forward_head(features, mask, embedding, pre_logits=pre_logits)

    def forward_features(
        self,
        x: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: Cache | None = None,
        embedding: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        documents: Tensor | None = None,
        intermediates: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Tokens after the last norm, [B, S, C]. Intermediate activations are stored in `intermediates`."""
        inputs = x if inputs_embeds is None else inputs_embeds
        if inputs is None or (x is not None and inputs_embeds is not None):
            raise UserError("pass either images or token ids, or inputs_embeds")
        context = self.context(inputs, mask, memory, memory_mask, cache, documents)
        x = self.embed(inputs, segments, context, embedding, embedded=inputs_embeds is not None)
        record(intermediates, "stem", x)
        x = self.run_blocks(x, context, intermediates)
        if cache is not None:
            cache.length += x.shape[1]
        x = self.norm(x if self.pool is None else self.pool.prepare(x, context))
        record(intermediates, "norm", x)
        return x

    def run_blocks(self, x: Tensor, context: Context, intermediates: dict[str, Tensor] | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if str(i) in self.merges:
                x = self.merges[str(i)](x)
                record(intermediates, f"merges.{i}", x)
            outputs = None if intermediates is None else {}
            x = self.run_block(block, x, context, outputs)
            for slot, output in (outputs or {}).items():
                record(intermediates, f"blocks.{i}.{slot}", output)
            record(intermediates, f"blocks.{i}", x)
        return x

    def forward_head(
        self,
        features: Tensor,
        mask: Tensor | None = None,
        embedding: Tensor | None = None,
        intermediates: dict[str, Tensor] | None = None,
        *,
        pre_logits: bool = False,
    ) -> Tensor:
        """Pooled features where there is no head, or with `pre_logits`; features where there is no pool either."""
        x = features
        if self.pool is not None:
            x = self.pool(x, mask)
            record(intermediates, "pool", x)
        if self.head is not None and not pre_logits:
            x = self.head(x, self.embedding if embedding is None else embedding)
            record(intermediates, "head", x)
        return x

    @property
    def embedding(self) -> Tensor | None:
        """The token embedding, which a tied head uses."""
        stem = self.stem
        return stem.embedding.weight if isinstance(stem, TokenEmbedLayer) and stem.embedding is not None else None

    def forward_activations(
        self, x: Tensor, names: Iterable[str] | None = None, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Activations by name: stem, blocks.0.token, blocks.0.channel, blocks.0, ..., norm, pool, head; where a stage
        begins with block 4, merges.4 before it.
        """
        activations: dict[str, Tensor] = {}
        features = self.forward_features(x, mask, segments=segments, intermediates=activations)
        self.forward_head(features, mask, intermediates=activations)
        return activations if names is None else {name: lookup(name, activations, "intermediate") for name in names}

    def context(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: Tensor | None,
        memory_mask: Tensor | None,
        cache: Cache | None,
        documents: Tensor | None = None,
    ) -> Context:
        if cache is not None and not self.spec.block.causal:
            raise UserError("only a causal model can use a cache")
        check_mask(mask, x)
        if memory is not None:
            check_mask(memory_mask, memory)
        if documents is not None:
            self.check_documents(cache)
            mask = documents > 0
        if cache is not None:
            mask = cache.extend_mask(self, mask, x)
        start = 0 if cache is None else cache.length
        bias = None
        if self.relative is not None:
            tokens = self.spec.stem.tokens if isinstance(self.spec.stem, PatchEmbed) else x.shape[1]
            bias = self.relative(start, start + tokens)
        return Context(mask, memory, memory_mask, bias, cache, documents)

    def check_documents(self, cache: Cache | None) -> None:
        mixers = [part for part in self.spec.children() if isinstance(part, TokenMixer)]
        unable = [type(mixer).__name__ for mixer in mixers if not mixer.separates_documents]
        if unable:
            raise UserError(f"{unable[0]} mixes all tokens of a row: it cannot separate documents")
        if cache is not None or self.pool is not None:
            raise UserError("a row of several documents cannot be pooled or decoded step by step")

    def embed(
        self, x: Tensor, segments: Tensor | None, context: Context, embedding: Tensor | None, embedded: bool = False
    ) -> Tensor:
        if isinstance(self.stem, TokenEmbedLayer):
            return self.stem(x, segments, context.start(), embedding, embedded)
        if embedded:
            raise UserError(f"a model of {self.spec.input_spec} does not accept inputs_embeds")
        return self.stem(x)

    def parts(self) -> dict[str, str]:
        return {self.label(path): path for path in part_paths(self)}

    def label(self, path: str) -> str:
        """blocks.0.token -> blocks.token; the first block of stage 1: blocks.2.token -> stages.1.blocks.token."""
        if not self.spec.stages:
            return path.replace(".0", "")
        part, number, *rest = [*path.split("."), ""]
        if part != "blocks":
            return path
        stage = self.spec.stage_of(int(number))
        within = int(number) - self.spec.blocks_by_stage[stage][0]
        return ".".join(["stages", str(stage), "blocks", *([str(within)] if within else []), *rest[:-1]])

    def reset_classifier(self, num_classes: int | Head, global_pool: str | None = None) -> Self:
        """Replace the head by a new one, given as a number of classes (0 for none) or as a spec.

        `global_pool` is timm's name of the pool, which must be the model's; "" without classes removes it as well.
        """
        head = num_classes if isinstance(num_classes, Head) else self.spec.with_classes(int(num_classes))
        self.check_global_pool(global_pool, head)
        if global_pool == "" and head is None:
            self.spec, self.pool = self.spec.replace(pool=None, head=None), None
        self.spec = self.spec.replace(head=head)
        self.forget_class_names()
        with self.device:
            fresh = self.build_head()
        self.head = None if fresh is None else fresh.to(self.dtype).train(self.training)
        return self

    def dummy_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        stem = self.spec.stem
        if isinstance(stem, PatchEmbed):
            return (torch.randn(batch_size, stem.in_chans, *stem.img_size, device=self.device, dtype=self.dtype),)
        assert isinstance(stem, TokenEmbed)
        return (torch.randint(stem.vocab_size, (batch_size, stem.seq_len), device=self.device),)


def record(intermediates: dict[str, Tensor] | None, name: str, x: Tensor) -> None:
    if intermediates is not None:
        intermediates[name] = x


CONTAINERS = (nn.ModuleList, nn.ModuleDict, BlockLayer, Residual, ChannelMlpLayer)
"""Modules whose children are rows of the cost table, rather than themselves."""


def part_paths(model: nn.Module, prefix: str = "") -> list[str]:
    """Paths of the stem, of the modules inside the blocks, and of norm, pool and head."""
    paths = []
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        paths += part_paths(child, f"{path}.") if isinstance(child, CONTAINERS) else [path]
    return paths
