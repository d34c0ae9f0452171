"""Published image weights in and out: a file of Google, timm or FAIR becomes a model folder, or the other way round.

What a file holds is read from the names and shapes in it. The weights keep their numbers and their precision.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from allmlp.data.inputs import FILE, Inputs, write_inputs
from allmlp.errors import UserError, lookup, one_line
from allmlp.files import write_atomically
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.mixers.linear import TokenLinear
from allmlp.layers.mixers.mlp import TokenMlp
from allmlp.layers.stem import Patches
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model
from allmlp.models.timm import PREFIX, Timm
from allmlp.models.zoo import preset
from allmlp.spec import Spec
from allmlp.weights import fair, folder, google, timm
from allmlp.weights.timm import Shape, Shapes


class Source(Protocol):
    """What the module of a source has."""

    TITLE: str
    SIGNATURES: dict[str, dict[str, int]]

    def inputs(self, family: str) -> Inputs: ...

    def key(self, family: str, name: str) -> str: ...

    def outward(self, family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor: ...

    def inward(self, family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor: ...

    def describe(self, family: str, shapes: Shapes) -> Encoder: ...

    def write(self, file: Path, tensors: Mapping[str, Tensor]) -> None: ...


SOURCES: dict[str, Source] = {"google": google, "timm": timm, "fair": fair}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FILES = ".npz, .safetensors and .pth, .pt or .bin can be read"
LONGEST = 200
"""Letters in a name."""
START_ONLY = {"init", "dropout", "drop_path", "value"}
"""Fields that only say how a model starts or learns."""


class Found(NamedTuple):
    spec: Encoder
    state: dict[str, Tensor]
    inputs: Inputs | None


def convert(source: str, target: str, to: str | None = None) -> Path:
    """Write the model in `source` to `target` and return where it is.

    `source` is a file of Google's Mixer, of timm's Mixer, ResMLP, gMLP or ViT, or of FAIR's ResMLP; one of our own
    folders; or `timm:NAME` for published weights. `target` becomes one of our folders, or with `to` ("google", "timm"
    or "fair") a file in that layout: .npz, .safetensors or .pth.
    """
    layout = None if to is None else lookup(to, SOURCES, "layout")
    place, path = Path(source).expanduser(), Path(target).expanduser()
    if layout is None and place.is_dir():
        raise UserError(f"{source} is one of our folders already; to='google', 'timm' or 'fair' makes a file of it")
    if source.startswith(PREFIX):
        found = published(source)
    else:
        found = own(place) if place.is_dir() else adopt(place, read(place))
    try:
        return write_folder(path, found) if layout is None else write_file(path, layout, found)
    except OSError as reason:
        raise UserError(f"cannot write {path}: {one_line(reason)}") from None


# --- in ----------------------------------------------------------------------------------------------------


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, whose kind its first bytes tell."""
    if not file.is_file():
        raise UserError(f"{file} is not there; name a weights file, a model folder or {PREFIX}NAME")
    try:
        with file.open("rb") as stream:
            start = stream.read(9)
        # A safetensors file begins with the length of its header, whose bytes may look like anything.
        if start.endswith(b"{") and int.from_bytes(start[:8], "little") < file.stat().st_size:
            return timm.read_safetensors(file)
        if start.startswith(b"PK"):
            with zipfile.ZipFile(file) as archive:
                arrays = any(name.endswith(".npy") for name in archive.namelist())
            return google.read_npz(file) if arrays else fair.read_pickle(file)
        if start.startswith(b"\x80"):
            return fair.read_pickle(file)
    except UserError as reason:
        # A name in a damaged file may hold anything, a line break too.
        raise UserError("".join(letter if letter.isprintable() else "?" for letter in str(reason))) from None
    except Exception as reason:  # what the readers raise for damaged bytes is of a dozen kinds
        raise UserError(f"{file} is damaged or not a weights file: {one_line(reason)}") from None
    raise UserError(f"{file} is not a weights file; {FILES}")


