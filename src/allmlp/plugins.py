"""Packages that add to this one: mixers, models, tasks, datasets, recipes, studies, optimizers.

A plug-in is a module. Importing it registers its specs, that is every subclass of `Spec`; models are in its dictionary
PRESETS, and functions that return a Run or a Study in its tuples RECIPES and STUDIES. It is found by the entry point
of an installed package,

    [project.entry-points."allmlp.plugins"]
    shift = "allmlp_shift"

or by its name: `allmlp --import my_module train ...`, or ALLMLP_IMPORT=my_module; or it is imported by the script that
uses it, or is that script. An installed plug-in that cannot be imported is left out with a warning; one that is asked
for by name is an error.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from allmlp.declared import Declared
from allmlp.errors import UserError, lookup, one_line

PACKAGE = "allmlp."
GROUP = "allmlp.plugins"
VARIABLE = "ALLMLP_IMPORT"
FUNCTIONS = ("RECIPES", "STUDIES")
LOADED: dict[str, ModuleType | None] = {}
"""Loaded plug-ins by name; None while one is being imported, or if that failed."""
log = logging.getLogger("allmlp.plugins")


def plugins() -> list[ModuleType]:
    """All plug-ins; those not imported yet are imported at the first call."""
    for point in installed():
        if point.name not in LOADED:
            LOADED[point.name] = None  # a plug-in may ask for the presets while it is imported
            try:
                LOADED[point.name] = point.load()
            except (Exception, SystemExit) as reason:  # third-party code
                log.warning("plug-in %s is skipped: %s: %s", point.name, type(reason).__name__, one_line(reason))
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if name not in LOADED:
            LOADED[name] = import_by_name(name)
    named = [module for module in LOADED.values() if module is not None]
    return [*named, *(module for module in list(sys.modules.values()) if adds(module) and module not in named)]


@cache
def installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def adds(module: ModuleType) -> bool:
    """Whether an imported module defines models, recipes or studies for this library."""
    namespace = getattr(module, "__dict__", {})
    if namespace.keys().isdisjoint(("PRESETS", *FUNCTIONS)):  # nearly all of the thousands of modules of a process
        return False
    models, functions = namespace.get("PRESETS"), [namespace[name] for name in FUNCTIONS if name in namespace]
    if namespace.get("__name__", PACKAGE).startswith(PACKAGE):
        return False
    ours = isinstance(models, dict) and any(type(model).__module__.startswith(PACKAGE) for model in models.values())
    if ours or not functions or not all(isinstance(some, tuple) and all(map(callable, some)) for some in functions):
        return ours
    return any(str(getattr(value, "__module__", "")).startswith(PACKAGE) for value in namespace.values())


def added(name: str) -> dict[str, Declared]:
    """The functions of all plug-ins in their tuples of this name, one of `FUNCTIONS`."""
    functions = [function for module in plugins() for function in getattr(module, name, ())]
    return {
        function.__name__: Declared(function.__name__, function.__module__, inspect.getdoc(function) or "")
        for function in functions
    }


def import_by_name(name: str) -> ModuleType:
    """Import a module from the current folder or from Python's search path."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return import_module(name)
    except (Exception, SystemExit) as reason:  # third-party code
        raise UserError(f"cannot import {name!r}: {type(reason).__name__}: {one_line(reason)}") from reason


def import_file(file: Path) -> ModuleType:
    """Import a user's Python file as a module."""
    if not file.is_file():
        raise UserError(f"{file} does not exist")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # where dataclasses look for the names in annotations
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as reason:  # third-party code
        raise UserError(f"cannot import {file}: {type(reason).__name__}: {one_line(reason)}") from reason
    return module


def import_named(place: str) -> tuple[str, Any]:
    """MODULE:NAME or FILE.py:NAME -> NAME and the object."""
    source, colon, name = place.rpartition(":")
    if not colon or not source or not name:
        raise UserError(f"{place!r} does not name a function: write MODULE:NAME or FILE.py:NAME")
    module = import_file(Path(source).expanduser()) if source.endswith(".py") else import_by_name(source)
    return name, lookup(name, vars(module), f"name in {source},")
