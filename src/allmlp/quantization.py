"""Quantization-aware training: weights are rounded in the forward pass, all of them or random blocks (Quant-Noise)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated

import torch
from torch import Tensor, nn

from allmlp.lora import LinearMap, linear_maps
from allmlp.models.model import Model, check_merged
from allmlp.spec import Count, Range, Rate, Spec
from allmlp.weights.int8 import quantize_rows


class Quantization(Spec):
    """Train, evaluate and save a model whose linear maps have weights of few bits.

        Q[i] = s[i] round(W[i] / s[i]),   s[i] = max_j |W[i, j]| / (2^(bits - 1) - 1)
        training:    y = (W + m (Q - W)) x,   dL/dW = dL/d(W + m (Q - W));   m: 1 for a block with probability `noise`
        evaluation:  y = Q x

    noise=1 is plain fake quantization with a straight-through gradient, noise=0 quantization after training, and
    values between are Quant-Noise (Fan et al., 2020): a step rounds some blocks, and the gradient of the others is
    unbiased. The maps are those of channels, patches, tokens (not Toeplitz vectors) and the head. The saved model is an
    ordinary one with the weights Q; with 8 bits, `save(dtype=torch.int8)` keeps them exactly.
    """

    bits: Annotated[int, Range(2, 8)] = 8
    noise: Rate = 1.0
    block_size: Count = 8
    """Adjacent weights of a row that are rounded or kept together."""

    def apply(self, model: Model) -> None:
        """Round the weights of `model` in every forward pass from now on; its parameters keep full precision."""
        check_merged(model)
        for module in linear_maps(model, "all"):
            module.quantization = self  # type: ignore[assignment]
            module.__class__ = quantized(type(module))  # type: ignore[bad-argument-type]

    def weight(self, full: Tensor, training: bool) -> Tensor:
        """Weights used in a forward pass."""
        if training and not self.noise:
            return full
        levels, scale = quantize_rows(full.detach(), self.bits)
        change = levels * scale.to(full.dtype)[:, None] - full.detach()
        if training and self.noise < 1:
            rows, columns = full.shape
            draws = torch.rand(rows, -(-columns // self.block_size), device=full.device) < self.noise
            change = change * draws.repeat_interleave(self.block_size, 1)[:, :columns]
        return full + change


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Replace W by Q, which gives an ordinary model again."""
    for module in [*quantized_maps(model)]:
        full, quantization = module._parameters["weight"], module.quantization
        assert full is not None and isinstance(quantization, Quantization)
        full.copy_(quantization.weight(full, training=False))
        del module.quantization
        module.__class__ = type(module).__mro__[1]


def quantized_maps(model: nn.Module) -> Iterator[LinearMap]:
    for module in model.modules():
        if isinstance(module, LinearMap) and hasattr(module, "quantization"):
            yield module


@cache
def quantized(kind: type[nn.Module]) -> type[nn.Module]:
    """Subclass of `kind` with the weight W + m (Q - W). Parameters keep their names, so optimizers and files are
    unaffected. All modules of a kind share one class, so that equal blocks stay equal for the compiler.
    """

    def weight(self: nn.Module) -> Tensor:
        return self.quantization.weight(self._parameters["weight"], self.training)  # type: ignore[operator]

    return type(f"Quantized{kind.__name__}", (kind,), {"weight": property(weight)})
