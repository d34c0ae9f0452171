"""Augmentations compared with kornia, Pillow, timm and torchvision at fixed parameters."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from allmlp.data.augment import (
    ColorJitter,
    GaussianBlur,
    HorizontalFlip,
    Mixup,
    RandomAffine,
    RandomErasing,
    Solarize,
    one_hot,
)
from allmlp.data.augment.color import blur, hue
from allmlp.data.augment.geometry import affine, warp
from allmlp.data.augment.policy import (
    CIFAR,
    IMAGENET,
    INCREASING,
    INDEX,
    NONE,
    OPERATIONS,
    PLAIN,
    POLICIES,
    apply_operations,
    arguments,
)

BYTE = 1 / 255
SIZES = [(32, 32), (21, 34)]


@pytest.fixture(params=SIZES, ids=str)
def images(request: pytest.FixtureRequest) -> Tensor:
    """Images with structure and noise, with values that are multiples of 1 / 255."""
    height, width = request.param
    y, x = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 3, width), indexing="ij")
    waves = torch.stack([torch.sin(x * k + y) * torch.cos(y * k) for k in range(1, 13)]).view(4, 3, height, width)
    values = 0.5 + 0.35 * waves + 0.05 * torch.randn(4, 3, height, width)
    return (values.clamp(0.05, 0.93) * 255).round() / 255


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
    close(HorizontalFlip(1.0)(images, torch.Generator()), kornia.geometry.hflip(images), 0)


@pytest.mark.parametrize("factor", [0.4, 1.0, 1.7])
def test_kornia_colors(images: Tensor, kornia: ModuleType, factor: float) -> None:
    enhance = kornia.enhance
    uniforms = torch.full((len(images), 8), factor / 2)  # U(0, 2)
    close(ColorJitter(1.0, 0, 0, 0).apply(images, uniforms), enhance.adjust_brightness_accumulative(images, factor))
    close(
        ColorJitter(0, 1.0, 0, 0).apply(images, uniforms),
        enhance.adjust_contrast_with_mean_subtraction(images, factor),
    )
    saturated = ColorJitter(0, 0, 1.0, 0).apply(images, uniforms)
    close(saturated, enhance.adjust_saturation_with_gray_subtraction(images, factor), 1e-3)


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.2])
def test_kornia_hue(images: Tensor, kornia: ModuleType, turn: float) -> None:
    close(hue(images, fixed(images, turn)), kornia.enhance.adjust_hue(images, turn * 2 * math.pi), 1e-4)


def test_kornia_solarize_invert_posterize_equalize(images: Tensor, kornia: ModuleType) -> None:
    enhance = kornia.enhance
    close(Solarize(1.0, 0.6)(images, torch.Generator()), enhance.solarize(images, 0.6))

    def apply(name: str, argument: float = 0.0) -> Tensor:
        return apply_operations(images, torch.full((len(images),), INDEX[name]), fixed(images, argument))

    close(apply("invert"), enhance.invert(images))
    close(apply("posterize", 3), enhance.posterize(images, 3), 1e-4)
    # kornia bins floats while we, like Pillow, count bytes: a level may fall into the next bin.
    assert ((apply("equalize") - enhance.equalize(images)).abs() <= 2.5 * BYTE).float().mean() > 0.95


@pytest.mark.parametrize("sigma", [0.3, 1.5])
def test_kornia_blur(images: Tensor, kornia: ModuleType, sigma: float) -> None:
    theirs = kornia.filters.gaussian_blur2d(images, (13, 13), (sigma, sigma), border_type="reflect")
    close(blur(images, fixed(images, sigma), radius=6), theirs)
    close(GaussianBlur(1.0, (sigma, sigma))(images, torch.Generator()), theirs, 1e-3)


@pytest.mark.parametrize("shift", [(0, 0), (2, -1)])  # torchvision shifts by whole pixels
def test_torchvision_affine(images: Tensor, shift: tuple[int, int]) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    height, width = images.shape[2:]
    turn, factor = torch.rand(2, len(images))
    right, down = (torch.full((len(images),), 0.5 + 5 * d / side) for d, side in zip(shift, (width, height)))
    uniforms = torch.stack((turn, right, down, factor, factor), dim=1)
    ours = RandomAffine(30.0, 0.1, (0.9, 1.3)).apply(images, uniforms)
    inner = slice(height // 3, -(height // 3)), slice(width // 3, -(width // 3))  # what is outside is blended there
    for i, image in enumerate(images):
        angle, scale = float(60 * turn[i] - 30), float(0.9 + 0.4 * factor[i])
        theirs = functional.affine(image, angle, list(shift), scale, [0.0, 0.0], functional.InterpolationMode.BILINEAR)
        close(ours[i][:, *inner], theirs[:, *inner], 1e-4)


def test_kornia_warp(images: Tensor, kornia: ModuleType) -> None:
    matrix = torch.tensor([[[0.9, 0.2, 1.5], [-0.1, 1.1, -2.0]]]).repeat(len(images), 1, 1)
    # kornia's matrices map input to output, with the origin at the center of the first pixel.
    full = torch.cat((matrix, torch.tensor([[[0.0, 0.0, 1.0]]]).repeat(len(images), 1, 1)), 1)
    half = torch.tensor([[1.0, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    inverse = (half.inverse() @ full @ half).inverse()
    theirs = kornia.geometry.warp_affine(
        images, inverse[:, :2], images.shape[2:], padding_mode="border", align_corners=True
    )
    close(warp(images, matrix), theirs, 1e-4)


def test_the_identity_map(images: Tensor) -> None:
    one, zero = fixed(images, 1.0), fixed(images, 0.0)
    for interpolation in ("bilinear", "bicubic"):
        close(warp(images, affine(one, zero, zero, zero, one, zero), interpolation=interpolation), images, 1e-5)


# --- Pillow, through timm --------------------------------------------------------------------------------

CASES = [
    ("autocontrast", "auto_contrast", 0.0, BYTE),
    ("equalize", "equalize", 0.0, 0.0),
    ("invert", "invert", 0.0, 0.0),
    ("posterize", "posterize", 3, 0.0),
    ("posterize", "posterize", 8, 0.0),
    ("solarize", "solarize", 100, 0.0),
    ("solarize", "solarize", 256, 0.0),
    ("solarize_add", "solarize_add", 77, 0.0),
    ("brightness", "brightness", 0.3, BYTE),
    ("brightness", "brightness", 1.8, BYTE),
    ("contrast", "contrast", 0.3, BYTE),
    ("contrast", "contrast", 1.8, BYTE),
    ("color", "color", 0.3, 1.5 * BYTE),
    ("color", "color", 1.8, 2 * BYTE),
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
def test_operations_match_pillow(
    images: Tensor, pillow_ops: ModuleType, name: str, theirs: str, argument: float, tolerance: float
) -> None:
    from PIL import Image

    ours = apply_operations(images, torch.full((len(images),), INDEX[name]), fixed(images, argument))
    takes = () if name in ("autocontrast", "equalize", "invert") else (argument,)
    expected = []
    for image in images:
        bitmap = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        options = {"resample": Image.Resampling.BILINEAR, "fillcolor": (128, 128, 128)}
        result = getattr(pillow_ops, theirs)(bitmap, *takes, **options)
        expected.append(torch.from_numpy(np.array(result)).permute(2, 0, 1) / 255)
    difference = (ours - torch.stack(expected)).abs()
    # A pixel whose source is within rounding error of the edge may be inside for one and outside for the other.
    assert (difference <= tolerance + 1e-5).float().mean() > (0.998 if name in OPERATIONS[10:] else 0.99999)


def test_no_operation_changes_nothing(images: Tensor) -> None:
    close(apply_operations(images, torch.full((len(images),), NONE), fixed(images, 0.3)), images, 1e-7)


def test_equalize_and_autocontrast_keep_a_constant_image() -> None:
    plain = torch.full((1, 3, 8, 8), 0.4)
    for name in ("equalize", "autocontrast"):
        close(apply_operations(plain, torch.tensor([INDEX[name]]), torch.zeros(1)), plain, BYTE / 2)


TIMM = {
    "autocontrast": "AutoContrast",
    "equalize": "Equalize",
    "invert": "Invert",
    "posterize": "Posterize",
    "solarize": "Solarize",
    "solarize_add": "SolarizeAdd",
    "brightness": "Brightness",
    "contrast": "Contrast",
    "color": "Color",
    "sharpness": "Sharpness",
    "rotate": "Rotate",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}


@pytest.mark.parametrize("level", [0.0, 1, 3, 4.9, 7, 9, 10])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arguments_match_timm(pillow_ops: ModuleType, name: str, level: float) -> None:
    for table, suffix in ((INCREASING, "Increasing"), (PLAIN, ""), (IMAGENET, "Original")):
        functions = pillow_ops.LEVEL_TO_ARG
        function = functions.get(TIMM[name] + suffix, functions[TIMM[name]])
        if function is None:
            continue
        theirs = sorted({function(level, {})[0] for _ in range(64)})  # one value, or two of random sign
        operation = torch.full((2,), INDEX[name])
        ours = arguments(operation, fixed(operation, level), torch.tensor([0.2, 0.8]), table)
        assert ours.tolist() == pytest.approx(theirs if len(theirs) == 2 else theirs * 2, abs=1e-5)


def test_policies_match_timm_and_torchvision(pillow_ops: ModuleType) -> None:
    expected = pillow_ops.auto_augment_policy_original({})
    names = {TIMM[name]: INDEX[name] for name in OPERATIONS} | {"PosterizeOriginal": INDEX["posterize"]}
    ours = [[(int(name), p, level) for name, p, level in pair] for pair in POLICIES["imagenet"]]
    assert ours == [[(names[op.name], op.prob, op.magnitude) for op in pair] for pair in expected]

    module = pytest.importorskip("torchvision.transforms.autoaugment")
    names |= {"TranslateX": INDEX["translate_x"], "TranslateY": INDEX["translate_y"]}
    cifar = module.AutoAugment(module.AutoAugmentPolicy.CIFAR10).policies
    assert len(cifar) == len(POLICIES["cifar10"])
    for pair, other in zip(POLICIES["cifar10"], cifar):
        for (name, p, level), (their, their_p, their_level) in zip(pair, other):
            assert (int(name), p) == (names[their], their_p) and their_level in (None, level)
    assert len(CIFAR) == len(OPERATIONS)


# --- statistics of timm's erasing and mixup --------------------------------------------------------------


def test_erased_area_is_distributed_as_in_timm() -> None:
    erasing = pytest.importorskip("timm.data.random_erasing")
    ones = torch.ones(3000, 1, 24, 24)
    theirs = erasing.RandomErasing(probability=0.5, mode="const", device="cpu")(ones.clone())
    ours = RandomErasing(p=0.5, mode="mean")(ones, torch.Generator().manual_seed(1))
    left, right = ((images == 0).float().mean((1, 2, 3)) for images in (ours, theirs))
    assert abs((left > 0).float().mean() - (right > 0).float().mean()) < 0.05
    for q in (0.6, 0.75, 0.9, 0.99):
        assert abs(left.quantile(q) - right.quantile(q)) < 0.03
    where = [(images == 0).float().mean((0, 1)) for images in (ours, theirs)]
    close(where[0], where[1], 0.05)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixup_weights_are_distributed_as_in_timm(mixup: float, cutmix: float) -> None:
    module = pytest.importorskip("timm.data.mixup")
    np.random.seed(0)
    images, labels = torch.rand(4000, 1, 16, 16), torch.arange(4000) % 2
    labels[2000:] = 1 - labels[:2000].flip(0)  # partners have the other class, so the targets are the weights
    theirs = module.Mixup(mixup, cutmix, mode="elem", label_smoothing=0.1, num_classes=2)(images.clone(), labels)[1]
    targets = one_hot(labels, 2, 0.1)
    ours = Mixup(mixup, cutmix)(images, targets, torch.Generator().manual_seed(2))[1]
    own, other = (t.gather(1, labels[:, None])[:, 0] for t in (ours, theirs))
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert abs(own.quantile(q) - other.quantile(q)) < 0.05


def test_one_hot_matches_timm() -> None:
    module = pytest.importorskip("timm.data.mixup")
    labels = torch.tensor([0, 3, 1, 2])
    close(one_hot(labels, 5, 0.1), module.mixup_target(labels, 5, lam=1.0, smoothing=0.1), 1e-7)


def test_jitter_of_one_kind_matches_torchvision(images: Tensor) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    uniforms = torch.rand(len(images), 8)
    jitter = ColorJitter(0.0, 0.6, 0.0, 0.0)
    expected = [functional.adjust_contrast(x, (0.4 + 1.2 * d).item()) for x, d in zip(images, uniforms[:, 1])]
    close(jitter.apply(images, uniforms), torch.stack(expected), 1e-4)
    jitter = ColorJitter(0.0, 0.0, 0.0, 0.5)
    expected = [functional.adjust_hue(x, (d - 0.5).item()) for x, d in zip(images, uniforms[:, 6])]
    close(jitter.apply(images, uniforms), torch.stack(expected), 1e-4)
