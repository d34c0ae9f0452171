"""Models that learn by the operators have the losses and gradients of plain PyTorch."""

from __future__ import annotations

import pytest
import torch

import allmlp
from allmlp.layers import channel
from allmlp.layers.mixers import mlp, projection
from kernels.test_token_mix import DEVICE

pytest.importorskip("triton")
MODELS = {
    "mixer": ("mixer_nano", {}),
    "resmlp": ("resmlp_nano", {}),
    "gmlp": ("gmlp_nano", {}),
    "amlp": ("amlp_nano", {}),
    "text": ("gmlp_mlm_tiny", {}),
    "causal": ("gmlp_causal_tiny", {}),
    **{way: ("gmlp_nano", {"block.channel.inner.combine": way}) for way in ("multiply", "add", "linear")},
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preset, changes = MODELS[name]
    model = allmlp.create(preset, overrides={"depth": "2", **changes}, seed=3, device=DEVICE).train()
    (x,) = model.example(3)
    mask = None
    if not x.is_floating_point():
        x = x[:, :13]
        mask = torch.arange(13, device=DEVICE) < torch.tensor([[13], [9], [4]], device=DEVICE)
    inputs = (x,) if mask is None else (x, mask)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        y = model(*inputs)
        (y * torch.linspace(0, 1, y.numel(), device=DEVICE).view_as(y)).sum().backward()
        return [y.detach(), *(torch.zeros(0) if w.grad is None else w.grad for w in model.parameters())]

    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    plain = gradients()
    called = []
    for place in (channel, mlp, projection):
        monkeypatch.setattr(place, "training_type", lambda x: called.append(1) or x.dtype)
    for number, (mine, right) in enumerate(zip(gradients(), plain, strict=True)):
        assert (mine - right).norm() <= 2e-4 * right.norm() + 1e-6, number
    assert called


def test_on_a_cpu_nothing_is_fused() -> None:
    from allmlp.kernels import training_type

    with torch.autocast("cpu", torch.bfloat16):
        assert training_type(torch.zeros(2, dtype=torch.bfloat16)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mixer_s16", "resmlp_s12", "gmlp_ti16", "amlp_ti16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_within_twice_the_error_of_plain(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = allmlp.create(name, overrides={"depth": "2"}, seed=3, device="cuda").train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    (x,) = model.example(5)

    def gradient(half: bool, call: object) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = call(x).float().logsumexp(1).mean()  # type: ignore[operator]
        loss.backward()
        return torch.cat([w.grad.flatten().double() for w in model.parameters() if w.grad is not None])

    truth = gradient(False, model)
    fused = gradient(True, torch.compile(model) if compiled else model)
    for place in (channel, mlp, projection):
        monkeypatch.setattr(place, "training_type", lambda x: None)
    plain = gradient(True, model)
    assert (fused - truth).norm() <= 2 * (plain - truth).norm()
