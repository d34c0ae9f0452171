"""Baselines of transformers and timm: parameter counts, and the interface of this library's models."""

from __future__ import annotations

import importlib
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.models import huggingface
from allmlp.models.external import ExternalModel
from allmlp.models.timm import Timm
from allmlp.spec import from_json, to_json

pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

# Counted by the packages that released the weights.
COUNTS = {
    "hf:resnet50": 25_557_032,
    "hf:resnet152": 60_192_808,
    "hf:regnety_040": 20_646_656,
    "hf:regnety_080": 39_180_068,
    "hf:regnety_160": 83_590_140,
    "hf:efficientnet_b0": 5_288_548,
    "hf:efficientnet_b3": 12_233_232,
    "hf:efficientnet_b7": 66_347_960,
    "hf:bit_r152x4": 936_533_224,
    "hf:deit_ti16": 5_717_800,
    "hf:deit_s16": 22_051_432,
    "hf:deit_b16": 86_569_192,
    "hf:bert_base": 109_514_298,
    "hf:bert_large": 335_174_458,
    "timm:resnet50": 25_557_032,
    "timm:mixer_b16_224": 59_880_472,
}
PEERS = {f"hf:efficientnet_b{size}": f"timm:tf_efficientnet_b{size}" for size in range(8)} | {
    "hf:resnet152": "timm:resnet152",
    "hf:regnety_080": "timm:regnety_080",
    "hf:bit_r152x4": "timm:resnetv2_152x4_bit",
}


def narrow(architecture: huggingface.Architecture, **options: Any) -> huggingface.Architecture:
    return architecture._replace(options=architecture.options | options)


# A small network of every kind: options of `create`, and the shape of the features of two examples.
SMALL: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "hf:resnet_small": ({"num_classes": 10, "img_size": 64}, (2, 4, 64)),
    "hf:regnety_small": ({"num_classes": 10, "img_size": 64}, (2, 4, 64)),
    "hf:efficientnet_small": ({"num_classes": 10, "img_size": (64, 96)}, (2, 6, 320)),
    "hf:bit_small": ({"num_classes": 10, "img_size": 64}, (2, 4, 64)),
    "hf:deit_small": ({"num_classes": 10, "img_size": (64, 32), "in_chans": 1}, (2, 2 + 8, 32)),
    "hf:bert_small": ({"vocab_size": 50, "seq_len": 12}, (2, 12, 32)),
    "timm:resnet10t": ({"num_classes": 10, "img_size": 64}, (2, 4, 512)),
    "timm:vit_tiny_patch16_224": ({"num_classes": 10, "img_size": (64, 32), "in_chans": 1}, (2, 1 + 8, 192)),
    "timm:mambaout_femto": ({"num_classes": 10, "img_size": (64, 96)}, (2, 6, 288)),
}
IMAGES = [name for name in SMALL if "bert" not in name]
STAGES = {"hidden_sizes": [16, 32, 48, 64], "embedding_size": 16}
ARCHITECTURES = {
    "resnet_small": narrow(huggingface.resnet(1, 1, 1, 1), **STAGES),
    "regnety_small": huggingface.regnet_y("small", [1, 1, 1, 1], [16, 32, 48, 64], 16),
    "efficientnet_small": huggingface.efficientnet("small", 0.25, 1.0, 224, 0.2, 320),
    "bit_small": narrow(huggingface.bit(1, 1, 1, 1, 1), **STAGES, num_groups=8),
    "deit_small": narrow(huggingface.deit("tiny", 32, 2), num_hidden_layers=2),
}


