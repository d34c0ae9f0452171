"""What the papers claim of their layers and models, measured: docs/guides/properties.md."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
import properties
from allmlp.analysis.target import AnalysisTarget, default_preprocessing
from allmlp.layers import (
    Attention,
    ChannelMlp,
    Context,
    Init,
    MeanPool,
    Normal,
    SpatialGatingUnit,
    TinyAttention,
    Toeplitz,
    TokenConv,
    TokenLinear,
    TokenLstm,
    TokenMlp,
)
from allmlp.layers.channel import ChannelMixer
from allmlp.layers.context import BuildContext
from allmlp.layers.mixers.mixer import TokenMixer
from tiny import TINY_SPECS, randomize, tiny_model

ROOT = Path(__file__).parents[1]
CTX = BuildContext(tokens=6, channels=8, init=Init(), grid=(2, 3))
RECORD: dict[str, Any] = json.loads((ROOT / "docs" / "logs" / "properties.json").read_text(encoding="utf8"))


# --- permutation equivariance ------------------------------------------------------------------------------------

SETS = [Attention(2), Attention(4, num_kv_heads=2), ChannelMlp(12), ChannelMlp(12, "silu", glu=True)]
SEQUENCES = [
    TokenLinear(),
    TokenLinear(Toeplitz()),
    TokenMlp(5),
    TokenConv("depthwise"),
    TokenLstm(),
    Attention(2, causal=True),
    ChannelMlp(12, inner=SpatialGatingUnit("split")),
    ChannelMlp(12, inner=SpatialGatingUnit("split", attention=TinyAttention(4))),
]


def moved(spec: TokenMixer | ChannelMixer) -> float:
    """|f(PX) - P f(X)| / |f(X)| for a permutation P of the tokens."""
    layer = spec.build(CTX).double()
    randomize(layer.requires_grad_(False))
    x, order = torch.randn(3, 6, 8, dtype=torch.float64), torch.tensor([3, 0, 5, 1, 4, 2])
    y = layer(x, Context())
    return float((layer(x[:, order], Context()) - y[:, order]).norm() / y.norm())


@pytest.mark.parametrize("spec", SETS, ids=repr)
def test_attention_and_the_channel_mlp_are_permutation_equivariant(spec: TokenMixer | ChannelMixer) -> None:
    assert moved(spec) < 1e-12


@pytest.mark.parametrize("spec", SEQUENCES, ids=repr)
def test_token_mixing_depends_on_the_order(spec: TokenMixer | ChannelMixer) -> None:
    assert moved(spec) > 0.01


@pytest.mark.parametrize(
    ("name", "positions", "is_set"),
    [("bert_base", False, True), ("bert_base", True, False), ("mixer_mlm", False, False)],
)
def test_a_transformer_needs_positions_and_a_mixer_does_not(name: str, positions: bool, is_set: bool) -> None:
    """Pooled features of a text and of the same words in another order."""
    spec = TINY_SPECS[name].replace(head=None, pool=MeanPool())
    spec = spec if positions else spec.replace(stem=spec.stem.replace(positions=None))
    model = spec.build().double().eval()
    randomize(model)
    (ids,) = model.dummy_inputs(2)
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(1))
    assert torch.allclose(model(ids), model(ids[:, order])) == is_set


def test_the_example_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.spec_from_file_location("permutation", ROOT / "examples" / "permutation.py")
    assert found is not None and found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    sizes = example.main()
    equivariant = {name for name, size in sizes.items() if size < 1e-9}
    assert (
        equivariant == {"channel MLP", "self-attention"}
        and min(set(sizes.values()) - {sizes[n] for n in equivariant}) > 0.01
    )
    assert capsys.readouterr().out.count("does not know the order") == 2


# --- the gate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gmlp_ti16", "gmlp_l18"])
def test_gmlp_starts_as_a_plain_channel_mlp(name: str) -> None:
    """At initialization no token acts on another, and the gate multiplies by one; noise in its weights ends both."""
    model = allmlp.create(TINY_SPECS[name], seed=0).double().eval()
    x = torch.randn(2, model.spec.build_contexts[0].tokens, 16, dtype=torch.float64)
    block = model.blocks[0].channel
    assert properties.from_others(properties.token_influence(block, x)) < 1e-9
    z = torch.randn(2, x.shape[1], 24, dtype=torch.float64)
    assert torch.allclose(block.mix.inner(z, x, Context()), z[..., :12], atol=1e-4)
    assert properties.from_others(properties.token_influence(tiny_model(name).blocks[0].channel, x)) > 0.01


def test_influence_is_the_jacobian() -> None:
    model = tiny_model("resmlp_s12")
    residual, x = model.blocks[0].token, torch.randn(1, 12, 16, dtype=torch.float64)
    probe = torch.randn(1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))[0]
    found = properties.token_influence(residual, x)
    jacobian = torch.autograd.functional.jacobian(lambda x: residual.branch(residual.norm(x), Context())[0] @ probe, x)
    assert torch.allclose(found, jacobian[:, 0].norm(dim=-1))


def test_orders_of_known_polynomials() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    sizes = properties.order_sizes(lambda x: 2 * x + x**4, x)
    expected = torch.stack([2 * x, x**4]).flatten(1).norm(dim=1)
    assert [sizes[1], sizes[4]] == pytest.approx((expected / expected.max()).tolist(), rel=1e-9)
    assert max(sizes[k] for k in (0, 2, 3, 5, 6)) < 1e-9


def test_the_gate_is_of_second_order_and_attention_of_third() -> None:
    sizes = properties.orders()
    assert sizes["spatial gate"][2] == 1 and max(sizes["spatial gate"][3:]) < 1e-9
    product = sizes["attention without softmax"]
    assert product[3] == 1 and max(product[k] for k in (0, 1, 2, 4, 5, 6)) < 1e-9
    # The softmax adds a first order, the mean of the values, and odd ones above the third.
    assert sizes["attention"][3] > 0.01 and max(sizes["attention"][k] for k in (0, 2, 4, 6)) < 1e-9


def test_a_gate_with_its_norm_is_still_a_product_of_two_tokens() -> None:
    """The second mixed difference over two tokens, one in each half, is not zero; over three tokens the third is."""
    ctx = BuildContext(5, 8, Init(Normal(0.5)))
    gate = SpatialGatingUnit("split", norm=None, init=Init(Normal(0.5), Normal(0.5))).build(ctx, 8).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    steps = torch.zeros(3, 1, 5, 8, dtype=torch.float64)
    for token in range(3):
        steps[token, 0, token] = torch.randn(8, dtype=torch.float64)

    def mixed(count: int) -> float:
        total = torch.zeros_like(gate(x, x, Context()))
        for corner in range(2**count):
            chosen = [number for number in range(count) if corner >> number & 1]
            total += (-1) ** (count - len(chosen)) * gate(x + sum(steps[n] for n in chosen), x, Context())
        return total.norm().item()

    assert mixed(2) > 0.1 and mixed(3) < 1e-12


# --- trained models ------------------------------------------------------------------------------------------------


def test_the_record_is_what_the_bundled_models_give() -> None:
    filters, known = properties.filters(), RECORD["filters"]
    assert filters["ahead"] == pytest.approx(known["ahead"])
    assert {**filters, "ahead": known["ahead"]} == known
    assert set(RECORD["filters"]["count"]) == {"forward", "backward", "two-sided"}
    for name in ("cifar10", "image"):
        own = [
            properties.reach(one.weight, one.grid) for one in properties.token_weights(properties.bundled(name).model)
        ]
        assert own == pytest.approx(RECORD["reach"]["reach"][f"gMLP, {name}"])


@pytest.mark.parametrize("name", ["gMLP, cifar10", "gMLP, image"])
def test_deeper_layers_of_the_bundled_gmlps_look_farther(name: str) -> None:
    """Rank correlation of reach and depth, and the last third against the first."""
    reach = torch.tensor(RECORD["reach"]["reach"][name])
    ranks = reach.argsort().argsort().double()
    assert torch.corrcoef(torch.stack([ranks, torch.arange(len(ranks)).double()]))[0, 1] > 0.5
    third = len(reach) // 3
    assert reach[-third:].mean() > 1.5 * reach[:third].mean()


def test_token_weights_of_the_bundled_models_are_sparser_than_channel_weights() -> None:
    for name in ("gMLP, cifar10", "gMLP, image", "aMLP, text"):
        assert RECORD["sparsity"][name]["token"] > RECORD["sparsity"][name]["channel"] + 0.1
    own = RECORD["sparsity"]["ResMLP, digits"]  # the page says that it does not hold there
    assert own["token"] < own["channel"]


def test_other_models_are_added_to_the_record() -> None:
    """Their reach is that of their matrices, a Mixer's that of its gradient."""
    record: dict[str, Any] = {"reach": {"reach": {}}, "sparsity": {}}
    models = {name: tiny_model(name, torch.float32).requires_grad_(False) for name in ("resmlp_s12", "mixer_s32")}
    for name, model in models.items():
        properties.add(record, name, AnalysisTarget(name, model, True, default_preprocessing(model.spec)))
        assert set(record["sparsity"][name]) == {"token", "channel"} and len(record["reach"]["reach"][name]) == 2
    matrix = models["resmlp_s12"].blocks[0].token.mix.weight
    assert record["reach"]["reach"]["resmlp_s12"][0] == properties.reach(matrix, (3, 4))
    assert 0 < record["reach"]["reach"]["mixer_s32"][0] < 3.7


def test_tokens_get_information_from_others_after_training() -> None:
    assert max(RECORD["start"]["before"]) < 1e-8 and min(RECORD["start"]["after"]) > 0.01
    assert RECORD["start"]["digits"] == sorted(RECORD["start"]["digits"]) and RECORD["start"]["digits"][0] < 1e-8


@pytest.mark.slow
def test_padding_need_not_be_masked_after_training_with_it() -> None:
    found = properties.padding()["accuracy"]
    both = [found[f"trained {how} mask, tested {how} mask"] for how in ("with", "without")]
    assert both[1] > both[0] - 0.05 and both[1] > 0.7, found
    ids, real = properties.gray_words(properties.digits()[2])
    assert (
        (ids[~real] == properties.PAD).all()
        and ids[real].max() < properties.PAD
        and 0.1 < (~real).double().mean() < 0.3
    )
