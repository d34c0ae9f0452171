"""Token-mixing weights: frequencies, opposing pairs, direction and reach against known values."""

from __future__ import annotations

import math

import pytest
import torch

import allmlp
from allmlp.analysis.toeplitz import mean_filter
from allmlp.analysis.token_filters import (
    TokenWeights,
    center_patches,
    direction,
    evenly_spaced,
    frequencies,
    opposing_pairs,
    reach,
    token_weights,
)
from allmlp.layers import Toeplitz
from allmlp.layers.mixers.mlp import TokenMlpLayer
from tiny import TINY_SPECS, tiny_model


def cosine(cycles: int, size: int) -> torch.Tensor:
    """Half a cycle more with each number: an even mirror image continues it without a jump."""
    return torch.cos(math.pi * cycles * (torch.arange(size) + 0.5) / size)


def test_the_frequency_of_a_cosine_is_its_own() -> None:
    for cycles in range(8):
        across = cosine(cycles, 8).expand(6, 8)
        down = cosine(cycles % 6, 6)[:, None].expand(6, 8)
        found = frequencies(torch.stack([across, down, across * down]))
        x, y = cycles / 16, cycles % 6 / 12
        assert found.tolist() == pytest.approx([x, y, math.hypot(x, y)], abs=1e-6)
    line = frequencies(cosine(3, 12).view(1, 1, 12))
    assert line.item() == pytest.approx(3 / 24)
    assert frequencies(torch.zeros(1, 4, 4)).item() == 0.0


def test_units_of_a_mixer_come_out_in_pairs_from_low_to_high() -> None:
    """A Mixer whose hidden units are cosines and their negatives, shuffled."""
    side = 8
    waves = [cosine(k, side).repeat(side) for k in range(side)]
    waves += [cosine(k, side).repeat_interleave(side) * cosine(side - 1, side).repeat(side) for k in range(1, side)]
    units = torch.stack([wave * sign for wave in waves for sign in (1.0, -0.5)])
    shuffled = torch.randperm(len(units))
    model = allmlp.create("mixer_nano", overrides={"block.token.hidden": len(units), "depth": 1})
    (layer,) = (module for module in model.modules() if isinstance(module, TokenMlpLayer))
    with torch.no_grad():
        layer.up.weight.copy_(units[shuffled])
    (found,) = token_weights(model)
    assert found.grid == (side, side)
    pairs = opposing_pairs(found)
    assert [tuple(sorted(shuffled[list(pair.units)].tolist())) for pair in pairs] == [
        (2 * k, 2 * k + 1) for k in range(len(waves))
    ]
    assert all(pair.cosine == pytest.approx(-1.0) for pair in pairs)
    assert [pair.frequency for pair in pairs] == sorted(pair.frequency for pair in pairs)
    assert pairs[1].frequency == pytest.approx(1 / (2 * side))


def test_an_odd_unit_is_alone() -> None:
    weight = torch.stack([cosine(1, 9), -cosine(1, 9), cosine(5, 9)])
    pairs = opposing_pairs(TokenWeights("up", "units", weight))
    assert [pair.units for pair in pairs] == [(0, 1), (2,)] and pairs[1].cosine is None


def line(ahead: float, behind: float, own: float = 0.0, size: int = 9) -> torch.Tensor:
    """A filter with this energy at later tokens, earlier tokens and the token itself."""
    weights = torch.zeros(2 * size - 1)
    weights[size - 1] = math.sqrt(own)
    weights[size : size + 3] = math.sqrt(ahead / 3)
    weights[size - 4 : size - 1] = -math.sqrt(behind / 3)
    return weights


@pytest.mark.parametrize(
    ("ahead", "behind", "own", "kind"),
    [
        (1.0, 0.0, 0.0, "forward"),
        (0.0, 1.0, 5.0, "backward"),
        (0.76, 0.24, 1.0, "forward"),
        (0.24, 0.76, 1.0, "backward"),
        (0.74, 0.26, 0.0, "two-sided"),
        (0.5, 0.5, 0.0, "two-sided"),
        (0.04, 0.0, 1.0, "own token"),
        (0.06, 0.0, 0.94, "forward"),
    ],
)
def test_the_direction_of_a_filter(ahead: float, behind: float, own: float, kind: str) -> None:
    found, fraction = direction(line(ahead, behind, own))
    assert found == kind and fraction == pytest.approx(ahead / (ahead + behind), abs=1e-6)
    matrix = Toeplitz().matrix(line(ahead, behind, own), 0, 9, False)
    assert direction(mean_filter(matrix))[0] == kind
    assert direction(mean_filter(matrix.T))[0] == {"forward": "backward", "backward": "forward"}.get(kind, kind)


