"""Optimizers against independent implementations, and which parameter is in which group."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import allmlp
from allmlp.models.timm import package as timm_package
from allmlp.optim import Adagrad, AdamW, Lamb, Muon, Optim, Sgd, hidden_matrices, orthogonalize, parameter_groups
from allmlp.schedule import CosineSchedule, InverseSqrtSchedule, LinearSchedule, StepSchedule

SPECS = [AdamW(lr=1e-2), Sgd(lr=0.1), Lamb(lr=0.03), Muon(lr=1e-2), Adagrad(lr=1e-2)]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_every_optimizer_learns(spec: Optim) -> None:
    model = allmlp.create("resmlp_nano", seed=0, img_size=8, patch_size=4, overrides={"depth": 2})
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


@pytest.mark.slow
def test_what_decays() -> None:
    """Neither norms, Affine, LayerScale, biases, class token nor positions."""
    for name in ("resmlp_nano", "vit_nano", "gmlp_mlm_tiny", "bert_base_rel"):
        model = allmlp.create(name, overrides={"depth": 1})
        names = {id(weight): key for key, weight in model.named_parameters()}
        groups = parameter_groups(model, AdamW(weight_decay=0.1))
        decayed = {names[id(w)] for group in groups if group["weight_decay"] for w in group["params"]}
        spared = {names[id(w)] for group in groups if not group["weight_decay"] for w in group["params"]}
        assert decayed | spared == set(names.values())
        assert all(key.endswith("weight") and "norm" not in key and "positions" not in key for key in decayed)
        assert not any("bias" in key or "gamma" in key or "relative" in key for key in decayed)
        assert any("mix.up.weight" in key for key in decayed)


@pytest.mark.parametrize("spec", [AdamW(lr=1.0, vector_lr_scale=4.0), Muon(lr=1.0, vector_lr_scale=4.0)], ids=repr)
def test_rate_of_one_dimensional_parameters(spec: Optim) -> None:
    """Affine, LayerScale and biases of ResMLP, and no matrix."""
    model = allmlp.create("resmlp_nano", overrides={"depth": 1})
    rates = {id(w): group["peak_lr"] for group in spec.build(model).param_groups for w in group["params"]}
    assert {name for name, weight in model.named_parameters() if rates[id(weight)] == 4.0} == {
        name for name, weight in model.named_parameters() if weight.dim() == 1
    }
    assert all(rates[id(w)] == 1.0 for w in model.parameters() if w.dim() > 1) and 4.0 in rates.values()


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


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("timm:test_vit", ["pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "norm.weight"]),
        ("timm:test_convnext", ["stem.0.weight", "stages.0.blocks.0.gamma", "stages.1.blocks.0.gamma", "head.fc.bias"]),
        ("hf:deit_ti16", ["cls_token", ".0.layernorm_before", ".11.layernorm_before", "classifier.bias"]),
        ("resnet18_cifar", ["conv1.weight", "layer1.0.", "layer1.1.", "layer4.1.", "fc.bias"]),
    ],
)
def test_layer_decay_of_other_networks(name: str, order: list[str]) -> None:
    """Their blocks have other names and numbers; the stem is the slowest, and positions are not decayed."""
    with torch.device("meta"):
        model = allmlp.preset(name).spec.build()
    names = {id(weight): key for key, weight in model.named_parameters()}
    groups = parameter_groups(model, AdamW(lr=1.0, layer_decay=0.5))
    rates = {names[id(weight)]: group["peak_lr"] for group in groups for weight in group["params"]}
    found = [next(rate for key, rate in rates.items() if part in key) for part in order]
    assert found == sorted(found) and found[0] == min(rates.values()) and found[-1] == 1.0
    levels = sorted(set(rates.values()))
    assert levels == [0.5**number for number in reversed(range(len(levels)))]
    kept = {names[id(weight)] for group in groups if not group["decays"] for weight in group["params"]}
    assert all(key in kept for key in rates if "pos_embed" in key or "position_embeddings" in key)


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    model = allmlp.create("gmlp_nano", overrides={"depth": 1})
    chosen = hidden_matrices(model)
    assert {key for key, weight in model.named_parameters() if id(weight) in chosen} == {
        "blocks.0.channel.mix.up.weight",
        "blocks.0.channel.mix.inner.proj.weight",
        "blocks.0.channel.mix.down.weight",
    }


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("hf:deit_ti16", "layers.3.mlp.fc1", "classifier.weight"),
        ("hf:patchtst", "encoder.layers.0.self_attn.q_proj.weight", "head.projection.weight"),
        ("timm:test_vit", "blocks.0.mlp.fc1.weight", "head.weight"),
        ("timm:swin_tiny_patch4_window7_224", "layers.1.blocks.0.mlp.fc1.weight", "relative_position_bias_table"),
    ],
)
def test_muon_takes_the_matrices_of_other_networks(name: str, inside: str, outside: str) -> None:
    with torch.device("meta"):
        model = allmlp.preset(name).spec.build()
    chosen = hidden_matrices(model)
    assert chosen == {
        id(weight) for group in Muon().build(model).param_groups if group["muon"] for weight in group["params"]
    }
    found = {key: id(weight) in chosen for key, weight in model.named_parameters()}
    assert [taken for key, taken in found.items() if inside in key and key.endswith("weight")] == [True]
    assert not any(taken for key, taken in found.items() if outside in key or "embed" in key)
    share = sum(weight.numel() for weight in model.parameters() if id(weight) in chosen) / sum(
        weight.numel() for weight in model.parameters()
    )
    assert share > (0.05 if name == "hf:patchtst" else 0.5)


@pytest.mark.parametrize("name", ["timm:resmlp_12_224", "timm:test_vit", "hf:deit_ti16"])
def test_vectors_of_other_networks_are_not_decayed(name: str) -> None:
    """There, Affine and class tokens are of shape (1, 1, C)."""
    with torch.device("meta"):
        model = allmlp.preset(name).spec.build()
    groups = parameter_groups(model, AdamW(lr=1.0, vector_lr_scale=4.0))
    rates = {id(weight): (group["peak_lr"], group["decays"]) for group in groups for weight in group["params"]}
    vectors = [w for key, w in model.named_parameters() if key.endswith(("alpha", "beta", "_token", "norm1.weight"))]
    assert vectors and all(rates[id(weight)] == (4.0, False) for weight in vectors)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 6, 20), (2, 20, 6)])
def test_orthogonalize(shape: tuple[int, ...]) -> None:
    """Singular values end near one, singular vectors stay."""
    matrices = torch.randn(shape, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrices, steps=5))
    assert values.min() > 0.3 and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    aligned = (left.mT @ orthogonalize(matrices) @ right.mT).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(aligned.sort().values, values.sort().values, atol=1e-8)


def random_steps(ours: nn.Module, theirs: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 4) -> None:
    """The same random gradients for both modules."""
    for _ in range(steps):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def twins(*shapes: tuple[int, int], dtype: torch.dtype = torch.float64) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Two stacks of bias-free linear layers with equal weights, named as blocks."""
    torch.manual_seed(0)
    stacks = [nn.ModuleList(nn.Linear(c, r, bias=False, dtype=dtype) for r, c in shapes) for _ in range(2)]
    stacks[1].load_state_dict(stacks[0].state_dict())
    return stacks[0], stacks[1]


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_lamb_is_timms(max_grad_norm: float | None) -> None:
    timm_package()  # registers the operators whose absence keeps timm from being imported on a CPU
    from timm.optim import Lamb as TimmLamb

    ours, theirs = twins((4, 5), (6, 3))
    spec = Lamb(lr=0.01, weight_decay=0.1, max_grad_norm=max_grad_norm)
    oracle = TimmLamb(theirs.parameters(), lr=0.01, weight_decay=0.1, eps=spec.eps, max_grad_norm=max_grad_norm)
    random_steps(ours, theirs, spec.build(ours), oracle)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-8)  # clipping adds 1e-6 to the norm in one of the two


