"""Memory traffic of a model's matrix products, for the arithmetic intensity of a roofline."""

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
    """Elements that the matrix products of one batch read and write, counting each operand and result once.

    This models a network in which everything but the products is fused into them. The backward pass has two products
    for each one here, over the same three matrices, so it triples both operations and traffic.
    """
    with torch.device("meta"), torch.no_grad(), TrafficCounter() as count:
        model = spec.build().eval()
        model(*model.dummy_inputs(batch))
    return count.numbers


class TrafficCounter(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in PRODUCTS:
            operands = [*args, *(kwargs or {}).values()]
            self.numbers += sum(
                unique_elements(x) for x in [*operands, result] if isinstance(x, Tensor) and x.dim() > 1
            )
        return result


def unique_elements(x: Tensor) -> int:
    """Elements in memory: an expanded axis repeats the same ones."""
    return math.prod(size for size, stride in zip(x.shape, x.stride()) if stride)
