"""A named model: its spec, and what its paper prints about it."""

from __future__ import annotations

from typing import NamedTuple

from allmlp.models.model import ModelSpec


class Published(NamedTuple):
    """Figures as printed, so that a test can hold ours against every printed digit."""

    parameters: str
    """Millions."""
    source: str
    macs: str | None = None
    """Billions of multiply-adds."""
    head: bool = True
    """Whether the printed count includes the classifier."""
    note: str = ""
    """Where the figure and the model's own description disagree: how, in words."""


class Preset(NamedTuple):
    spec: ModelSpec
    family: str
    published: Published | None = None
    about: str = ""
