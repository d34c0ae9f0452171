"""timm's format of MLP-Mixer, ResMLP, gMLP, ViT and CaiT.

timm uses the exact GELU and LayerNorm with eps 1e-6 (1e-5 in gMLP's gate). A Mixer trained with the tanh GELU can be
written in this format, but its outputs then differ by about 3e-4, as those of timm's own copy of Google's weights do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.errors import UserError
from allmlp.layers.pool import FirstTokenPool, MeanPool
from allmlp.layers.scale import LayerScale
from allmlp.models.cait import cait
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit
from allmlp.spec import override_all
from allmlp.weights.formats.format import (
    HALF,
    IMAGENET,
    Format,
    Shapes,
    Signatures,
    classifier,
    count_blocks,
    infer_img_size,
    patch_kernel,
    translate_key,
)
from allmlp.weights.tensors import write_pickle, write_safetensors

OUTER = {"stem.proj": "stem.proj", "norm": "norm", "head.proj": "head"}
CHANNEL = {"channel.mix.up": "mlp_channels.fc1", "channel.mix.down": "mlp_channels.fc2"}
NORMS = {"token.norm": "norm1", "channel.norm": "norm2"}
VIT = (
    OUTER
    | NORMS
    | {
        "stem.proj": "patch_embed.proj",
        "stem.positions.weight": "pos_embed",
        "token.mix.qkv": "attn.qkv",
        "token.mix.out": "attn.proj",
        "channel.mix.up": "mlp.fc1",
        "channel.mix.down": "mlp.fc2",
    }
)
CLASS_ATTENTION = {
    "gathers.norm": ("norm1",),
    "gathers.q": ("attn.q",),
    "gathers.kv": ("attn.k", "attn.v"),
    "gathers.out": ("attn.proj",),
    "gathers.scale.gamma": ("gamma_1",),
    "channels.norm": ("norm2",),
    "channels.mix.up": ("mlp.fc1",),
    "channels.mix.down": ("mlp.fc2",),
    "channels.scale.gamma": ("gamma_2",),
}
"""The parts of a layer of CaiT's class attention -> their names in its block in timm."""
NAMES: dict[str, dict[str, str]] = {
    "Mixer": OUTER | CHANNEL | NORMS | {"token.mix.up": "mlp_tokens.fc1", "token.mix.down": "mlp_tokens.fc2"},
    "ResMLP": OUTER
    | CHANNEL
    | NORMS
    | {"token.mix": "linear_tokens", "token.scale.gamma": "ls1", "channel.scale.gamma": "ls2"},
    "gMLP": OUTER
    | CHANNEL
    | {
        "channel.norm": "norm",
        "channel.mix.inner.norm": "mlp_channels.gate.norm",
        "channel.mix.inner.proj": "mlp_channels.gate.proj",
    },
    "ViT": VIT | {"stem.token": "cls_token", "token.scale": "ls1", "channel.scale": "ls2"},
    "CaiT": VIT
    | {
        "pool.token": "cls_token",
        "token.mix.before": "attn.proj_l",
        "token.mix.after": "attn.proj_w",
        "token.scale.gamma": "gamma_1",
        "channel.scale.gamma": "gamma_2",
    },
}
"""Native module or parameter, relative to its block -> its name in timm."""

