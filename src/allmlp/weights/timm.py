"""timm's layout of Mixer, ResMLP, gMLP and ViT: its names for our weights and the spec behind a file.

timm's models take the exact GELU and LayerNorm with eps 1e-6, inside gMLP's gate 1e-5. A Mixer that learnt with the
tanh GELU keeps its weights here and answers as timm's own copy of Google's does: about 3e-4 off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from allmlp.data.inputs import Inputs, TextInputs
from allmlp.errors import UserError
from allmlp.layers.head import Classes
from allmlp.layers.pool import First, Mean
from allmlp.layers.scale import LayerScale
from allmlp.layers.stem import Patches
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit
from allmlp.spec import override_all
from allmlp.weights.tensors import write_safetensors

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

TITLE: str = "timm's"

SIGNATURES: dict[str, dict[str, int]] = {
    "Mixer": {
        "stem.proj.weight": 4,
        "blocks.0.mlp_tokens.fc1.weight": 2,
        "blocks.0.mlp_channels.fc1.weight": 2,
    },
    "ResMLP": {
        "stem.proj.weight": 4,
        "blocks.0.linear_tokens.weight": 2,
        "blocks.0.mlp_channels.fc1.weight": 2,
    },
    "gMLP": {
        "stem.proj.weight": 4,
        "blocks.0.mlp_channels.gate.proj.weight": 2,
        "blocks.0.mlp_channels.fc1.weight": 2,
    },
    "ViT": {
        "patch_embed.proj.weight": 4,
        "pos_embed": 3,
        "blocks.0.attn.qkv.weight": 2,
        "blocks.0.mlp.fc1.weight": 2,
    },
}
"""The weights by which a family is known, with their number of axes."""
SPARE: tuple[str, ...] = ()
UNTOLD: dict[str, str] = {}

AROUND = {"stem.proj": "stem.proj", "norm": "norm", "head.proj": "head"}
CHANNEL = {"channel.mix.up": "mlp_channels.fc1", "channel.mix.down": "mlp_channels.fc2"}
NORMS = {"token.norm": "norm1", "channel.norm": "norm2"}
NAMES: dict[str, dict[str, str]] = {
    "Mixer": AROUND | CHANNEL | NORMS | {"token.mix.up": "mlp_tokens.fc1", "token.mix.down": "mlp_tokens.fc2"},
    "ResMLP": AROUND
    | CHANNEL
    | NORMS
    | {"token.mix": "linear_tokens", "token.scale.gamma": "ls1", "channel.scale.gamma": "ls2"},
    "gMLP": AROUND
    | CHANNEL
    | {
        "channel.norm": "norm",
        "channel.mix.inner.norm": "mlp_channels.gate.norm",
        "channel.mix.inner.proj": "mlp_channels.gate.proj",
    },
    "ViT": AROUND
    | NORMS
    | {
        "stem.proj": "patch_embed.proj",
        "stem.token": "cls_token",
        "stem.positions.weight": "pos_embed",
        "token.mix.qkv": "attn.qkv",
        "token.mix.out": "attn.proj",
        "token.scale": "ls1",
        "channel.mix.up": "mlp.fc1",
        "channel.mix.down": "mlp.fc2",
        "channel.scale": "ls2",
    },
}
"""Our module or weight, inside its block -> its name there."""

HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""The published ViTs (So, H, g, G) whose heads are not 64 channels wide."""

LAYERS = ("_layer", "_fn")
"""How timm's arguments end that put another function in a layer's place."""

HALF, CROP = (0.5, 0.5, 0.5), 0.875
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def inputs(family: str, spec: Encoder, config: Mapping[str, Any]) -> Inputs:
    """What the configuration beside the weights says, else what most weights of a family expect: MIIL's Mixer (mean 0,
    std 1) and DeiT (ImageNet's) differ.
    """
    usual = Inputs(HALF, HALF, crop=0.9 if family == "ViT" else CROP)
    if family == "ResMLP":
        usual = Inputs(*IMAGENET, crop=CROP)
    said = config.get("pretrained_cfg")
    if not isinstance(said, dict):
        return usual
    names = {"mean": "mean", "std": "std", "crop": "crop_pct"}
    return usual.replace(**{ours: said[theirs] for ours, theirs in names.items() if said.get(theirs) is not None})


