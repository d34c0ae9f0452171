"""What every test shares."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

# The models here are small: more threads only get in each other's way.
torch.set_num_threads(min(torch.get_num_threads(), 4))


def name_missing_operators() -> torch.library.Library | None:
    """Let torchvision be imported where its compiled part does not load (timm and transformers import it).

    It then only needs two operators to have a name; no test calls them. Torchvision itself is not imported here.
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


# The names last as long as the library does.
MISSING_OPERATORS = name_missing_operators()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers whenever it runs."""
    torch.manual_seed(0)
