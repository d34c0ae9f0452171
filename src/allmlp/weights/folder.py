"""A model as a folder: config.json (its whole spec) and model.safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from allmlp import __version__
from allmlp.errors import UserError, one_line
from allmlp.files import write_atomically
from allmlp.models.model import Model, ModelSpec
from allmlp.models.zoo import presets
from allmlp.spec import from_json, to_json
from allmlp.weights.resize import Resize, can_crop, can_resize, other_length

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TOP = ("head.", "pool.")
"""What a model has above its body, which another task may need otherwise."""


def save(model: Model, folder: str | os.PathLike[str]) -> Path:
    """Write `model` to `folder`. A reader, or a crash, sees the old files or the new ones, never half of one."""
    return write(Path(folder), model.spec, model.state_dict())


def write(path: Path, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Spec and weights as a model folder."""
    config = to_json(spec)
    state = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    metadata = {"format": "pt", "allmlp": __version__, "config": digest(config)}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / WEIGHTS, lambda temporary: save_file(state, temporary, metadata))
        write_atomically(path / CONFIG, lambda temporary: temporary.write_text(config, encoding="utf8"))
    except (OSError, SafetensorError) as reason:
        raise UserError(f"cannot write the model to {path}: {one_line(reason)}") from reason
    return path


def load(folder: str | os.PathLike[str], device: str | torch.device = "cpu") -> Model:
    """The model saved in `folder`, in evaluation mode."""
    path = Path(folder)
    spec = read_spec(path)
    with torch.device("meta"):
        model = spec.build()
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    state = read_weights(path / WEIGHTS, expected, device, digest((path / CONFIG).read_text(encoding="utf8")))
    model.load_state_dict(state, assign=True)
    return model.eval()


def transfer(model: Model, folder: str | os.PathLike[str]) -> list[str]:
    """Start `model` from the weights in `folder`; returns the keys that keep their own start.

    Everything but head and pool must be there and fit; these stay fresh where they differ. Weights of the same model
    for another image size, or another length of text, are resized.
    """
    found = load(folder, device="cpu")
    source = found.state_dict()
    if can_resize(found.spec, model.spec):
        source = Resize(found.spec, model.spec)(source)  # type: ignore[arg-type]
    elif can_crop(found.spec, model.spec):
        source = other_length(source, model)
    own = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    given = {name: tuple(tensor.shape) for name, tensor in source.items()}
    fresh = [name for name, shape in shapes.items() if name.startswith(TOP) and given.get(name) != shape]
    body = {name: shape for name, shape in shapes.items() if name not in fresh}
    compare(Path(folder), body, {name: s for name, s in given.items() if name in body or not name.startswith(TOP)})
    model.load_state_dict({name: source[name] for name in body}, strict=False)
    return fresh


def read_spec(folder: Path) -> ModelSpec:
    """The spec in a folder's config.json."""
    presets()  # so that every kind of the zoo is known
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f"{folder} is not a model folder: it has no {CONFIG}")
    try:
        spec = from_json(file.read_bytes())
    except UserError as reason:
        raise UserError(f"{file}: {reason}") from None
    except (OSError, UnicodeError) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None
    if not isinstance(spec, ModelSpec):
        raise UserError(f"{file} describes a {type(spec).__name__}, not a model")
    return spec


def read_weights(
    file: Path, expected: dict[str, tuple[int, ...]], device: str | torch.device, config: str
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, checked name by name before the first is read."""
    if not file.is_file():
        raise UserError(f"{file.parent} has no {WEIGHTS}")
    try:
        with safe_open(file, framework="pt", device=str(device)) as source:
            found = {name: tuple(source.get_slice(name).get_shape()) for name in source.keys()}  # noqa: SIM118
            compare(file, expected, found)
            recorded = (source.metadata() or {}).get("config")
            if recorded not in (None, config):
                raise UserError(
                    f"{file.parent}: {CONFIG} was changed after the weights were written, "
                    f"or a save was cut short; save the model again"
                )
            return {name: source.get_tensor(name) for name in found}
    except (SafetensorError, OSError) as reason:
        raise UserError(f"{file} is damaged or not a safetensors file: {one_line(reason)}") from None


def compare(file: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    """Name every missing, unknown and misshapen tensor."""
    missing, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
    shaped = [name for name in expected.keys() & found.keys() if expected[name] != found[name]]
    faults = [
        f"{len(names)} {what} ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", shaped))
        if names
    ]
    if faults:
        raise UserError(f"{file} does not hold the weights of this model: {'; '.join(faults)}")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
