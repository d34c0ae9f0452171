"""Contracts of single layers, parametrized over every registered spec, so that a new mixer is tested too."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck as check_jacobian

import allmlp
from allmlp.layers import (
    Affine,
    Attention,
    BatchNorm,
    Block,
    ChannelLinear,
    ChannelMlp,
    Constant,
    Context,
    CrossAttention,
    Dense,
    DropPath,
    Init,
    LayerScale,
    LecunNormal,
    NoMixing,
    Normal,
    RelativePositionBias,
    RotaryPositions,
    RotaryScaling,
    SpatialGatingUnit,
    TinyAttention,
    Toeplitz,
    TokenConv,
    TokenLinear,
    TokenMlp,
    TorchDefault,
    TruncatedNormal,
    XavierUniform,
    Zeros,
)
from allmlp.layers.channel import ChannelMixer
from allmlp.layers.context import BuildContext
from allmlp.layers.init import Distribution
from allmlp.layers.linear import has_hooks, is_standard
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import Norm
from allmlp.layers.pool import Pool
from allmlp.layers.scale import DropPathLayer
from allmlp.layers.token_roles import token_parameters
from allmlp.show import equations
from allmlp.spec import Spec, from_dict, to_dict
from tiny import randomize

gradcheck = partial(check_jacobian, fast_mode=True)  # along random directions instead of entry by entry
CTX = BuildContext(tokens=6, channels=4, init=Init(), grid=(2, 3))
# Specs with required fields; every other spec is built from its defaults.
ARGUMENTS = {
    "TokenMlp": {"hidden": 3},
    "Attention": {"num_heads": 2},
    "CrossAttention": {"num_heads": 2},
    "ClassAttention": {"num_heads": 2},
    "Stage": {"width": 8, "depth": 2, "block": Block()},
    "ChannelMlp": {"hidden": 6},
    "ClassifierHead": {"num_classes": 3},
    "PooledHead": {"num_classes": 3},
    "GatedTokens": {"mix": TokenMlp(3)},
    "GatedChannels": {"mix": ChannelMlp(6)},
    "Constant": {"value": 0.5},
    "Normal": {"std": 0.1},
}


def kinds(base: type[Spec]) -> list[Spec]:
    """One value of every spec of the layers that is a `base`."""
    found = {name: kind for name, kind in Spec.kinds.items() if kind.__module__.startswith("allmlp.layers")}
    return [example(kind) for kind in found.values() if issubclass(kind, base)]


def example(kind: type[Spec]) -> Spec:
    try:
        return kind(**ARGUMENTS.get(kind.__name__, {}))
    except TypeError as missing:
        raise LookupError(
            f"add values for the required fields to ARGUMENTS in tests/test_layers.py: {missing}"
        ) from None


MIXERS = [
    *kinds(TokenMixer),
    TokenLinear(Toeplitz()),
    TokenLinear(causal=True),
    TokenLinear(Toeplitz(), causal=True),
    TokenLinear(act="sigmoid"),
    TokenMlp(expansion=1.5, act="gelu_tanh"),
    Attention(2, causal=True),
    Attention(2, talking_heads=True),
    Attention(2, num_kv_heads=1, rotary=RotaryPositions(), linear_bias=False),
    *(TokenConv(variant, act=act) for variant in ("depthwise", "separable") for act in (None, "gelu")),
    *kinds(ChannelMixer),
    *(ChannelMlp(6, act, glu=True) for act in ("silu", "sigmoid", "gelu")),
    ChannelMlp(6, "silu", SpatialGatingUnit(), glu=True, linear_bias=False),
    ChannelLinear("gelu"),
]
GATES = [
    SpatialGatingUnit(variant, projection, causal, attention=attention)
    for variant in ("split", "multiplicative", "additive", "linear")
    for projection in (Dense(), Toeplitz())
    for causal in (False, True)
    for attention in (None, TinyAttention(2))
]
GATES.append(SpatialGatingUnit(causal=True, attention=TinyAttention(2, rotary=RotaryPositions())))


def prepared(module: nn.Module) -> nn.Module:
    module = module.double()
    randomize(module)
    return module


def tokens(batch: int = 2, channels: int = 4) -> Tensor:
    return torch.randn(batch, 6, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_every_spec_is_exported() -> None:
    missing = {type(spec).__name__ for spec in kinds(Spec)} - set(allmlp.layers.__all__)
    assert not missing, (
        f"add {', '.join(sorted(missing))} to the imports and to __all__ in src/allmlp/layers/__init__.py"
    )


@pytest.mark.parametrize("spec", kinds(Spec), ids=repr)
def test_every_spec_survives_json(spec: Spec) -> None:
    assert from_dict(to_dict(spec)) == spec


def test_every_layer_shows_its_equation() -> None:
    layers = [type(spec) for spec in kinds(Spec) if not isinstance(spec, (Distribution, Init))]
    assert [kind.__name__ for kind in layers if kind.__name__ not in equations(example(kind))] == []


@pytest.mark.parametrize("spec", MIXERS, ids=repr)
def test_mixer_shape_gradient_and_batch(spec: TokenMixer | ChannelMixer) -> None:
    module = prepared(spec.build(CTX))
    x = tokens().requires_grad_()
    assert module(x, Context()).shape == x.shape
    assert gradcheck(lambda x: module(x, Context()), x)
    check_parameter_gradients(module, lambda: module(x.detach(), Context()))
    assert torch.allclose(module(x, Context())[:1], module(x[:1], Context()))


@pytest.mark.parametrize("spec", [spec for spec in MIXERS if isinstance(spec, TokenMixer)], ids=repr)
def test_mixer_declares_what_its_parameters_do(spec: TokenMixer) -> None:
    layer, larger = spec.build(CTX), spec.build(replace(CTX, tokens=12, grid=(3, 4)))
    name = type(layer).__name__
    assert any(hasattr(module, "token_roles") for module in layer.modules()), (
        f"{name} does not declare what its parameters do: set `token_roles` as in allmlp/layers/token_roles.py"
    )
    roles = {parameter.full_name for parameter in token_parameters(layer)}
    shapes = {key: weight.shape for key, weight in larger.named_parameters()}
    missing = [key for key, weight in layer.named_parameters() if weight.shape != shapes[key] and key not in roles]
    assert not missing, (
        f"the shape of {missing} depends on the number of tokens: add them to the `token_roles` of {name}"
    )
    unknown = roles - shapes.keys()
    assert not unknown, f"`token_roles` of {name} names {unknown}, which are no parameters"


def check_parameter_gradients(module: nn.Module, run: object) -> None:
    names, weights = zip(*module.named_parameters(), strict=True) if list(module.parameters()) else ((), ())

    def with_weights(*values: Tensor) -> Tensor:
        for name, value in zip(names, values):
            owner, _, leaf = name.rpartition(".")
            target = module.get_submodule(owner)
            target._parameters[leaf] = value  # type: ignore[assignment]
        return run()  # type: ignore[operator]

    if weights:
        assert gradcheck(with_weights, tuple(weight.detach().requires_grad_() for weight in weights))


@pytest.mark.parametrize("variant", ["full", "depthwise", "separable"])
def test_gradients_of_convolutions_have_the_strides_of_their_weights(variant: str) -> None:
    """Otherwise DDP warns of them, also where only the stride of a dimension of size 1 differs."""
    layer = TokenConv(variant).build(CTX)  # type: ignore[arg-type]
    for model in (layer, copy.deepcopy(layer), copy.deepcopy(layer).double().float()):
        model(torch.randn(2, 6, 4), Context()).square().sum().backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None and weight.grad.stride() == weight.stride(), name
            assert variant == "full" or weight.is_contiguous(), "it is saved and reshaped as it is"


@pytest.mark.parametrize("spec", GATES, ids=repr)
def test_gate_gradients_and_causality(spec: SpatialGatingUnit) -> None:
    module = prepared(spec.build(CTX, hidden=4))
    z, x = tokens(channels=4).requires_grad_(), tokens(channels=4).requires_grad_()
    assert gradcheck(lambda z, x: module(z, x, Context()), (z, x))
    check_parameter_gradients(module, lambda: module(z.detach(), x.detach(), Context()))
    changed = z.detach().clone()
    changed[:, 3:] = -changed[:, 3:].flip(-1)
    moved = (module(changed, x, Context()) - module(z, x, Context())).abs().sum(dim=(0, 2)) > 1e-12
    assert moved.tolist() == ([False] * 3 if spec.causal else [True] * 3) + [True] * 3


def test_cross_attention_gradients() -> None:
    module = prepared(CrossAttention(2).build(CTX))
    x, memory = tokens().requires_grad_(), tokens()[:, :3].clone().requires_grad_()
    assert gradcheck(lambda x, m: module(x, Context(memory=m)), (x, memory))
    with pytest.raises(allmlp.UserError, match="memory"):
        module(x, Context())


@pytest.mark.parametrize("pool", kinds(Pool), ids=repr)
def test_pool_gradients(pool: Pool) -> None:
    block = Block(TokenLinear(), channel=ChannelMlp(6), norm=Affine(), scale=LayerScale(0.5))
    module = prepared(pool.build(CTX, block))
    x = tokens().requires_grad_()
    assert module(module.prepare(x, Context()), None).shape == (2, 4)
    assert gradcheck(lambda x: module(module.prepare(x, Context()), None), x)


@pytest.mark.parametrize("norm", kinds(Norm), ids=repr)
def test_norm_gradients(norm: Norm) -> None:
    module = prepared(norm.build(4))
    assert gradcheck(module, tokens().requires_grad_())


def test_batch_norm_is_torch_s_with_channels_last() -> None:
    """Batch statistics in training, running averages in evaluation, over batch and tokens together."""
    layer, peer = BatchNorm(eps=0.1, momentum=0.3).build(4).double(), nn.BatchNorm2d(4, 0.1, 0.3).double()
    for module in (layer, peer):
        randomize(module)
    for train in (True, True, False):
        x = tokens(batch=3)
        expected = peer.train(train)(x.unflatten(1, (2, 3)).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)
        assert torch.allclose(layer.train(train)(x), expected, atol=1e-12)
    assert torch.allclose(layer.running_var, peer.running_var) and layer.num_batches_tracked == 2


def test_a_branch_without_skip_connection_replaces_its_input() -> None:
    block = Block(NoMixing(), channel=ChannelLinear(), norm=None, residual="token")
    layer = block.build(CTX, drop_path=0.5)
    assert (layer.token.drop_path.rate, layer.channel.drop_path.rate) == (0.5, 0.0)
    layer, x = prepared(layer).eval(), tokens()
    proj = layer.channel.mix.proj
    assert torch.allclose(layer(x, Context()), 2 * x @ proj.weight.T + proj.bias)


@pytest.mark.parametrize("causal", [False, True])
def test_toeplitz_is_constant_along_diagonals_and_crops(causal: bool) -> None:
    full = prepared(TokenProjection(Toeplitz(), 6, causal, Init(Normal(1.0))))
    matrix = full.matrix()
    for offset in range(-5, 6):
        diagonal = matrix.diagonal(offset)
        assert torch.equal(diagonal, diagonal[:1].expand_as(diagonal))
    assert bool((matrix.triu(1) == 0).all()) == causal
    assert torch.equal(full.matrix(0, 4), matrix[:4, :4]) and torch.equal(full.matrix(2, 5), matrix[2:5, :5])
    assert full.weight.numel() == (6 if causal else 11)


def test_causal_dense_matrix_cannot_be_refilled() -> None:
    module = prepared(TokenProjection(Dense(), 6, True, Init(Normal(1.0))))
    assert module.weight.triu(1).abs().sum() > 0 and module.matrix().triu(1).abs().sum() == 0
    module(tokens(), Context()).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.triu(1).abs().sum() == 0


# --- initialization ---------------------------------------------------------------------------------

SPREADS = {
    Zeros(): 0.0,
    Constant(0.5): 0.0,
    Normal(0.3): 0.3,
    TruncatedNormal(0.02): 0.02,
    TruncatedNormal(0.02, limit=0.04): 0.02 * 0.8796,
    LecunNormal(): math.sqrt(1 / 400),
    XavierUniform(): math.sqrt(2 / (400 + 300)),
    TorchDefault(): 1 / math.sqrt(3 * 400),
}


@pytest.mark.parametrize("spec", SPREADS, ids=repr)
def test_distributions(spec: Distribution) -> None:
    tensor = torch.empty(300, 400)
    spec.fill(tensor, fan_in=400)
    assert tensor.std().item() == pytest.approx(SPREADS[spec], rel=0.02, abs=1e-9)


def test_every_distribution_is_tested() -> None:
    assert {type(spec) for spec in kinds(Distribution)} == {type(spec) for spec in SPREADS}


def spread(model: nn.Module, key: str) -> float:
    return model.state_dict()[key].std().item()


@pytest.mark.slow
def test_initialization_of_the_sources() -> None:
    """Google's Mixer, FAIR's ResMLP, timm's gMLP, torch.nn's defaults in ConvMixer."""
    mixer = allmlp.create("mixer_s32", seed=0)
    assert spread(mixer, "blocks.0.token.mix.up.weight") == pytest.approx(49**-0.5, rel=0.02)
    assert spread(mixer, "stem.proj.weight") == pytest.approx((3 * 32 * 32) ** -0.5, rel=0.02)
    assert spread(mixer, "head.proj.weight") == 0
    resmlp = allmlp.create("resmlp_s12", seed=0)
    assert spread(resmlp, "blocks.0.token.mix.weight") == pytest.approx(0.02, rel=0.02)
    assert spread(resmlp, "stem.proj.weight") == pytest.approx((3 * 768) ** -0.5, rel=0.02)
    for name, gamma in [("resmlp_s12", 0.1), ("resmlp_s24", 1e-5), ("resmlp_s36", 1e-6), ("resmlp_b24_8", 1e-6)]:
        assert allmlp.preset(name).spec.block.scale.init_value == gamma
    gmlp = allmlp.create("gmlp_ti16", seed=0).state_dict()
    assert gmlp["blocks.0.channel.mix.inner.proj.weight"].abs().max() < 1e-4
    assert (gmlp["blocks.0.channel.mix.inner.proj.bias"] == 1).all()
    convmixer = allmlp.create("convmixer_nano", seed=0)
    assert spread(convmixer, "blocks.0.token.mix.conv.weight") == pytest.approx((3 * 5 * 5) ** -0.5, rel=0.05)
    assert spread(convmixer, "blocks.0.channel.mix.proj.bias") == pytest.approx((3 * 128) ** -0.5, rel=0.15)
    vit = allmlp.create("vit_ti16", seed=0)
    assert spread(vit, "blocks.0.token.mix.qkv.weight") == pytest.approx(math.sqrt(2 / (192 + 192)), rel=0.02)


@pytest.mark.parametrize("variant", ["split", "multiplicative", "additive"])
def test_a_gate_starts_as_a_plain_mlp(variant: str) -> None:
    """Before training no token depends on any other."""
    name = {"split": "gmlp_l36", "multiplicative": "gmlp_l36_multiplicative", "additive": "gmlp_l36_additive"}[variant]
    model = allmlp.create(name, seed=0, vocab_size=50, seq_len=8, overrides={"depth": 2}).eval()
    ids = torch.randint(50, (1, 8))
    other = ids.clone()
    other[:, 4] = (ids[:, 4] + 1) % 50
    moved = (model(ids) - model(other)).abs().amax(dim=(0, 2))
    assert moved[4] > 1e-2 and moved[[0, 1, 2, 3, 5, 6, 7]].max() < 1e-4


# --- stochastic depth -------------------------------------------------------------------------------


def test_drop_path_schedules() -> None:
    assert [DropPath(0.3).at(i, 4) for i in range(4)] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert [DropPath(0.3, "flat").at(i, 4) for i in range(4)] == [0.3] * 4
    assert DropPath(0.3).at(0, 1) == 0
    model = allmlp.create("resmlp_nano", drop_path=0.2)
    assert {layer.rate for layer in model.modules() if isinstance(layer, DropPathLayer)} == {0.2}


def test_drop_path_drops_whole_examples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    layer = DropPathLayer(0.25).train()
    y = layer(torch.ones(4000, 2, 3))
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert (y.flatten(1).min(dim=1).values == y.flatten(1).max(dim=1).values).all()
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(layer.eval()(y), y)
    assert DropPathLayer(1.0).train()(y).abs().sum() == 0


def test_relative_position_bias_checks_its_fields() -> None:
    with pytest.raises(allmlp.UserError, match="buckets"):
        RelativePositionBias(buckets=7)
    with pytest.raises(allmlp.UserError, match="RelativePositionBias"):
        Attention(2, scores="bias")
    with pytest.raises(allmlp.UserError, match="neither num_kv_heads nor rotary"):
        Attention(2, bias=RelativePositionBias(), scores="bias", rotary=RotaryPositions())
    with pytest.raises(allmlp.UserError, match="must divide the 6 heads, which 4 does not"):
        Attention(6, num_kv_heads=4)
    with pytest.raises(allmlp.UserError, match="heads of an even size, not 1"):
        Attention(4, rotary=RotaryPositions()).build(CTX)
    with pytest.raises(allmlp.UserError, match="an even number of channels, not 5"):
        TinyAttention(5, rotary=RotaryPositions())
    with pytest.raises(allmlp.UserError, match="low below high, not 4 and 4"):
        RotaryScaling(low=4.0)


@pytest.mark.parametrize(("std", "limit"), [(0.5, 1.0), (0.5, 0.4), (0.02, 2.0)])
def test_truncated_normal_has_its_distribution(std: float, limit: float) -> None:
    """Its CDF is that of the normal distribution, truncated and rescaled."""
    torch.manual_seed(0)
    x = torch.empty(200, 500)
    TruncatedNormal(std, limit).fill(x, 1)
    assert x.abs().max() <= limit
    points = torch.linspace(-limit, limit, 41)[1:-1].clamp(-3 * std, 3 * std)
    normal = torch.distributions.Normal(0, std)
    low, high = normal.cdf(torch.tensor([-limit, limit]))
    right = (normal.cdf(points) - low) / (high - low)
    found = torch.searchsorted(x.flatten().sort().values, points) / x.numel()
    assert (found - right).abs().max() < 0.006  # 1.9 / sqrt(n), a chance of 1 in 700


def test_a_context_has_no_properties() -> None:
    """torch.compile of torch 2.8, the oldest that is supported, does not evaluate those of a named tuple."""
    assert not [name for name, value in vars(Context).items() if isinstance(value, property)]


def test_talking_heads_ignore_padding_on_the_left() -> None:
    layer = prepared(Attention(2, causal=True, talking_heads=True).build(BuildContext(6, 8, Init(Normal(0.5)))))
    x, mask = torch.randn(1, 6, 8, dtype=torch.float64), torch.tensor([[False, False, True, True, True, True]])
    alone, padded = layer(x[:, 2:], Context()), layer(x, Context(mask))
    assert padded.isfinite().all() and torch.allclose(padded[:, 2:], alone)
    assert layer.attention_weights(x, Context(mask)).isfinite().all()


def test_a_forward_that_accelerate_replaced_is_a_hook() -> None:
    layer, seen = allmlp.create("mixer_nano").blocks[0].token.mix, list[int]()
    original = layer.up.forward
    assert not has_hooks(layer.up) and is_standard(layer.up)
    layer.up.forward = lambda x: (seen.append(1), original(x))[1]
    layer(torch.randn(1, 64, 8), Context())
    assert seen and has_hooks(layer.up)
