"""Models inside timm's own code: creation, feature maps, layer-wise learning rates, data config, a training script."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import allmlp
from allmlp.errors import UserError
from allmlp.models.gmlp import gmlp
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit

timm = pytest.importorskip("timm")
allmlp_timm = pytest.importorskip("allmlp.timm")

SPECS = {
    "mixer": mixer(3, 16, 4, img_size=16, num_classes=5),
    "resmlp": resmlp(3, 16, 0.1, 4, img_size=16, num_classes=5),
    "gmlp": gmlp(3, 16, 4, img_size=16, num_classes=5),
    "vit": vit(3, 16, 2, 4, img_size=16, num_classes=5),
}


def test_every_image_model_is_registered() -> None:
    assert {"allmlp_mixer_b16", "allmlp_resmlp_s24", "allmlp_gmlp_s16", "allmlp_amlp_nano"} <= set(timm.list_models())
    assert "allmlp_gmlp_l18" not in timm.list_models()
    model = timm.create_model("allmlp_gmlp_nano", num_classes=7, in_chans=1, img_size=24, drop_path_rate=0.2)
    assert model(torch.zeros(2, 1, 24, 24)).shape == (2, 7)
    rates = [block.channel.drop_path.rate for block in model.blocks]
    assert rates[0] == 0 and rates[-1] == pytest.approx(0.2)
    with pytest.raises(UserError, match="unknown option 'qk_norm'"):
        timm.create_model("allmlp_gmlp_nano", qk_norm=True)
    with pytest.raises(UserError, match="no weights of gmlp_nano are published"):
        timm.create_model("allmlp_gmlp_nano", pretrained=True)
    with pytest.raises(UserError, match=r"no weights mixer_b16.nobody are published, only mixer_b16.google_gsam, "):
        timm.create_model("allmlp_mixer_b16.nobody", pretrained=True)


@pytest.mark.parametrize("name", SPECS)
def test_layer_decay_gives_a_rate_to_every_layer(name: str) -> None:
    """depth + 2 rates: the stem, every block, and norm and head together, which has the full rate."""
    from timm.optim import param_groups_layer_decay

    model = allmlp.create(SPECS[name])
    groups = param_groups_layer_decay(
        model, weight_decay=0.05, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay()
    )
    names = {id(weight): key for key, weight in model.named_parameters()}
    scales = {names[id(weight)]: group["lr_scale"] for group in groups for weight in group["params"]}
    assert sorted(set(scales.values())) == [0.5**4, 0.5**3, 0.5**2, 0.5, 1.0]
    assert scales["stem.proj.weight"] == 0.5**4 and scales["head.proj.weight"] == 1.0
    assert next(scales[key] for key in scales if key.startswith("blocks.1.")) == 0.5**2
    decay = {names[id(weight)]: group["weight_decay"] for group in groups for weight in group["params"]}
    assert decay["head.proj.weight"] == 0.05 and decay["head.proj.bias"] == 0
    assert decay.get("stem.positions.weight", 0) == 0


def test_the_data_config_is_the_models_own() -> None:
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(allmlp.from_pretrained("allmlp:cifar10"))
    assert config["input_size"] == (3, 32, 32) and config["mean"] == pytest.approx((0.4914, 0.4822, 0.4465), abs=1e-3)
    config = resolve_model_data_config(timm.create_model("allmlp_mixer_nano"))
    assert config["input_size"] == (3, 32, 32) and config["crop_pct"] == 0.875


@pytest.mark.parametrize("name", SPECS)
def test_intermediates_are_the_activations(name: str) -> None:
    """With timm's arguments: which blocks, maps or tokens, the last norm, and the final features."""
    model = allmlp.create(SPECS[name], seed=0).eval()
    images = torch.randn(2, 3, 16, 16)
    known = model.forward_activations(images)
    prefix = model.num_prefix_tokens
    final, maps = model.forward_intermediates(images, indices=2)
    torch.testing.assert_close(final, known["norm"])
    for i, found in zip((1, 2), maps, strict=True):
        tokens = known[f"blocks.{i}"][:, prefix:]
        assert found.shape == (2, 16, 4, 4)
        torch.testing.assert_close(found[:, :, 1, 2], tokens[:, 6])
    tokens = model.forward_intermediates(images, [0, -1], norm=True, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(tokens[1], model.norm(known["blocks.2"])[:, prefix:])
    early = model.forward_intermediates(images, [0], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(early[0].flatten(2).transpose(1, 2), known["blocks.0"][:, prefix:])
    pairs = model.forward_intermediates(images, 1, return_prefix_tokens=True, intermediates_only=True)
    assert pairs[0][1].shape == (2, prefix, 16)
    with pytest.raises(UserError, match="no block 3"):
        model.forward_intermediates(images, [3])


def test_features_only_gives_maps_at_another_size() -> None:
    network = timm.create_model("allmlp_resmlp_s12", features_only=True, out_indices=(1, 3), dynamic_img_size=True)
    assert network.feature_info.channels() == [384, 384] and network.feature_info.reduction() == [16, 16]
    maps = network(torch.randn(1, 3, 64, 96))
    assert [tuple(one.shape) for one in maps] == [(1, 384, 4, 6)] * 2
    assert len(network.model.blocks) == 4  # later blocks are gone
    maps[-1].sum().backward()


def test_heads() -> None:
    model = allmlp.create(SPECS["mixer"], seed=0)
    images = torch.randn(2, 3, 16, 16)
    features = model.forward_features(images)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features.mean(1))
    assert model.get_classifier() is model.head and model.num_classes == 5 and model.num_features == 16
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), features.mean(1))
    assert model.num_classes == 0 and isinstance(model.get_classifier(), torch.nn.Identity)
    model.reset_classifier(3)
    assert model(images).shape == (2, 3)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(images), features)
    assert allmlp.create("mixer_nano", num_classes=0)(torch.zeros(1, 3, 32, 32)).shape == (1, 128)


