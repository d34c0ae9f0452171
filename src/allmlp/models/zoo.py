"""Every model by its name: find it, change it, build it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from allmlp.errors import lookup
from allmlp.models import timm
from allmlp.models.catalog import matching
from allmlp.models.grid import any_size
from allmlp.models.model import Model, ModelSpec
from allmlp.models.preset import Preset
from allmlp.spec import discover, override_all


@cache
def presets() -> dict[str, Preset]:
    """All presets of the modules beside this one: a new family is a new file with a PRESETS table."""
    found: dict[str, Preset] = {}
    for module in discover("allmlp.models"):
        for name, entry in getattr(module, "PRESETS", {}).items():
            if name in found:
                raise TypeError(f"two presets are called {name}")
            found[name] = entry
    return dict(sorted(found.items(), key=lambda item: ":" in item[0]))  # our own first


def list_models(pattern: str = "*") -> list[str]:
    """Names of the zoo that match a shell pattern or contain a word: list_models("gmlp_*")."""
    return matching(timm.names() if pattern.startswith(timm.PREFIX) else presets(), pattern)


def preset(name: str) -> Preset:
    if name.startswith(timm.PREFIX):
        return timm.preset(name)
    return lookup(name, presets(), "model")


def configure(
    spec: ModelSpec,
    *,
    classes: int | None = None,
    image: int | tuple[int, int] | None = None,
    patch: int | tuple[int, int] | None = None,
    in_channels: int | None = None,
    vocabulary: int | None = None,
    length: int | None = None,
    drop_path: float | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """`spec` with its input, its output or any field changed. Dotted `overrides` take text or values."""
    options = {
        "classes": classes,
        "image": image,
        "patch": patch,
        "in_channels": in_channels,
        "vocabulary": vocabulary,
        "length": length,
        "drop_path": drop_path,
    }
    spec = spec.configure(**{name: value for name, value in options.items() if value is not None})
    return override_all(spec, overrides or {})


def create(
    model: str | ModelSpec,
    *,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    dynamic: bool = False,
    **changes: Any,
) -> Model:
    """Build a model by name, or from a spec, with its own initialisation.

        create("mixer_b16")
        create("resmlp_s24", classes=10, image=(160, 256), drop_path=0.1)
        create("gmlp_l18", overrides={"block.channel.inner.combine": "add"}, seed=0)

    `changes` are those of `configure`: classes, image, patch, in_channels, vocabulary, length,
    drop_path, overrides. A `seed` makes the initial weights repeatable and leaves torch's own
    generator untouched. A `dynamic` image model reads every size that its patches divide, with token
    weights resized as it goes.
    """
    spec = configure(resolve(model), **known(changes))
    with torch.random.fork_rng(enabled=seed is not None), torch.device(device or torch.get_default_device()):
        if seed is not None:
            torch.manual_seed(seed)
        built = spec.build()
    built = any_size(built) if dynamic else built
    return built if dtype is None else built.to(dtype)


def resolve(model: str | ModelSpec) -> ModelSpec:
    return preset(model).spec if isinstance(model, str) else model


def known(changes: dict[str, Any]) -> dict[str, Any]:
    for name in changes:
        lookup(name, configure.__kwdefaults__ or {}, "option of create")
    return changes
