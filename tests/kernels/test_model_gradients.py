"""Models that train with the fused ops have the outputs and gradients of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.layers import channel
from allmlp.layers.context import Context
from allmlp.layers.mixers import mlp, projection
from kernels.compare import DEVICE

pytest.importorskip("triton", minversion="3.6")
MODELS = {
    "mixer": ("mixer_nano", {}),
    "resmlp": ("resmlp_nano", {}),
    "gmlp": ("gmlp_nano", {}),
    "amlp": ("amlp_nano", {}),
    "text": ("gmlp_mlm_tiny", {}),
    "causal": ("gmlp_causal_tiny", {}),
    **{
        variant: ("gmlp_nano", {"block.channel.inner.variant": variant})
        for variant in ("multiplicative", "additive", "linear")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_match_plain_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preset, overrides = MODELS[name]
    model = allmlp.create(preset, overrides={"depth": "1", **overrides}, seed=3, device=DEVICE).train()
    inputs = model.dummy_inputs(3)
    if not inputs[0].is_floating_point():
        lengths = torch.tensor([[13], [9], [4]], device=DEVICE)
        inputs = inputs[0][:, :13], torch.arange(13, device=DEVICE) < lengths

    def output_and_grads() -> list[Tensor]:
        model.zero_grad()
        y = model(*inputs)
        (y * torch.linspace(0, 1, y.numel(), device=DEVICE).view_as(y)).sum().backward()
        return [y.detach(), *(torch.zeros(0) if w.grad is None else w.grad for w in model.parameters())]

    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    plain = output_and_grads()
    calls = []
    for module in (channel, mlp, projection):
        monkeypatch.setattr(module, "training_dtype", lambda x, act="none": calls.append(1) or x.dtype)
    for i, (actual, expected) in enumerate(zip(output_and_grads(), plain, strict=True)):
        assert (actual - expected).norm() <= 2e-4 * expected.norm() + 1e-6, i
    assert calls


@pytest.mark.parametrize("slot", ["token", "channel"])
def test_affine_and_layer_scale_are_folded_into_weights(slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pass of their own over the activations, but not in float16, nor where padding is masked in between."""
    model = allmlp.create("resmlp_nano", overrides={"depth": "1"}, seed=3, device=DEVICE).train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    residual, x = getattr(model.blocks[0], slot), torch.randn(3, 64, 96, device=DEVICE)
    expected = residual.branch(residual.norm(x), Context())
    for module in (channel, projection):
        monkeypatch.setattr(module, "training_dtype", lambda x, act="none": x.dtype)
    folded = residual.folded(x, Context())
    assert (folded - expected).norm() <= 1e-5 * expected.norm()
    assert residual.folded(x.half(), Context()) is None
    mask = torch.ones(3, 64, dtype=torch.bool, device=DEVICE)
    assert (residual.folded(x, Context(mask=mask)) is None) == (slot == "token")


def test_fused_ops_are_not_used_on_a_cpu() -> None:
    from allmlp.kernels import training_dtype

    with torch.autocast("cpu", torch.bfloat16):
        assert training_dtype(torch.zeros(2, dtype=torch.bfloat16)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("mixer_s16", False),
        ("resmlp_s12", False),
        ("gmlp_ti16", False),
        ("amlp_ti16", False),
        ("mixer_s16", True),
        ("gmlp_ti16", True),
    ],
)
def test_gpu_gradients_within_twice_the_error_of_plain(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = allmlp.create(name, overrides={"depth": "2"}, seed=3, device="cuda").train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    (x,) = model.dummy_inputs(5)

    def gradient(autocast: bool, forward: Any) -> Tensor:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = forward(x).float().logsumexp(1).mean()
        loss.backward()
        return torch.cat([w.grad.flatten().double() for w in model.parameters() if w.grad is not None])

    exact = gradient(False, model)
    fused = gradient(True, torch.compile(model) if compiled else model)
    for module in (channel, mlp, projection):
        monkeypatch.setattr(module, "training_dtype", lambda x, act="none": None)
    plain = gradient(True, model)
    assert 0 < (fused - exact).norm() <= 2 * (plain - exact).norm()
