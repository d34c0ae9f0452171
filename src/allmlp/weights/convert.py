"""Published weights in and out: a file or folder of another source becomes a model folder of ours, or the other way.

What a file holds is read from the names and shapes in it. The weights keep their numbers and their precision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import reduce
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from allmlp.data.inputs import FILE, TOKENIZERS, Inputs, TextInputs, read_inputs, write_inputs
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
from allmlp.spec import Spec, override_all
from allmlp.weights import fair, folder, google, huggingface, lucidrains, timm
from allmlp.weights.fetch import locate
from allmlp.weights.tensors import read
from allmlp.weights.timm import Shape, Shapes


class Source(Protocol):
    """What the module of a source has."""

    TITLE: str
    SIGNATURES: dict[str, dict[str, int]]
    """By family, the weights by which it is known, with their number of axes."""
    SPARE: tuple[str, ...]
    """How weights begin that may be left out."""
    UNTOLD: dict[str, str]
    """By family, the field that neither names, nor shapes, nor a configuration tell."""

    def inputs(self, family: str, spec: Encoder, config: Mapping[str, Any]) -> Inputs | TextInputs | None: ...

    def keys(self, family: str, name: str, spec: Encoder) -> tuple[str, ...]:
        """Its names of the weights that are stacked in one of ours; KeyError where it has none."""
        ...

    def outward(self, family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor: ...

    def inward(self, family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor: ...

    def describe(self, family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
        """The model behind these shapes; `config` is what lies beside the weights, where something does."""
        ...

    def files(self, spec: Encoder, inputs: Inputs | TextInputs | None) -> dict[str, Any]:
        """Name -> content of the JSON files to lay beside the weights."""
        ...

    def write(self, path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None: ...


SOURCES: dict[str, Source] = {
    "google": google,
    "timm": timm,
    "fair": fair,
    "hf": huggingface,
    "lucidrains": lucidrains,
}
TIDY = (google.tidy, huggingface.tidy, lucidrains.tidy)
"""Older and newer names of the same weights, and what is there twice, each by the one who knows."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LONGEST = 200
"""Letters in a name."""
START_ONLY = {"init", "dropout", "drop_path", "value"}
"""Fields that only say how a model starts or learns."""
NUMBERED = re.compile(r"^(blocks\.|MixerBlock_|encoder\.layer\.|layers\.)\d+")


class Found(NamedTuple):
    """A model, as its parts."""

    spec: Encoder
    state: dict[str, Tensor]
    inputs: Inputs | TextInputs | None = None
    files: Mapping[str, str] = MappingProxyType({})
    """Name -> text of what else lies beside it: a tokenizer."""
    unused: tuple[str, ...] = ()
    """Weights of the source that have no place here."""


