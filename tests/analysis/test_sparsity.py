"""Near-zero weights, counted by hand and in models with known weights."""

from __future__ import annotations

import pytest
import torch

import allmlp
from allmlp.analysis.module_path import branch, module_path
from allmlp.analysis.sparsity import small_fraction, sparsity
from tiny import TINY_SPECS, tiny_model


def test_the_fraction_by_hand() -> None:
    weights = torch.tensor([[1.0, -0.049], [0.05, 0.0]])
    assert small_fraction(weights) == 0.5  # 0.05 itself is not below
    assert small_fraction(weights, 0.06) == 0.75
    assert small_fraction(torch.ones(3, 3)) == 0.0 and small_fraction(torch.zeros(3, 3)) == 0.0
    even = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    assert small_fraction(even) == pytest.approx(0.05, abs=1e-5)


def test_linear_against_mlp() -> None:
    """ResMLP with sparse token matrices and full channel MLPs, as the paper's figure shows."""
    model = allmlp.create("resmlp_nano")
    tokens = model.spec.stem.tokens
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("token.mix.weight"):
                weight.copy_(torch.eye(tokens))
            elif ".channel.mix." in name and name.endswith("weight"):
                weight.fill_(0.5)
    found = sparsity(model)
    inside = [one for one in found if one.block is not None]
    assert {one.kind for one in inside} == {"token", "channel"}
    for one in inside:
        assert one.fraction == pytest.approx(1 - 1 / tokens if one.kind == "token" else 0.0)
    assert [one.block for one in inside if one.kind == "token"] == list(range(model.spec.depth))


def test_only_the_lower_triangle_of_a_causal_matrix_counts() -> None:
    model = tiny_model("resmlp_seq2seq_6")
    found = {one.name: one for one in sparsity(model)}
    whole, lower = found["encoder.blocks.0.token.mix.weight"], found["decoder.blocks.0.token.mix.weight"]
    assert whole.weights == 144 and lower.weights == 78 and lower.stack == "decoder"
    with torch.no_grad():
        dict(model.named_parameters())[lower.name].copy_(torch.ones(12, 12).tril())
    assert {one.name: one for one in sparsity(model)}[lower.name].fraction == 0.0


@pytest.mark.parametrize("name", TINY_SPECS)
def test_every_matrix_is_counted_and_nothing_else(name: str) -> None:
    model = tiny_model(name)
    found = sparsity(model)
    matrices = {key for key, weight in model.named_parameters() if weight.dim() > 1}
    toeplitz = {one.name for one in found} - matrices
    assert matrices <= {one.name for one in found} and all(key.endswith("proj.weight") for key in toeplitz)
    assert all(0 <= one.fraction < 1 for one in found)


def test_kinds_of_a_separable_convolution() -> None:
    found = {one.name: one.kind for one in sparsity(tiny_model("resmlp_s12_dwsep")) if "0.token" in one.name}
    assert found == {"blocks.0.token.mix.conv.weight": "token", "blocks.0.token.mix.pointwise.weight": "channel"}


def test_kinds_of_amlp() -> None:
    kinds = {one.name.split("blocks.0.")[1]: one.kind for one in sparsity(tiny_model("amlp_base")) if one.block == 0}
    assert kinds == {
        "channel.mix.up.weight": "channel",
        "channel.mix.inner.proj.weight": "token",
        "channel.mix.inner.attention.qkv.weight": "attention",
        "channel.mix.inner.attention.out.weight": "attention",
        "channel.mix.down.weight": "channel",
    }


def test_module_paths() -> None:
    assert module_path("decoder.blocks.13.cross.mix.q") == ("decoder", 13) and module_path("blocks.2") == ("", 2)
    assert module_path("encoder.norm") == ("encoder", None) and module_path("stem.proj.weight") == ("", None)
    assert (
        branch("decoder.blocks.13.cross.mix.q") == "cross"
        and branch("pool.channels.0") == "pool"
        and not branch("stem")
    )
