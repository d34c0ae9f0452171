"""Torchvision without its compiled extension, which timm and transformers import but do not need for their models."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch


@cache
def define_missing_operators() -> torch.library.Library | None:
    """Make torchvision importable if its extension does not load because it was built for another version of torch.

    Importing it then only needs two operators to be defined; no model calls them. Torchvision itself is not imported
    here. The definitions last as long as the returned library, which the cache keeps alive.
    """
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return None
    for compiled in Path(package.origin).parent.glob("_C.*"):
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
