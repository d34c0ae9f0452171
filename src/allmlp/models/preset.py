"""Presets: models by name, with the figures that their papers publish."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from allmlp.errors import UserError, lookup
from allmlp.plugins import plugins
from allmlp.spec import discover

if TYPE_CHECKING:
    from allmlp.models.model import ModelSpec


class Published(NamedTuple):
    """Figures as printed in the paper, so that a test can compare every printed digit."""

    parameters: str
    """In millions."""
    source: str
    macs: str | None = None
    """In billions of multiply-adds."""
    head: bool = True
    """Whether the printed count includes the classifier."""
    note: str = ""
    """Explains a difference between the printed figure and the model's description."""


class Preset(NamedTuple):
    """A named model: its spec, the family it is listed under, the figures of its paper, and a note."""

    spec: ModelSpec
    family: str
    published: Published | None = None
    about: str = ""


def presets() -> dict[str, Preset]:
    """All presets of this package (each family is a file with a PRESETS table) and of plug-ins."""
    table = dict(own_presets())
    for module in plugins():
        for name, entry in getattr(module, "PRESETS", {}).items():
            if not isinstance(entry, Preset):
                raise UserError(
                    f"{module.__name__}.PRESETS: {name} is {type(entry).__name__}, not Preset(spec, family)"
                )
            if table.setdefault(name, entry) is not entry:
                raise UserError(f"{module.__name__}.PRESETS: there is a model {name} already; use another name")
    return dict(sorted(table.items(), key=lambda item: ":" in item[0]))  # our own first


@cache
def own_presets() -> dict[str, Preset]:
    table: dict[str, Preset] = {}
    for module in discover("allmlp.models"):
        for name, entry in getattr(module, "PRESETS", {}).items():
            if name in table:
                raise TypeError(f"two presets are called {name}")
            table[name] = entry
    return table


def preset(name: str) -> Preset:
    """Return the preset called `name`: a spec and the figures published in its paper.

    >>> allmlp.preset("mixer_b16").spec.depth
    12
    """
    # A module with a PREFIX resolves the names that begin with it, such as timm:resnet50.
    for module in discover("allmlp.models"):
        prefix = getattr(module, "PREFIX", None)
        if prefix is not None and name.startswith(prefix):
            return module.preset(name)
    return own_presets().get(name) or lookup(name, presets(), "model")