@pytest.fixture(autouse=True)
def small_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks of families that have none."""
    for name, architecture in ARCHITECTURES.items():
        monkeypatch.setitem(huggingface.IMAGES, name, architecture)
    monkeypatch.setitem(huggingface.TEXTS, "bert_small", huggingface.bert(2, 32, 2))


@cache
def built(name: str) -> ExternalModel[Any]:
    package, _, member = name.partition(":")
    kind = huggingface.HuggingFaceText if member == "bert_small" else huggingface.HuggingFaceImages
    spec = kind(member) if package == "hf" else Timm(member)
    return allmlp.create(allmlp.configure(spec, **SMALL[name][0]), seed=0).eval()


def small_model(name: str) -> ExternalModel[Any]:
    """A copy: the initialization of some networks takes seconds."""
    return deepcopy(built(name))


@pytest.fixture(params=SMALL)
def model(request: pytest.FixtureRequest) -> ExternalModel[Any]:
    found = small_model(request.param)
    assert isinstance(found, ExternalModel)
    return found


def inputs(model: allmlp.Model) -> tuple[Tensor, ...]:
    return model.dummy_inputs(2)


# --- sizes ------------------------------------------------------------------------------------------


@cache
def count(name: str) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in allmlp.create(name).parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_exact_parameters(name: str) -> None:
    assert count(name) == COUNTS[name]


@pytest.mark.parametrize("name", PEERS)
def test_two_packages_agree_on_the_size(name: str) -> None:
    assert count(name) == count(PEERS[name])


def test_native_sizes_of_efficientnet() -> None:
    names = allmlp.list_models("hf:efficientnet_b*")
    sizes = [allmlp.preset(name).spec.input_spec for name in names]
    assert sizes == [f"{size}x{size} image" for size in (224, 240, 260, 300, 380, 456, 528, 600)]


def test_padding_of_efficientnet() -> None:
    """The blocks that the released configurations list."""
    listed = [[], [16], [5, 8, 16], [5, 18], [6], [13, 27], [31], [18]]
    for size, blocks in enumerate(listed):
        known = huggingface.IMAGES[f"efficientnet_b{size}"]
        assert huggingface.odd_blocks(known.img_size, known.options["depth_coefficient"]) == blocks


# --- what every model promises ----------------------------------------------------------------------


@pytest.mark.slow
def test_shapes(model: ExternalModel[Any], request: pytest.FixtureRequest) -> None:
    x = inputs(model)
    output, features = model(*x), model.forward_features(*x)
    assert output.shape == ((2, 12, 50) if output.ndim == 3 else (2, 10))
    assert features.shape == SMALL[request.node.callspec.params["model"]][1]
    assert torch.allclose(model.forward_head(features), output, atol=1e-6)


def test_wrapping_changes_nothing(model: ExternalModel[Any]) -> None:
    x = inputs(model)
    expected = model.network(*x)
    assert torch.allclose(model(*x), getattr(expected, "logits", expected), atol=1e-5)


def test_gradients_reach_every_parameter(model: ExternalModel[Any]) -> None:
    model.train()(*inputs(model)).square().mean().backward()
    assert not [key for key, weight in model.named_parameters() if weight.grad is None]
    assert next(model.parameters()).grad.abs().sum() > 0  # type: ignore[union-attr]


def test_checkpointing_changes_memory_not_gradients(model: ExternalModel[Any]) -> None:
    model.train()
    x = inputs(model)
    gradients = []
    for enable in (False, True, False):
        torch.manual_seed(0)
        model.set_grad_checkpointing(enable).zero_grad()
        model(*x).square().mean().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])  # type: ignore[union-attr]
    for other in gradients[1:]:
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(gradients[0], other))


def test_description_counts_the_model(model: ExternalModel[Any]) -> None:
    cost = model.describe()
    assert cost.parameters == sum(weight.numel() for weight in model.parameters())
    assert min(*cost.parts[0][1:], *cost.parts[-1][1:]) >= 0 and 0 < cost.head_parameters < cost.parameters
    assert 2 < len(cost.parts) < 10 and cost.macs > 0


@pytest.mark.slow
def test_json_and_folder(model: ExternalModel[Any], tmp_path: Path) -> None:
    assert from_json(to_json(model.spec)) == model.spec
    x = inputs(model)
    loaded = allmlp.load(allmlp.save(model, tmp_path))
    assert loaded.spec == model.spec and torch.equal(loaded(*x), model(*x))
    assert len(list(loaded.parameters())) == len(list(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_reset_head(name: str, tmp_path: Path) -> None:
    model = small_model(name).double()
    x = inputs(model)
    features = model.forward_features(*x)
    assert model.reset_classifier(3) is model
    assert model(*x).shape == (2, 3) and model.dtype == torch.float64
    assert torch.equal(model.forward_features(*x), features) and model.spec.num_classes == 3
    assert torch.equal(allmlp.load(allmlp.save(model, tmp_path), dtype=None)(*x), model(*x))


def test_bert_uses_masks_and_segments() -> None:
    model = small_model("hf:bert_small").double()
    (ids,) = inputs(model)
    mask = torch.arange(12).expand(2, -1) < 5
    assert torch.allclose(model(ids, mask)[:, :5], model(ids[:, :5]), atol=1e-12)
    assert not torch.allclose(model(ids, segments=torch.ones_like(ids)), model(ids))
    with pytest.raises(allmlp.UserError, match="an output per token"):
        model.reset_classifier(3)


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    """BERT's embedding is its output layer: in the file, after loading, and inside another module."""
    model = small_model("hf:bert_small")
    assert not [key for key in model.state_dict() if "decoder" in key]
    loaded = allmlp.load(allmlp.save(model, tmp_path))
    assert loaded.network.cls.predictions.decoder.weight is loaded.network.bert.embeddings.word_embeddings.weight
    outer = torch.nn.Sequential(loaded)
    assert not any(outer.load_state_dict(torch.nn.Sequential(model).state_dict()))


