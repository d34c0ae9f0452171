"""`allmlp.nn`: layers as plain modules, equal to those inside the models."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import allmlp
from allmlp.errors import UserError
from allmlp.layers import LayerNorm, TokenLstm
from allmlp.layers.block import BlockLayer
from allmlp.layers.context import Context
from allmlp.models.cyclemlp import cyclemlp
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit

TOKENS, CHANNELS = 16, 12
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "TokenMlp": lambda: allmlp.nn.TokenMlp(TOKENS, 8),
    "TokenLinear": lambda: allmlp.nn.TokenLinear(TOKENS),
    "TokenLinear causal": lambda: allmlp.nn.TokenLinear(TOKENS, causal=True, toeplitz=True),
    "TokenConv": lambda: allmlp.nn.TokenConv((4, 4), CHANNELS),
    "TokenCycle": lambda: allmlp.nn.TokenCycle((4, 4), CHANNELS),
    "TokenLstm": lambda: allmlp.nn.TokenLstm(CHANNELS),
    "Attention": lambda: allmlp.nn.Attention(CHANNELS, 3),
    "Llama's attention": lambda: allmlp.nn.Attention(
        CHANNELS, 6, causal=True, num_kv_heads=2, rope_theta=5e5, bias=False
    ),
    "SpatialGatingUnit": lambda: allmlp.nn.SpatialGatingUnit(TOKENS, CHANNELS),
    "ChannelMlp": lambda: allmlp.nn.ChannelMlp(CHANNELS),
    "SwiGLU": lambda: allmlp.nn.ChannelMlp(CHANNELS, 32, act="silu", glu=True, bias=False),
    "Affine": lambda: allmlp.nn.Affine(CHANNELS),
    "LayerScale": lambda: allmlp.nn.LayerScale(CHANNELS),
    "MixerBlock": lambda: allmlp.nn.MixerBlock(TOKENS, CHANNELS),
    "ResMlpBlock": lambda: allmlp.nn.ResMlpBlock(TOKENS, CHANNELS),
    "GMlpBlock": lambda: allmlp.nn.GMlpBlock(TOKENS, CHANNELS),
    "aMLP's block": lambda: allmlp.nn.GMlpBlock(TOKENS, CHANNELS, attention=4),
    "TransformerBlock": lambda: allmlp.nn.TransformerBlock(CHANNELS, 3),
    "Block": lambda: allmlp.nn.Block(allmlp.Block(norm=LayerNorm()), TOKENS, CHANNELS),
}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.1.lstm")  # torch's own LSTM
@pytest.mark.parametrize("name", LAYERS)
def test_layers_live_in_other_peoples_networks(name: str, x: torch.Tensor) -> None:
    """nn.Sequential, deepcopy, pickle, functional_call, export and a training step, all with the input alone."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    network = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), layer)
    expected = network(x)
    assert expected.shape[:2] == x.shape[:2]
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
    called = torch.func.functional_call(network, dict(network.named_parameters()), (x,))
    torch.testing.assert_close(called, expected, rtol=0, atol=0)
    torch.testing.assert_close(torch.export.export(network, (x,)).module()(x), expected)
    expected.square().mean().backward()
    assert all(weight.grad is not None for weight in network.parameters())


@pytest.mark.slow
def test_a_network_of_layers_compiles(x: torch.Tensor) -> None:
    network = nn.Sequential(*(LAYERS[name]() for name in ("MixerBlock", "ResMlpBlock", "GMlpBlock")))
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), network(x))


def blocks() -> dict[str, tuple[BlockLayer, nn.Module]]:
    """A block of each family as the models have it, and on its own."""
    own = allmlp.nn
    pairs = {
        "mixer": (mixer(1, CHANNELS, 8, img_size=32), own.MixerBlock(TOKENS, CHANNELS)),
        "resmlp": (resmlp(1, CHANNELS, 0.1, 8, img_size=32), own.ResMlpBlock(TOKENS, CHANNELS)),
        "gmlp": (gmlp(1, CHANNELS, 8, img_size=32), own.GMlpBlock(TOKENS, CHANNELS)),
        "gmlp text": (
            gmlp_text(1, CHANNELS, 24, TOKENS, 50, causal=True),
            own.GMlpBlock(TOKENS, CHANNELS, 24, causal=True, toeplitz=True),
        ),
        "amlp": (
            gmlp_text(1, CHANNELS, 24, TOKENS, 50, attention=allmlp.layers.TinyAttention(4)),
            own.GMlpBlock(TOKENS, CHANNELS, 24, toeplitz=True, attention=4),
        ),
        "vit": (vit(1, CHANNELS, 3, 8, img_size=32), own.TransformerBlock(CHANNELS, 3)),
    }
    return {name: (spec.build().blocks[0], block) for name, (spec, block) in pairs.items()}


@pytest.mark.parametrize("name", ["mixer", "resmlp", "gmlp", "gmlp text", "amlp", "vit"])
def test_a_block_is_the_one_in_the_models(name: str, x: torch.Tensor) -> None:
    """The same parameter names, the same equation, the same initialization, with and without a mask."""
    torch.manual_seed(0)
    inside, alone = blocks()[name]
    for (key, weight), (other_key, other) in zip(inside.named_parameters(), alone.named_parameters(), strict=True):
        assert key == other_key and weight.shape == other.shape
        if weight.numel() > 100:
            assert other.std().item() == pytest.approx(weight.std().item(), rel=0.25), key
    alone.load_state_dict(inside.state_dict())
    mask = torch.arange(TOKENS)[None] < torch.tensor([[TOKENS], [9]])
    torch.testing.assert_close(alone(x), inside(x, Context()), rtol=0, atol=0)
    if name != "vit":
        torch.testing.assert_close(alone(x, mask), inside(x, Context(mask)), rtol=0, atol=0)


