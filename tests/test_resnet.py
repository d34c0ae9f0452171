"""ResNet: the same as timm's with another stem, and a model like every other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import allmlp
from allmlp import training as loop
from allmlp.models.resnet import ResNet
from tiny import randomize
from train.runs import small

SMALL = ResNet(widths=(8, 12), depths=(1, 2), img_size=(8, 8), in_chans=1, num_classes=4)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_agrees_with_timm(training: bool) -> None:
    timm = pytest.importorskip("timm")
    ours = allmlp.create("resnet18_cifar", seed=0).double()
    randomize(ours, spread=0.05)
    theirs = timm.create_model("resnet18", num_classes=10)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    theirs.double().load_state_dict(ours.state_dict())
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    gradients = []
    for model in (ours.train(training), theirs.train(training)):
        loss = model(images).square().mean()
        gradients.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert ours.describe().parameters == sum(weight.numel() for weight in theirs.parameters()) == 11_173_962


@pytest.mark.slow
def test_large_stem_agrees_with_timm() -> None:
    timm = pytest.importorskip("timm")
    ours = ResNet(img_size=(64, 64), stem="large").build().double().eval()
    randomize(ours, spread=0.05)
    theirs = timm.create_model("resnet18", num_classes=10).double().eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-9, atol=1e-12)


def test_blocks_begin_as_their_shortcuts() -> None:
    """The last norm of a block is zero, so that the features of the first stage are those of the stem."""
    model = ResNet(widths=(8,), depths=(3,), img_size=(8, 8)).build().eval()
    (images,) = model.dummy_inputs(2)
    stem = model.bn1(model.conv1(images)).relu()
    assert torch.equal(model.forward_features(images), stem.flatten(2).transpose(1, 2)) and stem.std() > 0.1


def test_trains_like_any_model(tmp_path: Path) -> None:
    run = small(model=SMALL)
    results = loop.train(run, tmp_path / "run", "cpu")
    model = allmlp.load(tmp_path / "run")
    assert loop.evaluate_checkpoint(tmp_path / "run", "cpu") == pytest.approx(results)
    (images,) = model.dummy_inputs(3)
    with torch.no_grad():
        torch.testing.assert_close(model.forward_head(model.forward_features(images)), model(images))
        assert model.set_grad_checkpointing()(images).shape == (3, 4)
        assert model.reset_classifier(7)(images).shape == (3, 7) and model.spec.num_classes == 7
        assert model.reset_classifier(0)(images).shape == (3, 12) and not model.spec.has_head
        assert model.reset_classifier(2)(images).shape == (3, 2)


def test_without_classes_it_returns_pooled_features(tmp_path: Path) -> None:
    model = allmlp.create(SMALL, num_classes=0, seed=0).eval()
    (images,) = model.dummy_inputs(3)
    assert torch.equal(model(images), model.forward_features(images).mean(1))
    assert "head" not in model.parts() and model.describe().parameters == sum(w.numel() for w in model.parameters())
    allmlp.save(model, tmp_path)
    assert torch.equal(allmlp.load(tmp_path)(images), model(images))
    assert allmlp.load(tmp_path, num_classes=5)(images).shape == (3, 5)
