"""A model as a folder: config.json (its whole spec) and model.safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from allmlp import __version__
from allmlp.data.preprocessing import (
    Preprocessing,
    TextPreprocessing,
    copy_tokenizer,
    known_preprocessing,
    refuse_runs,
    write_preprocessing,
)
from allmlp.device import as_dtype, usable_device
from allmlp.errors import UserError, command, one_line, suggest_keywords
from allmlp.files import CONFIG, RUN, write_atomically, write_text_atomically
from allmlp.layers.stem import TokenEmbed
from allmlp.models.grid import Rule, make_dynamic
from allmlp.models.model import Model, ModelSpec, check_merged, uncompiled
from allmlp.models.zoo import presets
from allmlp.spec import from_json, override_all, plugin_hint, to_json
from allmlp.weights.bundled import model_path
from allmlp.weights.int8 import SCALE, dequantize, quantize
from allmlp.weights.resize import resize_model

WEIGHTS = "model.safetensors"
WRAPPED_TYPE, WRAPPED_PREFIX = "allmlp", "model."
"""The model type and the prefix of weights in folders of `allmlp.hf`."""
MAX_CONFIG_BYTES = 2**20
MAX_NAMES = 50
"""Parameter names listed in an error."""


@suggest_keywords
def save(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
) -> Path:
    """Save `model` as `folder`: config.json and model.safetensors, each written atomically.

    >>> allmlp.save(model, "my_model")
    >>> allmlp.save(model, "small_model", dtype=torch.int8)
    >>> model = allmlp.load("my_model")

    The preprocessing and tokenizer that the model was loaded with are saved too, or those of the folder `like`. `dtype`
    is the precision of the file, by default the model's; torch.int8 takes a quarter of the size of float32 (see
    `allmlp.weights.int8`).
    """
    model = uncompiled(model)
    if not isinstance(model, Model):
        inside = ": save its .module" if isinstance(uncompiled(getattr(model, "module", None)), Model) else ""
        raise UserError(f"only models of this library can be saved, not {type(model).__name__}{inside}")
    check_merged(model)
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_shapes("the model was changed: its state dict", expected_shapes(model.spec), shapes, "its spec")
    like = None if like is None else model_path(like)
    if like is not None:
        check_target(Path(folder), like)
    path = write_model(Path(folder), model.spec, to_dtype(state, dtype))
    preprocessing, source = (model.preprocessing, model.folder) if like is None else (known_preprocessing(like), like)
    embedding = next((part for part in model.spec.children() if isinstance(part, TokenEmbed)), None)
    if embedding is not None and isinstance(preprocessing, TextPreprocessing):
        preprocessing = preprocessing.replace(seq_len=embedding.seq_len)
    try:
        if preprocessing is not None:
            write_preprocessing(path, preprocessing)
        if source is not None:
            copy_tokenizer(Path(source), path)
    except OSError as reason:
        raise UserError(f"cannot write to {path}: {one_line(reason)}") from reason
    return path


def check_target(path: Path, source: Path) -> None:
    """Raise UserError if a model made from `source` would overwrite it or the model of a run."""
    if path.resolve() == source.resolve():
        raise UserError(f"{path} would overwrite itself; name another folder")
    if (path / RUN).exists():
        raise UserError(f"{path} holds a run, whose model would be overwritten; name another folder")


def to_dtype(tensors: dict[str, torch.Tensor], dtype: torch.dtype | str | None) -> dict[str, torch.Tensor]:
    """The tensors as they are stored in precision `dtype`; None leaves them unchanged."""
    if dtype is None:
        return tensors
    target = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if target == torch.int8:
        return quantize(tensors)
    if not isinstance(target, torch.dtype) or not target.is_floating_point:
        raise UserError(f"weights cannot be stored as {dtype}: choose torch.float32, float16, bfloat16 or int8")
    return {name: tensor.to(target) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def write_model(path: Path, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a spec and its weights as a model folder."""
    config = to_json(spec)
    state = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    metadata = {"format": "pt", "allmlp": __version__, "config": digest(config)}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / WEIGHTS, lambda temporary: save_file(state, temporary, metadata))
        write_text_atomically(path / CONFIG, config)
    except (OSError, SafetensorError) as reason:
        raise UserError(f"cannot write the model to {path}: {one_line(reason)}") from reason
    return path


