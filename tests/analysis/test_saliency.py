"""Saliency maps: models that read one patch only, finite differences, and the mean of class maps."""

from __future__ import annotations

import pytest
import torch

import allmlp
from allmlp.analysis.saliency import (
    class_maps,
    gradient,
    occlusion,
    occlusion_squares,
    patch_grid,
    patch_size,
    saliency,
)
from allmlp.errors import UserError
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model
from tiny import IMAGES, tiny_model


def reads_one_patch(patch: int) -> Model:
    """A model whose features are the brightness of one patch, and whose class 1 has weight 3 on them."""

    class OnePatch(EncoderModel):
        def forward_features(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            bright = x.unflatten(3, (4, 2)).unflatten(2, (3, 2)).mean((1, 3, 5)).flatten(1)  # b s
            keep = torch.zeros_like(bright)
            keep[:, patch] = bright[:, patch]
            return keep[..., None].expand(-1, -1, self.spec.width)

    model = OnePatch(tiny_model("resmlp_s12").spec).double().eval()
    with torch.no_grad():
        model.head.proj.weight.zero_()
        model.head.proj.weight[1] = 3.0
        model.head.proj.bias.zero_()
    return model


@pytest.mark.parametrize("patch", [0, 5, 11])
def test_the_one_patch_that_is_read_is_found(patch: int) -> None:
    model = reads_one_patch(patch)
    image = 1 + torch.rand(3, 6, 8, dtype=torch.float64)
    row, column = divmod(patch, 4)
    (found,) = saliency(model, image[None])
    assert found.label == 1
    for values in (found.occlusion, found.gradient, found.class_map):
        assert values is not None and values.shape == (3, 4)
        others = values.clone()
        others[row, column] = 0
        assert values[row, column] > 0 and torch.allclose(others, torch.zeros_like(others), atol=1e-12)
    # The mean over 12 patches, 16 channels of weight 3: z = 4 times the brightness of the patch.
    bright = image[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].mean()
    scores = torch.zeros(5, dtype=torch.float64)
    scores[1] = 4 * bright
    lost = scores.log_softmax(0)[1] - torch.zeros(5, dtype=torch.float64).log_softmax(0)[1]
    assert found.occlusion[row, column].item() == pytest.approx(lost.item(), rel=1e-5)
    assert found.probability == pytest.approx(scores.softmax(0)[1].item(), rel=1e-5)
    assert found.gradient[row, column].item() == pytest.approx(4 / 12**0.5, rel=1e-6)


@pytest.mark.parametrize("name", ["mixer_s32", "gmlp_ti16", "resmlp_s12_class", "vit_ti16"])
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    model = tiny_model(name)
    images = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    labels = torch.tensor([1, 3])
    step = 1e-5
    slopes = torch.zeros_like(images)
    with torch.no_grad():
        for index in range(images[0].numel()):
            moved = images.flatten(1)[:, None].repeat(1, 2, 1)
            moved[:, 0, index] -= step
            moved[:, 1, index] += step
            scores = model(moved.view(4, 3, 6, 8)).view(2, 2, -1).gather(2, labels.view(2, 1, 1).expand(2, 2, 1))
            slopes.flatten(1)[:, index] = (scores[:, 1, 0] - scores[:, 0, 0]) / (2 * step)
    blocks = slopes.unflatten(3, (4, 2)).unflatten(2, (3, 2)).square().sum((1, 3, 5)).sqrt()
    assert torch.allclose(gradient(model, images, labels), blocks, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["mixer_s32", "gmlp_ti16", "resmlp_s12"])
def test_the_mean_of_a_class_map_is_the_logit(name: str) -> None:
    model = tiny_model(name)
    images, labels = torch.randn(3, 3, 6, 8, dtype=torch.float64), torch.tensor([0, 2, 4])
    maps = class_maps(model, images, labels)
    assert maps is not None and maps.shape == (3, 3, 4)
    assert torch.allclose(maps.mean((1, 2)), model(images).gather(1, labels[:, None])[:, 0].detach())


@pytest.mark.parametrize("name", ["vit_ti16", "resmlp_s12_class"])
def test_other_pools_have_no_class_map(name: str) -> None:
    images = torch.randn(1, 3, 6, 8, dtype=torch.float64)
    assert class_maps(tiny_model(name), images, torch.tensor([0])) is None
    assert saliency(tiny_model(name), images)[0].class_map is None


def test_occlusion_by_hand() -> None:
    model = tiny_model("gmlp_ti16")
    image = torch.randn(3, 6, 8, dtype=torch.float64)
    found = occlusion(model, image, label=2)
    for row in range(3):
        for column in range(4):
            hidden = image.clone()
            hidden[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 0
            with torch.no_grad():
                whole, less = model(torch.stack([image, hidden])).float().log_softmax(1)[:, 2]
            assert found[row, column].item() == pytest.approx((whole - less).item(), abs=1e-6)


def test_large_grids_are_occluded_in_squares() -> None:
    assert occlusion_squares((8, 8)).unique().numel() == 64
    squares = occlusion_squares((14, 14))
    assert squares.max() == 48 and torch.equal(squares[2:4, 4:6], torch.full((2, 2), 9))
    uneven = occlusion_squares((5, 3), most=6)
    assert uneven.tolist() == [[0, 0, 1], [0, 0, 1], [2, 2, 3], [2, 2, 3], [4, 4, 5]]
    model = tiny_model("mixer_s32")
    found = occlusion(model, torch.randn(3, 6, 8, dtype=torch.float64), 0, squares=4)
    assert found.shape == (3, 4) and found.unique().numel() == 4


@pytest.mark.parametrize("name", IMAGES)
def test_every_image_model_can_be_explained(name: str) -> None:
    (found,) = saliency(tiny_model(name, torch.float32), torch.randn(1, 3, 6, 8))
    assert found.occlusion.isfinite().all() and found.gradient.isfinite().all() and 0 < found.probability <= 1


def test_patches_of_models() -> None:
    assert patch_size(allmlp.create("mixer_nano").spec) == (4, 4) and patch_grid(tiny_model("vit_ti16").spec) == (3, 4)
    with pytest.raises(UserError, match="not images"):
        patch_size(tiny_model("gmlp_l18").spec)


def test_models_without_class_scores_are_refused() -> None:
    model = tiny_model("resmlp_s12").spec.replace(head=None, pool=None).build().eval()
    with pytest.raises(UserError, match="no class scores"):
        saliency(model, torch.randn(1, 3, 6, 8))
