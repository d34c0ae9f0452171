"""Optimisers against their definitions, and which parameter gets which treatment."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import allmlp
from allmlp.optim import Adagrad, AdamW, Lamb, Muon, Optim, Sgd, hidden_matrices, orthogonal, parameter_groups
from allmlp.schedule import Cosine, Flat, Linear, OneCycle

SPECS = [AdamW(lr=1e-2), Sgd(lr=0.1), Lamb(lr=0.03), Muon(lr=1e-2), Adagrad(lr=1e-2)]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_every_optimiser_learns(spec: Optim) -> None:
    model = allmlp.create("resmlp_nano", seed=0, image=8, patch=4, overrides={"depth": 2})
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    optimizer = spec.build(model)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_what_decays() -> None:
    """Neither norms, Affine, LayerScale, biases, class token nor positions."""
    for name in ("resmlp_nano", "vit_nano", "gmlp_mlm_tiny", "bert_base_rel"):
        model = allmlp.create(name, overrides={"depth": 1})
        names = {id(weight): key for key, weight in model.named_parameters()}
        groups = parameter_groups(model, AdamW(decay=0.1))
        decayed = {names[id(w)] for group in groups if group["weight_decay"] for w in group["params"]}
        spared = {names[id(w)] for group in groups if not group["weight_decay"] for w in group["params"]}
        assert decayed | spared == set(names.values())
        assert all(key.endswith("weight") and "norm" not in key and "positions" not in key for key in decayed)
        assert not any("bias" in key or "gamma" in key or "relative" in key for key in decayed)
        assert any("mix.up.weight" in key for key in decayed)


def test_layer_decay() -> None:
    model = allmlp.create("mixer_nano", overrides={"depth": 3})
    names = {id(weight): key for key, weight in model.named_parameters()}
    rates = {
        names[id(weight)]: group["lr"]
        for group in parameter_groups(model, AdamW(lr=1.0, layer_decay=0.5))
        for weight in group["params"]
    }
    assert rates["head.proj.weight"] == rates["norm.weight"] == 1.0
    assert rates["blocks.2.token.mix.up.weight"] == 0.5 and rates["blocks.0.channel.mix.up.bias"] == 0.125
    assert rates["stem.proj.weight"] == 0.0625


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    model = allmlp.create("gmlp_nano", overrides={"depth": 1})
    chosen = hidden_matrices(model)
    assert {key for key, weight in model.named_parameters() if id(weight) in chosen} == {
        "blocks.0.channel.mix.up.weight",
        "blocks.0.channel.mix.inner.proj.weight",
        "blocks.0.channel.mix.down.weight",
    }


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 6, 20), (2, 20, 6)])
def test_orthogonal(shape: tuple[int, ...]) -> None:
    """Singular values end near one, singular vectors stay."""
    matrices = torch.randn(shape, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonal(matrices, steps=5))
    assert values.min() > 0.3 and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    aligned = (left.mT @ orthogonal(matrices) @ right.mT).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(aligned.sort().values, values.sort().values, atol=1e-8)


def reference_lamb(weight: torch.Tensor, gradients: list[torch.Tensor], spec: Lamb) -> torch.Tensor:
    """You et al., algorithm 2, line by line."""
    m = v = torch.zeros_like(weight)
    for t, g in enumerate(gradients, 1):
        m = spec.beta1 * m + (1 - spec.beta1) * g
        v = spec.beta2 * v + (1 - spec.beta2) * g * g
        r = (m / (1 - spec.beta1**t)) / ((v / (1 - spec.beta2**t)).sqrt() + spec.eps) + spec.decay * weight
        weight = weight - spec.lr * weight.norm() / r.norm() * r
    return weight


def test_lamb_is_its_algorithm() -> None:
    spec = Lamb(lr=0.01, decay=0.1, clip=None)
    layer = nn.Linear(5, 4, bias=False).double()
    start, gradients = layer.weight.detach().clone(), [torch.randn(4, 5).double() for _ in range(4)]
    optimizer = spec.build(layer)
    for gradient in gradients:
        layer.weight.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(layer.weight, reference_lamb(start, gradients, spec), atol=1e-12)


def test_the_adam_inside_muon_is_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 4).double(), nn.Linear(5, 4).double()
    theirs.load_state_dict(ours.state_dict())
    spec = Muon(lr=0.01, decay=0.1, beta2=0.99)
    first, second = spec.build(ours), AdamW(lr=0.01, decay=0.1, beta2=0.99).build(theirs)
    for _ in range(4):
        for one, other in zip(ours.parameters(), theirs.parameters()):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        first.step()
        second.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-12)


def test_schedules() -> None:
    cosine = Cosine(warmup=0.2, floor=0.1)
    assert [cosine.at(p) for p in (0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0, 0.5, 1, 0.55, 0.1])
    assert [Linear(warmup=0.5).at(p) for p in (0.25, 0.5, 0.75, 1)] == pytest.approx([0.5, 1, 0.5, 0])
    assert [Flat(warmup=0.0, cooldown=0.5).at(p) for p in (0, 0.5, 0.75, 1)] == pytest.approx([1, 1, 0.5, 0])
    cycle = OneCycle(rise=0.3)
    assert [cycle.at(p) for p in (0, 0.3, 1)] == pytest.approx([0.04, 1, 4e-6])
    for schedule in (cosine, Linear(), Flat(), cycle):
        values = [schedule.at(step / 100) for step in range(101)]
        assert all(0 <= value <= 1 and math.isfinite(value) for value in values)