@suggest_keywords
def load(
    folder: str | os.PathLike[str],
    *,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    seq_len: int | None = None,
    rule: Rule | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = torch.float32,
    dynamic: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Load a model from its folder, or a bundled model (`allmlp:NAME`), in evaluation mode.

    >>> model = allmlp.load("runs/cifar10", device="cuda")
    >>> model = allmlp.load("runs/cifar10", img_size=64, num_classes=5)

    With another `img_size` or `seq_len` the weights are resized (`rule`: "interpolate", or MLP-Mixer's "tile" for
    multiples of the size). With another `num_classes` the head is new. `dtype=None` keeps the precision of the file;
    8-bit weights become float32. With `dynamic=True` the model accepts images of any size that is a multiple of its
    patch size. `overrides` sets fields of the spec that do not change its weights, such as {"drop_path.rate": 0.1}.
    """
    changes, path = ModelChanges(num_classes, img_size, seq_len, rule, dtype, dynamic), model_path(folder)
    return changes.apply(read_model(path, device, overrides), known_preprocessing(path), path)


def read_model(path: Path, device: str | torch.device = "cpu", overrides: Mapping[str, Any] | None = None) -> Model:
    """The model as it was saved, in evaluation mode."""
    spec = override_all(read_spec(path), overrides or {})
    config = digest((path / CONFIG).read_text(encoding="utf8", errors="replace"))
    state = read_weights(path / WEIGHTS, expected_shapes(spec), device, config)
    with torch.device("meta"):
        model = spec.build()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not state[name].is_floating_point():
            dtype_name = str(state[name].dtype).removeprefix("torch.")
            raise UserError(f"{path / WEIGHTS} does not match the model: {name} is {dtype_name}, not floating point")
    model.load_state_dict(state, assign=True)
    return model.eval()


class ModelChanges(NamedTuple):
    """Changes that `load` makes to a loaded model."""

    num_classes: int | None = None
    img_size: int | tuple[int, int] | None = None
    seq_len: int | None = None
    rule: Rule | None = None
    dtype: torch.dtype | str | None = torch.float32
    dynamic: bool = False

    def apply(self, model: Model, preprocessing: Preprocessing | None = None, folder: Path | None = None) -> Model:
        """Apply the changes, and set preprocessing and folder; a new head has no class names."""
        model.preprocessing, model.folder = preprocessing, None if folder is None else str(folder.resolve())
        if self.dtype is not None:
            model = model.to(as_dtype(self.dtype))
        if self.img_size is not None or self.seq_len is not None:
            model = resize_model(model, self.img_size, self.seq_len, self.rule, copy=False)
        if self.num_classes is not None and model.spec.configure(num_classes=self.num_classes) != model.spec:
            reset: Any = getattr(model, "reset_classifier", None)
            if reset is None:
                raise UserError(f"{type(model.spec).__name__} models have no classifier to replace")
            model = reset(self.num_classes).eval()
        return make_dynamic(model, self.rule or "interpolate") if self.dynamic else model


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight. Only one block of each stack is built."""
    single, depths = spec.shallow()
    with torch.device("meta"):
        state = {name: tuple(tensor.shape) for name, tensor in single.build().state_dict().items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in state.items():
        block = next((block for block in depths if name.startswith(f"{block}.")), "")
        stack = block.rpartition(".")[0]
        for number in depths.get(block, range(1)):
            shapes[f"{stack}.{number}{name.removeprefix(block)}" if block else name] = shape
    return shapes


def read_spec(folder: Path) -> ModelSpec:
    """The spec in a folder's config.json."""
    presets()  # importing the zoo registers its kinds
    folder = model_path(folder)
    file = folder / CONFIG
    if not file.is_file():
        refuse_runs(folder)
        if folder.is_file():
            beside = (folder.parent / CONFIG).is_file()
            convert = f"if it holds weights, convert it: {command('convert', folder, 'FOLDER')}"
            advice = f"name its folder, {folder.parent}" if beside else convert
            raise UserError(f"{folder} is a file, not a model folder: {advice}")
        reason = f"it has no {CONFIG}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} is not a model folder: {reason}")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise UserError(f"{file} is larger than {MAX_CONFIG_BYTES:,} bytes; it is not read")
    try:
        spec = from_json(unwrap_config(file.read_bytes()))
    except UserError as reason:
        raise UserError(f"{file}: {reason}{plugin_hint(reason)}") from None
    except (OSError, UnicodeError, OverflowError) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None
    if not isinstance(spec, ModelSpec):
        raise UserError(f"{file} contains {type(spec).__name__}, which is not a model")
    return spec


def unwrap_config(text: bytes) -> str | bytes:
    """The spec inside the configuration of a model of `allmlp.hf`; other text is returned unchanged."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):  # from_json says what is wrong
        return text
    wrapped = isinstance(config, dict) and config.get("model_type") == WRAPPED_TYPE
    return json.dumps(config.get("spec")) if wrapped else text


def read_weights(
    file: Path, expected: dict[str, tuple[int, ...]], device: str | torch.device, config: str
) -> dict[str, torch.Tensor]:
    """Read a safetensors file after checking the names and shapes in its header; 8-bit weights become float32."""
    if not file.is_file():
        raise UserError(f"{file.parent} has no {WEIGHTS}")
    place = usable_device(device)
    try:
        with safe_open(file, framework="pt", device="cpu" if place.type == "meta" else str(place)) as source:
            stored = list(source.keys())
            # Models of `allmlp.hf` wrap ours in a module `model`.
            prefix = WRAPPED_PREFIX if all(name.startswith(WRAPPED_PREFIX) for name in stored) else ""
            slices = {name.removeprefix(prefix): source.get_slice(name) for name in stored}
            stored_shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            quantized = [name for name, part in slices.items() if part.get_dtype() == "I8" and name in expected]
            check_shapes(file, expected | {name + SCALE: expected[name][:1] for name in quantized}, stored_shapes)
            recorded = (source.metadata() or {}).get("config")
            if recorded not in (None, config):
                raise UserError(
                    f"{file.parent}: {CONFIG} does not match the weights: it was edited, or a save was "
                    f"interrupted; save the model again"
                )
            state = {name: source.get_tensor(prefix + name) for name in stored_shapes}
            for name in quantized:
                state[name] = dequantize(state[name], state.pop(name + SCALE))
            return {name: tensor.to(place) for name, tensor in state.items()}
    except (SafetensorError, OSError) as reason:
        raise UserError(f"{file} is damaged or not a safetensors file: {one_line(reason)}") from None


def check_shapes(
    where: Path | str, expected: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]], what: str = "the model"
) -> None:
    """Raise UserError if tensors are missing, unexpected or of another shape."""
    missing, unknown = expected.keys() - shapes.keys(), shapes.keys() - expected.keys()
    shaped = [name for name in expected.keys() & shapes.keys() if expected[name] != shapes[name]]
    faults = [
        f"{len(names)} {fault} ({', '.join(group_names(names))})"
        for fault, names in (("missing", missing), ("unexpected", unknown), ("of another shape", shaped))
        if names
    ]
    if faults:
        raise UserError(f"{where} does not match {what}: {'; '.join(faults)}")


def group_names(names: Iterable[str]) -> list[str]:
    """The names, with the indices of blocks grouped: blocks.{0..11}.norm.bias."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        start, *rest = re.split(r"(?<=[._])(\d{1,9})(?=[./])", name, maxsplit=1)
        number, end = rest or ("", "")
        groups.setdefault((start, end), []).append(number)
    grouped = [
        start + (numbers[0] if len(numbers) == 1 else f"{{{ranges(sorted(map(int, numbers)))}}}") + end
        for (start, end), numbers in groups.items()
    ]
    return grouped if len(grouped) <= MAX_NAMES else [*grouped[:MAX_NAMES], "..."]


def ranges(numbers: list[int]) -> str:
    """Sorted numbers as text: 0,2..4."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])  # consecutive ones
    runs = [[number for _, number in group] for _, group in groups]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
