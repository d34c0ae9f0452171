"""Studies: functions that return a Study; `allmlp study NAME` finds them by name.

A study is a public function without parameters in a module of this package. Its docstring gives the question, the
command and the price.
"""

from __future__ import annotations

from functools import cache

from allmlp.declared import Declared, find_declared
from allmlp.plugins import added


@cache
def studies() -> dict[str, Declared]:
    """All studies, parsed from the source files, so that listing them does not import torch; and those of plug-ins."""
    return find_declared(__name__, __file__) | added("STUDIES")
