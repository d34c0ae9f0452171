"""Low-rank adapters: the equation, what is trained, and that the saved model is an ordinary one."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter

import allmlp
from allmlp import checkpoint, compilation
from allmlp.layers import BatchNorm
from allmlp.lora import Lora, linear_maps, merge
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.models.grid import make_dynamic
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit
from allmlp.optim import AdamW, Muon
from allmlp.quantization import Quantization
from allmlp.run import Run
from allmlp.training import train
from allmlp.weights.pruning import prune
from train.runs import small
from train.test_train import losses, same_weights, train_interrupted

IMAGES = {"img_size": 8, "patch_size": 4, "num_classes": 3}
MODELS = {
    "resmlp": resmlp(2, 16, 0.1, **IMAGES),
    "mixer": mixer(2, 16, **IMAGES),
    "gmlp": gmlp(2, 16, **IMAGES),
    "attention": vit(2, 16, 2, **IMAGES),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("trained")
    train(small(), out, "cpu")
    return str(out)


def adapting(trained: str, **changes: Any) -> Run:
    return small(model=None, init_from=trained, lora=Lora(rank=2), ema_decay=0.9, **changes)


def randomize(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("lora_b"):
                weight.normal_(generator=torch.Generator().manual_seed(len(name)))


CHANGES: dict[str, Callable[[Any], object]] = {
    "resize": lambda model: allmlp.resize_model(model, img_size=16),
    "any size": make_dynamic,
    "prune": lambda model: prune(model, 0.5),
    "adapt again": Lora(rank=2).apply,
    "quantize": Quantization().apply,
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_are_merged_before_other_changes(change: str) -> None:
    model = MODELS["mixer"].build()
    Lora(rank=2).apply(model)
    with pytest.raises(allmlp.UserError, match="has LoRA adapters: merge them into its weights first"):
        CHANGES[change](model)
    merge(model)
    CHANGES[change](model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("maps", ["all", "channel", "token"])
def test_the_equation(name: str, maps: Any) -> None:
    """Y = W X + (alpha / r) B A X for every adapted map: at first the output of the model, merged the same output."""
    model = allmlp.create(MODELS[name]).double().eval()
    if maps == "token" and name == "attention":
        with pytest.raises(allmlp.UserError, match="no linear maps"):
            Lora(maps=maps).apply(model)
        return
    x = torch.rand(2, *model.dummy_inputs()[0].shape[1:], dtype=torch.float64)
    before, plain = model.forward_features(x), {name: weight.clone() for name, weight in model.state_dict().items()}
    Lora(rank=3, alpha=6, maps=maps).apply(model)
    torch.testing.assert_close(model.forward_features(x), before, rtol=1e-13, atol=1e-13)
    randomize(model)
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and hasattr(module, "lora_a"):
            tokens = torch.rand(5, module.in_features, dtype=torch.float64)
            change = tokens @ module.lora_a.T @ module.lora_b.T
            expected = tokens @ plain[f"{path}.weight"].T + 2 * change + (0 if module.bias is None else module.bias)
            torch.testing.assert_close(module(tokens), expected)
    changed = model.forward_features(x)
    assert not torch.allclose(changed, before)
    merge(model)
    torch.testing.assert_close(model.forward_features(x), changed)
    assert model.state_dict().keys() == plain.keys()
    assert {type(module) for module in model.modules()} == {type(m) for m in allmlp.create(MODELS[name]).modules()}


def test_which_maps_have_adapters() -> None:
    """Matrices over tokens and over channels, none in the head, no Toeplitz vectors; they and the head train."""
    model = allmlp.create(MODELS["gmlp"])
    kinds = {maps: len([*linear_maps(model, maps)]) for maps in ("all", "token", "channel")}
    assert kinds["token"] == 2 and kinds["all"] == kinds["token"] + kinds["channel"]
    Lora(rank=2).apply(model)
    names = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(name.endswith(("lora_a", "lora_b")) or name.startswith("head.") for name in names)
    assert {"head.weight", "head.bias"} <= {name.replace("head.proj.", "head.") for name in names}
    assert not any(name.startswith("head.") and "lora" in name for name in names)
    text = allmlp.create(gmlp_text(1, 16, 32, vocab_size=50, seq_len=8))
    assert not [*linear_maps(text, "token")]


@pytest.mark.slow
@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), Muon(lr=1e-2)], ids=lambda optim: type(optim).__name__)
def test_a_run_trains_adapters_and_head_and_saves_an_ordinary_model(
    optim: Any, trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = train(adapting(trained, optim=optim), tmp_path, "cpu")
    start, end = (load_file(Path(folder) / "model.safetensors") for folder in (trained, tmp_path))
    assert start.keys() == end.keys()
    for name, weight in start.items():
        mapped = weight.dim() == 2 and not name.startswith("head.")
        assert torch.equal(weight, end[name]) == (not mapped and not name.startswith("head.")), name
        if mapped:
            assert torch.linalg.matrix_rank(end[name].double() - weight.double(), rtol=1e-4) <= 2, name
    states = load_file(checkpoint.complete(tmp_path)[-1] / "optimizer.safetensors")
    assert all("lora_" in name or ".head." in name for name in states)
    record = json.loads((tmp_path / "run.json").read_text())["result"]
    model = allmlp.load(tmp_path)
    assert record["parameters"] == sum(weight.numel() for weight in model.parameters())
    Lora(rank=2).apply(model)
    expected = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert record["trained_parameters"] == expected < record["parameters"]
    assert f"{record['parameters']:,} parameters ({expected:,} trained)" in capsys.readouterr().err
    again = allmlp.training.evaluate_checkpoint(tmp_path, "cpu")
    assert again["loss"] == pytest.approx(results["loss"], rel=1e-4)


def test_resuming_is_exact(trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = adapting(trained, val_size=16, keep_best=True)
    train(run, tmp_path / "whole", "cpu")
    train_interrupted(run, tmp_path / "parts", monkeypatch)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_blocks_share_one_graph(trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled with adapters: the losses of the eager run, and no more graphs than without."""
    frames = {}
    for name, lora in (("plain", None), ("lora", Lora(rank=2))):
        counter = CompileCounter()
        monkeypatch.setattr(compilation, "BACKEND", counter)
        run = adapting(trained).replace(lora=lora)
        train(run.replace(compile=True), tmp_path / f"{name} compiled", "cpu")
        train(run, tmp_path / name, "cpu")
        frames[name] = counter.frame_count
        compiled, eager = losses(tmp_path / f"{name} compiled"), losses(tmp_path / name)
        assert compiled == pytest.approx(eager, rel=1e-4)
    assert frames["lora"] == frames["plain"]


