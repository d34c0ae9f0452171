"""The parts of timm's model interface besides `forward`: feature maps, parameter groups, data config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.layers.head import ClassifierHead, ClassifierHeadLayer, Head, PooledHead
from allmlp.layers.pool import FirstTokenPool, MeanPool
from allmlp.layers.stem import PatchEmbed

if TYPE_CHECKING:
    from allmlp.models.encoder import Encoder

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
POOLS: dict[str, type | None] = {"avg": MeanPool, "token": FirstTokenPool, "": None}
"""timm's names of pools."""
LAST = 99999
"""timm's number for the layer after the last block."""
Format = Literal["NCHW", "NLC"]


class TimmProtocol(nn.Module):
    """Methods and attributes of timm's models, for `EncoderModel`."""

    spec: Encoder
    preprocessing: Any
    blocks: Any
    merges: Any
    norm: Any
    pool: Any
    head: Any
    context: Any
    embed: Any
    run_block: Any

    # --- sizes -------------------------------------------------------------------------------------------

    @property
    def num_features(self) -> int:
        return self.spec.num_features

    embed_dim = head_hidden_size = num_features

    @property
    def num_classes(self) -> int:
        """0 without a classifier."""
        head = self.spec.head
        return head.num_classes if isinstance(head, (ClassifierHead, PooledHead)) else 0

    @property
    def num_prefix_tokens(self) -> int:
        return self.spec.num_prefix_tokens

    @property
    def feature_blocks(self) -> list[int]:
        """The blocks whose outputs are features: all of them, or the last of every stage."""
        return [blocks[-1] for blocks in self.spec.blocks_by_stage] if self.spec.stages else [*range(len(self.blocks))]

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Name, channels and stride of every feature."""
        stem, features = self.spec.stem, []
        reduction = max(stem.patch_size) if isinstance(stem, PatchEmbed) else 1
        for stage, blocks in zip(self.spec.all_stages, self.spec.blocks_by_stage, strict=True):
            reduction *= max(stage.merge.patch_size) if stage.merge else 1
            numbers = [number for number in self.feature_blocks if number in blocks]
            features += [{"module": f"blocks.{i}", "num_chs": stage.width, "reduction": reduction} for i in numbers]
        return features

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """Input configuration for `timm.data.resolve_model_data_config`: the model's image size, and the normalization
        it was loaded with, else ImageNet's.
        """
        stem, preprocessing = self.spec.stem, self.preprocessing
        if not isinstance(stem, PatchEmbed):
            # Not a UserError: tracing and inspection read every attribute.
            raise AttributeError(f"a model of {self.spec.input_spec} has no image config")
        colors = stem.in_chans == len(IMAGENET_MEAN)
        return {
            "architecture": "allmlp",
            "input_size": (stem.in_chans, *stem.img_size),
            "num_classes": self.num_classes,
            "mean": preprocessing.mean if preprocessing else IMAGENET_MEAN if colors else (0.5,) * stem.in_chans,
            "std": preprocessing.std if preprocessing else IMAGENET_STD if colors else (0.5,) * stem.in_chans,
            "crop_pct": preprocessing.crop_pct if preprocessing else 0.875,
            "interpolation": "bicubic",
            "fixed_input_size": True,
            "first_conv": "stem.proj",
            "classifier": "head.proj",
        }

    default_cfg = pretrained_cfg

    # --- training ----------------------------------------------------------------------------------------

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups for layer-wise learning rates: the stem, each block with the merge before it, the rest."""
        blocks = [(r"^(?:blocks|merges)\.(\d+)", None), (r"^(?:norm|pool)\.", (LAST,))]
        return {"stem": r"^(?:stem|relative)\.", "blocks": blocks}

    def no_weight_decay(self) -> set[str]:
        """Positions and class tokens."""
        names = ("stem.positions.weight", "stem.token", "pool.token", "relative.weight")
        return {name for name, _ in self.named_parameters() if name in names}

    # --- head --------------------------------------------------------------------------------------------

    def get_classifier(self) -> nn.Module:
        """The last linear layer, which `pretrained_cfg["classifier"]` names."""
        head = nn.Identity() if self.head is None else self.head
        return head.proj if isinstance(head, ClassifierHeadLayer) else head

    def check_global_pool(self, global_pool: str | None, head: Head | None) -> None:
        """Raise UserError if timm's name of a pool is not that of the model's; "" is for a model without a head."""
        if global_pool is None:
            return
        if global_pool not in POOLS:
            raise UserError(f"global_pool {global_pool!r} is unknown: use one of {', '.join(map(repr, POOLS))}")
        pool = POOLS[global_pool]
        if pool is None and head is not None:
            raise UserError("global_pool '' is for features, without a classifier: use num_classes=0")
        if pool is not None and not isinstance(self.spec.pool, pool):
            name = type(self.spec.pool).__name__
            raise UserError(f"the model pools with {name}, not with global_pool {global_pool!r}")

    # --- features ----------------------------------------------------------------------------------------

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Format = "NCHW",
        intermediates_only: bool = False,
        mask: Tensor | None = None,
    ) -> Any:
        """Final features, and intermediate outputs of the blocks: all, the last `indices`, or those at `indices`. For a
        model with stages, the outputs of the stages.

        "NCHW" gives maps [B, C, H, W] of an image, without class tokens (with `return_prefix_tokens`, pairs of both);
        "NLC" gives tokens [B, S, C]. `norm` applies the last norm to each. `intermediates_only` gives the list alone,
        and with `stop_early` later blocks do not run.
        """
        stem, prefix = self.spec.stem, self.num_prefix_tokens
        if output_fmt not in get_args(Format):
            raise UserError(f"output_fmt must be one of {', '.join(get_args(Format))}, not {output_fmt!r}")
        if output_fmt == "NCHW" and not isinstance(stem, PatchEmbed):
            raise UserError("the tokens of a text form no map: use output_fmt='NLC'")
        taken = take_indices(self.feature_blocks, indices)
        if norm and self.spec.stage_of(min(taken)) != len(self.spec.stages):
            raise UserError("the last norm is for the channels of the last stage: use norm=False for the other stages")
        context = self.context(x, mask, None, None, None)
        x = self.embed(x, None, context, None)
        outputs = {}
        for i, block in enumerate(self.blocks):
            x = self.run_block(block, self.merges[str(i)](x) if str(i) in self.merges else x, context)
            if i in taken:
                outputs[i] = self.norm(x) if norm else x
            if i == max(taken) and stop_early and intermediates_only:
                break
        intermediates = [tokens[:, prefix:] for tokens in outputs.values()]
        if output_fmt == "NCHW":
            grids = [self.spec.build_contexts[self.spec.stage_of(i)].grid for i in outputs]
            intermediates = [
                tokens.transpose(1, 2).unflatten(2, grid).contiguous() for tokens, grid in zip(intermediates, grids)
            ]
        if return_prefix_tokens:
            intermediates = [
                (features, tokens[:, :prefix]) for features, tokens in zip(intermediates, outputs.values())
            ]
        if intermediates_only:
            return intermediates
        return self.norm(x if self.pool is None else self.pool.prepare(x, context)), intermediates

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last one at `indices`, and the norm and the head if they are not needed."""
        blocks = self.feature_blocks
        taken = take_indices(blocks, indices)
        count = max(taken) + 1
        pruned = self.spec.first(count)
        if pruned.num_features != self.spec.num_features and not (prune_norm and prune_head):
            raise UserError("without its last stage the model has other channels: prune_norm and prune_head are needed")
        self.spec = pruned.replace(
            norm=None if prune_norm else self.spec.norm,
            pool=None if prune_head else self.spec.pool,
            head=None if prune_head else self.spec.head,
        )
        self.blocks = self.blocks[:count]
        for name in [name for name in self.merges if int(name) >= count]:
            del self.merges[name]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.pool = self.head = None
        return [blocks.index(block) for block in taken]

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resize the model in place to another image size. Weights over tokens become new parameters: create the
        optimizer afterwards.
        """
        # Through the public name: resizing is implemented in a package above this one.
        import allmlp

        stem = self.spec.stem
        if patch_size is not None and isinstance(stem, PatchEmbed):
            new_size = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
            if new_size != stem.patch_size:
                raise UserError(f"a model with patches of {stem.patch_size} cannot be changed to {new_size}")
        if img_size is None:
            return
        resized = allmlp.resize_model(self, img_size, copy=False)  # type: ignore[arg-type]
        for name, child in resized.named_children():
            setattr(self, name, child)
        self.spec = resized.spec


def take_indices(blocks: list[int], indices: int | Sequence[int] | None) -> list[int]:
    """Select from `blocks`: all, the last `indices`, or those at `indices`; negative indices count from the end."""
    count, what = len(blocks), "blocks" if blocks == [*range(len(blocks))] else "stages"
    if indices is None:
        return blocks
    if isinstance(indices, Sequence) and not indices:
        raise UserError(f"name at least one of the {what}, not an empty list")
    if isinstance(indices, int):
        if not 0 < indices <= count:
            raise UserError(f"the model has {count} {what}: {indices} cannot be taken")
        return blocks[count - indices :]
    for index in indices:
        if not -count <= index < count:
            raise UserError(f"there is no {what.removesuffix('s')} {index} in a model of {count} {what}")
    return [blocks[index] for index in indices]
