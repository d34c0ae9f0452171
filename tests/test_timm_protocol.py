"""Models inside timm's own code: creation, feature maps, layer-wise learning rates, data config."""

from __future__ import annotations

import pytest
import torch

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
    for features_only in (False, True):
        config = resolve_model_data_config(timm.create_model("allmlp_mixer_nano", features_only=features_only))
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
    with pytest.raises(UserError, match="output_fmt must be one of NCHW, NLC, not 'NHWC'"):
        model.forward_intermediates(images, output_fmt="NHWC")


def test_features_only_gives_maps_at_another_size() -> None:
    network = timm.create_model("allmlp_resmlp_s12", features_only=True, out_indices=(1, 3), dynamic_img_size=True)
    assert network.feature_info.channels() == [384, 384] and network.feature_info.reduction() == [16, 16]
    maps = network(torch.randn(1, 3, 64, 96))
    assert [tuple(one.shape) for one in maps] == [(1, 384, 4, 6)] * 2
    assert len(network.model.blocks) == 4  # later blocks are gone
    maps[-1].sum().backward()
    timm.create_model("allmlp_mixer_nano", features_only=True, feature_cls="getter")
    with pytest.raises(UserError, match="feature_cls 'hook' is not for these models"):
        timm.create_model("allmlp_mixer_nano", features_only=True, feature_cls="hook")


def test_options_that_timm_passes_on() -> None:
    model = timm.create_model("allmlp_mixer_nano", num_classes=3, device="meta", dtype=torch.bfloat16)
    assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {("meta", torch.bfloat16)}


def test_a_pool_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="pools with FirstTokenPool, not with global_pool 'avg'"):
        timm.create_model("allmlp_vit_s16", img_size=32, global_pool="avg")
    with pytest.raises(UserError, match="pools with MeanPool, not with global_pool 'token'"):
        timm.create_model("allmlp_mixer_nano", num_classes=3, global_pool="token")
    assert timm.create_model("allmlp_mixer_nano", num_classes=3, global_pool="avg").num_classes == 3
    for num_classes in (3, 10):
        with pytest.raises(UserError, match="global_pool '' is for features, without a classifier: use num_classes=0"):
            timm.create_model("allmlp_mixer_nano", num_classes=num_classes, global_pool="")
    model = allmlp.create("mixer_nano")
    for global_pool, reason in (("", "for features"), ("token", "pools with MeanPool"), ("max", "'max' is unknown")):
        with pytest.raises(UserError, match=reason):
            model.reset_classifier(3, global_pool)
    assert model.reset_classifier(3, "avg").num_classes == 3


def test_heads() -> None:
    model = allmlp.create(SPECS["mixer"], seed=0)
    images = torch.randn(2, 3, 16, 16)
    features = model.forward_features(images)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features.mean(1))
    assert model.get_classifier() is model.head.proj and model.num_classes == 5 and model.num_features == 16
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


def test_an_empty_list_of_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="name at least one of the blocks, not an empty list"):
        allmlp.create("mixer_nano").forward_intermediates(torch.randn(1, 3, 32, 32), indices=[])
