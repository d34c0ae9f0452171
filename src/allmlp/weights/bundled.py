"""Trained models bundled with the package, each a model folder with a card; found without importing torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from allmlp.errors import UserError
from allmlp.files import expand_user

CARD = "README.md"
BUNDLED_PREFIX = "allmlp:"
BUNDLED = "allmlp:cifar10"
BUNDLED_TEXT = "allmlp:text"
"""The bundled models for images and texts that are used by default."""


def bundled_models() -> dict[str, Path]:
    """The bundled models of this installation: `allmlp:NAME` -> folder."""
    here = Path(__file__).resolve()
    # In a wheel the folders are in this package, in a checkout next to src.
    places = (here.parent, here.parents[3] / "weights")
    folders = [path.parent for place in places for path in sorted(place.glob("*/config.json"))]
    return {BUNDLED_PREFIX + path.name: path for path in reversed(folders)}


def bundled(name: str = BUNDLED) -> Path:
    """The folder of a bundled model: `allmlp:cifar10`, a gMLP trained on CIFAR-10, or another of `bundled_models`."""
    models = bundled_models()
    if name not in models:
        have = f"only {', '.join(models)}" if models else "none at all: pass a model folder instead"
        raise UserError(f"this installation has no bundled model {name}, {have}")
    return models[name]


def model_path(name: str | os.PathLike[str]) -> Path:
    """The folder of a bundled model (`allmlp:NAME`), or `name` as a path."""
    text = os.fspath(name)
    return bundled(text) if text.startswith(BUNDLED_PREFIX) else expand_user(text)


class BundledWeights(NamedTuple):
    name: str
    description: str
    """The title of its model card."""
    result: str
    """The first row of the card's table."""
    size: int
    """Bytes of the folder."""


def bundled_weights() -> list[BundledWeights]:
    """A row for each bundled model, from its card."""
    rows = []
    for name, path in bundled_models().items():
        lines = (path / CARD).read_text(encoding="utf8").splitlines()
        title = next((line[2:] for line in lines if line.startswith("# ")), path.name)
        cells = next((line.strip("| ").split("|") for line in lines if line.startswith("| ") and "%" in line), ["", ""])
        size = sum(file.stat().st_size for file in path.iterdir())
        rows.append(BundledWeights(name, title, f"{cells[0].strip()} {cells[1].partition('(')[0].strip()}", size))
    return rows
