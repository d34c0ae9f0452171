"""FAIR's layout of ResMLP: its names for our weights, the spec behind a file, and its pickled .pth files.

A pickle can run code when it is read. Only torch's own reader for plain tensors sees one here, and only files that
pass the checks before it.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmlp.data.inputs import Inputs
from allmlp.errors import UserError
from allmlp.models.encoder import Encoder
from allmlp.models.resmlp import resmlp
from allmlp.spec import override_all
from allmlp.weights.timm import (
    IMAGENET,
    Shape,
    Shapes,
    blocks,
    classifier,
    convolution,
    scale_at,
    square_image,
    translate,
)

TITLE: str = "FAIR's"

SIGNATURES: dict[str, dict[str, int]] = {
    "ResMLP": {"patch_embed.proj.weight": 4, "blocks.0.attn.weight": 2, "blocks.0.mlp.fc1.weight": 2}
}
"""The weights by which the family is known, with their number of axes."""

NAMES = {
    "stem.proj": "patch_embed.proj",
    "token.norm": "norm1",
    "token.mix": "attn",
    "token.scale.gamma": "gamma_1",
    "channel.norm": "norm2",
    "channel.mix.up": "mlp.fc1",
    "channel.mix.down": "mlp.fc2",
    "channel.scale.gamma": "gamma_2",
    "norm": "norm",
    "head.proj": "head",
}
"""Our module or weight, inside its block -> its name there."""

WRAPPERS = ("model", "state_dict")
"""Where a training checkpoint keeps the weights."""


def inputs(family: str) -> Inputs:
    return Inputs(*IMAGENET, crop=0.9)


def key(family: str, name: str) -> str:
    """FAIR's name of one of our weights; KeyError where it has none."""
    return translate(name, NAMES)


def outward(family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
    """One of our weights in FAIR's shape: only the stem differs."""
    return convolution(tensor, spec) if name == "stem.proj.weight" else tensor


def inward(family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """The way back: the same numbers in the same order."""
    return tensor.reshape(shape)


def describe(family: str, shapes: Shapes) -> Encoder:
    """The model whose weights have these names and shapes."""
    depth = blocks(shapes, r"blocks\.(\d+)\.")
    width, colours, *patch = shapes["patch_embed.proj.weight"]
    spec = resmlp(depth, width, scale_at(depth), 1, 1)
    changes = {
        "block.channel.hidden": shapes["blocks.0.mlp.fc1.weight"][0],
        "stem.in_channels": colours,
        "stem.patch": tuple(patch),
        "stem.image": square_image(shapes["blocks.0.attn.weight"][0], patch),
        "head": classifier(spec, shapes.get("head.weight")),
    }
    return override_all(spec, changes)


# --- files -------------------------------------------------------------------------------------------------


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a .pth, .pt or .bin file, which may lie under `model` or `state_dict`."""
    zipped = zipfile.is_zipfile(file)
    if zipped:
        check_archive(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of, it also refuses
            # A file of before torch 1.6 is not a zip archive and cannot be mapped into memory.
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError:
        raise UserError(
            f"{file} is damaged or holds more than weights; loading it could run code, so it is refused"
        ) from None
    tensors = unwrap(content)
    if not isinstance(tensors, dict) or not tensors:
        raise UserError(f"{file} holds no state dict: save model.state_dict()")
    check_tensors(file, tensors)
    return dict(tensors)


def check_archive(file: Path) -> None:
    """torch stores its records as they are: a compressed one could grow without bound. Every checksum must fit."""
    with zipfile.ZipFile(file) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise UserError(f"{file} is compressed, as torch never writes it; it is refused")
        damaged = archive.testzip()
    if damaged is not None:
        raise UserError(f"{file} is damaged: the checksum of {damaged} does not fit")


def unwrap(content: Any) -> Any:
    for name in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            return content[name]
    return content


def check_tensors(file: Path, tensors: dict[Any, Any]) -> None:
    """Plain tensors by name, and no more numbers than the file has room for: a view can repeat one for ever."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(f"{file}: {name!r} is not a tensor; save model.state_dict()")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise UserError(f"{file}: {name} is not a plain tensor")
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > file.stat().st_size:
        raise UserError(f"{file} is damaged: its tensors claim more numbers than the file holds")


def write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