def test_a_zero_filter_has_no_direction() -> None:
    assert direction(torch.zeros(5)) == ("own token", None)


def test_row_i_of_a_matrix_reads_ahead_where_the_filter_is_forward() -> None:
    """The sign of an offset: a shift matrix whose token i reads token i + 2."""
    matrix = torch.diag(torch.ones(6), 2)
    assert torch.equal(matrix @ torch.arange(8.0), torch.tensor([2.0, 3, 4, 5, 6, 7, 0, 0]))
    assert direction(mean_filter(matrix)) == ("forward", 1.0)
    assert reach(matrix) == pytest.approx(2.0)


def test_reach_on_a_grid_is_euclidean() -> None:
    matrix = torch.zeros(12, 12)
    matrix[0, 4 * 1 + 3] = 2.0  # from the corner one row down and three columns right
    matrix[5, 5] = 1.0
    assert reach(matrix, (3, 4)) == pytest.approx((4 * math.hypot(1, 3) + 0) / 5)
    assert reach(torch.zeros(4, 4)) is None


def test_causal_models_read_earlier_tokens_only() -> None:
    for one in token_weights(tiny_model("gmlp_causal_tiny")):
        assert one.causal and direction(mean_filter(one.weight))[:1] in (("backward",), ("own token",))


@pytest.mark.parametrize(
    ("name", "kind", "rows", "inputs"),
    [
        ("mixer_s32", "units", 10, 12),
        ("resmlp_s12", "matrix", 12, 12),
        ("gmlp_ti16", "matrix", 12, 12),
        ("gmlp_l18", "matrix", 12, 12),
        ("resmlp_s12_dw", "kernels", 16, 3),
        ("resmlp_s12_conv", "kernels", 256, 3),
    ],
)
def test_what_mixes_tokens(name: str, kind: str, rows: int, inputs: int) -> None:
    model = tiny_model(name)
    found = list(token_weights(model))
    assert len(found) == 2 and {one.kind for one in found} == {kind}
    assert all(one.weight.shape[:2] == (rows, inputs) for one in found)
    assert all(one.maps.shape[1:] == ((3, 4) if one.grid else one.maps.shape[1:]) for one in found)


def test_the_weights_are_the_models_own() -> None:
    model = tiny_model("mixer_s32")
    state = model.state_dict()
    for one in token_weights(model):
        assert torch.equal(one.weight, state[f"{one.name}.up.weight"])
    seq2seq = list(token_weights(tiny_model("resmlp_seq2seq_6")))
    assert [one.causal for one in seq2seq] == [False, False, True, True]
    assert all(torch.equal(one.weight, one.weight.tril()) == one.causal for one in seq2seq)


def test_class_mlp_has_a_row_over_the_patches() -> None:
    model = tiny_model("resmlp_s12_class")
    rows = [one for one in token_weights(model) if one.kind == "class row"]
    assert len(rows) == 2 and all(one.maps.shape == (1, 3, 4) for one in rows)
    for one in rows:  # the class token comes first
        assert torch.equal(one.weight, model.state_dict()[f"{one.name}.mix.weight"][:, 1:])


@pytest.mark.parametrize("name", ["vit_ti16", "bert_base", "resmlp_s12_none"])
def test_attention_has_no_fixed_weights(name: str) -> None:
    assert name in TINY_SPECS and not list(token_weights(tiny_model(name)))


def test_center_patches_and_even_spacing() -> None:
    assert (
        center_patches((14, 14))[:7] == [4 * 14 + 4 + i for i in range(6)] + [5 * 14 + 4]
        and len(center_patches((14, 14))) == 36
    )
    assert center_patches((2, 8)) == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14]
    assert evenly_spaced(5, 9) == [0, 1, 2, 3, 4] and evenly_spaced(100, 3) == [0, 50, 99]
