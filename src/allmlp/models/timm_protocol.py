"""What timm's code expects of a model beside `forward`: feature maps, parameter groups, its data config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.layers.head import ClassifierHead, PooledHead
from allmlp.layers.stem import PatchEmbed

if TYPE_CHECKING:
    from allmlp.models.encoder import Encoder

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAST = 99999
"""timm's number for the layer after the last block."""
Format = Literal["NCHW", "NLC"]


class TimmProtocol(nn.Module):
    """Methods and attributes of timm's models, for `EncoderModel`."""

    spec: Encoder
    preprocessing: Any
    blocks: Any
    norm: Any
    pool: Any
    head: Any
    context: Any
    embed: Any
    run_block: Any

    # --- sizes -------------------------------------------------------------------------------------------

    @property
    def num_features(self) -> int:
        return self.spec.width

    embed_dim = head_hidden_size = num_features

    @property
    def num_classes(self) -> int:
        """0 without a classifier."""
        head = self.spec.head
        return head.num_classes if isinstance(head, (ClassifierHead, PooledHead)) else 0

    @property
    def num_prefix_tokens(self) -> int:
        stem = self.spec.stem
        return int(isinstance(stem, PatchEmbed) and stem.class_token)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Name, channels and stride of the output of every block."""
        stem = self.spec.stem
        reduction = max(stem.patch_size) if isinstance(stem, PatchEmbed) else 1
        return [
            {"module": f"blocks.{i}", "num_chs": self.spec.width, "reduction": reduction}
            for i in range(self.spec.depth)
        ]

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """The model's input, as `timm.data.resolve_model_data_config` reads it: its own size and normalization where
        the model was loaded with them, else ImageNet's.
        """
        stem, known = self.spec.stem, self.preprocessing
        if not isinstance(stem, PatchEmbed):
            raise UserError(f"a model of {self.spec.input_spec} has no image config")
        colors = stem.in_chans == len(IMAGENET_MEAN)
        return {
            "architecture": "allmlp",
            "input_size": (stem.in_chans, *stem.img_size),
            "num_classes": self.num_classes,
            "mean": known.mean if known else IMAGENET_MEAN if colors else (0.5,) * stem.in_chans,
            "std": known.std if known else IMAGENET_STD if colors else (0.5,) * stem.in_chans,
            "crop_pct": known.crop_pct if known else 0.875,
            "interpolation": "bicubic",
            "fixed_input_size": True,
            "first_conv": "stem.proj",
            "classifier": "head.proj",
        }

    @property
    def default_cfg(self) -> dict[str, Any]:
        return self.pretrained_cfg

    # --- training ----------------------------------------------------------------------------------------

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The stem, each block, and what follows them, for layer-wise learning rates."""
        return {"stem": r"^(?:stem|relative)\.", "blocks": [(r"^blocks\.(\d+)", None), (r"^(?:norm|pool)\.", (LAST,))]}

    def no_weight_decay(self) -> set[str]:
        """Positions and class tokens."""
        names = ("stem.positions.weight", "stem.token", "pool.token", "relative.weight")
        return {name for name, _ in self.named_parameters() if name in names}

    # --- head --------------------------------------------------------------------------------------------

    def get_classifier(self) -> nn.Module:
        return self.head if isinstance(self.head, nn.Module) else nn.Identity()

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
        """The features, and the outputs of blocks on the way: all of them, the last `indices`, or those at `indices`.

        "NCHW" gives maps [B, C, H, W] of an image, without class tokens (with `return_prefix_tokens`, pairs of both);
        "NLC" gives tokens [B, S, C]. `norm` applies the last norm to each. `intermediates_only` gives the list alone,
        and with `stop_early` later blocks do not run.
        """
        stem, prefix = self.spec.stem, self.num_prefix_tokens
        if output_fmt == "NCHW" and not isinstance(stem, PatchEmbed):
            raise UserError("the tokens of a text form no map: use output_fmt='NLC'")
        taken = take_indices(self.spec.depth, indices)
        context = self.context(x, mask, None, None, None)
        x = self.embed(x, None, context, None)
        outputs = []
        for i, block in enumerate(self.blocks):
            x = self.run_block(block, x, context)
            if i in taken:
                outputs.append(self.norm(x) if norm else x)
            if i == max(taken) and stop_early and intermediates_only:
                break
        found = [tokens[:, prefix:] for tokens in outputs]
        if output_fmt == "NCHW":
            found = [tokens.transpose(1, 2).unflatten(2, stem.grid).contiguous() for tokens in found]
        if return_prefix_tokens:
            found = [(features, tokens[:, :prefix]) for features, tokens in zip(found, outputs)]
        if intermediates_only:
            return found
        return self.norm(x if self.pool is None else self.pool.prepare(x, context)), found

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last one at `indices`, and the norm and the head if they are not needed."""
        taken = take_indices(self.spec.depth, indices)
        depth, drop_path = max(taken) + 1, self.spec.drop_path
        self.spec = self.spec.replace(
            # The blocks that stay keep their rates.
            depth=depth,
            drop_path=drop_path.replace(rate=drop_path.at(depth - 1, self.spec.depth)),
            norm=None if prune_norm else self.spec.norm,
            pool=None if prune_head else self.spec.pool,
            head=None if prune_head else self.spec.head,
        )
        self.blocks = self.blocks[:depth]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.pool = self.head = None
        return taken

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resize the model in place to another image size. Weights over tokens are new parameters: an optimizer is to
        be created afterwards.
        """
        # Through the public name: resizing is implemented in a package above this one.
        import allmlp

        stem = self.spec.stem
        if patch_size is not None and isinstance(stem, PatchEmbed):
            wanted = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
            if wanted != stem.patch_size:
                raise UserError(f"a model with patches of {stem.patch_size} cannot be changed to {wanted}")
        if img_size is None:
            return
        resized = allmlp.resize_model(self, img_size)  # type: ignore[arg-type]
        for name, child in resized.named_children():
            setattr(self, name, child)
        self.spec = resized.spec


def take_indices(depth: int, indices: int | Sequence[int] | None) -> list[int]:
    """Block numbers: all, the last `indices`, or `indices` themselves, where negative ones count from the end."""
    if indices is None:
        return list(range(depth))
    if isinstance(indices, int):
        if not 0 < indices <= depth:
            raise UserError(f"the model has {depth} blocks: {indices} cannot be taken")
        return list(range(depth - indices, depth))
    for index in indices:
        if not -depth <= index < depth:
            raise UserError(f"there is no block {index} in a model of {depth} blocks")
    return [index % depth for index in indices]
