"""Small weights, counted by hand and in models where the answer is built in."""

from __future__ import annotations

import pytest
import torch

import allmlp
from allmlp.analysis.place import place, slot
from allmlp.analysis.sparsity import small_share, sparsity
from tiny import SENTENCES, tiny_model


def test_the_share_by_hand() -> None:
    weights = torch.tensor([[1.0, -0.049], [0.05, 0.0]])
    assert small_share(weights) == 0.5  # 0.05 itself is not below
    assert small_share(weights, 0.06) == 0.75
    assert small_share(torch.ones(3, 3)) == 0.0 and small_share(torch.zeros(3, 3)) == 0.0
    even = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    assert small_share(even) == pytest.approx(0.05, abs=1e-5)


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
    assert {one.role for one in inside} == {"token", "channel"}
    for one in inside:
        assert one.share == pytest.approx(1 - 1 / tokens if one.role == "token" else 0.0)
    assert [one.block for one in inside if one.role == "token"] == list(range(model.spec.depth))


def test_only_the_lower_triangle_of_a_causal_matrix_counts() -> None:
    model = tiny_model("resmlp_seq2seq_6")
    found = {one.name: one for one in sparsity(model)}
    whole, lower = found["encoder.blocks.0.token.mix.weight"], found["decoder.blocks.0.token.mix.weight"]
    assert whole.weights == 144 and lower.weights == 78 and lower.stack == "decoder"
    with torch.no_grad():
        dict(model.named_parameters())[lower.name].copy_(torch.ones(12, 12).tril())
    assert {one.name: one for one in sparsity(model)}[lower.name].share == 0.0


@pytest.mark.parametrize("name", SENTENCES)
def test_every_matrix_is_counted_and_nothing_else(name: str) -> None:
    model = tiny_model(name)
    found = sparsity(model)
    matrices = {key for key, weight in model.named_parameters() if weight.dim() > 1}
    toeplitz = {one.name for one in found} - matrices
    assert matrices <= {one.name for one in found} and all(key.endswith("proj.weight") for key in toeplitz)
    assert all(0 <= one.share < 1 for one in found)


def test_roles_of_amlp() -> None:
    roles = {one.name.split("blocks.0.")[1]: one.role for one in sparsity(tiny_model("amlp_base")) if one.block == 0}
    assert roles == {
        "channel.mix.up.weight": "channel",
        "channel.mix.inner.proj.weight": "token",
        "channel.mix.inner.side.qkv.weight": "attention",
        "channel.mix.inner.side.out.weight": "attention",
        "channel.mix.down.weight": "channel",
    }


def test_places() -> None:
    assert place("decoder.blocks.13.cross.mix.q") == ("decoder", 13) and place("blocks.2") == ("", 2)
    assert place("encoder.norm") == ("encoder", None) and place("stem.proj.weight") == ("", None)
    assert slot("decoder.blocks.13.cross.mix.q") == "cross" and slot("pool.channels.0") == "pool" and not slot("stem")