def convert(
    source: str,
    target: str,
    to: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Path:
    """Write the model in `source` to `target` and return where it is.

    `source` is a weights file or a folder of Google, timm, FAIR, Hugging Face or lucidrains; one of our own folders; a
    name of `allmlp list weights`; `timm:NAME`; or a model on the hub, `ORGANISATION/NAME`. `target` becomes one of our
    folders, or with `to` ("google", "timm", "fair", "hf" or "lucidrains") a file in that layout, for "hf" a folder.
    `overrides` say what a file does not: {"block.channel.inner.causal": True}. What is worth knowing is told to `say`.
    """
    layout = None if to is None else lookup(to, SOURCES, "layout")
    path = Path(target).expanduser()
    if source.startswith(PREFIX):
        found = published(source)
    else:
        place = locate(source, say)
        if layout is None and is_ours(Path(source).expanduser()):
            raise UserError(
                f"{source} is one of our folders already; to={' or '.join(map(repr, SOURCES))} changes that"
            )
        found = open_place(place.path, overrides)
        found = found._replace(inputs=place.inputs or found.inputs)
    if found.unused:
        say(f"left out, for there is no place for them here: {', '.join(found.unused)}")
    try:
        return write_folder(path, found) if layout is None else write_layout(path, layout, found)
    except OSError as reason:
        raise UserError(f"cannot write {path}: {one_line(reason)}") from None


# --- in ----------------------------------------------------------------------------------------------------


def open_place(path: Path, overrides: Mapping[str, Any] | None = None) -> Found:
    """The model in a weights file or in a folder, ours or another's."""
    if not path.is_dir():
        # A file taken out of its folder alone is known by its shapes; in the folder more is known.
        config = huggingface.read_beside(path.parent) if path.name in huggingface.WEIGHTS else {}
        return adopt(path, read(path), config, overrides)
    if is_ours(path):
        return own(path)
    config = huggingface.read_beside(path)
    found = adopt(path, read(huggingface.weights_file(path)), config, overrides)
    return found._replace(files={name: text for name in TOKENIZERS if (text := huggingface.text(path / name))})


def is_ours(path: Path) -> bool:
    """Whether it is a folder of this library: our config.json names a kind, those of others do not."""
    return "kind" in huggingface.read_json(path / folder.CONFIG)


def adopt(
    where: Path, tensors: dict[str, Tensor], config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Found:
    """The weights of another source as a model of ours. `tensors` is emptied, so that no weight is held twice."""
    try:
        check_names(tensors)
        for tidy in TIDY:
            changed = tidy(tensors)
            tensors.clear()
            tensors.update(changed)
            del changed
        dtype = check_kinds(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        source, family = recognise(shapes)
        spec = override_all(source.describe(family, shapes, config), overrides or {})
        own = folder.outline(spec)
        inputs = source.inputs(family, spec, config)
        keys = {name: names_there(source, family, name, spec) for name in own}
    except UserError as reason:
        raise UserError(f"{where}: {reason}") from None
    expected = {}
    for name, (rows, *rest) in own.items():
        piece = torch.empty(rows // len(keys[name]), *rest, device="meta")
        expected |= dict.fromkeys(keys[name], tuple(source.outward(family, name, piece, spec).shape))
    unused = tuple(name for name in shapes if name not in expected and name.startswith(source.SPARE))
    folder.compare(where, expected, {name: shape for name, shape in shapes.items() if name not in unused})
    state = {}
    for name, (rows, *rest) in own.items():
        piece = (rows // len(keys[name]), *rest)
        pieces = [source.inward(family, name, check_finite(where, key, tensors.pop(key)), piece) for key in keys[name]]
        state[name] = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(dtype).contiguous()
    grey = isinstance(spec.stem, Patches) and spec.stem.in_channels != 3
    return Found(spec, state, None if grey else inputs, unused=unused)


def names_there(source: Source, family: str, name: str, spec: Encoder) -> tuple[str, ...]:
    """The names in another layout of what is stacked in one of our weights."""
    try:
        return source.keys(family, name, spec)
    except KeyError:
        raise UserError(f"{source.TITLE} layout of {family} has no place for {name}") from None


def check_names(tensors: Mapping[str, Tensor]) -> None:
    for name in tensors:
        if not name.isprintable() or len(name) > LONGEST:
            raise UserError(f"{name[:LONGEST]!r} is not the name of a weight")


def check_kinds(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Refuse what cannot be weights, before a number is read; the precision that holds all of them without loss."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise UserError(f"{name} holds {str(tensor.dtype).removeprefix('torch.')} numbers, not weights")
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()} or {torch.float32})


def check_finite(where: Path, name: str, tensor: Tensor) -> Tensor:
    if not tensor.isfinite().all():
        raise UserError(f"{where}: {name} holds NaN or infinite numbers; these weights are of no use")
    return tensor


def recognise(shapes: Shapes) -> tuple[Source, str]:
    """Whose layout it is, and which family: the one of whose signature the most is there, in any block."""
    names = {NUMBERED.sub(r"\g<1>0", name) for name in shapes}

    def present(layout: tuple[Source, str]) -> float:
        signature = layout[0].SIGNATURES[layout[1]]
        return len(names & signature.keys()) / len(signature)

    best = max(((source, family) for source in SOURCES.values() for family in source.SIGNATURES), key=present)
    if present(best) < 0.5:
        known = "; ".join(f"{source.TITLE} {', '.join(source.SIGNATURES)}" for source in SOURCES.values())
        raise UserError(f"it holds none of the models that can be converted ({known})")
    check_signature(best, shapes)
    return best


def check_signature(layout: tuple[Source, str], shapes: Shapes) -> None:
    """Whether the weights are there from which a model is described."""
    source, family = layout
    signature = source.SIGNATURES[family]
    missing = [name for name in signature if name not in shapes]
    if missing:
        raise UserError(f"it looks like a {family} in {source.TITLE} layout, but has no {', '.join(missing)}")
    for name, axes in signature.items():
        if len(shapes[name]) != axes:
            raise UserError(f"it has a {name} of the shape {list(shapes[name])}, not with {axes} axes")


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
    found = adopt(Path(name), dict(state), {"pretrained_cfg": network.pretrained_cfg})
    compare_answers(name, found, trained.model)
    return found._replace(inputs=Inputs(trained.mean, trained.std, crop=network.pretrained_cfg.get("crop_pct") or 1.0))


@torch.no_grad()
def compare_answers(name: str, found: Found, model: Model) -> None:
    """Refuse a network whose features are not those of the model that its weights describe."""
    ours = build(found)
    images = ours.example()
    actual, expected = ours.forward_features(*images), model.eval().forward_features(*images)
    if expected.shape != actual.shape or (expected - actual).abs().max() > 1e-3 * expected.abs().max():
        raise UserError(f"{name} does not answer like the model its weights describe; it cannot be converted")


def own(path: Path) -> Found:
    """One of our folders."""
    model = folder.load(path)
    if not isinstance(model.spec, Encoder):
        raise UserError(f"{path} is a {type(model.spec).__name__}, which has no layout elsewhere")
    state = {name: check_finite(path, name, tensor) for name, tensor in model.state_dict().items()}
    inputs = read_inputs(path) if (path / FILE).is_file() else None
    return Found(
        model.spec, state, inputs, {name: text for name in TOKENIZERS if (text := huggingface.text(path / name))}
    )


def build(found: Found, device: str | torch.device = "cpu") -> Model:
    """The model itself, in evaluation mode."""
    with torch.device("meta"):
        model = found.spec.build()
    model.load_state_dict({name: tensor.to(device) for name, tensor in found.state.items()}, assign=True)
    return model.eval()


# --- out ---------------------------------------------------------------------------------------------------


def write_folder(path: Path, found: Found) -> Path:
    folder.write(path, found.spec, found.state)
    if found.inputs is None:
        (path / FILE).unlink(missing_ok=True)
    else:
        write_inputs(path, found.inputs)
    for name in TOKENIZERS:
        if name in found.files:
            write_atomically(path / name, lambda file, text=found.files[name]: file.write_text(text, encoding="utf8"))
        else:
            (path / name).unlink(missing_ok=True)
    return path


def write_layout(path: Path, layout: Source, found: Found) -> Path:
    tensors = export(layout, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = layout.files(found.spec, found.inputs)
    texts = {name: json.dumps(content, indent=2) for name, content in files.items()}
    layout.write(path, tensors, {**texts, **found.files})
    return path


def export(layout: Source, found: Found) -> dict[str, Tensor]:
    """Our weights in another layout, from which the same model can be read again."""
    spec, family = found.spec, family_of(found.spec)
    if family not in layout.SIGNATURES:
        has = ", ".join(layout.SIGNATURES)
        raise UserError(f"{layout.TITLE} layout has no {family or 'such model'}; it has {has}")
    tensors = {}
    for name, tensor in found.state.items():
        keys = names_there(layout, family, name, spec)
        for key, piece in zip(keys, tensor.chunk(len(keys))):
            tensors[key] = layout.outward(family, name, piece, spec)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        check_signature((layout, family), shapes)
        again = layout.describe(family, shapes, layout.files(spec, found.inputs).get(folder.CONFIG, {}))
        if family in layout.UNTOLD:
            again = override_all(again, {layout.UNTOLD[family]: attrgetter(layout.UNTOLD[family])(spec)})
        other = next(differences(spec, again), None)
    except UserError as reason:
        other = str(reason)
    if other:
        raise UserError(f"{layout.TITLE} layout of {family} cannot hold this model: {other}")
    return tensors


def family_of(spec: Encoder) -> str | None:
    """The family that a model belongs to by what it reads and the way its tokens mix."""
    token, channel, text = spec.block.token, spec.block.channel, not isinstance(spec.stem, Patches)
    if token is None and channel and channel.inner:
        return "gMLP for text" if text else "gMLP"
    if isinstance(token, Attention):
        return "BERT" if text else "ViT"
    return {TokenMlp: "Mixer", TokenLinear: "ResMLP"}.get(type(token)) if not text else None  # type: ignore[call-overload]


def differences(ours: Spec, theirs: Spec, above: str = "") -> Iterator[str]:
    """Where two specs compute different things. The two formulas of GELU count as one."""
    for name in [field.name for field in fields(ours) if field.name not in START_ONLY]:  # type: ignore[arg-type]
        mine, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(mine, Spec) and type(mine) is type(other):
            yield from differences(mine, other, f"{above}{name}.")
        elif mine != other and {mine, other} != {"gelu", "gelu_tanh"}:
            yield f"{above}{name} is {mine}, there it would be {other}"
