"""Registration of custom torch ops, so that torch.compile and torch.export see one node with a shape and a gradient.

torch.library.custom_op does the same but checks for aliasing on every call, which costs more than launching the kernels
of a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from allmlp.kernels.ahead import compile_launches

LIBRARY = torch.library.Library("allmlp", "DEF")


def define_op(function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register `function` as the op allmlp::NAME; it must neither mutate its inputs nor return any of them.

    `fake` returns empty outputs for the same arguments. The first time that torch.compile asks it, the kernels that
    `function` would launch are compiled in the background.
    """
    name = function.__name__
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")

    def fake_outputs(*args: Any) -> Any:
        compile_launches(function, args)
        return fake(*args)

    torch.library.register_fake(f"allmlp::{name}", fake_outputs, lib=LIBRARY)
    return getattr(torch.ops.allmlp, name).default


def register_backward(op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Register the gradient of an op."""
    torch.library.register_autograd(op, backward, setup_context=setup_context, lib=LIBRARY)
