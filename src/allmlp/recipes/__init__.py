"""Recipes: functions that return a Run, or a table of runs; `allmlp train NAME` finds them by name.

A recipe is a public function without parameters in a module of this package. Its docstring gives the command, the
hardware, the time and a published result; `make results` adds what was measured.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from allmlp.declared import Declared, find_declared
from allmlp.errors import UserError, lookup
from allmlp.plugins import added

if TYPE_CHECKING:
    from allmlp.run import Run


@cache
def recipes() -> dict[str, Declared]:
    """All recipes, parsed from the source files, so that listing them does not import torch; and those of plug-ins."""
    return find_declared(__name__, __file__) | added("RECIPES")


def recipe(name: str) -> Declared:
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
