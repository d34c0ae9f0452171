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
    """A package that `make test-peers` installs; outside of it the test is skipped."""
    if "ALLMLP_PEERS" not in os.environ:
        pytest.skip("run by `make test-peers`", allow_module_level=True)
    return importlib.import_module(name)


def example(name: str) -> Any:
    """The function `main` of a script in `examples`."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
