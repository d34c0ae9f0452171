"""What layers compute another way on a CPU than torch does: GELU's gradient and dropout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from allmlp.layers import act
from allmlp.layers.dropout import dropout


@pytest.fixture(autouse=True)
def without_vector_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an ARM CPU, on any."""
    monkeypatch.setattr(act, "SLOW_BACKWARD", True)
    monkeypatch.setattr("allmlp.layers.dropout.HAS_MKL", False)


def test_gradient_of_gelu() -> None:
    x = torch.cat([torch.linspace(-12, 12, 2_001), torch.tensor([-1e4, 0.0, 1e4])]).requires_grad_()
    weights = torch.randn_like(x)
    (found,) = torch.autograd.grad((act.gelu(x) * weights).sum(), x)
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad((F.gelu(exact) * weights).sum(), exact)
    (plain,) = torch.autograd.grad((F.gelu(x) * weights).sum(), x)
    assert torch.equal(act.gelu(x), F.gelu(x))
    assert (found - expected).abs().max() <= 2 * (plain - expected).abs().max() + 1e-6


def test_second_derivatives_and_transforms_of_gelu() -> None:
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(act.gelu, x) and torch.autograd.gradgradcheck(act.gelu, x)
    per_example = torch.func.vmap(torch.func.grad(lambda one: act.gelu(one).sum()))(x.detach().view(7, 1))
    assert torch.allclose(per_example.flatten(), torch.autograd.grad(F.gelu(x).sum(), x)[0])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.7])
def test_dropout_keeps_the_mean(rate: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(501, 3, 401, requires_grad=True)
    y = dropout(x.transpose(0, 2), rate, training=True)
    kept = y != 0
    assert kept.double().mean().item() == pytest.approx(1 - rate, abs=0.003)
    assert y.mean().item() == pytest.approx(1, abs=0.01) and y[kept].unique().numel() == 1
    for place in range(4):  # each element has bits of its own in the random number that four of them share
        assert kept.transpose(0, 2).flatten()[place::4].double().mean().item() == pytest.approx(1 - rate, abs=0.006)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad.transpose(0, 2), y)
    assert dropout(x, rate, training=False) is x and not dropout(x, 1.0, training=True).any()


def test_dropout_repeats_with_the_seed() -> None:
    torch.manual_seed(3)
    first = dropout(torch.ones(99), 0.5, training=True)
    second = dropout(torch.ones(99), 0.5, training=True)
    torch.manual_seed(3)
    assert torch.equal(dropout(torch.ones(99), 0.5, training=True), first) and not torch.equal(first, second)