def test_token_mixers_are_those_in_the_models(x: torch.Tensor) -> None:
    """With the defaults of a layer alone, the weights of a model give the same."""
    lstm = mixer(1, CHANNELS, 8, img_size=32).replace(block=allmlp.Block(TokenLstm()))
    pairs = {
        "TokenMlp": (mixer(1, CHANNELS, 8, img_size=32), allmlp.nn.TokenMlp(TOKENS, CHANNELS // 2)),
        "TokenCycle": (cyclemlp((1,), (CHANNELS,), (4,), img_size=16), LAYERS["TokenCycle"]()),
        "TokenLstm": (lstm, LAYERS["TokenLstm"]()),
    }
    for name, (spec, alone) in pairs.items():
        torch.manual_seed(0)
        inside = spec.build().blocks[0].token.mix
        for key, weight in alone.named_parameters():
            if weight.numel() > 100:
                assert weight.std().item() == pytest.approx(inside.get_parameter(key).std().item(), rel=0.25), key
        alone.load_state_dict(inside.state_dict())
        torch.testing.assert_close(alone(100 * x), inside(100 * x, Context()), rtol=0, atol=0, msg=name)


def test_the_gating_unit_is_the_papers_equation(x: torch.Tensor) -> None:
    """gMLP, eq. 4: Z1 * (W norm(Z2) + b), W near 0 and b one, so that it starts as Z1."""
    unit = allmlp.nn.SpatialGatingUnit(TOKENS, CHANNELS).double()
    z = x.double()
    z1, z2 = z.chunk(2, dim=-1)
    torch.testing.assert_close(unit(z), z1, atol=1e-4, rtol=1e-4)
    nn.init.normal_(unit.proj.weight)
    normed = (z2 - z2.mean(-1, keepdim=True)) / (z2.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    gate = torch.einsum("ij,bjc->bic", unit.proj.weight, normed) + unit.proj.bias[:, None]
    torch.testing.assert_close(unit(z), z1 * gate)


def test_padding_is_not_read(x: torch.Tensor) -> None:
    mask = torch.arange(TOKENS)[None] < torch.tensor([[9], [9]])
    for name in ("TokenMlp", "TokenLinear", "TokenConv", "Attention"):
        layer, other = LAYERS[name](), x.clone()
        other[:, 9:] = 7.0
        torch.testing.assert_close(layer(x, mask)[:, :9], layer(other, mask)[:, :9])


def test_stems() -> None:
    images, ids = torch.rand(2, 3, 32, 48), torch.randint(50, (2, 10))
    stem = allmlp.nn.PatchEmbed((32, 48), 8, 12)
    torch.testing.assert_close(stem(images)[:, 1], images[:, :, :8, 8:16].flatten(1) @ stem.proj.weight.T)
    assert allmlp.nn.TokenEmbed(50, 16, 12)(ids).shape == (2, 10, 12)
    assert stem(images).shape == (2, 24, 12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: allmlp.nn.SpatialGatingUnit(16, 7), "even number of hidden channels, not 7"),
        (lambda: allmlp.nn.Attention(10, 3), "num_heads must divide them"),
        (lambda: allmlp.nn.TransformerBlock(10, 3), "num_heads must divide them"),
        (lambda: allmlp.nn.PatchEmbed(30, 16, 8), "does not divide"),
    ],
)
def test_sizes_that_do_not_fit(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("toeplitz", [False, True])
def test_more_tokens_than_a_layer_has_weights_for(toeplitz: bool) -> None:
    layers = allmlp.nn.TokenLinear(8, toeplitz=toeplitz), allmlp.nn.SpatialGatingUnit(8, 6, toeplitz=toeplitz)
    for layer in (*layers, allmlp.nn.TokenMlp(8, 4), allmlp.nn.GMlpBlock(8, 6)):
        assert layer(torch.rand(1, 7, 6)).shape[1] == 7
        with pytest.raises(UserError, match="built for at most 8 tokens, got 9"):
            layer(torch.rand(1, 9, 6))


def test_every_public_layer_is_tried_here() -> None:
    tried = {name.split()[0] for name in LAYERS} | {"PatchEmbed", "TokenEmbed"}
    assert tried >= set(allmlp.nn.__all__)


def test_attention_refuses_a_mask_of_numbers() -> None:
    """As numbers a mask would be added to the scores."""
    x, mask = torch.randn(1, 5, CHANNELS), torch.tensor([[1, 1, 1, 0, 0]])
    for layer in (allmlp.nn.Attention(CHANNELS, 3), allmlp.nn.SpatialGatingUnit(TOKENS, CHANNELS)):
        with pytest.raises(UserError, match=r"the mask must be bool, .* not float32: pass mask.bool\(\)"):
            layer(x, mask.float())
        with pytest.raises(UserError, match=r"the mask \[1, 4\] does not match the tokens \[1, 5, 12\]"):
            layer(x, mask.bool()[:, 1:])


@pytest.mark.parametrize("kind", [allmlp.nn.TokenConv, allmlp.nn.TokenCycle])
def test_a_layer_over_a_grid_names_it(kind: type[nn.Module]) -> None:
    with pytest.raises(UserError, match="grid of 4x4 tokens, got 9 tokens"):
        kind((4, 4), CHANNELS)(torch.randn(1, 9, CHANNELS))


def test_rotary_positions_need_heads_of_an_even_size() -> None:
    with pytest.raises(UserError, match="heads of an even size, not 3"):
        allmlp.nn.Attention(9, 3, rope_theta=1e4)
