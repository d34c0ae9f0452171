"""How much memory the matrix products of a model touch: what a roofline divides its operations by."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from allmlp.models.model import ModelSpec

PRODUCTS = {
    "linear",
    "matmul",
    "__matmul__",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "conv1d",
    "conv2d",
    "scaled_dot_product_attention",
}


def traffic(spec: ModelSpec, batch: int) -> int:
    """Numbers that the products of one batch read and write, each operand and result once.

    That is a model whose products are kernels of their own and whose everything else is free: fused into them. A
    backward pass has two products for each one here, over the same three matrices: it triples operations and traffic.
    """
    with torch.device("meta"), torch.no_grad(), Count() as count:
        model = spec.build().eval()
        model(*model.example(batch))
    return count.numbers


class Count(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in PRODUCTS:
            operands = [*args, *(kwargs or {}).values()]
            self.numbers += sum(stored(x) for x in [*operands, result] if isinstance(x, Tensor) and x.dim() > 1)
        return result


def stored(x: Tensor) -> int:
    """Different numbers: an expanded axis repeats the same ones."""
    return math.prod(size for size, stride in zip(x.shape, x.stride()) if stride)
