"""The training ops have the values and gradients of their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.kernels.activation import reference as activation
from allmlp.kernels.channel_mlp.op import channel_mlp
from allmlp.kernels.gated_mlp import reference as gated
from allmlp.kernels.token_matmul.op import token_matmul
from kernels.compare import DEVICE, DTYPES, assert_within_twice_eager, randn

pytest.importorskip("triton", minversion="3.6")
ACTS = ["gelu", "gelu_tanh", "relu"]
EPS = 0.1  # large enough to notice when it is missing


def assert_matches(op: Any, definition: Any, inputs: list[Tensor], tolerance: float) -> None:
    """Compare the value and all gradients of an op in float32 with its definition in float64."""

    def value_and_grads(function: Any, values: list[Tensor]) -> list[Tensor]:
        leaves = [value.detach().clone().requires_grad_() for value in values]
        y = function(*leaves)
        loss = (y * torch.linspace(0, 1, y.numel()).to(y).view_as(y)).sum()
        return [y.detach(), *torch.autograd.grad(loss, leaves)]

    actual = value_and_grads(op, [value.to(DEVICE, torch.float32) for value in inputs])
    expected = value_and_grads(definition, [value.float().double() for value in inputs])
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = (a.double().cpu() - e).abs().max() / e.abs().max()
        assert error < tolerance, (i, float(error))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("biased", [True, False])
def test_activation(act: str, biased: bool) -> None:
    from allmlp.kernels.activation import triton

    # More than one program along both axes.
    x, dy = (randn(2, 43, 300).to(DEVICE, torch.float32) for _ in range(2))
    bias = randn(43).to(DEVICE, torch.float32) if biased else None
    torch.testing.assert_close(triton.forward(x, bias, act), activation.forward(x, bias, act), rtol=1e-5, atol=1e-6)
    actual, expected = (module.backward(x, bias, dy, act) for module in (triton, activation))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 8), (200, 4, 75), (70, 1500), (37, 9000)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_row_sum(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    from allmlp.kernels.row_sum import reference, triton

    x = randn(*shape).to(DEVICE, dtypes[0])
    actual, expected = triton.sum_rows(x, dtypes[1]), reference.sum_rows(x.double(), torch.float64)
    # Triton's interpreter truncates where a GPU rounds.
    rounding = {"rtol": 2**-7 if dtypes[1] == torch.bfloat16 else 1e-5, "atol": 1e-4}
    assert actual.dtype == dtypes[1]
    torch.testing.assert_close(actual.double(), expected, **rounding)
    torch.testing.assert_close(reference.sum_rows(x, dtypes[1]).double(), expected, **rounding)


def test_float32_gelu_is_accurate_everywhere() -> None:
    from allmlp.kernels.activation import triton

    x = torch.linspace(-8, 8, 4001, device=DEVICE).view(1, -1)
    error = triton.forward(x, None, "gelu").double() - F.gelu(x.double())
    assert error.abs().max() < 1e-6


@pytest.mark.slow
def test_16_bit_gelu_is_accurate_everywhere() -> None:
    """To the precision of 16 bits."""
    from allmlp.kernels.activation import triton

    x = torch.linspace(-12, 12, 4001, device=DEVICE).half().view(1, -1)
    z = x.double().requires_grad_()
    y = F.gelu(z)
    (dz,) = torch.autograd.grad(y.sum(), z)
    actual, dx, _ = triton.backward(x, None, torch.ones_like(x), "gelu")
    ulp = 2**-10  # of float16; the interpreter truncates instead of rounding
    assert ((actual.double() - y).abs() <= 5e-5 + ulp * y.abs()).all()
    assert ((dx.double() - dz).abs() <= 2e-4 + ulp * dz.abs()).all()
    torch.testing.assert_close(triton.forward(x, None, "gelu"), actual, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [8, 13, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_token_matmul(tokens: int, batch: int) -> None:
    inputs = [randn(5, tokens), randn(batch, tokens, 24)]
    assert_matches(token_matmul, lambda matrix, x: matrix @ x, inputs, 1e-5)


@pytest.mark.parametrize("act", ACTS)
def test_token_matmul_after_bias_and_activation(act: str) -> None:
    def definition(matrix: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return matrix @ activation.activate(x + bias.unsqueeze(1), act)

    inputs = [randn(5, 13), randn(3, 13, 24), randn(13)]
    assert_matches(lambda matrix, x, bias: token_matmul(matrix, x, bias, act), definition, inputs, 1e-5)


@pytest.mark.parametrize("act", ACTS)
def test_channel_mlp(act: str) -> None:
    def definition(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        return F.linear(activation.activate(F.linear(x, up, up_bias), act), down, down_bias)

    inputs = [randn(2, 7, 6), randn(20, 6), randn(20), randn(6, 20), randn(6)]
    assert_matches(lambda *tensors: channel_mlp(*tensors, act), definition, inputs, 1e-5)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("rows", "hidden"), [(300, 272), (1100, 64)])
def test_hidden_layer_in_one_kernel(act: str, rows: int, hidden: int) -> None:
    """Rows and channels that do not fill the last tile, and programs with one tile and with several."""
    from allmlp.kernels.channel_mlp import reference, triton

    dtype = DTYPES[1]
    x, up, bias = randn(rows, 40), randn(hidden, 40, std=40**-0.5), randn(hidden)
    dy, down = randn(rows, 136), randn(136, hidden, std=136**-0.5)
    x, up, bias, dy, down = (tensor.to(DEVICE, dtype) for tensor in (x, up, bias, dy, down))
    h, a = triton.hidden(x, up, bias, act)
    exact, eager = (reference.hidden(*(t.to(to) for t in (x, up, bias)), act) for to in (torch.float64, dtype))
    for actual, rounded, true in zip((h, a), eager, exact, strict=True):
        assert_within_twice_eager(actual, rounded, true.cpu())
    gradients = triton.hidden_backward(dy, down, h, act)
    exact, eager = (reference.hidden_backward(*(t.to(to) for t in (dy, down, h)), act) for to in (torch.float64, dtype))
    for actual, rounded, true in zip(gradients, eager, exact, strict=True):
        assert_within_twice_eager(actual, rounded, true.cpu())
    torch.testing.assert_close(gradients[0], a, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("act", ACTS)
def test_channel_mlp_in_bfloat16(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op as models use it, with more rows than `MIN_ROWS`, within twice the error of the definition's passes."""
    from allmlp.kernels.channel_mlp import op, reference

    shapes = [(5, 1001, 192), (768, 192), (768,), (192, 768), (192,)]
    inputs = [randn(*shape, std=1.0 if i == 0 else 0.1).to("cuda", torch.bfloat16) for i, shape in enumerate(shapes)]

    def value_and_grads(dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        y = channel_mlp(*leaves, act)
        return [y.detach(), *torch.autograd.grad((y * torch.linspace(0, 1, 192).to(y)).sum(), leaves)]

    fused, exact = value_and_grads(torch.bfloat16), value_and_grads(torch.float64)
    monkeypatch.setattr(op, "dispatch", lambda x, weight: reference)
    for values in zip(fused, value_and_grads(torch.bfloat16), exact, strict=True):
        assert_within_twice_eager(values[0], values[1], values[2].cpu())


@pytest.mark.slow
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("masked", [True, False])
def test_gated_mlp(masked: bool, act: str) -> None:
    from allmlp.kernels.gated_mlp.op import gated_mlp

    lengths = torch.tensor([[27], [9], [2]])
    mask = (torch.arange(27) < lengths).double() if masked else None

    def definition(x: Tensor, *weights: Tensor) -> Tensor:
        return gated.gated_mlp(x, gated.GatedMlpWeights(*weights), mask, act, EPS)

    def fused(x: Tensor, *weights: Tensor) -> Tensor:
        return gated_mlp(x, gated.GatedMlpWeights(*weights), None if mask is None else mask.to(x), act, EPS)

    # More than one program along rows and channels.
    shapes = [(3, 27, 6), (520, 6), (520,), (27, 27), (27,), (260,), (260,), (6, 260), (6,)]
    assert_matches(fused, definition, [randn(*shape) for shape in shapes], 3e-5)


@pytest.mark.slow
def test_opcheck() -> None:
    """The ops follow torch's rules: schema, fake outputs, autograd registration, torch.compile."""
    from allmlp.kernels.channel_mlp import op as channel_op
    from allmlp.kernels.gated_mlp import op as gated_op
    from allmlp.kernels.token_matmul import op as token_op

    def leaf(*shape: int) -> Tensor:
        return randn(*shape).float().to(DEVICE).requires_grad_()

    torch.library.opcheck(token_op.forward_op, (leaf(5, 13), leaf(3, 13, 24), leaf(13), "gelu"))
    torch.library.opcheck(token_op.forward_op, (leaf(5, 13), leaf(3, 13, 24), None, "none"))
    torch.library.opcheck(channel_op.forward_op, (leaf(2, 7, 6), leaf(20, 6), leaf(20), leaf(6, 20), leaf(6), "gelu"))
    weights = [leaf(40, 6), leaf(40), leaf(13, 13), leaf(13), leaf(20), leaf(20), leaf(6, 20), leaf(6)]
    torch.library.opcheck(gated_op.forward_op, (leaf(3, 13, 6), weights, None, "gelu", 1e-6))
