"""Activation with a preceding bias, and its gradient: the definition.

a = act(x + bias),   dx = da act'(x + bias),   dbias = sum of dx over all dimensions but the bias's own
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

ActivationName = Literal["none", "gelu", "gelu_tanh", "relu"]


def dispatch(x: Tensor) -> ModuleType:
    """The module whose `forward` and `backward` to use: Triton's on a GPU, else this one."""
    return import_module(f"allmlp.kernels.activation.{'triton' if x.is_cuda else 'reference'}")


def activate(z: Tensor, act: str) -> Tensor:
    if act == "none":
        return z
    return F.relu(z) if act == "relu" else F.gelu(z, approximate="tanh" if act == "gelu_tanh" else "none")


def forward(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """act(x + bias): with a bias (d), x is ... d c; without one, x has any shape."""
    return activate(x if bias is None else x + bias.unsqueeze(1), act)


def backward(x: Tensor, bias: Tensor | None, dy: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """act(x + bias), dx, and dx summed to (d) with a bias, else to the channels (the bias of a preceding linear)."""
    z = x if bias is None else x + bias.unsqueeze(1)
    if act == "none":
        dx = dy
    elif act == "relu":
        dx = dy * (z > 0)
    else:
        dx = torch.ops.aten.gelu_backward(dy, z, approximate="tanh" if act == "gelu_tanh" else "none")
    bias_dim = x.dim() - (1 if bias is None else 2)
    return activate(z, act), dx, dx.sum([dim for dim in range(x.dim()) if dim != bias_dim])
