"""Scripts made of timm's parts, and segmentation_models_pytorch on our encoders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import allmlp
from peers.installed import example, peer

timm = peer("timm")

import allmlp.timm  # noqa: E402


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for split in ("train", "validation"):
        for label in ("dark", "light"):
            place = tmp_path / "photos" / split / label
            place.mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(0, 100, (20, 20, 3)) + (120 if label == "light" else 0)
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return tmp_path / "photos"


def test_a_script_made_of_timms_parts(photos: Path, tmp_path: Path) -> None:
    """Dataset, loader, mixup, optimizer with layer decay, scheduler, EMA and checkpoints of timm; the model of ours."""
    out = tmp_path / "out"
    out.mkdir()
    assert example("timm_training")(photos, out, img_size=16) > 0.5
    saved = torch.load(out / "last.pth.tar", weights_only=True)
    model = allmlp.load(out / "model")
    assert saved["epoch"] == 1 and all(torch.equal(saved["state_dict"][k], v) for k, v in model.state_dict().items())
    assert saved["state_dict_ema"].keys() == saved["state_dict"].keys()
    rebuilt = timm.create_model("allmlp_mixer_nano", num_classes=2, img_size=16)
    timm.models.load_checkpoint(rebuilt, str(out / "last.pth.tar"), use_ema=False)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(rebuilt.eval()(images), model.eval()(images))


def test_segmentation_trains() -> None:
    peer("segmentation_models_pytorch")
    losses = example("timm_segmentation")()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["allmlp_gmlp_nano", "allmlp_resmlp_nano", "allmlp_vit_nano"])
def test_segmentation_at_another_size(name: str) -> None:
    """Of a dynamic encoder; that of ViT has a class token."""
    smp = peer("segmentation_models_pytorch")
    options = {"encoder_depth": 2, "decoder_intermediate_channels": (16, 16), "decoder_fusion_channels": 16}
    model = smp.DPT(f"tu-{name}", encoder_weights=None, classes=3, dynamic_img_size=True, **options)
    assert model(torch.rand(2, 3, 32, 48)).shape == (2, 3, 32, 48)