@pytest.mark.parametrize("name", ["mixer", "vit"])
def test_the_input_size_is_set_in_place(name: str) -> None:
    model = allmlp.create(SPECS[name], seed=0).eval()
    model.set_input_size(img_size=(16, 24))
    assert model.spec.input_size == (16, 24) and model(torch.zeros(1, 3, 16, 24)).shape == (1, 5)
    assert model.pretrained_cfg["input_size"] == (3, 16, 24)
    with pytest.raises(UserError, match="patches"):
        model.set_input_size(patch_size=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for split in ("train", "validation"):
        for label in ("dark", "light"):
            place = tmp_path / split / label
            place.mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(0, 100, (20, 20, 3)) + (120 if label == "light" else 0)
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return tmp_path


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_script_made_of_timms_parts(folder: Path, tmp_path: Path) -> None:
    """Dataset, loader, mixup, optimizer with layer decay, scheduler, EMA and checkpoints of timm; the model of ours."""
    from timm.data import Mixup, create_dataset, create_loader, resolve_model_data_config
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV3

    torch.manual_seed(0)
    model = timm.create_model("allmlp_mixer_nano", num_classes=2, img_size=16)
    config = resolve_model_data_config(model)
    loaders = [
        create_loader(
            create_dataset("", root=folder, split=split, is_training=training),
            input_size=config["input_size"],
            mean=config["mean"],
            std=config["std"],
            batch_size=8,
            is_training=training,
            num_workers=0,
            use_prefetcher=False,
            persistent_workers=False,
        )
        for split, training in (("train", True), ("validation", False))
    ]
    mixup, loss = Mixup(mixup_alpha=0.2, num_classes=2), SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.01, layer_decay=0.8)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=2)
    ema = ModelEmaV3(model, decay=0.5)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    for epoch in range(2):
        model.train()
        for images, labels in loaders[0]:
            optimizer.zero_grad()
            mixed, targets = mixup(images, labels)
            loss(model(mixed), targets).backward()
            optimizer.step()
            ema.update(model)
        scheduler.step(epoch + 1)
        model.eval()
        with torch.no_grad():
            accuracy = torch.cat([(model(images).argmax(1) == labels) for images, labels in loaders[1]]).float().mean()
        saver.save_checkpoint(epoch, metric=accuracy.item())
    assert (tmp_path / "model_best.pth.tar").exists() and accuracy > 0.5
