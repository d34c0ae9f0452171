"""Operators of torch in a few lines: torch.compile and torch.export see one node with a shape and a gradient.

torch.library.custom_op does the same and looks for aliases at every call, which costs more time than launching the
kernels of a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("allmlp", "DEF")


def define(function: Callable[..., Any], shape: Callable[..., Any]) -> Any:
    """The operator allmlp::NAME of a function that changes none of its inputs and returns none of them.

    `shape` makes empty results from the same arguments.
    """
    name = function.__name__
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"allmlp::{name}", shape, lib=LIBRARY)
    return getattr(torch.ops.allmlp, name).default


def differentiate(operator: Any, remember: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give an operator its gradient."""
    torch.library.register_autograd(operator, backward, setup_context=remember, lib=LIBRARY)
