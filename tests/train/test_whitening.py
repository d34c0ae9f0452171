"""The whitening initialization of a patch embedding: what comes out of it over training patches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.data.dataset import ImageDataset, InMemory
from allmlp.models.model import Model
from allmlp.run import Budget
from allmlp.training import train
from allmlp.weights import folder
from allmlp.whitening import Whitening
from train.runs import small


def smooth_images() -> ImageDataset:
    """200 RGB images whose neighboring pixels are alike, as in photographs."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(200, 3, 5, 5, generator=generator)
    images = torch.nn.functional.interpolate(coarse, (16, 16), mode="bicubic").clamp(0, 1)
    noisy = (255 * images + torch.randint(0, 3, images.shape, generator=generator)).clamp(0, 255).to(torch.uint8)
    split = InMemory(noisy, torch.arange(200) % 2)
    return ImageDataset(split, split, ("a", "b"), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def embedded(model: Model, dataset: ImageDataset) -> torch.Tensor:
    """The tokens of all training images before the first block, n c."""
    images = dataset.train.fetch(torch.arange(200)).images / 255
    return model.stem((images - 0.5) / 0.25).flatten(0, 1)  # type: ignore[operator]


@pytest.mark.parametrize("width", [96, 48, 20])
@torch.no_grad()
def test_tokens_are_white(width: int) -> None:
    """48 pixels a patch: twice as many channels, as many, and fewer."""
    dataset = smooth_images()
    model = allmlp.create("mixer_nano", img_size=16, patch_size=4, seed=0, overrides={"width": width})
    usual = torch.linalg.eigvalsh(embedded(model, dataset).T.cov())
    Whitening(eps=1e-9, images=200).initialize(model, dataset, seed=0)
    tokens = embedded(model, dataset)
    covariance = tokens.T.double().cov(correction=0)
    rank = min(width, 48)
    variances = torch.linalg.eigvalsh(covariance)[-rank:]
    torch.testing.assert_close(variances, torch.full((rank,), width / rank).double(), rtol=0.01, atol=0)
    assert tokens.mean(0).abs().max() < 1e-3 and covariance.trace() == pytest.approx(width, rel=0.01)
    assert usual[-1] > 20 * usual[-rank:].median(), "the patches of this test are hardly correlated"


@torch.no_grad()
def test_eps_keeps_noise_small() -> None:
    dataset = smooth_images()
    model = allmlp.create("mixer_nano", img_size=16, patch_size=4, seed=0)
    Whitening(eps=1e-9).initialize(model, dataset, seed=0)
    sharp = model.get_parameter("stem.proj.weight").clone()
    Whitening(eps=0.1).initialize(model, dataset, seed=0)
    largest = [torch.linalg.svdvals(weight)[0] for weight in (model.get_parameter("stem.proj.weight"), sharp)]
    assert largest[0] <= (model.spec.width / 48) ** 0.5 / 0.1**0.5 + 1e-4 < largest[1]


def test_a_run_starts_white_and_a_loaded_model_stays_as_it_is(tmp_path: Path) -> None:
    run = small(budget=Budget(steps=1), ema_decay=None, stem_init=Whitening())
    run = run.replace(optim=run.optim.replace(lr=0.0))
    train(run, tmp_path / "a", "cpu")
    train(run.replace(stem_init=None), tmp_path / "b", "cpu")
    first, plain = (folder.load(tmp_path / name).get_parameter("stem.proj.weight") for name in "ab")
    assert not torch.allclose(first, plain)
    train(run.replace(init_from=str(tmp_path / "b")), tmp_path / "c", "cpu")
    torch.testing.assert_close(folder.load(tmp_path / "c").get_parameter("stem.proj.weight"), plain)


def test_only_for_patch_embeddings() -> None:
    with pytest.raises(allmlp.UserError, match="patch embedding"):
        Whitening().initialize(allmlp.create("gmlp_mlm_tiny", overrides={"depth": 1}), smooth_images(), 0)
