"""A model as a folder: config.json (its whole spec) and model.safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from allmlp import __version__
from allmlp.data.inputs import carry_inputs, refuse_unfinished
from allmlp.errors import UserError, one_line
from allmlp.files import RUN, write_atomically
from allmlp.layers.stem import Tokens
from allmlp.models.cost import one_block
from allmlp.models.grid import Resize, Rule, any_size
from allmlp.models.model import Model, ModelSpec
from allmlp.models.zoo import presets
from allmlp.spec import from_json, to_json
from allmlp.weights.resize import can_crop, can_resize, other_length, resized

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LONGEST = 2**20
"""Bytes of a configuration."""
NAMED = 50
"""Names in an error; a model has fewer kinds of weights."""
TOP = ("head.", "pool.")
"""What a model has above its body, which another task may need otherwise."""


def save(model: Model, folder: str | os.PathLike[str], *, like: str | os.PathLike[str] | None = None) -> Path:
    """Write `model` to `folder`. A reader, or a crash, sees the old files or the new ones, never half of one.

    A model made from the one in the folder `like` keeps its inputs and its tokenizer.
    """
    if like is not None and Path(folder).resolve() == Path(like).resolve():
        raise UserError(f"{folder} would be written over itself; name another folder")
    if like is not None and (Path(folder) / RUN).exists():
        raise UserError(f"{folder} holds a run, whose model would be written over; name another folder")
    path = write(Path(folder), model.spec, model.state_dict())
    if like is not None:
        length = next((part.length for part in model.spec.children() if isinstance(part, Tokens)), None)
        try:
            carry_inputs(Path(like), path, length)
        except OSError as reason:
            raise UserError(f"cannot write to {path}: {one_line(reason)}") from reason
    return path


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


def load(
    folder: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    image: int | tuple[int, int] | None = None,
    length: int | None = None,
    rule: Rule | None = None,
    dynamic: bool = False,
) -> Model:
    """The model saved in `folder`, in evaluation mode.

    With another `image` size or `length` of text its weights are resized (`rule`: "interpolate", or Mixer's "tile" for
    multiples of the size). With `dynamic` it reads pictures of any size.
    """
    path = Path(folder)
    spec = read_spec(path)
    config = digest((path / CONFIG).read_text(encoding="utf8"))
    state = read_weights(path / WEIGHTS, outline(spec), device, config)
    with torch.device("meta"):
        model = spec.build()
    model.load_state_dict(state, assign=True)
    model.eval()
    if image is not None or length is not None:
        model = resized(model, image, length, rule)
    return any_size(model, rule or "interpolate") if dynamic else model


def transfer(model: Model, folder: str | os.PathLike[str]) -> list[str]:
    """Start `model` from the weights in `folder`; returns the keys that keep their own start.

    Everything but head and pool must be there and fit; these stay fresh where they differ. Weights of the same model
    for another image size, or another length of text, are resized.
    """
    found = load(folder, device="cpu")
    source = found.state_dict()
    if can_resize(found.spec, model.spec):
        source = Resize(found.spec, model.spec)(source)
    elif can_crop(found.spec, model.spec):
        source = other_length(source, model.spec)
    own = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    given = {name: tuple(tensor.shape) for name, tensor in source.items()}
    fresh = [name for name, shape in shapes.items() if name.startswith(TOP) and given.get(name) != shape]
    body = {name: shape for name, shape in shapes.items() if name not in fresh}
    compare(Path(folder), body, {name: s for name, s in given.items() if name in body or not name.startswith(TOP)})
    model.load_state_dict({name: source[name] for name in body}, strict=False)
    return fresh


def outline(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight; of a stack of equal blocks only one is built."""
    single, depths = one_block(spec)
    with torch.device("meta"):
        state = {name: tuple(tensor.shape) for name, tensor in single.build().state_dict().items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in state.items():
        stack = next((stack for stack in depths if name.startswith(f"{stack}.0.")), "")
        for number in range(depths.get(stack, 1)):
            shapes[name.replace(f"{stack}.0.", f"{stack}.{number}.", 1) if stack else name] = shape
    return shapes


def read_spec(folder: Path) -> ModelSpec:
    """The spec in a folder's config.json."""
    presets()  # so that every kind of the zoo is known
    file = folder / CONFIG
    if not file.is_file():
        refuse_unfinished(folder)
        reason = f"it has no {CONFIG}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} is not a model folder: {reason}")
    if file.stat().st_size > LONGEST:
        raise UserError(f"{file} is longer than a model's configuration ever is; it is refused")
    try:
        spec = from_json(file.read_bytes())
    except UserError as reason:
        raise UserError(f"{file}: {reason}") from None
    except (OSError, UnicodeError, OverflowError) as reason:
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
        f"{len(names)} {what} ({', '.join(fold(names))})"
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", shaped))
        if names
    ]
    if faults:
        raise UserError(f"{file} does not hold the weights of this model: {'; '.join(faults)}")


def fold(names: Iterable[str]) -> list[str]:
    """Every name, those of equal weights in many blocks as one: blocks.{0..11}.norm.bias."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        start, *rest = re.split(r"(?<=[._])(\d{1,9})(?=[./])", name, maxsplit=1)
        number, end = rest or ("", "")
        groups.setdefault((start, end), []).append(number)
    folded = [
        start + (numbers[0] if len(numbers) == 1 else f"{{{runs(sorted(map(int, numbers)))}}}") + end
        for (start, end), numbers in groups.items()
    ]
    return folded if len(folded) <= NAMED else [*folded[:NAMED], "..."]


def runs(numbers: list[int]) -> str:
    """0..11 for all of them, 0,2..4 for some."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}..{last}" for first, last in found)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
