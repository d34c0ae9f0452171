"""Models by name: find, configure and build them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from allmlp.device import as_dtype, usable_device
from allmlp.errors import UserError, suggest_keywords
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.models import timm
from allmlp.models.catalog import CatalogEntry, matching
from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.external import External
from allmlp.models.grid import make_dynamic
from allmlp.models.model import Model, ModelSpec
from allmlp.models.preset import Preset, preset, presets
from allmlp.spec import check_seed, override_all

__all__ = ["build_catalog", "configure", "create", "family", "list_models", "preset", "presets"]


def list_models(pattern: str = "*") -> list[str]:
    """Model names that match a shell pattern or contain a word.

    >>> allmlp.list_models("gmlp_?16")
    ['gmlp_s16', 'gmlp_b16']
    """
    return matching(timm.names() if pattern.startswith(timm.PREFIX) else presets(), pattern)


@suggest_keywords
def configure(
    spec: ModelSpec,
    *,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    in_chans: int | None = None,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    horizon: int | None = None,
    drop_path: float | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Return a copy of `spec` with another input or output, or with fields changed by their dotted paths.

    >>> spec = allmlp.preset("gmlp_s16").spec
    >>> spec = allmlp.configure(spec, num_classes=10, overrides={"block.channel.hidden": 512})
    """
    options = {
        "num_classes": num_classes,
        "img_size": img_size,
        "patch_size": patch_size,
        "in_chans": in_chans,
        "vocab_size": vocab_size,
        "seq_len": seq_len,
        "horizon": horizon,
        "drop_path": drop_path,
    }
    spec = spec.configure(**{name: value for name, value in options.items() if value is not None})
    return override_all(spec, overrides or {})


@suggest_keywords
def create(
    model: str | ModelSpec,
    *,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    in_chans: int | None = None,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    horizon: int | None = None,
    drop_path: float | None = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    dynamic: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Build a model by name or from a spec, with random weights. `allmlp.from_pretrained` loads trained ones.

    >>> model = allmlp.create("resmlp_s24", num_classes=10, img_size=(160, 256), drop_path=0.1)
    >>> model = allmlp.create("gmlp_l18", overrides={"block.channel.inner.variant": "additive"}, seed=0)

    `overrides` sets any field of the spec by its dotted path, to a value or its text. `seed` makes the initial weights
    reproducible and does not change torch's global generator. With `dynamic=True` an image model accepts every image
    size that is a multiple of its patch size; weights over tokens are resized in each forward pass.
    """
    if not isinstance(model, (str, ModelSpec)):
        hint = ": pass its `spec`" if hasattr(model, "spec") else ""
        raise UserError(f"create() takes a model name or a spec, not {type(model).__name__}{hint}")
    spec = configure(
        preset(model).spec if isinstance(model, str) else model,
        num_classes=num_classes,
        img_size=img_size,
        patch_size=patch_size,
        in_chans=in_chans,
        vocab_size=vocab_size,
        seq_len=seq_len,
        horizon=horizon,
        drop_path=drop_path,
        overrides=overrides,
    )
    if seed is not None:
        check_seed(seed)
    place = torch.get_default_device() if device is None else usable_device(device)
    with torch.random.fork_rng(enabled=seed is not None), place:
        if seed is not None:
            torch.manual_seed(seed)
        built = spec.build()
    built = make_dynamic(built) if dynamic else built
    return built if dtype is None else built.to(as_dtype(dtype))


@cache
def family(spec: ModelSpec) -> str:
    """Family of the preset with the most similar parts; the name of the token mixer if no preset has it."""
    name = getattr(spec, "name", None)
    if name is not None:  # a network of another package
        families = (entry.family for entry in presets().values() if getattr(entry.spec, "name", None) == name)
        return next(families, type(spec).__name__)
    parts = kinds(spec)
    preset_parts = [(entry.family, kinds(entry.spec)) for entry in presets().values()]
    new = parts.difference(*(others for _, others in preset_parts))
    mixers = [kind.__name__ for kind in new if issubclass(kind, TokenMixer)]
    if mixers:
        return min(mixers)
    most_similar, _ = max(preset_parts, key=lambda row: len(parts & row[1]) / len(parts | row[1]))
    return most_similar


def short_name(spec: ModelSpec | None) -> str:
    """A short name for a model: gMLP 12 x 256."""
    if spec is None:
        return ""
    if isinstance(spec, External):
        return spec.name
    if not isinstance(spec, Encoder):
        return family(spec)
    depths, widths = ("+".join(str(getattr(stage, size)) for stage in spec.all_stages) for size in ("depth", "width"))
    return f"{family(spec)} {depths} x {widths}"


def kinds(spec: ModelSpec) -> frozenset[type]:
    return frozenset(map(type, spec.children()))


def build_catalog() -> list[CatalogEntry]:
    """Every preset with its counts, for zoo.json."""
    return catalog_entries(presets())


def catalog_entries(table: Mapping[str, Preset]) -> list[CatalogEntry]:
    entries = []
    for name, entry in table.items():
        cost, printed = measure(entry.spec), entry.published
        text = "" if printed is None else f"{printed.parameters} M" + (f", {printed.macs} G" if printed.macs else "")
        spec = entry.spec.input_spec
        entries.append(CatalogEntry(name, entry.family, spec, cost.parameters, cost.macs, text, entry.about))
    return entries
