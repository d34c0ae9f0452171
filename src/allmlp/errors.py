"""The one kind of error a user sees: a single line that says what is wrong and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """What the caller gave cannot be used. The command line prints the message and exits with 2."""


class MissingExtra(UserError, ImportError):
    """An optional package is needed for this and is not installed."""


def lookup(name: str, table: Mapping[str, T], noun: str) -> T:
    """`table[name]`, or an error that names the closest entries."""
    try:
        return table[name]
    except (KeyError, TypeError):
        raise UserError(f"unknown {noun} {name!r}{did_you_mean(name, table)}") from None


def did_you_mean(name: object, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(names), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say in one sentence which extra brings it."""
    try:
        return importlib.import_module(module)
    except Exception as reason:  # what a package raises whose compiled part does not load is not always an ImportError
        package = module.partition(".")[0]
        if isinstance(reason, ModuleNotFoundError) and (reason.name or "").partition(".")[0] == package:
            raise MissingExtra(f"this needs {package}: pip install 'allmlp[{extra}]'") from reason
        raise MissingExtra(f"{package} is installed but cannot be imported here: {one_line(reason)}") from reason


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