def test_efficientnet_is_trainable_from_its_initialization() -> None:
    """With the initialization of transformers every feature is below 1e-30."""
    model = allmlp.create("hf:efficientnet_b0", num_classes=10, img_size=64)
    assert 0.1 < model.forward_features(*inputs(model)).std() < 10


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "timm:resnet10t"])
def test_timm_has_its_default_size(name: str) -> None:
    spec = Timm(name.removeprefix("timm:"))
    assert spec.img_size is None and spec.input_spec == allmlp.preset(name).spec.input_spec
    assert allmlp.preset(name).spec.img_size == spec.input_size


@pytest.mark.slow
def test_timm_options() -> None:
    model = allmlp.create("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k", drop_path=0.2, img_size=32)
    assert model.network.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)
    with pytest.raises(allmlp.UserError, match=r"cannot build vgg11 .* 'drop_path_rate'"):
        allmlp.create("timm:vgg11", drop_path=0.1, device="meta")
    with pytest.raises(allmlp.UserError, match="does not support gradient checkpointing"):
        allmlp.create("timm:vgg11", device="meta").set_grad_checkpointing()
    crossvit = allmlp.create("timm:crossvit_9_240", device="meta").eval()
    with pytest.raises(allmlp.UserError, match="not a single feature map"):
        crossvit.forward_features(*crossvit.dummy_inputs())
    assert allmlp.list_models("timm:mixer_b*")[0] == "timm:mixer_b16_224"


def test_features_of_another_image_size() -> None:
    model = allmlp.create("timm:resnet10t", num_classes=10, img_size=64).eval()
    images = torch.randn(1, 3, 96, 64)
    assert torch.allclose(model.forward_head(model.forward_features(images)), model(images), atol=1e-6)


# --- mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hf:resnet5", {}, "did you mean 'hf:resnet50'"),
        ("timm:resnet5", {}, "did you mean 'resnet50'"),
        ("timm:resnet50.nothing", {}, "Invalid pretrained tag"),
        ("hf:resnet50", {"patch_size": 4}, "have no 'patch_size'"),
        ("hf:bert_base", {"num_classes": 2}, "have no 'num_classes'"),
        ("hf:resnet50", {"overrides": {"name": "resnet51"}}, "did you mean 'resnet50'"),
        ("timm:vit_tiny_patch16_224", {"img_size": 0}, "Timm.img_size"),
    ],
)
def test_mistakes_are_one_line_errors(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(allmlp.UserError, match=message) as caught:
        allmlp.create(name, device="meta", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hf:resnet50", "hf:bert_base"])
@pytest.mark.parametrize("broken", [False, True])
def test_transformers_that_is_missing_or_broken(name: str, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "transformers", broken)
    with pytest.raises(allmlp.UserError) as caught:
        allmlp.create(name)
    missing = "this needs transformers: pip install 'allmlp[baselines]'"
    unusable = "transformers is installed but cannot be imported here: operator torchvision::nms does not exist"
    assert str(caught.value) == (unusable if broken else missing)


@pytest.mark.parametrize("broken", [False, True])
def test_timm_that_is_missing_or_broken(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "timm", broken)
    for attempt in (allmlp.preset, allmlp.create, allmlp.list_models):
        with pytest.raises(allmlp.UserError, match=r"timm is installed but cannot" if broken else "this needs timm"):
            attempt("timm:resnet50")


def refuse(monkeypatch: pytest.MonkeyPatch, package: str, broken: bool) -> None:
    """Make importing `package` fail as if it were not installed, or as with a torchvision that does not load."""
    find = importlib.import_module

    def fail(name: str, *args: Any) -> Any:
        if name.partition(".")[0] != package:
            return find(name, *args)
        if broken:
            raise RuntimeError("operator torchvision::nms does not exist")
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(importlib, "import_module", fail)


@pytest.mark.slow
def test_the_zoo_imports_neither_package() -> None:
    code = "import sys, allmlp; allmlp.list_models(); assert not {'timm', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["hf:patchtst", "hf:patchtsmixer"])
def test_features_of_series_do_not_read_missing_values(name: str) -> None:
    model = allmlp.create(name, seq_len=32, in_chans=2, horizon=4).eval()
    x, mask = torch.randn(1, 32, 2), torch.rand(1, 32, 2) > 0.3
    features = model.forward_features(x, mask)
    assert torch.equal(features, model.forward_features(torch.where(mask, x, 100.0), mask))
    assert not torch.allclose(features, model.forward_features(x))
