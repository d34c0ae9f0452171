"""The position of a module or parameter in a model, read from its name."""

from __future__ import annotations

import re
from typing import NamedTuple


class ModulePath(NamedTuple):
    stack: str
    """encoder or decoder; empty for a model with one stack."""
    block: int | None
    """Counted from 0; None outside the blocks."""


def module_path(name: str) -> ModulePath:
    """decoder.blocks.3.token.mix -> decoder, 3."""
    match = re.match(r"(?:(encoder|decoder)\.)?(?:blocks\.(\d+)(?:\.|$))?", name)
    assert match is not None, "every part of the pattern is optional"
    return ModulePath(match[1] or "", int(match[2]) if match[2] else None)


def branch(name: str) -> str:
    """The residual branch a name belongs to: token, cross, channel; pool for those of Class-MLP, empty elsewhere."""
    parts = name.split(".")
    if "pool" in parts:
        return "pool"
    return next((part for part in parts if part in ("token", "cross", "channel")), "")
