"""Nearest neighbors against brute force."""

from __future__ import annotations

import pytest
import torch

from allmlp.analysis.neighbors import agreement, features, nearest_neighbors
from tiny import tiny_model


def test_the_nearest_by_brute_force() -> None:
    bank = torch.nn.functional.normalize(torch.randn(40, 6), dim=1)
    queries = torch.nn.functional.normalize(torch.randn(7, 6), dim=1)
    for query, row in zip(queries, nearest_neighbors(queries, bank, k=3)):
        angles = sorted(((float(query @ one), index) for index, one in enumerate(bank)), reverse=True)
        assert [near.index for near in row] == [index for _, index in angles[:3]]
        assert [near.cosine for near in row] == pytest.approx([value for value, _ in angles[:3]])


def test_an_image_is_not_its_own_neighbor() -> None:
    bank = torch.eye(4)
    bank[1] = bank[0]
    found = nearest_neighbors(bank, bank, k=9, query_indices=torch.arange(4))
    assert found[0][0] == (1, 1.0) and found[1][0] == (0, 1.0)
    assert all(len(row) == 3 and query not in [near.index for near in row] for query, row in enumerate(found))


def test_neighbors_below_the_smallest_cosine_are_left_out() -> None:
    angle = torch.tensor([0.0, 0.3, 1.0, 1.2])
    bank = torch.stack([angle.cos(), angle.sin()], dim=1)
    # cos 1.0 = 0.54, cos 1.2 = 0.36
    found = nearest_neighbors(bank[:1], bank, query_indices=torch.tensor([0]), min_cosine=0.5)
    assert [near.index for near in found[0]] == [1, 2]
    assert nearest_neighbors(torch.eye(3), torch.eye(3), query_indices=torch.arange(3), min_cosine=0.5) == [[], [], []]


def test_agreement_counts_the_nearest() -> None:
    angle = torch.tensor([0.0, 0.1, 1.0, 1.1, 2.0, 2.3])
    bank = torch.stack([angle.cos(), angle.sin()], dim=1)
    assert agreement(bank, torch.tensor([0, 0, 1, 1, 2, 2])) == 1.0
    assert agreement(bank, torch.tensor([0, 0, 1, 0, 2, 2])) == pytest.approx(4 / 6)


def test_features_are_pooled_and_of_norm_one() -> None:
    model = tiny_model("mixer_s32", torch.float32)
    images = torch.randn(5, 3, 6, 8)
    found = features(model, images, batch_size=2)
    with torch.no_grad():
        pooled = model.forward_features(images).mean(1)
    assert torch.allclose(found, pooled / pooled.norm(dim=1, keepdim=True), atol=1e-6)
