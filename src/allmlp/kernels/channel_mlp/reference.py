"""The hidden layer of the channel MLP and its gradient: the definition.

    H = X U^T + a,   A = act(H),   dH = (dY V) act'(H),   da = sum dH

x: m k    up: h k    up_bias: h    dy: m o    down: o h
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from allmlp.kernels.activation.reference import dispatch as dispatch_activation

MAX_WIDTH = 1024
"""Widths of the model up to which the fused kernels have been measured, and are faster."""
MIN_ROWS = 4096
"""Rows from which on they are used: fewer do not fill a GPU with their large tiles."""


def dispatch(x: Tensor, weight: Tensor) -> ModuleType:
    """The module whose `hidden` or `hidden_backward` to use: Triton's for large 16-bit products with aligned rows on
    Hopper, where they were measured and a multiprocessor has the shared memory for two programs, else this one.
    """
    is_large = len(x) >= MIN_ROWS and x.shape[1] <= MAX_WIDTH
    is_aligned = all(size % 8 == 0 for size in weight.shape)
    is_hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
    fused = is_hopper and is_large and is_aligned and x.dtype.itemsize == 2
    return import_module(f"allmlp.kernels.channel_mlp.{'triton' if fused else 'reference'}")


def hidden(x: Tensor, up: Tensor, up_bias: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """H and A."""
    h = torch.addmm(up_bias, x, up.T)
    return h, dispatch_activation(h).forward(h, None, act)


def hidden_backward(dy: Tensor, down: Tensor, h: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """A, dH and da."""
    return dispatch_activation(h).backward(h, None, dy @ down, act)
