"""Conversion between the weights of other libraries and model folders of this library.

The format is detected from keys and shapes; source-specific settings are carried over. Values and dtype are unchanged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import reduce
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allmlp.data.preprocessing import (
    PREPROCESSING_FILE,
    TOKENIZER_FILES,
    ImagePreprocessing,
    Preprocessing,
    known_preprocessing,
    refuse_runs,
    write_preprocessing,
)
from allmlp.errors import UserError, lookup, one_line
from allmlp.files import expand_user, write_text_atomically
from allmlp.layers.channel import ChannelMlp
from allmlp.layers.gated import GatedTokens
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.mixers.linear import TokenLinear
from allmlp.layers.mixers.mlp import TokenMlp
from allmlp.layers.stem import PatchEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.models.timm import PREFIX, Timm
from allmlp.models.zoo import preset
from allmlp.spec import Spec, override_all
from allmlp.weights import folder
from allmlp.weights.bundled import BUNDLED_PREFIX, model_path
from allmlp.weights.fetch import locate
from allmlp.weights.formats import huggingface, timm
from allmlp.weights.formats.fair import Fair
from allmlp.weights.formats.format import Format, Shapes
from allmlp.weights.formats.google import Google
from allmlp.weights.formats.lucidrains import Lucidrains
from allmlp.weights.tensors import read

FORMATS: dict[str, Format] = {
    "google": Google(),
    "timm": timm.Timm(),
    "fair": Fair(),
    "hf": huggingface.HuggingFace(),
    "lucidrains": Lucidrains(),
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_KEY_LENGTH = 200
INIT_FIELDS = {"init", "dropout", "drop_path", "value", "init_value"}
"""Fields that affect initialization and training only."""
BLOCK_INDEX = re.compile(
    r"^(blocks\.|blocks_token_only\.|MixerBlock_|encoder\.(?:layer|mlp_mixer_encoder\.mixers)\.|layers\.|h\.)\d+"
)
GELUS = {"gelu": "the exact GELU", "gelu_tanh": "GELU by tanh"}
"""Activations that weight files do not distinguish."""


class ConvertedModel(NamedTuple):
    spec: Encoder | SeriesEncoder
    state: dict[str, Tensor]
    preprocessing: Preprocessing | None = None
    files: Mapping[str, str] = MappingProxyType({})
    """Other files of the model, such as a tokenizer: name -> text."""
    unused: tuple[str, ...] = ()
    """Source keys that were dropped."""


def convert(
    source: str,
    target: str,
    to: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    notify: Callable[[str], object] = lambda text: None,
) -> Path:
    """Convert the model `source` to the folder or file `target`; returns its path.

    `source` is a weights file or folder of Google, timm, FAIR, Hugging Face or lucidrains, a model folder, a name of
    `allmlp list weights`, `timm:NAME`, or a model on the Hugging Face Hub (`ORGANIZATION/NAME`). `target` becomes a
    model folder; with `to` ("google", "timm", "fair", "hf", "lucidrains") a file in that format, for "hf" a folder.
    `overrides` set fields that a file does not state: {"block.channel.inner.causal": True}. Notes on the weights are
    passed to `notify`.
    """
    weight_format = None if to is None else lookup(to, FORMATS, "format")
    path = expand_user(target)
    if path.exists():
        folder.check_target(path, expand_user(source))
    if source.startswith(PREFIX):
        converted = timm_pretrained(source, overrides)
    else:
        located = locate(os.fspath(model_path(source)) if source.startswith(BUNDLED_PREFIX) else source, notify)
        if weight_format is None and is_model_folder(expand_user(source)):
            raise UserError(
                f"{source} is already a model folder; choose a format with to={' or '.join(map(repr, FORMATS))}"
            )
        converted = open_path(located.path, overrides)
        converted = converted._replace(preprocessing=located.preprocessing or converted.preprocessing)
    if converted.unused:
        notify(f"dropped, since the model does not use them: {', '.join(converted.unused)}")
    try:
        if weight_format is None:
            return write_folder(path, converted)
        return write_format(path, weight_format, converted, notify)
    except OSError as reason:
        raise UserError(f"cannot write {path}: {one_line(reason)}") from None


# --- reading ----------------------------------------------------------------------------------------------------


def open_path(path: Path, overrides: Mapping[str, Any] | None = None) -> ConvertedModel:
    """Read a weights file, a model folder, or a folder of transformers."""
    if not path.is_dir():
        # A weights file of transformers may have its configuration next to it.
        config = huggingface.read_config(path.parent) if path.name in huggingface.WEIGHTS else {}
        return import_state(path, read(path), config, overrides)
    if is_model_folder(path):
        return read_folder(path, overrides)
    refuse_runs(path)
    config = huggingface.read_config(path)
    converted = import_state(path, huggingface.read_weights(path), config, overrides)
    return converted._replace(files=read_tokenizer_files(path))


def read_tokenizer_files(path: Path) -> dict[str, str]:
    return {name: text for name in TOKENIZER_FILES if (text := huggingface.read_text(path / name))}


def is_model_folder(path: Path) -> bool:
    """Whether it is a folder of this library, whose config.json has a "kind", or of `allmlp.hf`."""
    config = huggingface.read_json(path / folder.CONFIG)
    return "kind" in config or config.get("model_type") == folder.WRAPPED_TYPE


def import_state(
    where: Path, tensors: dict[str, Tensor], config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> ConvertedModel:
    """Convert the weights of another library. `tensors` is emptied, so that no weight is stored twice."""
    try:
        check_names(tensors)
        for weight_format in FORMATS.values():
            changed = weight_format.normalize_keys(tensors)
            tensors.clear()
            tensors.update(changed)
            del changed
        dtype = check_dtypes(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        source, family = recognize(shapes)
        spec = override_all(source.infer_spec(family, shapes, {**config, **(overrides or {})}), overrides or {})
        native = folder.expected_shapes(spec)
        preprocessing = source.preprocessing(family, spec, config)
        pieces = {name: source_pieces(source, family, name, rows, spec) for name, (rows, *_) in native.items()}
    except UserError as reason:
        raise UserError(f"{where}: {reason}") from None
    expected = source_shapes(source, family, native, pieces, spec)
    unused = tuple(name for name in shapes if name not in expected and name.startswith(source.OPTIONAL))
    folder.check_shapes(where, expected, {name: shape for name, shape in shapes.items() if name not in unused})
    state = {}
    for name, (_, *rest) in native.items():
        parts = [
            source.from_source(family, name, check_finite(where, key, tensors.pop(key)), (rows, *rest))
            for key, rows in pieces[name].items()
        ]
        state[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype).contiguous()
    gray = isinstance(spec.stem, PatchEmbed) and spec.stem.in_chans != 3
    return ConvertedModel(spec, state, None if gray else preprocessing, unused=unused)


def source_pieces(source: Format, family: str, name: str, rows: int, spec: Encoder | SeriesEncoder) -> dict[str, int]:
    """Source keys of the tensors that are stacked in a native one, and the rows of each: equal numbers, except in
    grouped-query attention.
    """
    try:
        keys = source.keys(family, name, spec)
    except KeyError:
        raise UserError(f"{source.TITLE} format of {family} has no weight for {name}") from None
    if len(keys) == 3 and isinstance(spec.block.token, Attention):
        few = spec.block.token.kv_channels(spec.width)
        return dict(zip(keys, (spec.width, few, few)))
    return dict.fromkeys(keys, rows // len(keys))


def source_shapes(
    source: Format, family: str, native: Shapes, pieces: Mapping[str, Mapping[str, int]], spec: Encoder | SeriesEncoder
) -> dict[str, tuple[int, ...]]:
    """Source key -> shape, for the native shapes of a model and the `source_pieces` of each weight."""
    shapes = {}
    for name, (_, *rest) in native.items():
        for key, rows in pieces[name].items():
            piece = torch.empty(rows, *rest, device="meta")
            shapes[key] = tuple(source.to_source(family, name, piece, spec).shape)
    return shapes


def check_names(tensors: Mapping[str, Tensor]) -> None:
    for name in tensors:
        if not name.isprintable() or len(name) > MAX_KEY_LENGTH:
            raise UserError(f"{name[:MAX_KEY_LENGTH]!r} is not a valid weight name")


def check_dtypes(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The smallest dtype that represents all tensors exactly; only floating-point tensors are accepted."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{name} holds {dtype} numbers, not floating-point weights")
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()} or {torch.float32})


def check_finite(where: Path, name: str, tensor: Tensor) -> Tensor:
    if not tensor.isfinite().all():
        raise UserError(f"{where}: {name} contains NaN or infinite values")
    return tensor


def recognize(shapes: Shapes) -> tuple[Format, str]:
    """The format and family with the largest fraction of signature keys present, in any block."""
    names = {BLOCK_INDEX.sub(r"\g<1>0", name) for name in shapes}

    def present(candidate: tuple[Format, str]) -> float:
        signature = candidate[0].SIGNATURES[candidate[1]]
        return len(names & signature.keys()) / len(signature)

    best = max(((source, family) for source in FORMATS.values() for family in source.SIGNATURES), key=present)
    if present(best) < 0.5:
        formats = "; ".join(f"{source.TITLE} {', '.join(source.SIGNATURES)}" for source in FORMATS.values())
        raise UserError(f"the format is not recognized; supported are {formats}")
    check_signature(*best, shapes)
    return best


def check_signature(source: Format, family: str, shapes: Shapes) -> None:
    """Check the tensors from which the spec is inferred."""
    signature = source.SIGNATURES[family]
    missing = [name for name in signature if name not in shapes]
    if missing:
        raise UserError(f"it looks like a {family} in {source.TITLE} format, but lacks {', '.join(missing)}")
    for name, axes in signature.items():
        if len(shapes[name]) != axes:
            raise UserError(f"{name} has the shape {list(shapes[name])}, but {axes} dimensions are expected")


def timm_pretrained(name: str, overrides: Mapping[str, Any] | None = None) -> ConvertedModel:
    """The pretrained weights of `timm:NAME`, with their published head.

    The outputs are compared with timm's, since shapes do not show everything, such as the activation.
    """
    spec = preset(name).spec
    assert isinstance(spec, Timm)
    config = spec.defaults
    num_classes = config.num_classes if config else spec.num_classes
    trained = spec.replace(num_classes=num_classes or spec.num_classes).pretrained()
    network = trained.model.network
    state = network.state_dict()
    if not num_classes:
        state = {key: tensor for key, tensor in state.items() if not key.startswith("head.")}
    converted = import_state(Path(name), dict(state), {"pretrained_cfg": network.pretrained_cfg}, overrides)
    check_outputs(name, converted, trained.model)
    return converted._replace(
        preprocessing=ImagePreprocessing(
            trained.mean, trained.std, crop_pct=network.pretrained_cfg.get("crop_pct") or 1.0
        )
    )


@torch.no_grad()
def check_outputs(name: str, converted: ConvertedModel, model: Model) -> None:
    """Raise UserError if the converted model's features differ from the original's."""
    ours = build(converted)
    images = ours.dummy_inputs()
    actual, expected = ours.forward_features(*images), model.eval().forward_features(*images)
    if expected.shape != actual.shape or (expected - actual).abs().max() > 1e-3 * expected.abs().max():
        raise UserError(
            f"{name} cannot be converted: its outputs differ from those of the model inferred from its weights"
        )


def read_folder(path: Path, overrides: Mapping[str, Any] | None = None) -> ConvertedModel:
    model = folder.load(path, dtype=None, overrides=overrides)
    if not isinstance(model.spec, (Encoder, SeriesEncoder)):
        raise UserError(f"{path} is a {type(model.spec).__name__}, which no other format supports")
    if isinstance(model.spec, Encoder) and model.spec.stages:
        raise UserError(f"{path} is a model with stages, which no other format supports")
    state = {name: check_finite(path, name, tensor) for name, tensor in model.state_dict().items()}
    return ConvertedModel(model.spec, state, known_preprocessing(path), read_tokenizer_files(path))


def build(converted: ConvertedModel, device: str | torch.device = "cpu") -> Model:
    """The model in evaluation mode."""
    with torch.device("meta"):
        model = converted.spec.build()
    model.load_state_dict({name: tensor.to(device) for name, tensor in converted.state.items()}, assign=True)
    return model.eval()


# --- writing ---------------------------------------------------------------------------------------------------


def write_folder(path: Path, converted: ConvertedModel) -> Path:
    folder.write_model(path, converted.spec, converted.state)
    if converted.preprocessing is None:
        (path / PREPROCESSING_FILE).unlink(missing_ok=True)
    else:
        write_preprocessing(path, converted.preprocessing)
    for name in TOKENIZER_FILES:
        if name in converted.files:
            write_text_atomically(path / name, converted.files[name])
        else:
            (path / name).unlink(missing_ok=True)
    return path


def write_format(
    path: Path, weight_format: Format, converted: ConvertedModel, notify: Callable[[str], object] = lambda text: None
) -> Path:
    tensors = to_format(weight_format, converted, notify)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = weight_format.config_files(converted.spec, converted.preprocessing)
    texts = {name: json.dumps(content, indent=2) for name, content in files.items()}
    weight_format.write(path, tensors, {**texts, **converted.files})
    return path


def to_format(
    weight_format: Format, converted: ConvertedModel, notify: Callable[[str], object] = lambda text: None
) -> dict[str, Tensor]:
    """Convert weights to another format, and check that reading them back gives the same model; only the form of GELU,
    which weight files do not state, may differ, with a warning.
    """
    spec, family = converted.spec, family_of(converted.spec)
    if family not in weight_format.SIGNATURES:
        has = ", ".join(weight_format.SIGNATURES)
        raise UserError(f"{weight_format.TITLE} format has no {family or 'such model'}; it supports {has}")
    tensors = {}
    for name, tensor in converted.state.items():
        pieces = source_pieces(weight_format, family, name, len(tensor), spec)
        for key, piece in zip(pieces, tensor.split([*pieces.values()]), strict=True):
            tensors[key] = weight_format.to_source(family, name, piece, spec)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        check_signature(weight_format, family, shapes)
        config = weight_format.config_files(spec, converted.preprocessing).get(folder.CONFIG, {})
        again = weight_format.infer_spec(family, shapes, config)
        if field := weight_format.NOT_INFERRED.get(family):
            again = override_all(again, {field: attrgetter(field)(spec)})
        other = next(differences(spec, again), None)
        computed, implied = activation(spec), activation(again)
    except UserError as reason:
        other, computed, implied = str(reason), "", ""
    if other:
        raise UserError(f"{weight_format.TITLE} format of {family} cannot represent this model: {other}")
    if computed != implied:
        notify(
            f"warning: {weight_format.TITLE} format cannot say that the model computes {computed}: a reader that "
            f"computes {implied} gets slightly other outputs"
        )
    return tensors


def activation(spec: Spec) -> str:
    """The form of GELU used; empty if there is none."""
    names = {getattr(part, "act", None) for part in spec.children()}
    return " and ".join(GELUS[name] for name in GELUS if name in names)


def family_of(spec: Encoder | SeriesEncoder) -> str | None:
    """The family of a model by its input and token mixing."""
    if isinstance(spec, SeriesEncoder):
        return "PatchTSMixer" if isinstance(spec.block.token, (GatedTokens, TokenMlp)) else None
    token, channel, text = spec.block.token, spec.block.channel, not isinstance(spec.stem, PatchEmbed)
    if token is None and isinstance(channel, ChannelMlp) and channel.inner:
        return "gMLP for text" if text else "gMLP"
    if isinstance(token, Attention):
        if text and token.causal:
            return "Llama" if token.rotary else "GPT-2"
        return "BERT" if text else "CaiT" if token.talking_heads else "ViT"
    return {TokenMlp: "Mixer", TokenLinear: "ResMLP"}.get(type(token)) if not text else None  # type: ignore[call-overload]


def differences(ours: Spec, theirs: Spec, above: str = "") -> Iterator[str]:
    """Fields in which two specs compute different functions; both forms of GELU count as equal."""
    for name in [field.name for field in fields(ours) if field.name not in INIT_FIELDS]:  # type: ignore[arg-type]
        mine, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(mine, Spec) and type(mine) is type(other):
            yield from differences(mine, other, f"{above}{name}.")
        elif mine != other and {mine, other} != GELUS.keys():
            yield f"{above}{name} is {mine}, but the format implies {other}"
