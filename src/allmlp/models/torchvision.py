"""Torchvision without its compiled part: timm and transformers import it, and need none of it for their models."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch


@cache
def name_missing_operators() -> torch.library.Library | None:
    """Let torchvision be imported where its compiled part does not load, as where its build is not torch's.

    It then only needs two operators to have a name; no model calls them. Torchvision itself is
    not imported here. The names last as long as the library that is returned, which the cache keeps.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    for compiled in Path(found.origin).parent.glob("_C.*"):
        try:
            torch.ops.load_library(compiled)
        except OSError:
            continue
    if hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")
    return library
