"""Models converted by `fast` give the outputs of the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.inference import fast, fp8, gpu
from allmlp.inference.capabilities import Capabilities
from allmlp.inference.cpu import CpuFastEncoder
from allmlp.inference.encoder import FastEncoder, is_supported
from allmlp.inference.gpu import GpuFastEncoder
from allmlp.inference.gpu_fp8 import GpuFp8Encoder
from allmlp.kernels.linear.reference import LinearEpilogue
from allmlp.kernels.unit_rows.reference import FP8, FP8_MAX
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model
from allmlp.models.zoo import preset, presets

CPU = torch.device("cpu")
MODELS = {
    "mixer": ("mixer_nano", {}),
    "resmlp": ("resmlp_nano", {}),
    "gmlp": ("gmlp_nano", {}),
    "wide gmlp": ("gmlp_nano", {"block.channel.hidden": "512"}),
    **{
        variant: ("gmlp_nano", {"block.channel.inner.variant": variant})
        for variant in ("multiplicative", "additive", "linear")
    },
    "layernorm resmlp": ("resmlp_nano", {"block.norm": "LayerNorm"}),
    "scaled mixer": ("mixer_nano", {"block.scale": "LayerScale"}),
    "affine mixer": ("mixer_nano", {"block.norm": "Affine"}),
    "relu": ("mixer_nano", {"block.channel.act": "relu", "block.token.act": "gelu_tanh"}),
    "affine gate": ("gmlp_nano", {"block.norm": "Affine", "block.channel.inner.norm": "Affine"}),
    "affine gmlp": ("gmlp_nano", {"block.norm": "Affine"}),
    "class-mlp": ("resmlp_nano", {"pool": "ClassMlp"}),
    "text": ("gmlp_mlm_tiny", {}),
    "causal text": ("gmlp_causal_tiny", {}),
}
AMLPS = {
    "amlp": ("amlp_nano", {}),
    "causal amlp": ("gmlp_causal_tiny", {"block.channel.inner.attention": "TinyAttention"}),
    "amlp text": ("amlp_mlm_tiny", {}),
}
"""In fp8 only."""


def perturbed(name: str, overrides: dict[str, str] | None = None) -> Model:
    """A float64 model whose biases, norms and scales are not at their initial values, so that all of them matter."""
    model = allmlp.create(name, overrides=overrides or {}, seed=1).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2 * (weight.abs().mean() + 0.1))
    return model.eval()


def assert_same_outputs(model: Model, converted: FastEncoder, x: Tensor) -> None:
    torch.testing.assert_close(converted(x), model(x).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [CpuFastEncoder, GpuFastEncoder])
@pytest.mark.parametrize("name", MODELS)
def test_same_outputs(name: str, encoder: type[FastEncoder]) -> None:
    """On a CPU, where GpuFastEncoder uses the reference kernels; twice, since branches overwrite their input."""
    model = perturbed(*MODELS[name])
    (x,) = model.dummy_inputs(3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    converted = encoder(model, torch.float64)
    for _ in range(2):
        assert_same_outputs(model, converted, x)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["resmlp", "mixer", "relu"])
def test_same_outputs_with_the_linear_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used for large batches."""
    monkeypatch.setattr(gpu, "LINEAR_MIN_TOKENS", 0)
    calls = []
    linear = gpu.reference_linear.linear
    monkeypatch.setattr(gpu.reference_linear, "linear", lambda *args: (calls.append(args), linear(*args))[1])
    model = perturbed(*MODELS[name])
    (x,) = model.dummy_inputs(3)
    assert_same_outputs(model, GpuFastEncoder(model, torch.float64), x)
    assert len(calls) == len(model.blocks)