# --- names and shapes -------------------------------------------------------------------------------------


def keys(family: str, name: str, spec: Encoder) -> tuple[str, ...]:
    """timm's name of one of our weights; KeyError where it has none."""
    return (translate(name, NAMES[family]),)


def translate(name: str, names: Mapping[str, str]) -> str:
    """A name in another layout that keeps our `blocks.0.` and our weight, bias, alpha, beta."""
    block = re.match(r"blocks\.\d+\.", name)
    start = block.group() if block else ""
    place = name.removeprefix(start)
    module, _, kind = place.rpartition(".")
    return start + (names[place] if place in names else f"{names[module]}.{kind}")


def outward(family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
    """One of our weights in timm's shape."""
    if name == "stem.proj.weight":
        return convolution(tensor, spec)
    if name.endswith((".alpha", ".beta")) or name == "stem.token":
        return tensor.reshape(1, 1, -1)
    return tensor.unsqueeze(0) if name == "stem.positions.weight" else tensor


def inward(family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """The way back: the same numbers in the same order."""
    return tensor.reshape(shape)


def convolution(tensor: Tensor, spec: Encoder) -> Tensor:
    """The stem's matrix as the kernel of a convolution, c colours height width."""
    assert isinstance(spec.stem, Patches)
    return tensor.reshape(-1, spec.stem.in_channels, *spec.stem.patch)


# --- the spec ----------------------------------------------------------------------------------------------


def describe(family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
    """The model whose weights have these names and shapes."""
    said = config.get("model_args")
    other = [name for name in said if str(name).endswith(LAYERS)] if isinstance(said, dict) else []
    if other:
        raise UserError(f"its configuration changes {', '.join(map(str, other))}; convert timm:NAME, which is compared")
    depth = blocks(shapes, r"blocks\.(\d+)\.")
    width, colours, *patch = shapes[translate("stem.proj.weight", NAMES[family])]
    hidden = shapes[translate("blocks.0.channel.mix.up.weight", NAMES[family])][0]
    changes: dict[str, object] = {"block.channel.hidden": hidden, "stem.in_channels": colours}
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
    else:
        tokens = shapes["pos_embed"][1] - class_token
        spec = vit(depth, width, heads(width), 1, 1)
        changes |= {"stem.class_token": class_token, "pool": First() if class_token else Mean()}
        changes |= {"block.scale": LayerScale(1e-5)} if "blocks.0.ls1.gamma" in shapes else {}
    changes |= {"stem.patch": tuple(patch), "stem.image": square_image(tokens, patch)}
    changes["head"] = classifier(spec, shapes.get("head.weight"))
    return override_all(spec, changes)


def blocks(shapes: Shapes, pattern: str) -> int:
    """How many blocks the names number."""
    return len({found.group(1) for name in shapes if (found := re.match(pattern, name))})


def square_image(tokens: int, patch: list[int]) -> tuple[int, int]:
    """The image that `tokens` patches cover. A file does not say how high and wide it is: only squares are known."""
    side = math.isqrt(max(tokens, 0))
    if side**2 != tokens:
        raise UserError(f"{tokens} tokens are not a square image, and other sizes are not written in such a file")
    return side * patch[0], side * patch[1]


def classifier(spec: Encoder, shape: Shape | None) -> Classes | None:
    """The family's head for as many classes as a file's has rows; None without one."""
    if shape is None:
        return None
    assert isinstance(spec.head, Classes)
    return spec.head.replace(classes=shape[0] if shape else 0)


def heads(width: int) -> int:
    """The number of heads, which is in no shape: all published ViTs of a width agree on it."""
    if width not in HEADS and width % 64:
        raise UserError(f"how many heads a ViT of width {width} has is not written in such a file")
    return HEADS.get(width, width // 64)


def scale_at(depth: int) -> float:
    """Where LayerScale starts, for a model that is started anew from this spec."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


def files(spec: Encoder, inputs: Inputs | TextInputs | None) -> dict[str, Any]:
    return {}


def write(path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    write_safetensors(path, tensors)