def test_what_it_needs(trained: str, tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="lora adapts a trained model"):
        train(small(lora=Lora()), tmp_path, "cpu")
    with pytest.raises(allmlp.UserError, match=r"lora.rank=33 is above the rank of every map, at most 16"):
        train(adapting(trained).replace(lora=Lora(rank=33)), tmp_path, "cpu")
    with pytest.raises(allmlp.UserError, match="lora is not for sharding=fsdp"):
        adapting(trained, sharding="fsdp")


def test_frozen_batch_norm_keeps_its_statistics(tmp_path: Path) -> None:
    spec = small().model
    assert isinstance(spec, Encoder)
    model = spec.replace(block=spec.block.replace(norm=BatchNorm()), norm=BatchNorm())
    train(small(model=model), tmp_path / "start", "cpu")
    before = load_file(tmp_path / "start" / "model.safetensors")
    norms = {name: tensor for name, tensor in before.items() if "running_" in name or name.endswith("batches_tracked")}
    assert norms
    train(adapting(str(tmp_path / "start")), tmp_path / "adapted", "cpu")
    after = load_file(tmp_path / "adapted" / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in norms.items())
    assert not torch.equal(after["head.proj.weight"], before["head.proj.weight"])


def test_frozen_batch_norm_is_in_evaluation_mode_until_the_merge() -> None:
    spec = MODELS["resmlp"]
    model = allmlp.create(spec.replace(block=spec.block.replace(norm=BatchNorm()))).train()
    kinds = [type(module) for module in model.modules()]
    fresh = "blocks.1.token.norm.weight"
    Lora(rank=2).apply(model, fresh=[fresh])
    model = pickle.loads(pickle.dumps(copy.deepcopy(model))).train()
    modes = {
        name: module.training for name, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm1d)
    }
    assert {name for name, training in modes.items() if training} == {fresh.removesuffix(".weight")} and len(modes) > 1
    merge(model)
    assert [type(module) for module in model.modules()] == kinds
    assert all(module.training for module in model.modules())
