"""Recipes: functions that return a Run, or a table of runs; `allmlp train NAME` finds them by name.

A recipe is a public function without parameters in a module of this package. Its docstring gives the command, the
hardware, the time, the measured result and a published one.
"""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from allmlp.errors import UserError, lookup

if TYPE_CHECKING:
    from allmlp.run import Run


class Recipe(NamedTuple):
    name: str
    module: str
    text: str
    """The docstring."""

    def make(self) -> Run | dict[str, Run]:
        """Build the run, or a table of runs by name."""
        return getattr(importlib.import_module(f"{__name__}.{self.module}"), self.name)()


@cache
def recipes() -> dict[str, Recipe]:
    """All recipes, parsed from the source files, so that listing them does not import torch."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        for node in ast.parse(file.read_text(encoding="utf8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.args.args:
                text = ast.get_docstring(node) or ""
                found[node.name] = Recipe(node.name, file.stem, text)
    return found


def recipe(name: str) -> Recipe:
    return lookup(name, recipes(), "recipe")


def runs(name: str) -> dict[str, Run]:
    """The runs of a recipe by name: one run as NAME, a table as NAME/ROW. `name` may also be one row."""
    table, _, row = name.partition("/")
    made = recipe(table).make()
    if not isinstance(made, dict):
        if row:
            raise UserError(f"recipe {table} is one run: it has no row {row!r}")
        return {table: made}
    if row:
        lookup(row, made, f"row of {table}")
    return {f"{table}/{key}": run for key, run in made.items() if row in ("", key)}