def muon_and_torchs(steps: int = 3) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Both after a few steps, and the start."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon is not in this version of torch")
    shapes = (8, 8), (24, 8), (8, 24), (8, 8)
    ours, theirs = twins(*shapes, dtype=torch.float32)
    start = twins(*shapes, dtype=torch.float32)[0]
    ours, start = (nn.ModuleDict({"blocks": stack}) for stack in (ours, start))
    spec = Muon(lr=0.02, weight_decay=0.1)
    oracle = torch.optim.Muon(
        theirs.parameters(), lr=0.02, weight_decay=0.1, momentum=spec.momentum, adjust_lr_fn="match_rms_adamw"
    )
    random_steps(ours, theirs, spec.build(ours), oracle, steps=steps)
    return ours, theirs, start


def test_muon_is_torchs_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon iterates in bfloat16; with the cast taken away, only float32 rounding is left between them."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # torch 2.15 casts by .to()
    ours, theirs, start = muon_and_torchs()
    for one, other, begin in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        moved = (one - begin).norm()
        assert moved > 0.01 and (one - other).norm() < 1e-4 * moved


def test_muon_differs_from_torchs_by_bfloat16_rounding() -> None:
    ours, theirs, start = muon_and_torchs()
    for one, other, begin in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        assert (one - other).norm() < 0.1 * (one - begin).norm()


def test_the_adam_inside_muon_is_adamw() -> None:
    ours, theirs = twins((4, 5))
    spec = Muon(lr=0.01, weight_decay=0.1, betas=(0.9, 0.99))
    random_steps(ours, theirs, spec.build(ours), AdamW(lr=0.01, weight_decay=0.1, betas=(0.9, 0.99)).build(theirs))
    assert torch.allclose(ours[0].weight, theirs[0].weight, atol=1e-12)


def test_schedules() -> None:
    cosine = CosineSchedule(warmup_fraction=0.2, min_lr_ratio=0.1)
    assert [cosine.at(p) for p in (0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0, 0.5, 1, 0.55, 0.1])
    linear = LinearSchedule(warmup_fraction=0.5)
    assert [linear.at(p) for p in (0.25, 0.5, 0.75, 1)] == pytest.approx([0.5, 1, 0.5, 0])
    for schedule in (cosine, linear, LinearSchedule(warmup_fraction=0.0), CosineSchedule(warmup_fraction=1.0)):
        values = [schedule.at(step / 100) for step in range(101)]
        assert all(0 <= value <= 1 and math.isfinite(value) for value in values)


def test_the_schedule_of_the_transformer() -> None:
    """d^-0.5 min(t^-0.5, t w^-1.5) of Vaswani et al., relative to its peak at step w."""
    steps, warmup = 100_000, 4000
    schedule = InverseSqrtSchedule(warmup_fraction=warmup / steps)
    for step in (1, 1000, 4000, 16_000, 100_000):
        expected = min(step**-0.5, step * warmup**-1.5) / warmup**-0.5
        assert schedule.at(step / steps) == pytest.approx(expected)


def test_the_schedule_of_resnet() -> None:
    """A tenth at epochs 30, 60 and 80 of 90, after five of warm-up."""
    schedule = StepSchedule(warmup_fraction=5 / 90)
    epochs = (2.5, 5.1, 29.9, 30.1, 59.9, 60.1, 79.9, 80.1, 89.9)
    expected = (0.5, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001)
    assert [schedule.at(epoch / 90) for epoch in epochs] == pytest.approx(expected)
