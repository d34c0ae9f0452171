"""Augmentations against the libraries they are known from, at fixed parameters."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from allmlp.data.augment import colour
from allmlp.data.augment.geometry import affine, warp
from allmlp.data.augment.policy import (
    CIFAR,
    IMAGENET,
    NONE,
    NUMBER,
    OPERATIONS,
    PLAIN,
    POLICIES,
    RISING,
    arguments,
    operate,
)
from allmlp.data.images import Blur, ColourJitter, Equalise, Erasing, Flip, Invert, Mix, Posterise, Solarise, one_hot

BYTE = 1 / 255
SIZES = [(32, 32), (21, 34)]


@pytest.fixture(params=SIZES, ids=str)
def images(request: pytest.FixtureRequest) -> Tensor:
    """Pictures with structure and noise, whose values are bytes."""
    height, width = request.param
    y, x = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 3, width), indexing="ij")
    waves = torch.stack([torch.sin(x * k + y) * torch.cos(y * k) for k in range(1, 13)]).view(4, 3, height, width)
    pictures = 0.5 + 0.35 * waves + 0.05 * torch.randn(4, 3, height, width)
    return (pictures.clamp(0.05, 0.93) * 255).round() / 255


@pytest.fixture(scope="module")
def kornia() -> ModuleType:
    pytest.importorskip("kornia")
    import kornia.enhance
    import kornia.filters
    import kornia.geometry

    return kornia


@pytest.fixture(scope="module")
def pillow_ops() -> ModuleType:
    pytest.importorskip("PIL")
    return pytest.importorskip("timm.data.auto_augment")


def fixed(images: Tensor, value: float) -> Tensor:
    return torch.full((len(images),), value)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


# --- kornia -------------------------------------------------------------------------------------------


def test_kornia_flip(images: Tensor, kornia: ModuleType) -> None:
    close(Flip(1.0).apply(images, torch.Generator()), kornia.geometry.hflip(images), 0)


@pytest.mark.parametrize("factor", [0.4, 1.0, 1.7])
def test_kornia_colours(images: Tensor, kornia: ModuleType, factor: float) -> None:
    enhance, factors = kornia.enhance, fixed(images, factor)
    close(colour.brightness(images, factors), enhance.adjust_brightness_accumulative(images, factor))
    close(colour.contrast(images, factors), enhance.adjust_contrast_with_mean_subtraction(images, factor))
    close(colour.saturation(images, factors), enhance.adjust_saturation_with_gray_subtraction(images, factor), 1e-3)


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.2])
def test_kornia_hue(images: Tensor, kornia: ModuleType, turn: float) -> None:
    close(colour.hue(images, fixed(images, turn)), kornia.enhance.adjust_hue(images, turn * 2 * math.pi), 1e-4)


def test_kornia_solarise_posterise_equalise(images: Tensor, kornia: ModuleType) -> None:
    generator = torch.Generator()
    close(Solarise(1.0, 0.6).apply(images, generator), kornia.enhance.solarize(images, 0.6))
    close(Invert().apply(images, generator), kornia.enhance.invert(images))
    close(Posterise(bits=3).apply(images, generator), kornia.enhance.posterize(images, 3), 1e-4)
    ours, theirs = Equalise().apply(images, generator), kornia.enhance.equalize(images)
    # kornia bins floats, Pillow and we count bytes: a level may fall into the next bin.
    assert ((ours - theirs).abs() <= 2.5 * BYTE).float().mean() > 0.95


@pytest.mark.parametrize("sigma", [0.3, 1.5])
def test_kornia_blur(images: Tensor, kornia: ModuleType, sigma: float) -> None:
    theirs = kornia.filters.gaussian_blur2d(images, (13, 13), (sigma, sigma), border_type="reflect")
    close(colour.blur(images, fixed(images, sigma), radius=6), theirs)
    close(Blur(1.0, (sigma, sigma)).apply(images, torch.Generator()), theirs, 1e-3)


def test_kornia_warp(images: Tensor, kornia: ModuleType) -> None:
    matrix = torch.tensor([[[0.9, 0.2, 1.5], [-0.1, 1.1, -2.0]]]).repeat(len(images), 1, 1)
    # kornia's maps run from the picture to the result and count from the middle of the first pixel.
    full = torch.cat((matrix, torch.tensor([[[0.0, 0.0, 1.0]]]).repeat(len(images), 1, 1)), 1)
    half = torch.tensor([[1.0, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    inverse = (half.inverse() @ full @ half).inverse()
    theirs = kornia.geometry.warp_affine(
        images, inverse[:, :2], images.shape[2:], padding_mode="border", align_corners=True
    )
    close(warp(images, matrix), theirs, 1e-4)


def test_an_identity_map_is_exact_enough(images: Tensor) -> None:
    one, zero = fixed(images, 1.0), fixed(images, 0.0)
    for filter in ("bilinear", "bicubic"):
        close(warp(images, affine(one, zero, zero, zero, one, zero), filter=filter), images, 1e-5)


# --- Pillow, by way of timm ----------------------------------------------------------------------------

CASES = [
    ("autocontrast", "auto_contrast", 0.0, BYTE),
    ("equalise", "equalize", 0.0, 0.0),
    ("invert", "invert", 0.0, 0.0),
    ("posterise", "posterize", 3, 0.0),
    ("posterise", "posterize", 8, 0.0),
    ("solarise", "solarize", 100, 0.0),
    ("solarise", "solarize", 256, 0.0),
    ("solarise_add", "solarize_add", 77, 0.0),
    ("brightness", "brightness", 0.3, BYTE),
    ("brightness", "brightness", 1.8, BYTE),
    ("contrast", "contrast", 0.3, BYTE),
    ("contrast", "contrast", 1.8, BYTE),
    ("colour", "color", 0.3, 1.5 * BYTE),
    ("colour", "color", 1.8, 2 * BYTE),
    ("sharpness", "sharpness", 0.3, 1.5 * BYTE),
    ("sharpness", "sharpness", 1.8, 2 * BYTE),
    ("rotate", "rotate", 25.0, 1.5 * BYTE),
    ("rotate", "rotate", -11.0, 1.5 * BYTE),
    ("shear_x", "shear_x", 0.273, 1.5 * BYTE),
    ("shear_y", "shear_y", -0.213, 1.5 * BYTE),
    ("translate_x", "translate_x_rel", 0.41, 1.5 * BYTE),
    ("translate_y", "translate_y_rel", -0.13, 1.5 * BYTE),
]


@pytest.mark.parametrize(("name", "theirs", "argument", "tolerance"), CASES)
def test_operations_are_pillows(
    images: Tensor, pillow_ops: ModuleType, name: str, theirs: str, argument: float, tolerance: float
) -> None:
    from PIL import Image

    ours = operate(images, torch.full((len(images),), NUMBER[name]), fixed(images, argument))
    takes = () if name in ("autocontrast", "equalise", "invert") else (argument,)
    expected = []
    for picture in images:
        bitmap = Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())
        options = {"resample": Image.Resampling.BILINEAR, "fillcolor": (128, 128, 128)}
        result = getattr(pillow_ops, theirs)(bitmap, *takes, **options)
        expected.append(torch.from_numpy(np.array(result)).permute(2, 0, 1) / 255)
    difference = (ours - torch.stack(expected)).abs()
    # A pixel whose source lies within rounding of the edge may be inside for one and outside for the other.
    assert (difference <= tolerance + 1e-5).float().mean() > (0.998 if name in OPERATIONS[10:] else 0.99999)


def test_no_operation_changes_nothing(images: Tensor) -> None:
    close(operate(images, torch.full((len(images),), NONE), fixed(images, 0.3)), images, 1e-7)


def test_equalise_and_autocontrast_leave_one_colour_alone() -> None:
    plain = torch.full((1, 3, 8, 8), 0.4)
    for name in ("equalise", "autocontrast"):
        close(operate(plain, torch.tensor([NUMBER[name]]), torch.zeros(1)), plain, BYTE / 2)


TIMM = {
    "autocontrast": "AutoContrast",
    "equalise": "Equalize",
    "invert": "Invert",
    "posterise": "Posterize",
    "solarise": "Solarize",
    "solarise_add": "SolarizeAdd",
    "brightness": "Brightness",
    "contrast": "Contrast",
    "colour": "Color",
    "sharpness": "Sharpness",
    "rotate": "Rotate",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}


@pytest.mark.parametrize("level", [0.0, 1, 3, 4.9, 7, 9, 10])
@pytest.mark.parametrize("name", OPERATIONS)
def test_levels_mean_what_they_mean_in_timm(pillow_ops: ModuleType, name: str, level: float) -> None:
    for meaning, suffix in ((RISING, "Increasing"), (PLAIN, ""), (IMAGENET, "Original")):
        table = pillow_ops.LEVEL_TO_ARG
        function = table.get(TIMM[name] + suffix, table[TIMM[name]])
        if function is None:
            continue
        theirs = sorted({function(level, {})[0] for _ in range(64)})  # one value, or two of random sign
        operation = torch.full((2,), NUMBER[name])
        ours = arguments(operation, fixed(operation, level), torch.tensor([0.2, 0.8]), meaning)
        assert ours.tolist() == pytest.approx(theirs if len(theirs) == 2 else theirs * 2, abs=1e-5)


def test_policies_are_timms_and_torchvisions(pillow_ops: ModuleType) -> None:
    expected = pillow_ops.auto_augment_policy_original({})
    names = {TIMM[name]: NUMBER[name] for name in OPERATIONS} | {"PosterizeOriginal": NUMBER["posterise"]}
    ours = [[(int(name), p, level) for name, p, level in pair] for pair in POLICIES["imagenet"]]
    assert ours == [[(names[op.name], op.prob, op.magnitude) for op in pair] for pair in expected]

    module = pytest.importorskip("torchvision.transforms.autoaugment")
    names |= {"TranslateX": NUMBER["translate_x"], "TranslateY": NUMBER["translate_y"]}
    cifar = module.AutoAugment(module.AutoAugmentPolicy.CIFAR10).policies
    assert len(cifar) == len(POLICIES["cifar10"])
    for pair, other in zip(POLICIES["cifar10"], cifar):
        for (name, p, level), (their, their_p, their_level) in zip(pair, other):
            assert (int(name), p) == (names[their], their_p) and their_level in (None, level)
    assert len(CIFAR) == len(OPERATIONS)


# --- statistics of timm's erasing and mixing -------------------------------------------------------------


def test_erased_area_is_distributed_as_timms() -> None:
    erasing = pytest.importorskip("timm.data.random_erasing")
    ones = torch.ones(3000, 1, 24, 24)
    theirs = erasing.RandomErasing(probability=0.5, mode="const", device="cpu")(ones.clone())
    ours = Erasing(p=0.5, mode="mean").apply(ones, torch.Generator().manual_seed(1))
    left, right = ((pictures == 0).float().mean((1, 2, 3)) for pictures in (ours, theirs))
    assert abs((left > 0).float().mean() - (right > 0).float().mean()) < 0.05
    for share in (0.6, 0.75, 0.9, 0.99):
        assert abs(left.quantile(share) - right.quantile(share)) < 0.03
    where = [(pictures == 0).float().mean((0, 1)) for pictures in (ours, theirs)]
    close(where[0], where[1], 0.05)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_weights_are_distributed_as_timms(mixup: float, cutmix: float) -> None:
    module = pytest.importorskip("timm.data.mixup")
    np.random.seed(0)
    images, labels = torch.rand(4000, 1, 16, 16), torch.arange(4000) % 2
    labels[2000:] = 1 - labels[:2000].flip(0)  # partners have the other class, so targets show the weights
    theirs = module.Mixup(mixup, cutmix, mode="elem", label_smoothing=0.1, num_classes=2)(images.clone(), labels)[1]
    targets = one_hot(labels, 2, 0.1)
    ours = Mix(mixup, cutmix).apply(images, targets, torch.Generator().manual_seed(2))[1]
    own, other = (t.gather(1, labels[:, None])[:, 0] for t in (ours, theirs))
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert abs(own.quantile(share) - other.quantile(share)) < 0.05


def test_one_hot_is_timms() -> None:
    module = pytest.importorskip("timm.data.mixup")
    labels = torch.tensor([0, 3, 1, 2])
    close(one_hot(labels, 5, 0.1), module.mixup_target(labels, 5, lam=1.0, smoothing=0.1), 1e-7)


def test_jitter_of_one_kind_is_torchvisions(images: Tensor) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    draws = torch.rand(len(images), 8)
    jitter = ColourJitter(0.0, 0.6, 0.0, 0.0)
    expected = [functional.adjust_contrast(x, (0.4 + 1.2 * d).item()) for x, d in zip(images, draws[:, 1])]
    close(jitter.transform(images, draws), torch.stack(expected), 1e-4)
    jitter = ColourJitter(0.0, 0.0, 0.0, 0.5)
    expected = [functional.adjust_hue(x, (d - 0.5).item()) for x, d in zip(images, draws[:, 6])]
    close(jitter.transform(images, draws), torch.stack(expected), 1e-4)
