"""Layers and models of time series: equations written plainly, missing values, variates, and refused inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import allmlp
from allmlp.layers import (
    Attention,
    BatchNorm,
    Block,
    Context,
    CrossAttention,
    Init,
    RelativePositionBias,
    RevIN,
    SeriesPatches,
    SubtractLast,
    TokenLinear,
    VariateMlp,
)
from allmlp.layers.context import BuildContext
from allmlp.models.forecasting import PRESETS
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.spec import override_all
from tiny import TINY_SERIES, randomize, tiny_model

STEPS, VARIATES = 12, 3
SEPARATE = [name for name in TINY_SERIES if name not in ("tsmixer", "patchtsmixer_mix")]
NORMED = [name for name in TINY_SERIES if name != "dlinear"]


def series(batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 5 + 2 * torch.randn(batch, STEPS, VARIATES, dtype=torch.float64, generator=generator)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


# --- equations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [False, True])
def test_revin(affine: bool) -> None:
    layer, x = RevIN(eps=0.1, affine=affine).build(VARIATES).double(), series()
    randomize(layer)
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) > 0.4
    z, level = layer(x, mask)
    for b in range(4):
        for v in range(VARIATES):
            seen = x[b, mask[b, :, v], v]
            mean, scale = seen.mean(), (seen.var(correction=0) + 0.1).sqrt()
            expected = (seen - mean) / scale
            expected = expected * layer.weight[v] + layer.bias[v] if affine else expected
            assert same(z[b, mask[b, :, v], v], expected) and same(level.shift[b, 0, v], mean)
    assert bool((z[~mask] == 0).all())
    assert torch.allclose(layer.inverse(layer.normalize(x, level), level), x, rtol=0.1 if affine else 1e-9)
    quantiles = layer.inverse(z.unsqueeze(-1).expand(-1, -1, -1, 2), level)
    assert same(quantiles[..., 1], layer.inverse(z, level))


def test_last_value() -> None:
    layer, x = SubtractLast().build(VARIATES), series(2)
    z, level = layer(x, None)
    assert same(z, x - x[:, -1:]) and same(layer.inverse(z, level), x)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[0, -3:, 1], mask[1, :, 2] = False, False
    shift = layer(x, mask)[1].shift
    assert shift[0, 0, 1] == x[0, -4, 1] and shift[0, 0, 0] == x[0, -1, 0] and shift[1, 0, 2] == 0


def test_patches_end_with_the_last_step() -> None:
    stem = SeriesPatches(11, 2, 4, 3)
    layer = stem.build(BuildContext(stem.tokens, 5, Init()))
    patches = layer.split_patches(torch.arange(22.0).view(1, 11, 2))
    assert stem.tokens == 3 and patches.shape == (1, 2, 3, 4)
    assert patches[0, 1, :, 0].tolist() == [3.0, 9.0, 15.0] and patches[0, 1, 2, 3] == 21


def test_dlinear() -> None:
    """Two linear maps: of the moving average with repeated ends, and of the rest."""
    model, x = tiny_model("dlinear"), series()
    weight = model.head.proj.weight.unflatten(1, (STEPS, 2))
    padded = torch.cat([x[:, :1], x[:, :1], x, x[:, -1:], x[:, -1:]], dim=1)
    trend = torch.stack([padded[:, i : i + 5].mean(1) for i in range(STEPS)], dim=1)
    expected = torch.einsum("hl,blv->bhv", weight[..., 0], trend)
    expected = expected + torch.einsum("hl,blv->bhv", weight[..., 1], x - trend) + model.head.proj.bias[:, None]
    assert same(model(x), expected)


def test_nlinear() -> None:
    model, x = tiny_model("nlinear"), series()
    weight, bias = model.head.proj.weight, model.head.proj.bias
    expected = torch.einsum("hl,blv->bhv", weight, x - x[:, -1:]) + bias[:, None] + x[:, -1:]
    assert same(model(x), expected)


def test_tsmixer() -> None:
    """The blocks of the released code: time mixing with ReLU, then an MLP over the variates; statistics per step."""
    model, x = tiny_model("tsmixer"), series()
    p = dict(model.named_parameters()) | dict(model.named_buffers())

    def norm(name: str, y: Tensor) -> Tensor:
        parts = ("running_mean", "running_var", "weight", "bias")
        mean, variance, weight, bias = (p[f"{name}.{part}"].view(STEPS, VARIATES) for part in parts)
        return (y - mean) / (variance + 1e-3).sqrt() * weight + bias

    mean, scale = x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    z = (x - mean) / scale * p["series_norm.weight"] + p["series_norm.bias"]
    for i in range(2):
        name = f"blocks.{i}.token"
        mixed = torch.einsum("ij,bjv->biv", p[f"{name}.mix.proj.weight"], norm(f"{name}.norm", z))
        z = z + (mixed + p[f"{name}.mix.proj.bias"][:, None]).relu()
        name = f"blocks.{i}.channel"
        hidden = norm(f"{name}.norm", z) @ p[f"{name}.mix.up.weight"].T + p[f"{name}.mix.up.bias"]
        z = z + hidden.relu() @ p[f"{name}.mix.down.weight"].T + p[f"{name}.mix.down.bias"]
    y = torch.einsum("hl,blv->bhv", p["head.proj.weight"], z) + p["head.proj.bias"][:, None]
    assert same(model(x), (y - p["series_norm.bias"]) / (p["series_norm.weight"] + 1e-10) * scale + mean)


def test_variate_mlp() -> None:
    layer = VariateMlp(2.0).build(BuildContext(4, 5, Init(), variates=VARIATES)).double()
    randomize(layer)
    x = torch.randn(2 * VARIATES, 4, 5, dtype=torch.float64)
    z = x.view(2, VARIATES, 4, 5)
    scores = torch.einsum("uv,bvsc->busc", layer.gate.weight, z) + layer.gate.bias[:, None, None]
    z = z * scores.exp() / scores.exp().sum(1, keepdim=True)
    h = nn.functional.gelu(torch.einsum("dv,bvsc->bdsc", layer.up.weight, z) + layer.up.bias[:, None, None])
    expected = torch.einsum("vd,bdsc->bvsc", layer.down.weight, h) + layer.down.bias[:, None, None]
    assert layer.up.weight.shape == (6, VARIATES) and same(layer(x, Context()), expected.flatten(0, 1))


def test_batch_norm_per_token() -> None:
    block = Block(TokenLinear(), norm=BatchNorm(per_token=True)).build(BuildContext(4, 3, Init())).double().train()
    x = series(64)[:, :4] * torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    y = block.token.norm(x)
    assert y.mean(0).abs().max() < 1e-9 and (y.var(0, correction=0) - 1).abs().max() < 1e-4
    with pytest.raises(allmlp.UserError, match="per_token=True\\) is for the norm of a block"):
        PRESETS["gmlp_series"].spec.replace(norm=BatchNorm(per_token=True)).build()


# --- models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMED)
def test_forecasts_move_with_the_level(name: str) -> None:
    model, x = tiny_model(name), series()
    tolerance = {"rtol": 1e-4, "atol": 1e-4}  # eps of the variance
    torch.testing.assert_close(model(x + 100), model(x) + 100, **tolerance)
    if name != "nlinear":
        torch.testing.assert_close(model(10 * x), 10 * model(x), **tolerance)


@pytest.mark.parametrize("name", TINY_SERIES)
def test_variates_are_separate_or_mixed(name: str) -> None:
    model, x = tiny_model(name), series(1)
    changed = x.clone()
    changed[:, :, 1] = changed[:, :, 1].flip(1)
    moved = (model(changed) - model(x)).abs().amax((0, 1)) > 1e-6
    assert moved.tolist() == ([False, True, False] if name in SEPARATE else [True] * 3)


@pytest.mark.parametrize("name", TINY_SERIES)
def test_missing_values_are_not_read(name: str) -> None:
    model, x = tiny_model(name), series()
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    expected = model(torch.where(mask, x, 1e6), mask)
    assert torch.equal(model(torch.where(mask, x, torch.nan), mask), expected) and expected.isfinite().all()
    assert same(model(x, torch.ones_like(mask)), model(x))
    model(torch.where(mask, x, torch.nan), mask).sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    nothing = model(x, torch.zeros_like(mask))
    assert nothing.isfinite().all()


@pytest.mark.parametrize("name", TINY_SERIES)
def test_constant_series(name: str) -> None:
    output = tiny_model(name)(torch.full((2, STEPS, VARIATES), 3.0, dtype=torch.float64))
    assert output.isfinite().all() and (name in ("dlinear", "nlinear") or (output - 3).abs().max() < 0.5)


@pytest.mark.parametrize("name", TINY_SERIES)
def test_quantiles_and_other_sizes(name: str) -> None:
    spec = TINY_SERIES[name].configure(seq_len=15, in_chans=2, horizon=4, quantiles=(0.1, 0.5, 0.9))
    model = spec.build()
    assert model(torch.randn(3, 15, 2)).shape == (3, 4, 2, 3) and spec.input_spec == "15x2 series"
    point = spec.configure(quantiles=()).build()
    assert point(torch.randn(3, 15, 2)).shape == (3, 4, 2)


def test_hidden_patches_are_not_read() -> None:
    spec = TINY_SERIES["patchtsmixer"].replace(head=allmlp.layers.ReconstructionHead(), series_norm=None)
    model = spec.build().double().eval()
    x, hidden = series(2), torch.zeros(2, VARIATES, spec.stem.tokens, dtype=torch.bool)
    hidden[:, 1, -1] = True
    changed = x.clone()
    changed[:, -2:, 1] += 1  # steps of the last patch only
    assert model(x).shape == (2, VARIATES, 5, 4)
    assert same(model(x, hidden=hidden), model(changed, hidden=hidden)) and not same(model(x), model(changed))
    with pytest.raises(allmlp.UserError, match="only a series in patches"):
        tiny_model("nlinear")(series(), hidden=hidden)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("patchtsmixer", {"stem.patch_size": 16}, "a patch of 16 steps is longer than the 12"),
        ("dlinear", {"stem.kernel": 24}, "an odd number of steps, not 24"),
        ("tsmixer", {"width": 5}, "tokens of SeriesSteps have 3 channels: set width to 3"),
        ("tsmixer", {"block": Block(variate=VariateMlp())}, "already the channels of SeriesSteps"),
        ("patchtsmixer", {"block": Block(cross=CrossAttention(2))}, "no cross-attention"),
        ("patchtsmixer", {"block": Block(Attention(2, bias=RelativePositionBias()))}, "use RotaryPositions"),
    ],
)
def test_contradictions(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(allmlp.UserError, match=message):
        override_all(TINY_SERIES[name], change)


def test_refused_inputs() -> None:
    model = tiny_model("patchtsmixer", torch.float32)
    for bad in (torch.randn(2, 11, 3), torch.randn(2, 12, 2), torch.randn(12, 3), torch.ones(2, 12, 3).long()):
        with pytest.raises(allmlp.UserError, match=r"expected a float series of shape \[B, 12, 3\], got "):
            model(bad)
    with pytest.raises(allmlp.UserError, match="the input is float64 and the model float32"):
        model(torch.randn(2, 12, 3, dtype=torch.float64))
    with pytest.raises(allmlp.UserError, match="expected a bool mask"):
        model(torch.randn(2, 12, 3), torch.ones(2, 12, 3))
    with pytest.raises(allmlp.UserError, match=r"has no 'num_classes'.*it has seq_len, in_chans, horizon"):
        allmlp.create("patchtsmixer", num_classes=3)
    with pytest.raises(allmlp.UserError, match="quantiles must increase between 0 and 1"):
        TINY_SERIES["patchtsmixer"].configure(quantiles=(0.9, 0.1))
    assert isinstance(allmlp.preset("dlinear").spec, SeriesEncoder)
