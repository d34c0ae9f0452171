"""A model made fast gives the model's answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import allmlp
from allmlp.inference import fast, gpu
from allmlp.inference.cpu import FastOnCpu
from allmlp.inference.gpu import FastOnGpu
from allmlp.inference.lowered import Lowered, can_lower
from allmlp.kernels.linear.reference import Beside
from allmlp.models.model import Model
from allmlp.models.zoo import preset, presets

SMALL = {
    "mixer": ("mixer_nano", {}),
    "resmlp": ("resmlp_nano", {}),
    "gmlp": ("gmlp_nano", {}),
    "wide gmlp": ("gmlp_nano", {"block.channel.hidden": "512"}),
    **{combine: ("gmlp_nano", {"block.channel.inner.combine": combine}) for combine in ("multiply", "add", "linear")},
    "layernorm resmlp": ("resmlp_nano", {"block.norm": "LayerNorm"}),
    "scaled mixer": ("mixer_nano", {"block.scale": "LayerScale"}),
    "affine mixer": ("mixer_nano", {"block.norm": "Affine"}),
    "relu": ("mixer_nano", {"block.channel.act": "relu", "block.token.act": "gelu_tanh"}),
    "text": ("gmlp_mlm_tiny", {}),
    "causal text": ("gmlp_causal_tiny", {}),
}


def awake(name: str, overrides: dict[str, str]) -> Model:
    """A model all of whose parameters matter: biases, norms and scales are not at their starting values."""
    model = allmlp.create(name, overrides=overrides, seed=1).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2 * (weight.abs().mean() + 0.1))
    return model.eval()


@pytest.mark.parametrize("kind", [FastOnCpu, FastOnGpu])
@pytest.mark.parametrize("name", SMALL)
def test_the_same_answers(name: str, kind: type[Lowered]) -> None:
    """Both ways, the GPU's by the definitions of its kernels."""
    model = awake(*SMALL[name])
    (x,) = model.example(3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    quick = kind(model, torch.float64)
    torch.testing.assert_close(quick(x), model(x).detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(quick(x), model(x).detach(), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["resmlp", "mixer", "relu"])
def test_the_same_answers_by_our_linear_map(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which many tokens go through."""
    monkeypatch.setattr(gpu, "MANY", 0)
    asked = []
    plain = gpu.plain_linear.linear
    monkeypatch.setattr(gpu.plain_linear, "linear", lambda *inputs: (asked.append(inputs[0].shape), plain(*inputs))[1])
    model = awake(*SMALL[name])
    (x,) = model.example(3)
    torch.testing.assert_close(FastOnGpu(model, torch.float64)(x), model(x).detach(), rtol=1e-6, atol=1e-6)
    assert len(asked) == len(model.blocks)


@pytest.mark.parametrize("kind", [FastOnCpu, FastOnGpu])
@pytest.mark.parametrize("name", ["mixer", "resmlp", "gmlp", "wide gmlp"])
def test_no_pictures_give_no_answers(name: str, kind: type[Lowered]) -> None:
    model = awake(*SMALL[name])
    (x,) = model.example(1)
    assert kind(model, torch.float64)(x[:0]).shape == model(x[:0]).shape


@pytest.mark.parametrize("kind", [FastOnCpu, FastOnGpu])
@pytest.mark.parametrize("name", ["mixer", "resmlp", "wide gmlp"])
def test_autocast_changes_nothing(name: str, kind: type[Lowered]) -> None:
    model = awake(*SMALL[name])
    (x,) = model.example(2)
    quick = kind(model, torch.float32)
    right = quick(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(quick(x), right)


def test_text_with_a_mask_or_of_another_length_is_refused() -> None:
    model = awake("gmlp_mlm_tiny", {})
    quick, (ids,) = fast(model, torch.float64), model.example(2)
    for inputs in ((ids, torch.ones_like(ids)), (ids[:, :40],)):
        with pytest.raises(allmlp.UserError, match="a fast text model reads rows of 128 tokens, without a mask"):
            quick(*inputs)


def test_the_last_token_bias_of_a_mixer_has_no_effect() -> None:
    """LayerNorm takes away what is the same for all channels of a token, so this bias is left out."""
    model = awake("mixer_nano", {})
    (x,) = model.example(2)
    right = model(x)
    with torch.no_grad():
        for block in model.blocks:
            block.token.mix.down.bias.add_(3.0)
    torch.testing.assert_close(model(x), right)


def test_another_form_of_gelu_only_where_rounding_hides_it() -> None:
    for dtype, allowed in ((torch.bfloat16, True), (torch.float32, False)):
        quick = FastOnGpu(awake("mixer_nano", {}), dtype)
        quick.use = quick.use._replace(fused=True)
        assert quick.in_epilogue("gelu") is allowed and quick.in_epilogue("gelu_tanh") and quick.in_epilogue("relu")


def test_8_bits_are_near() -> None:
    """By the definitions of the kernels."""
    model = awake("mixer_nano", {}).float()
    (x,) = model.example(8)
    right = model(x).detach()
    assert (FastOnGpu(model, torch.float32, eight=True)(x) - right).norm() < 0.1 * right.norm()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_8_bits_never_leave_their_range(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst token there is, all of it in the one channel that the next layer reads; seen before it is rounded."""
    seen: list[float] = []
    plain = gpu.kernels(torch.device("cpu"))

    def rounded(y: torch.Tensor) -> torch.Tensor:
        seen.append(y.abs().max().item())
        return y.to(gpu.EIGHT)

    def norm(*given: Any) -> torch.Tensor:
        return rounded(plain.norm(*given[:5], torch.float32))

    def linear(x: torch.Tensor, weight: torch.Tensor, beside: Beside, act: Any = "none") -> torch.Tensor:
        last = beside.other is not None
        return plain.linear(x, weight, beside) if last else rounded(plain.linear(x, weight, beside, act, torch.float32))

    monkeypatch.setattr(gpu, "kernels", lambda device: plain._replace(norm=norm, linear=linear))
    model = awake("mixer_nano", {}).float()
    with torch.no_grad():
        model.blocks[0].channel.mix.up.weight.zero_()[:, 0] = size
        model.blocks[0].channel.mix.up.bias.zero_()
    z = torch.zeros(1, model.spec.stem.tokens, model.spec.width)
    z[:, :, 0] = 1e3
    FastOnGpu(model, torch.float32, eight=True).steps[1](z)
    first, second = seen
    assert 0.95 * gpu.LARGEST < first <= gpu.LARGEST
    assert 0.4 * gpu.LARGEST < second <= gpu.LARGEST


def test_8_bits_say_what_they_need() -> None:
    with pytest.raises(allmlp.UserError, match=r"compute capability 8\.9"):
        fast(awake("mixer_nano", {}), torch.float8_e4m3fn)
    for name in ("resmlp_nano", "gmlp_nano"):
        with pytest.raises(allmlp.UserError, match="as in a Mixer"):
            FastOnGpu(awake(name, {}), torch.float32, eight=True)
    with pytest.raises(allmlp.UserError, match="multiples of 16"):
        FastOnGpu(awake("mixer_nano", {"block.channel.hidden": "100"}), torch.float32, eight=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_8_bits_on_a_gpu_are_those_of_the_definitions() -> None:
    model = awake("mixer_s16", {}).float()
    (x,) = model.example(4)
    right, plain = model(x).detach(), FastOnGpu(model, torch.float32, eight=True)(x)
    mine = fast(model.cuda(), torch.float8_e4m3fn)(x.cuda()).float().cpu()
    assert (mine - right).norm() <= 1.5 * (plain - right).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mixer_s16", "resmlp_s12", "gmlp_s16"])
def test_float32_on_a_gpu(name: str) -> None:
    model = awake(name, {}).cuda()
    (x,) = model.example(2)
    truth = model(x).detach()
    eager = (model.float()(x.float()).double().detach() - truth).norm()
    assert (fast(model, torch.float32)(x.float()).double() - truth).norm() <= 10 * eager + 1e-5 * truth.norm()


def test_which_are_rewritten() -> None:
    kept = {name for name in presets() if hasattr(preset(name).spec, "block") and not can_lower(preset(name).spec)}
    assert {name.split("_")[0] for name in kept} == {"vit", "bert", "amlp", "transformer", "resmlp"}
    assert {name for name in kept if name.startswith("resmlp")} == {
        f"resmlp_s12_{way}" for way in ("none", "conv", "dw", "dwsep")
    }


def test_others_keep_their_blocks() -> None:
    model = awake("vit_nano", {})
    (x,) = model.example(2)
    torch.testing.assert_close(fast(model, torch.float64)(x), model(x).detach())
    with pytest.raises(allmlp.UserError, match="takes an encoder"):
        fast(allmlp.create("resmlp_seq2seq_tiny"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mixer_s16", "resmlp_s12", "gmlp_s16", "mixer_nano"])
def test_on_a_gpu_within_twice_the_error_of_eager(name: Any) -> None:
    model = awake(name, {}).cuda()
    (x,) = model.example(4)
    truth = model(x).detach()
    eager = model.float().to(torch.bfloat16)(x.bfloat16()).double().detach()
    quick = fast(model.float())
    for _ in range(2):
        error, allowed = (float((answer - truth).norm()) for answer in (quick(x.float()).double(), eager))
        assert error <= 2 * allowed
