"""Recipes and studies are public functions without parameters: found by name, without importing them or torch."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any, NamedTuple


class Declared(NamedTuple):
    name: str
    module: str
    text: str
    """The docstring."""

    def make(self) -> Any:
        """Import the module and call the function."""
        return getattr(importlib.import_module(self.module), self.name)()


def find_declared(package: str, file: str) -> dict[str, Declared]:
    """The functions in the modules of `package`, whose own file is `file`, by name."""
    functions = {}
    for source in sorted(Path(file).parent.glob("[!_]*.py")):
        for node in ast.parse(source.read_text(encoding="utf8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.args.args:
                text = ast.get_docstring(node) or ""
                functions[node.name] = Declared(node.name, f"{package}.{source.stem}", text)
    return functions