@pytest.mark.parametrize("name", ["wide gmlp", "multiplicative", "layernorm resmlp", "scaled mixer"])
def test_same_outputs_with_norms_folded_into_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for batches of many tokens."""
    monkeypatch.setattr(gpu, "FEW_TOKENS", 0)
    mix, folded = gpu.reference_mix.token_mix, list[Any]()

    def spied(x: Tensor, matrix: Any, epilogue: Any, *args: Any) -> Tensor:
        folded.extend([epilogue] if epilogue.mean is not None else [])
        return mix(x, matrix, epilogue, *args)

    monkeypatch.setattr(gpu.reference_mix, "token_mix", spied)
    model = perturbed(*MODELS[name])
    (x,) = model.dummy_inputs(3)
    assert_same_outputs(model, GpuFastEncoder(model, torch.float64), x)
    assert len(folded) == len(model.blocks)


def test_kernels_are_tuned_for_few_and_for_many_tokens() -> None:
    model = perturbed("gmlp_nano")
    tokens = model.spec.build_contexts[0].tokens
    few, many = [1, gpu.FEW_TOKENS // tokens], [gpu.FEW_TOKENS // tokens + 1, -(-gpu.LINEAR_MIN_TOKENS // tokens)]
    assert GpuFastEncoder(model, torch.float32).tuned_batch_sizes() == few + many
    assert [gpu.has_few_tokens(torch.empty(size, tokens, 1)) for size in few + many] == [True, True, False, False]


@pytest.mark.parametrize("encoder", [CpuFastEncoder, GpuFastEncoder])
@pytest.mark.parametrize("name", ["mixer", "resmlp", "gmlp", "wide gmlp"])
def test_empty_batch(name: str, encoder: type[FastEncoder]) -> None:
    model = perturbed(*MODELS[name])
    (x,) = model.dummy_inputs(1)
    assert encoder(model, torch.float64)(x[:0]).shape == model(x[:0]).shape


@pytest.mark.parametrize("encoder", [CpuFastEncoder, GpuFastEncoder])
@pytest.mark.parametrize("name", ["mixer", "resmlp", "wide gmlp"])
def test_autocast_has_no_effect(name: str, encoder: type[FastEncoder]) -> None:
    model = perturbed(*MODELS[name])
    (x,) = model.dummy_inputs(2)
    converted = encoder(model, torch.float32)
    expected = converted(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x), expected)


def test_masked_or_shorter_text_is_rejected() -> None:
    model = perturbed("gmlp_mlm_tiny")
    converted, (ids,) = fast(model, torch.float64), model.dummy_inputs(2)
    for inputs in ((ids, torch.ones_like(ids)), (ids[:, :40],)):
        with pytest.raises(allmlp.UserError, match="sequences of 128 tokens without a mask"):
            converted(*inputs)


def test_last_token_bias_of_a_mixer_cancels() -> None:
    """LayerNorm removes what is the same for all channels of a token, so this bias is omitted."""
    model = perturbed("mixer_nano")
    (x,) = model.dummy_inputs(2)
    expected = model(x)
    with torch.no_grad():
        for block in model.blocks:
            block.token.mix.down.bias.add_(3.0)
    torch.testing.assert_close(model(x), expected)


def test_tanh_gelu_replaces_gelu_only_in_16_bits() -> None:
    device = torch.device("cuda")
    assert gpu.cublas_fuses("gelu", torch.bfloat16, device) and not gpu.cublas_fuses("gelu", torch.float32, device)
    for act in ("gelu_tanh", "relu"):
        assert gpu.cublas_fuses(act, torch.float32, device) and not gpu.cublas_fuses(act, torch.float32, CPU)


FP8_MODELS = (
    *("mixer", "resmlp", "gmlp", "wide gmlp", "layernorm resmlp", "scaled mixer", "affine mixer", "relu"),
    *("affine gmlp", "class-mlp", "text", "causal text", "amlp", "causal amlp", "amlp text"),
)


@pytest.mark.parametrize("name", FP8_MODELS)
def test_fp8_error(name: str) -> None:
    """With the reference kernels."""
    model = perturbed(*(MODELS | AMLPS)[name]).float()
    (x,) = model.dummy_inputs(8)
    expected = model(x).detach()
    converted = GpuFp8Encoder(model, torch.float32)
    for _ in range(2):
        assert 0 < (converted(x) - expected).norm() < 0.15 * expected.norm()


def test_fp8_error_with_norms_folded_into_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for batches of many tokens."""
    monkeypatch.setattr(gpu, "FEW_TOKENS", 0)
    for name in ("wide gmlp", "gmlp", "amlp"):
        test_fp8_error(name)