def adopt(file: Path, tensors: Mapping[str, Tensor]) -> Found:
    """The weights of another source as a model of ours."""
    dtype = check_numbers(file, tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    source, family = recognise(file, shapes)
    try:
        spec = source.describe(family, shapes)
        with torch.device("meta"):
            empty = spec.build().state_dict()
    except UserError as reason:
        raise UserError(f"{file}: {reason}") from None
    keys = {name: source.key(family, name) for name in empty}
    expected = {keys[name]: tuple(source.outward(family, name, empty[name], spec).shape) for name in empty}
    folder.compare(file, expected, shapes)
    state = {
        name: source.inward(family, name, tensors[keys[name]], tuple(tensor.shape)).to(dtype, copy=True).contiguous()
        for name, tensor in empty.items()
    }
    colour = isinstance(spec.stem, Patches) and spec.stem.in_channels == 3
    return Found(spec, state, source.inputs(family) if colour else None)


def check_numbers(file: Path, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Refuse what cannot be weights; the precision that holds all of them without loss."""
    for name, tensor in tensors.items():
        if not name.isprintable() or len(name) > LONGEST:
            raise UserError(f"{file}: {name[:LONGEST]!r} is not the name of a weight")
        if tensor.dtype not in FLOATS:
            raise UserError(f"{file}: {name} holds {str(tensor.dtype).removeprefix('torch.')} numbers, not weights")
        if not tensor.isfinite().all():
            raise UserError(f"{file}: {name} holds NaN or infinite numbers; these weights are of no use")
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()} or {torch.float32})


def recognise(file: Path, shapes: Shapes) -> tuple[Source, str]:
    """Whose layout it is, and which family: the one of whose signature the most is there, in any block."""
    names = {re.sub(r"^(blocks\.|MixerBlock_)\d+", r"\g<1>0", name) for name in shapes}

    def present(layout: tuple[Source, str]) -> float:
        signature = layout[0].SIGNATURES[layout[1]]
        return len(names & signature.keys()) / len(signature)

    best = max(((source, family) for source in SOURCES.values() for family in source.SIGNATURES), key=present)
    if present(best) < 0.5:
        known = "; ".join(f"{source.TITLE} {', '.join(source.SIGNATURES)}" for source in SOURCES.values())
        raise UserError(f"{file} holds none of the models that can be converted ({known})")
    check_signature(str(file), best, shapes)
    return best


def check_signature(what: str, layout: tuple[Source, str], shapes: Shapes) -> None:
    """Whether the weights are there from which a model is described."""
    source, family = layout
    signature = source.SIGNATURES[family]
    missing = [name for name in signature if name not in shapes]
    if missing:
        raise UserError(f"{what} looks like a {family} in {source.TITLE} layout, but has no {', '.join(missing)}")
    for name, axes in signature.items():
        if len(shapes[name]) != axes:
            raise UserError(f"{what} has a {name} of the shape {list(shapes[name])}, not with {axes} axes")


def published(name: str) -> Found:
    """The weights that timm publishes under a name, with the head they were published with.

    What shapes do not tell, such as an activation, is seen in an answer.
    """
    spec = preset(name).spec
    assert isinstance(spec, Timm)
    known = spec.defaults
    classes = known.num_classes if known else spec.classes
    trained = spec.replace(classes=classes or spec.classes).pretrained()
    network = trained.model.network
    state = network.state_dict()
    if not classes:
        state = {key: tensor for key, tensor in state.items() if not key.startswith("head.")}
    found = adopt(Path(name), state)
    compare_answers(name, found, trained.model)
    crop = network.pretrained_cfg.get("crop_pct") or 1.0
    return found._replace(inputs=Inputs(trained.mean, trained.std, crop=crop))


@torch.no_grad()
def compare_answers(name: str, found: Found, model: Model) -> None:
    """Refuse a network whose features are not those of the model that its weights describe."""
    ours = found.spec.build().eval()
    ours.load_state_dict(found.state)
    images = ours.example()
    actual, expected = ours.forward_features(*images), model.eval().forward_features(*images)
    if expected.shape != actual.shape or (expected - actual).abs().max() > 1e-3 * expected.abs().max():
        raise UserError(f"{name} does not answer like the model its weights describe; it cannot be converted")


def own(path: Path) -> Found:
    """One of our folders."""
    model = folder.load(path)
    if not isinstance(model.spec, Encoder) or not isinstance(model.spec.stem, Patches):
        raise UserError(f"{path} is not one of our image models: only these have a layout elsewhere")
    state = dict(model.state_dict())
    check_numbers(path, state)
    return Found(model.spec, state, None)


# --- out ---------------------------------------------------------------------------------------------------


def write_folder(path: Path, found: Found) -> Path:
    folder.write(path, found.spec, found.state)
    if found.inputs is None:
        (path / FILE).unlink(missing_ok=True)
    else:
        write_inputs(path, found.inputs)
    return path


def write_file(path: Path, layout: Source, found: Found) -> Path:
    tensors = export(layout, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: layout.write(temporary, tensors))
    return path


def export(layout: Source, found: Found) -> dict[str, Tensor]:
    """Our weights in another layout, from which the same model can be read again."""
    spec, family = found.spec, family_of(found.spec)
    if family not in layout.SIGNATURES:
        has = ", ".join(layout.SIGNATURES)
        raise UserError(f"{layout.TITLE} layout has no {family or 'such model'}; it has {has}")
    tensors = {}
    for name, tensor in found.state.items():
        try:
            tensors[layout.key(family, name)] = layout.outward(family, name, tensor, spec)
        except KeyError:
            raise UserError(f"{layout.TITLE} layout of {family} has no place for {name}") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        check_signature("it", (layout, family), shapes)
        other = next(differences(spec, layout.describe(family, shapes)), None)
    except UserError as reason:
        other = str(reason)
    if other:
        raise UserError(f"{layout.TITLE} layout of {family} cannot hold this model: {other}")
    return tensors


def family_of(spec: Encoder) -> str | None:
    """The family that a model belongs to by the way its tokens mix."""
    token, channel = spec.block.token, spec.block.channel
    if token is None:
        return "gMLP" if channel and channel.inner else None
    return {TokenMlp: "Mixer", TokenLinear: "ResMLP", Attention: "ViT"}.get(type(token))  # type: ignore[call-overload]


def differences(ours: Spec, theirs: Spec, above: str = "") -> Iterator[str]:
    """Where two specs compute different things. The two formulas of GELU count as one."""
    for name in [field.name for field in fields(ours) if field.name not in START_ONLY]:  # type: ignore[arg-type]
        mine, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(mine, Spec) and type(mine) is type(other):
            yield from differences(mine, other, f"{above}{name}.")
        elif mine != other and {mine, other} != {"gelu", "gelu_tanh"}:
            yield f"{above}{name} is {mine}, there it would be {other}"
