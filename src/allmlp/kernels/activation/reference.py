"""An activation with the bias in front of it, and its gradient, as they are defined.

a = act(x + bias),   dx = da act'(x + bias),   dbias = sum of dx over everything but the bias's own dimension
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F


def kernels(x: Tensor) -> ModuleType:
    """Where `forward` and `backward` come from: Triton's on a GPU, or their definitions."""
    from importlib import import_module

    return import_module(f"allmlp.kernels.activation.{'triton' if x.is_cuda else 'reference'}")


def activate(z: Tensor, act: str) -> Tensor:
    if act == "none":
        return z
    return F.relu(z) if act == "relu" else F.gelu(z, approximate="tanh" if act == "gelu_tanh" else "none")


def forward(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """act(x + bias): x is ... d c, and the bias d; without one x is as wide as it likes."""
    return activate(x if bias is None else x + bias.unsqueeze(1), act)


def backward(x: Tensor, bias: Tensor | None, dy: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """act(x + bias), dx, and the sum of dx: for each d with a bias, else for each channel (a linear map's bias)."""
    z = x if bias is None else x + bias.unsqueeze(1)
    if act == "none":
        dx = dy
    elif act == "relu":
        dx = dy * (z > 0)
    else:
        dx = torch.ops.aten.gelu_backward(dy, z, approximate="tanh" if act == "gelu_tanh" else "none")
    kept = x.dim() - (1 if bias is None else 2)
    return activate(z, act), dx, dx.sum([dim for dim in range(x.dim()) if dim != kept])