HEADS_FIELD = "block.token.num_heads"
HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""Width -> number of heads of the published ViTs (So, H, g, G) whose heads do not have 64 channels."""

LAYERS = ("_layer", "_fn")
"""Suffixes of the timm arguments that replace a layer."""

CROP = 0.875


class Timm(Format):
    """timm's format of five families."""

    TITLE = "timm's"
    SIGNATURES: ClassVar[Signatures] = {
        "Mixer": {"stem.proj.weight": 4, "blocks.0.mlp_tokens.fc1.weight": 2, "blocks.0.mlp_channels.fc1.weight": 2},
        "ResMLP": {"stem.proj.weight": 4, "blocks.0.linear_tokens.weight": 2, "blocks.0.mlp_channels.fc1.weight": 2},
        "gMLP": {
            "stem.proj.weight": 4,
            "blocks.0.mlp_channels.gate.proj.weight": 2,
            "blocks.0.mlp_channels.fc1.weight": 2,
        },
        "CaiT": {  # before ViT, since it also has ViT's keys
            "patch_embed.proj.weight": 4,
            "pos_embed": 3,
            "blocks.0.attn.qkv.weight": 2,
            "blocks.0.attn.proj_l.weight": 2,
            "blocks.0.mlp.fc1.weight": 2,
            "blocks_token_only.0.attn.q.weight": 2,
        },
        "ViT": {
            "patch_embed.proj.weight": 4,
            "pos_embed": 3,
            "blocks.0.attn.qkv.weight": 2,
            "blocks.0.mlp.fc1.weight": 2,
        },
    }

    def preprocessing(self, family: str, spec: Encoder, config: Mapping[str, Any]) -> ImagePreprocessing:
        """From the configuration next to the weights; without one, the values that most weights of the family use."""
        usual = ImagePreprocessing(HALF, HALF, crop_pct=0.9 if family == "ViT" else CROP)
        if family in ("ResMLP", "CaiT"):
            usual = ImagePreprocessing(*IMAGENET, crop_pct=1.0 if family == "CaiT" else CROP)
        stated = config.get("pretrained_cfg")
        if not isinstance(stated, dict):
            return usual
        return usual.replace(**{n: stated[n] for n in ("mean", "std", "crop_pct") if stated.get(n) is not None})

    def keys(self, family: str, name: str, spec: Encoder) -> tuple[str, ...]:
        layer = re.match(r"pool\.(gathers|channels)\.(\d+)\.(.+)", name) if family == "CaiT" else None
        if layer is None:
            return (translate_key(name, NAMES[family]),)
        kind, number, inner = layer.groups()
        module, _, last = inner.rpartition(".")
        whole = CLASS_ATTENTION.get(f"{kind}.{inner}")
        parts = whole or [f"{part}.{last}" for part in CLASS_ATTENTION[f"{kind}.{module}"]]
        return tuple(f"blocks_token_only.{number}.{part}" for part in parts)

    def to_source(self, family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
        if name == "stem.proj.weight":
            return patch_kernel(tensor, spec)
        if name.endswith((".alpha", ".beta")) or name in ("stem.token", "pool.token"):
            return tensor.reshape(1, 1, -1)
        return tensor.unsqueeze(0) if name == "stem.positions.weight" else tensor

    def infer_spec(self, family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
        args = config.get("model_args")
        other = [name for name in args if str(name).endswith(LAYERS)] if isinstance(args, dict) else []
        if other:
            raise UserError(
                f"its configuration replaces {', '.join(map(str, other))}, which a file of weights does not show; "
                "convert timm:NAME instead"
            )
        depth = count_blocks(shapes, r"blocks\.(\d+)\.")
        width, colors, *patch_size = shapes[translate_key("stem.proj.weight", NAMES[family])]
        hidden = shapes[translate_key("blocks.0.channel.mix.up.weight", NAMES[family])][0]
        changes: dict[str, object] = {"block.channel.hidden": hidden, "stem.in_chans": colors}
        class_token = family == "ViT" and "cls_token" in shapes
        if family == "Mixer":
            token_hidden, tokens = shapes["blocks.0.mlp_tokens.fc1.weight"]
            spec = mixer(depth, width, 1, 1, token_hidden=token_hidden)
            changes |= {"block.token.act": "gelu", "block.channel.act": "gelu"}
        elif family == "ResMLP":
            tokens = shapes["blocks.0.linear_tokens.weight"][0]
            spec = resmlp(depth, width, scale_at(depth), 1, 1)
        elif family == "gMLP":
            tokens = shapes["blocks.0.mlp_channels.gate.proj.weight"][0]
            spec = gmlp(depth, width, 1, 1)
        elif family == "CaiT":
            tokens, num_heads = shapes["pos_embed"][1], shapes["blocks.0.attn.proj_l.weight"][0]
            spec = cait(depth, width, scale_at(depth), 1, 1, num_heads=num_heads)
            changes["pool.layers"] = count_blocks(shapes, r"blocks_token_only\.(\d+)\.")
        else:
            tokens = shapes["pos_embed"][1] - class_token
            spec = vit(depth, width, heads(width, config), 1, 1)
            changes |= {"stem.class_token": class_token, "pool": FirstTokenPool() if class_token else MeanPool()}
            changes |= {"block.scale": LayerScale(1e-5)} if "blocks.0.ls1.gamma" in shapes else {}
        changes |= {"stem.patch_size": tuple(patch_size), "stem.img_size": infer_img_size(tokens, patch_size, config)}
        changes["head"] = classifier(spec, shapes.get("head.weight"))
        return override_all(spec, changes)

    def write(self, path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
        """Pickled for the suffixes of torch.save, else safetensors: timm reads both."""
        (write_pickle if path.suffix in (".pth", ".pt", ".bin") else write_safetensors)(path, tensors)


def heads(width: int, config: Mapping[str, Any]) -> int:
    """Number of heads, which cannot be inferred from shapes; all published ViTs of a width have the same.

    If the user sets it, the overrides replace this value later.
    """
    if HEADS_FIELD in config:
        return 1
    args = config.get("model_args")
    if isinstance(args, dict) and "num_heads" in args:
        return args["num_heads"]
    if width not in HEADS and width % 64:
        raise UserError(f"the file does not state how many heads its ViT of width {width} has: set {HEADS_FIELD}")
    return HEADS.get(width, width // 64)


def scale_at(depth: int) -> float:
    """The initial LayerScale, in case a new model is built from the spec."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6
