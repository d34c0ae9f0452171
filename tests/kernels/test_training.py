"""The operators of training have the values and the gradients of their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.kernels.activation import reference as activation
from allmlp.kernels.channel_mlp.op import channel_mlp
from allmlp.kernels.gated_mlp import reference as gated
from allmlp.kernels.token_product.op import token_product
from kernels.test_token_mix import DEVICE, draw

pytest.importorskip("triton")
ACTS = ["gelu", "gelu_tanh", "relu"]


def same(function: Any, definition: Any, inputs: list[Tensor], tolerance: float) -> None:
    """Value and all gradients, the definition's in float64."""

    def both(call: Any, values: list[Tensor]) -> list[Tensor]:
        leaves = [value.detach().clone().requires_grad_() for value in values]
        y = call(*leaves)
        return [y.detach(), *torch.autograd.grad((y * torch.linspace(0, 1, y.numel()).to(y).view_as(y)).sum(), leaves)]

    mine = both(function, [value.to(DEVICE, torch.float32) for value in inputs])
    right = both(definition, [value.float().double() for value in inputs])
    for number, (one, other) in enumerate(zip(mine, right, strict=True)):
        error = (one.double().cpu() - other).abs().max() / other.abs().max()
        assert error < tolerance, (number, float(error))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("biased", [True, False])
def test_activation(act: str, biased: bool) -> None:
    from allmlp.kernels.activation import triton

    x, dy = (draw(2, 19, 37).to(DEVICE, torch.float32) for _ in range(2))
    bias = draw(19).to(DEVICE, torch.float32) if biased else None
    torch.testing.assert_close(triton.forward(x, bias, act), activation.forward(x, bias, act), rtol=1e-5, atol=1e-6)
    for mine, right in zip(triton.backward(x, bias, dy, act), activation.backward(x, bias, dy, act), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_erf_is_right_everywhere() -> None:
    from allmlp.kernels.activation import triton

    x = torch.linspace(-8, 8, 4001, device=DEVICE).view(1, -1)
    wrong = triton.forward(x, None, "gelu").double() - F.gelu(x.double())
    assert wrong.abs().max() < 1e-6


def test_the_short_gelu_is_right_everywhere() -> None:
    """As far as 16 bits can tell."""
    from allmlp.kernels.activation import triton

    x = torch.linspace(-12, 12, 4001, device=DEVICE).half().view(1, -1)
    z = x.double().requires_grad_()
    y = F.gelu(z)
    (slope,) = torch.autograd.grad(y.sum(), z)
    mine, dx, _ = triton.backward(x, None, torch.ones_like(x), "gelu")
    step = 2**-10  # of float16; the interpreter cuts off instead of rounding
    assert ((mine.double() - y).abs() <= 5e-5 + step * y.abs()).all()
    assert ((dx.double() - slope).abs() <= 2e-4 + step * slope.abs()).all()
    torch.testing.assert_close(triton.forward(x, None, "gelu"), mine, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [8, 13, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_token_product(tokens: int, batch: int) -> None:
    inputs = [draw(5, tokens), draw(batch, tokens, 24)]
    same(token_product, lambda matrix, x: matrix @ x, inputs, 1e-5)


@pytest.mark.parametrize("act", ACTS)
def test_token_product_after_bias_and_activation(act: str) -> None:
    def definition(matrix: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return matrix @ activation.activate(x + bias.unsqueeze(1), act)

    inputs = [draw(5, 13), draw(3, 13, 24), draw(13)]
    same(lambda matrix, x, bias: token_product(matrix, x, bias, act), definition, inputs, 1e-5)


@pytest.mark.parametrize("act", ACTS)
def test_channel_mlp(act: str) -> None:
    def definition(x: Tensor, up: Tensor, a: Tensor, down: Tensor, c: Tensor) -> Tensor:
        return F.linear(activation.activate(F.linear(x, up, a), act), down, c)

    inputs = [draw(2, 7, 6), draw(20, 6), draw(20), draw(6, 20), draw(6)]
    same(lambda *tensors: channel_mlp(*tensors, act), definition, inputs, 1e-5)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("masked", [True, False])
def test_gated_mlp(masked: bool, act: str) -> None:
    from allmlp.kernels.gated_mlp.op import gated_mlp

    mask = torch.tensor([[1] * 13, [1] * 9 + [0] * 4, [1] * 2 + [0] * 11], dtype=torch.float64) if masked else None

    def definition(x: Tensor, *weights: Tensor) -> Tensor:
        return gated.gated_mlp(x, gated.Weights(*weights), mask, act, 1e-6)

    def fused(x: Tensor, *weights: Tensor) -> Tensor:
        return gated_mlp(x, gated.Weights(*weights), None if mask is None else mask.to(x), act, 1e-6)

    inputs = [draw(3, 13, 6), draw(40, 6), draw(40), draw(13, 13), draw(13), draw(20), draw(20), draw(6, 20), draw(6)]
    same(fused, definition, inputs, 3e-5)


def test_torch_knows_the_operators() -> None:
    from allmlp.kernels.channel_mlp import op as channel
    from allmlp.kernels.gated_mlp import op as gate
    from allmlp.kernels.token_product import op as product

    def leaf(*shape: int) -> Tensor:
        return draw(*shape).float().to(DEVICE).requires_grad_()

    torch.library.opcheck(product.operator, (leaf(5, 13), leaf(3, 13, 24), leaf(13), "gelu"))
    torch.library.opcheck(product.operator, (leaf(5, 13), leaf(3, 13, 24), None, "none"))
    torch.library.opcheck(channel.operator, (leaf(2, 7, 6), leaf(20, 6), leaf(20), leaf(6, 20), leaf(6), "gelu"))
    weights = [leaf(40, 6), leaf(40), leaf(13, 13), leaf(13), leaf(20), leaf(20), leaf(6, 20), leaf(6)]
    torch.library.opcheck(gate.operator, (leaf(3, 13, 6), weights, None, "gelu", 1e-6))
