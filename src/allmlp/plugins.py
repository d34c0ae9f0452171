"""Packages that add to this one: mixers, models, tasks, datasets, recipes, optimizers.

A plug-in is a module. Importing it registers its specs, that is every subclass of `Spec`; models are in its dictionary
PRESETS, and recipes, functions that return a Run, in its tuple RECIPES. It is found by the entry point of an installed
package,

    [project.entry-points."allmlp.plugins"]
    shift = "allmlp_shift"

or by its name: `allmlp --import my_module train ...`, or ALLMLP_IMPORT=my_module. An installed plug-in that cannot be
imported is left out with a warning; one that is asked for by name is an error.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from allmlp.errors import UserError, one_line

GROUP = "allmlp.plugins"
VARIABLE = "ALLMLP_IMPORT"
LOADED: dict[str, ModuleType | None] = {}
"""The plug-ins of this process by name; None while one is imported, or if that failed."""
log = logging.getLogger("allmlp.plugins")


def plugins() -> list[ModuleType]:
    """All plug-ins, imported at the first call."""
    for point in entry_points(group=GROUP):
        if point.name not in LOADED:
            LOADED[point.name] = None  # a plug-in may ask for the presets while it is imported
            try:
                LOADED[point.name] = point.load()
            except Exception as reason:  # somebody else's code
                log.warning("plug-in %s is left out: %s: %s", point.name, type(reason).__name__, one_line(reason))
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if name not in LOADED:
            LOADED[name] = import_by_name(name)
    return [module for module in LOADED.values() if module is not None]


def import_by_name(name: str) -> ModuleType:
    """Import a module from the current folder or from where Python finds it."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return import_module(name)
    except Exception as reason:  # somebody else's code
        raise UserError(f"cannot import {name!r} (--import): {type(reason).__name__}: {one_line(reason)}") from reason
