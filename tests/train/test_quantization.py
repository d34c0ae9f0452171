"""Training for few bits: the equation, its gradient, the noise, and that the saved model is an ordinary one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.testing import CompileCounter

import allmlp
from allmlp import compilation
from allmlp.lora import Lora
from allmlp.models.gmlp import gmlp
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit
from allmlp.quantization import Quantization, quantized_maps, round_weights
from allmlp.training import evaluate_checkpoint, train
from train.runs import small
from train.test_train import losses, same_weights, train_interrupted

IMAGES = {"img_size": 8, "patch_size": 4, "num_classes": 3}
MODELS = {
    "resmlp": resmlp(2, 16, 0.1, **IMAGES),
    "mixer": mixer(2, 16, **IMAGES),
    "gmlp": gmlp(2, 16, **IMAGES),
    "vit": vit(2, 16, 2, **IMAGES),
}


def levels(weight: torch.Tensor) -> int:
    """The largest number of different values in a row."""
    return max(len(row.unique()) for row in weight)


def matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    names = [f"{path}.weight" for path, module in model.named_modules() if module in set(quantized_maps(model))]
    return {name: weight for name, weight in model.named_parameters() if name in names}


@pytest.mark.parametrize("name", MODELS)
def test_the_equation_and_its_gradient(name: str) -> None:
    """Evaluated, the outputs of a model with rounded weights; trained with noise=1, its gradients."""
    model, plain = (allmlp.create(MODELS[name], seed=1) for _ in range(2))
    Quantization(bits=4).apply(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    full = matrices(model)
    assert {"head.proj.weight", "stem.proj.weight"} <= full.keys() and len(full) >= 6
    with torch.no_grad():
        for path, weight in full.items():
            scale = (weight.abs().amax(1, keepdim=True) / 7).bfloat16().float()
            plain.get_parameter(path).copy_((weight / scale).nan_to_num().round().clamp(-7, 7) * scale)
    x = torch.rand(5, 3, 8, 8)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))
    for one in (model.train(), plain.train()):
        one(x).square().sum().backward()
    for (path, weight), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad, msg=path)
    before = model.eval()(x)
    round_weights(model)
    torch.testing.assert_close(model(x), before)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert all(levels(weight) <= 15 for weight in full.values())


def test_noise_rounds_whole_blocks() -> None:
    torch.manual_seed(0)
    full = torch.randn(200, 30)
    rounded = Quantization(bits=3).weight(full, training=False)
    mixed = Quantization(bits=3, noise=0.25, block_size=8).weight(full, training=True)
    changed = (mixed - full).abs() > 0
    assert ((mixed == rounded) | ~changed).all()
    blocks = [changed[:, start : start + 8] for start in range(0, 30, 8)]
    assert all((block.all(1) | ~block.any(1)).all() for block in blocks)
    assert 0.2 < torch.cat([block[:, 0] for block in blocks]).float().mean() < 0.3
    assert torch.equal(Quantization(noise=0.0).weight(full, training=True), full)
    assert torch.equal(Quantization(bits=3, noise=0.25).weight(full, training=False), rounded)


def test_a_run_saves_what_it_evaluates(tmp_path: Path) -> None:
    results = train(small(quantize=Quantization(bits=4, noise=0.5)), tmp_path / "run", "cpu")
    state = load_file(tmp_path / "run" / "model.safetensors")
    assert all(levels(weight) <= 15 for weight in state.values() if weight.ndim == 2)
    assert evaluate_checkpoint(tmp_path / "run", "cpu")["loss"] == pytest.approx(results["loss"], rel=1e-5)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["run"]["quantize"]["bits"] == 4


def test_noise_zero_is_quantization_after_training(tmp_path: Path) -> None:
    train(small(), tmp_path / "float", "cpu")
    train(small(quantize=Quantization(noise=0.0)), tmp_path / "int8", "cpu")
    assert losses(tmp_path / "float") == losses(tmp_path / "int8")
    stored = allmlp.load(tmp_path / "float")
    allmlp.save(stored, tmp_path / "stored", dtype=torch.int8)
    for name, weight in allmlp.load(tmp_path / "stored").state_dict().items():
        expected = load_file(tmp_path / "int8" / "model.safetensors")[name]
        if weight.ndim == 2:
            assert torch.equal(weight, expected), "in 8 bits, files hold the weights exactly"


def test_resuming_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(quantize=Quantization(noise=0.5), ema_decay=0.9)
    train(run, tmp_path / "whole", "cpu")
    train_interrupted(run, tmp_path / "parts", monkeypatch)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_blocks_share_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, the losses of the eager run, and no more graphs than without."""
    frames = {}
    for name, quantize in (("plain", None), ("quantized", Quantization())):
        counter = CompileCounter()
        monkeypatch.setattr(compilation, "BACKEND", counter)
        run = small(quantize=quantize)
        train(run.replace(compile=True), tmp_path / f"{name} compiled", "cpu")
        train(run, tmp_path / name, "cpu")
        frames[name] = counter.frame_count
        assert losses(tmp_path / f"{name} compiled") == pytest.approx(losses(tmp_path / name), rel=1e-4)
    assert frames["quantized"] == frames["plain"]


def test_what_it_is_not_for() -> None:
    for changes in ({"sharding": "fsdp"}, {"lora": Lora(), "model": None, "init_from": "x"}):
        with pytest.raises(allmlp.UserError, match="quantize is neither for lora nor for sharding=fsdp"):
            small(quantize=Quantization(), **changes)
