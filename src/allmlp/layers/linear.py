"""torch.nn's Linear, Conv2d and Embedding, initialized by a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from allmlp.layers.init import Distribution, Init


class Linear(nn.Linear):
    """Y = X W^T + b over channels. The rows of a fused projection are initialized in `parts` of these sizes."""

    def __init__(self, inputs: int, outputs: int, init: Init, bias: bool = True, parts: Sequence[int] = ()) -> None:
        # Set first: torch.nn's constructor calls reset_parameters.
        self.init, self.parts = init, list(parts) or [outputs]
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        for part in self.weight.detach().split(self.parts):
            self.init.weight.fill(part, self.in_features)
        if self.bias is not None:
            self.init.bias.fill(self.bias, self.in_features)


def is_standard(linear: nn.Module) -> bool:
    """Whether `linear` is a product with its `weight`, which others may then compute in its place.

    Layers that other libraries put here (adapters of PEFT, 8-bit layers of bitsandbytes) and layers with hooks
    (captured activations, counters of operations) must be called.
    """
    return isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward and not has_hooks(linear)


def has_hooks(*modules: nn.Module) -> bool:
    """Whether calling the modules does more than the `forward` of their class: hooks, or a `forward` put in its place,
    as accelerate does.
    """
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        for module in modules
    )


class Conv2d(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int, kernel: int, init: Init, **kwargs: Any) -> None:
        self.init = init
        super().__init__(inputs, outputs, kernel, **kwargs)
        if self.weight.is_contiguous(memory_format=torch.channels_last):
            # Kernels of one pixel or one input channel have the same memory in both formats. The gradient, computed
            # from tokens, has the strides of channels_last, and DDP compares strides even where a dimension is 1.
            _, rows, height, width = self.weight.shape
            strides = (rows * height * width, 1, rows * width, rows)
            self.weight = nn.Parameter(self.weight.detach().as_strided(self.weight.shape, strides))

    def reset_parameters(self) -> None:
        fan_in = self.weight[0].numel()
        self.init.weight.fill(self.weight, fan_in)
        if self.bias is not None:
            self.init.bias.fill(self.bias, fan_in)


class Embedding(nn.Embedding):
    def __init__(self, rows: int, channels: int, init: Distribution) -> None:
        self.init = init
        super().__init__(rows, channels)

    def reset_parameters(self) -> None:
        self.init.fill(self.weight, self.embedding_dim)