@pytest.mark.parametrize("name", ["mixer", "resmlp", "gmlp"])
def test_fp8_adds_the_last_bias(name: str) -> None:
    """Exactly: without the last weights nothing else of the fp8 product is left."""
    model = perturbed(*MODELS[name]).float()
    (x,) = model.dummy_inputs(2)
    with torch.no_grad():
        for block in model.blocks:
            block.channel.mix.down.weight.zero_()
    converted = GpuFp8Encoder(model, torch.float32)
    torch.testing.assert_close(converted(x), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_value", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("name", ["mixer", "resmlp", "gmlp"])
def test_fp8_never_overflows(name: str, weight_value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the worst case, a token with all its energy in the only channel that the next layer reads."""
    maxima: list[float] = []
    reference = gpu.select_kernels(CPU)

    def quantize(y: Tensor) -> Tensor:
        maxima.append(y.abs().max().item())
        return y.to(FP8)

    def norm(*args: Any) -> Tensor:
        return quantize(reference.norm(*args[:5], torch.float32))

    def unit_rows(*args: Any) -> tuple[Tensor, Tensor]:
        y, row_scale = reference.unit_rows(*args, dtype=torch.float32)
        return quantize(y), row_scale

    def linear(x: Tensor, weight: Tensor, epilogue: LinearEpilogue, act: Any, dtype: torch.dtype) -> Tensor:
        y = reference.linear(x, weight, epilogue, act, torch.float32)
        return quantize(y) if dtype == FP8 else y.to(dtype)

    kernels = reference._replace(norm=norm, linear=linear, unit_rows=unit_rows)
    monkeypatch.setattr(gpu, "FEW_TOKENS", 0)  # norms of gates are folded
    monkeypatch.setattr(gpu, "select_kernels", lambda device: kernels)
    model = perturbed(*MODELS[name]).float()
    with torch.no_grad():
        channel = model.blocks[0].channel
        channel.mix.up.weight.zero_()[:, 0] = weight_value
        channel.mix.up.bias.zero_()
        if name == "resmlp":
            channel.norm.beta.zero_()
    z = torch.zeros(1, model.spec.stem.tokens, model.spec.width)
    z[:, :, 0] = 1e3
    result = GpuFp8Encoder(model, torch.float32).blocks[0]["channel"](z)
    input_max, hidden_max = maxima[:2]
    assert 0.95 * FP8_MAX < input_max <= FP8_MAX
    assert 0.4 * FP8_MAX < hidden_max <= FP8_MAX
    assert result.isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e15])
@pytest.mark.parametrize("name", ["mixer", "resmlp", "gmlp", "affine gmlp"])
def test_fp8_of_tokens_of_any_size(name: str, size: float) -> None:
    converted = GpuFp8Encoder(perturbed(*MODELS[name]).float(), torch.float32)
    z = size * torch.randn(2, converted.spec.stem.tokens, converted.spec.width)
    expected = z.abs().max()
    z = converted.blocks[0]["channel"](z)
    assert z.isfinite().all() and z.abs().max() < 1e3 * (1 + expected)


def test_fp8_requirements() -> None:
    with pytest.raises(allmlp.UserError, match=r"compute capability 8\.9"):
        fast(perturbed("mixer_nano"), torch.float8_e4m3fn)
    with pytest.raises(allmlp.UserError, match="only for Mixer, ResMLP, gMLP and aMLP"):
        fp8(perturbed("vit_nano"), Capabilities("cuda", (9, 0)))
    for name in ("multiplicative", "affine gate"):
        with pytest.raises(allmlp.UserError, match="split the channels, with LayerNorm"):
            GpuFp8Encoder(perturbed(*MODELS[name]), torch.float32)
    with pytest.raises(allmlp.UserError, match="multiples of 16"):
        GpuFp8Encoder(perturbed("mixer_nano", {"block.channel.hidden": "100"}), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mixer_s16", "resmlp_s12", "gmlp_s16"])
def test_fp8_on_a_gpu_matches_the_reference_kernels(name: str) -> None:
    model = perturbed(name).float()
    (x,) = model.dummy_inputs(4)
    exact, reference = model(x).detach(), GpuFp8Encoder(model, torch.float32)(x)
    actual = fast(model.cuda(), torch.float8_e4m3fn)(x.cuda()).float().cpu()
    assert (actual - exact).norm() <= 1.5 * (reference - exact).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mixer_s16", "resmlp_s12", "gmlp_s16"])
def test_float32_on_a_gpu(name: str) -> None:
    model = perturbed(name).cuda()
    (x,) = model.dummy_inputs(2)
    exact = model(x).detach()
    eager_error = (model.float()(x.float()).double().detach() - exact).norm()
    assert (fast(model, torch.float32)(x.float()).double() - exact).norm() <= 10 * eager_error + 1e-5 * exact.norm()


def test_unsupported_presets() -> None:
    encoders = [name for name in presets() if isinstance(preset(name).spec, Encoder)]
    unsupported = {name for name in encoders if not is_supported(preset(name).spec)}
    families = {name.split("_")[0] for name in unsupported}
    attention = {"vit", "cait", "bert", "amlp", "transformer", "gpt2", "llama3", "llama"}
    assert families == attention | {"resmlp", "convmixer", "cyclemlp"}
    assert {name for name in unsupported if name.startswith("resmlp")} == {
        f"resmlp_s12_{token}" for token in ("none", "conv", "dw", "dwsep")
    }


@pytest.mark.parametrize(
    "overrides",
    [
        *({"block.norm": "BatchNorm"}, {"block.norm": "null"}, {"block.residual": "token"}, {"block.order": "post"}),
        *({"block.order": "res-post"}, {"block.channel": "ChannelLinear"}, {"block.norm": "RMSNorm"}),
        *({"block.channel.glu": "true"}, {"block.channel.linear_bias": "false"}),
        *({"block.channel.act": "silu"}, {"block.token.act": "sigmoid"}),
        {"block.scale": "LayerScale", "block.scale.shift": "true"},
    ],
    ids=str,
)
def test_unsupported_blocks_are_kept(overrides: dict[str, str]) -> None:
    model = perturbed("mixer_nano", overrides)
    (x,) = model.dummy_inputs(2)
    assert not is_supported(model.spec)
    torch.testing.assert_close(fast(model, torch.float64)(x), model(x).detach())


def test_other_models_keep_their_blocks() -> None:
    model = perturbed("vit_nano")
    (x,) = model.dummy_inputs(2)
    torch.testing.assert_close(fast(model, torch.float64)(x), model(x).detach())
    with pytest.raises(allmlp.UserError, match="takes an encoder"):
        fast(allmlp.create("resmlp_seq2seq_tiny"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mixer_s16", "resmlp_s12", "gmlp_s16", "mixer_nano"])
def test_gpu_outputs_within_twice_the_error_of_eager(name: str) -> None:
    """Twice: the first call captures the CUDA graph, the second replays it."""
    model = perturbed(name).cuda()
    (x,) = model.dummy_inputs(4)
    exact = model(x).detach()
    eager = model.float().to(torch.bfloat16)(x.bfloat16()).double().detach()
    converted = fast(model.float())
    for _ in range(2):
        assert (converted(x.float()).double() - exact).norm() <= 2 * (eager - exact).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_series_far_from_zero_on_a_gpu() -> None:
    """In float32: in 16 bits all values of such a series would be equal."""
    model = allmlp.create("patchtsmixer", seq_len=64, horizon=16, seed=0, device="cuda").eval()
    converted = fast(model)
    (x,) = model.dummy_inputs(4)
    x, mask = x + 1000, torch.rand_like(x) > 0.2
    for given in ((x,), (x, mask), (x,)):
        torch.testing.assert_close(converted(*given), model(*given).detach(), rtol=0, atol=1e-2)
