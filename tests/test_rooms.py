"""Imports run one way: a room may use the rooms below it and nothing else of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import allmlp

ROOT = Path(allmlp.__file__).parent
BELOW = {
    "errors": set(),
    "files": set(),
    "spec": {"errors"},
    "kernels": set(),
    "layers": {"errors", "spec", "kernels"},
    "models": {"errors", "spec", "layers"},
    "weights": {"errors", "files", "spec", "layers", "models", "data"},
    # tasks: pictures and pooled features are prepared as the probe does, so that neighbours here are neighbours there.
    "analysis": {"errors", "files", "spec", "layers", "models", "data", "weights", "tasks"},
    "show": {"errors", "spec", "models"},
    "data": {"errors", "files", "spec"},
    "tasks": {"errors", "spec", "layers", "models", "data", "weights"},
    "inference": {"errors", "kernels", "layers", "models"},
    "schedule": {"spec"},
    "optim": {"spec", "layers"},
    "average": {"models"},
    "log": {"errors"},
    "parallel": {"errors", "layers", "models"},
    "checkpoint": {"errors", "files", "parallel"},
    "run": {"spec", "models", "data", "tasks", "optim", "schedule", "parallel"},
    "meter": {"tasks"},
    "graph": set(),
    "train": {
        "errors",
        "files",
        "spec",
        "models",
        "weights",
        "data",
        "tasks",
        "run",
        "optim",
        "average",
        "graph",
        "log",
        "meter",
        "parallel",
        "checkpoint",
    },
    "predict": {"errors", "models", "weights", "data", "tasks"},
    "serve": {"errors", "spec", "files", "models", "weights", "data", "tasks", "predict", "analysis"},
    "report": {
        "errors",
        "files",
        "spec",
        "models",
        "weights",
        "data",
        "tasks",
        "run",
        "log",
        "checkpoint",
        "train",
        "analysis",
        "layers",
        "plan",
    },
    "plan": {"errors", "spec", "layers", "models", "optim", "run", "recipes"},
    "export": {"errors", "files", "spec", "layers", "models", "weights", "data", "tasks", "predict"},
    # analysis: its figures' style. export: a side that runs in ONNX Runtime.
    "bench": {
        "errors",
        "files",
        "spec",
        "layers",
        "models",
        "weights",
        "data",
        "tasks",
        "optim",
        "graph",
        "inference",
        "kernels",
        "analysis",
        "export",
    },
    "recipes": {"errors", "spec", "layers", "models", "weights", "data", "tasks", "run", "optim", "schedule"},
    "cli": {
        "errors",
        "analysis",
        "spec",
        "models",
        "weights",
        "tasks",
        "show",
        "train",
        "predict",
        "export",
        "log",
        "recipes",
        "report",
        "plan",
        "serve",
        "bench",
    },
    "__main__": {"cli"},
    "__init__": {"errors", "inference", "layers", "models", "weights"},
}


def room(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(file: Path) -> set[str]:
    """Rooms of allmlp that a file imports, also inside functions; the package's own version is no room."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: imports are written in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("allmlp.")} - {"__version__"}


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_imports_run_one_way(file: Path) -> None:
    here = room(file)
    assert here in BELOW, f"{here} is a new room: say in this test what it may import"
    assert imports(file) - {here} <= BELOW[here]


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_every_file_says_what_it_is(file: Path) -> None:
    source = file.read_text(encoding="utf8")
    assert ast.get_docstring(ast.parse(source)) and source.count("\n") <= 500
    assert not {"utils", "helpers", "common", "misc"} & set(file.relative_to(ROOT).with_suffix("").parts)
