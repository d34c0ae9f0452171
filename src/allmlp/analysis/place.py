"""Where in a model a name lies."""

from __future__ import annotations

import re
from typing import NamedTuple


class Place(NamedTuple):
    stack: str
    """encoder or decoder; empty where there is one stack."""
    block: int | None
    """Counted from 0; None outside of the blocks."""

    def __str__(self) -> str:
        return f"{self.stack} {'' if self.block is None else self.block}".strip()


def place(name: str) -> Place:
    """decoder.blocks.3.token.mix -> decoder, 3."""
    found = re.match(r"(?:(encoder|decoder)\.)?(?:blocks\.(\d+)(?:\.|$))?", name)
    assert found is not None, "every part of the pattern may be missing"
    return Place(found[1] or "", int(found[2]) if found[2] else None)


def slot(name: str) -> str:
    """The residual branch a name lies in: token, cross, channel; pool for Class-MLP's own, empty elsewhere."""
    parts = name.split(".")
    if "pool" in parts:
        return "pool"
    return next((part for part in parts if part in ("token", "cross", "channel")), "")
