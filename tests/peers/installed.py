"""The packages that these tests need, and the scripts in `examples` that they run."""

from __future__ import annotations

import importlib
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def peer(name: str) -> Any:
    """The package; where `make test-peers` has not installed it, the test is skipped."""
    if os.environ.get("ALLMLP_PEERS"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed: make test-peers")


def example(name: str) -> Any:
    """The function `main` of a script in `examples`."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
