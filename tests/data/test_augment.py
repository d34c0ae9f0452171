"""Augmentations: reproducible, per image, free of host syncs, in any precision, with the right distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import allmlp.models.zoo  # noqa: F401  (register all specs: no two may share a name)
from allmlp.data.augment import (
    Augment,
    AutoAugment,
    ColorJitter,
    Grayscale,
    HorizontalFlip,
    Mixup,
    MultiCrop,
    RandAugment,
    RandomAffine,
    RandomErasing,
    RandomResizedCrop,
    Solarize,
    Transform,
    Translate,
    one_hot,
    presets,
    to_float,
)
from allmlp.data.augment.erasing import noise
from allmlp.data.augment.geometry import reflect
from allmlp.data.augment.policy import OPERATIONS
from allmlp.data.augment.transform import standard_normal, symmetric_beta
from allmlp.errors import UserError
from allmlp.spec import Spec, from_json, override, to_json

DEFAULTS = [kind() for kind in Spec.kinds.values() if issubclass(kind, Transform)]
TRANSFORMS: list[Transform] = [
    *DEFAULTS,
    AutoAugment("cifar10"),
    RandAugment(3, 15, magnitude_std=0.0, increasing=False, max_magnitude=15, p=1.0),
    RandomResizedCrop(size=(12, 18), interpolation="bicubic"),
    RandomErasing(1.0, mode="noise"),
    RandomErasing(1.0, mode="mean"),
    presets.deit(),
    presets.mixer(),
    presets.gmlp(),
    presets.cifar(),
    Augment((HorizontalFlip(), ColorJitter(0.3, 0.3, 0.3, 0.0), Solarize(0.5))),
]
each = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda spec: repr(spec)[:50])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(*shape: int) -> Tensor:
    return torch.rand(shape or (6, 3, 20, 20), generator=seeded(7))


# --- properties of all transforms ------------------------------------------------------------------------


@each
def test_the_same_seed_gives_the_same_images(transform: Transform) -> None:
    images = random_images()
    before = images.clone()
    first, second, third = (transform(images, seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, second) and torch.equal(images, before)
    assert transform.num_uniforms() == 0 or not torch.equal(first, third)
    assert first.shape[:2] == images.shape[:2] and first.isfinite().all()
    if not any(isinstance(part, RandomErasing) for part in transform.children()):
        assert first.min() >= 0 and first.max() <= 1


@each
def test_an_image_does_not_depend_on_the_rest_of_the_batch(transform: Transform) -> None:
    images = random_images()
    uniforms = torch.rand(6, transform.num_uniforms(), generator=seeded(1))
    together = transform.apply(images, uniforms)
    for i in (0, 5):
        alone = transform.apply(images[i : i + 1], uniforms[i : i + 1])
        torch.testing.assert_close(alone, together[i : i + 1], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        # The others consist of these, and presets.cifar() is a sequence of several.
        one
        if one in DEFAULTS or not isinstance(one, (Augment, AutoAugment, RandAugment)) or one == presets.cifar()
        else pytest.param(one, marks=pytest.mark.slow)
        for one in TRANSFORMS
    ],
    ids=lambda spec: repr(spec)[:50],
)
def test_compiles_into_one_graph(transform: Transform) -> None:
    torch.compiler.reset()
    images = random_images()
    uniforms = transform.draw_uniforms(images, seeded(2))
    compiled = torch.compile(transform.apply, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images, uniforms), transform.apply(images, uniforms))


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keeps_half_precision(transform: Transform, dtype: torch.dtype) -> None:
    images = random_images(4, 3, 16, 16)
    uniforms = transform.draw_uniforms(images, seeded(5))
    result = transform.apply(images.to(dtype), uniforms)
    assert result.dtype == dtype and result.isfinite().all()
    # A few pixels may fall on the other side of a threshold or into the next level of a lookup table.
    difference = (result.float() - transform.apply(images, uniforms)).abs()
    assert difference.median() < 0.05


@each
def test_gray_images_and_uint8(transform: Transform) -> None:
    if any(len(getattr(part, "mean", ())) > 1 for part in transform.children()):
        transform = Augment(tuple(t for t in getattr(transform, "transforms", ()) if not hasattr(t, "mean")))
    assert transform(random_images(4, 1, 20, 20), seeded()).shape[:2] == (4, 1)
    images = (random_images() * 255).byte()
    result = Augment((transform,))(images, seeded())
    assert torch.equal(result, Augment((transform,))(to_float(images), seeded()))


@each
def test_survives_json(transform: Transform) -> None:
    assert from_json(to_json(transform)) == transform and hash(transform) == hash(from_json(to_json(transform)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each
def test_never_synchronizes_with_the_device(transform: Transform) -> None:
    images = random_images().cuda()
    uniforms = transform.draw_uniforms(images, torch.Generator("cuda").manual_seed(0))
    expected = transform.apply(images, uniforms)  # also copies the constants
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a host sync would be an error
        captured = transform.apply(images, uniforms).clone()  # a graph must not be empty
    graph.replay()
    torch.testing.assert_close(captured, expected)
    on_cpu = transform.apply(images.cpu(), uniforms.cpu())
    assert (captured.cpu() - on_cpu).abs().median() < 1e-4


# --- distributions ---------------------------------------------------------------------------------------


def test_images_of_a_batch_get_different_operations() -> None:
    images = random_images(1, 3, 16, 16).repeat(64, 1, 1, 1)
    result = RandAugment(1, p=1.0)(images, seeded())
    assert len({tuple(image.flatten().tolist()) for image in result}) > 15


def test_operations_are_equally_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "allmlp.data.augment.policy.apply_operations", lambda images, operation, *_: seen.append(operation) or images
    )
    RandAugment(2, p=0.5)(random_images(20_000, 1, 1, 1), seeded())
    assert len(seen) == 2
    for operation in seen:
        counts = torch.bincount(operation + 1, minlength=len(OPERATIONS) + 1) / 20_000
        assert abs(counts[0] - 0.5) < 0.015 and (counts[1:] - 0.5 / 15).abs().max() < 0.006
    assert abs(((seen[0] >= 0) & (seen[1] >= 0)).float().mean() - 0.25) < 0.015  # layers are independent

    seen.clear()
    AutoAugment("cifar10")(random_images(20_000, 1, 1, 1), seeded())
    assert abs((seen[0] == OPERATIONS.index("invert")).float().mean() - 0.1 / 25) < 0.002


def test_magnitudes_are_normal_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = []
    monkeypatch.setattr(
        "allmlp.data.augment.policy.arguments", lambda operation, level, *_: levels.append(level) or level
    )
    RandAugment(1)(random_images(20_000, 1, 3, 3), seeded())
    level = levels[0]
    assert level.max() <= 10 and abs((level == 10).float().mean() - 0.0228) < 0.006
    assert abs(level.mean() - 9) < 0.02 and abs(level.quantile(0.16) - 8.5) < 0.03


@pytest.mark.parametrize("spec", [HorizontalFlip(0.3), Grayscale(0.3), Solarize(0.3), RandomErasing(0.3)])
def test_probability(spec: Transform) -> None:
    images = random_images(4000, 3, 8, 8)
    changed = (spec(images, seeded()) != images).flatten(1).any(1).float().mean()
    assert abs(changed - 0.3) < 0.03


def test_normal_beta_and_noise() -> None:
    uniforms = torch.rand(50_000, 2, generator=seeded())
    assert abs(standard_normal(uniforms[:, 0]).std() - 1) < 0.02 and standard_normal(torch.zeros(1)).isfinite().all()
    for alpha in (0.2, 0.5, 1.0, 3.0):
        values = symmetric_beta(uniforms[:, 0], uniforms[:, 1], alpha)
        assert values.min() >= 0 and values.max() <= 1 and abs(values.mean() - 0.5) < 0.01
        assert abs(values.var() - 1 / (4 * (2 * alpha + 1))) < 0.003
        skewless = torch.distributions.Beta(alpha, alpha).sample((50_000,))
        assert abs(values.quantile(0.1) - skewless.quantile(0.1)) < 0.02
    assert symmetric_beta(torch.zeros(2), torch.tensor([0.0, 0.25]), 0.2).isfinite().all()

    values = noise(torch.rand(16, generator=seeded()), (3, 64, 64))
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    assert abs((values**4).mean() - 3) < 0.1  # kurtosis of a normal distribution
    rows = values.flatten(1)
    assert (torch.corrcoef(rows) - torch.eye(16)).abs().max() < 0.05  # noise differs between images
    for lag in (1, 64, 4096):
        assert abs((rows[:, lag:] * rows[:, :-lag]).mean()) < 0.02


def test_crop_boxes_are_distributed_as_in_torchvision() -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    crop = RandomResizedCrop()
    ours = torch.stack(crop.boxes(40, 60, torch.rand(4000, crop.num_uniforms(), generator=seeded())), 1)
    image = torch.zeros(3, 40, 60)
    theirs = torch.tensor(
        [transforms.RandomResizedCrop.get_params(image, crop.scale, crop.ratio) for _ in range(4000)]
    ).float()
    assert (ours == ours.round()).all() and (ours >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= 40).all() and (ours[:, 1] + ours[:, 3] <= 60).all()
    for column in range(4):
        for q in (0.1, 0.5, 0.9):
            assert abs(ours[:, column].quantile(q) - theirs[:, column].quantile(q)) <= 2
    narrow = RandomResizedCrop(scale=(1.0, 1.0))
    boxes = narrow.boxes(20, 60, torch.rand(8, narrow.num_uniforms()))
    assert [b.tolist() for b in boxes] == [[0.0] * 8, [16.0] * 8, [20.0] * 8, [27.0] * 8]  # the centered fallback


def test_a_crop_is_the_resized_box() -> None:
    images = random_images(5, 3, 24, 24)
    crop = RandomResizedCrop(size=(12, 12))
    uniforms = torch.rand(5, crop.num_uniforms(), generator=seeded(3))
    result = crop.apply(images, uniforms)
    for i, (top, left, rows, columns) in enumerate(torch.stack(crop.boxes(24, 24, uniforms), 1).int().tolist()):
        box = images[i : i + 1, :, top : top + rows, left : left + columns]
        if rows <= 12 and columns <= 12:  # interpolate stops at the edge of the box, grid_sample at that of the image
            expected = F.interpolate(box, (12, 12), mode="bilinear", align_corners=False)
            torch.testing.assert_close(result[i : i + 1, :, 2:-2, 2:-2], expected[:, :, 2:-2, 2:-2])
    assert result.shape == (5, 3, 12, 12)


# --- single transforms -----------------------------------------------------------------------------------


def test_horizontal_flip_reverses_columns() -> None:
    images = random_images(3, 2, 4, 5)
    flipped = HorizontalFlip(1.0)(images, seeded())
    for column in range(5):
        assert torch.equal(flipped[..., column], images[..., 4 - column])
    assert torch.equal(HorizontalFlip(0.0)(images, seeded()), images)


def test_random_affine_stretches_each_side() -> None:
    """Twice as wide and as high as before; half a width to the right."""
    images = random_images(1, 1, 4, 8)
    wide = RandomAffine(0.0, 0.0, (1.0, 2.0)).apply(images, torch.tensor([[0.5, 0.5, 0.5, 1.0, 0.0]]))
    torch.testing.assert_close(wide, F.interpolate(images[..., 1:7], scale_factor=(1, 2), mode="bilinear")[..., 2:10])
    black = RandomAffine(0.0, 1.0, (1.0, 1.0)).apply(images, torch.tensor([[0.5, 0.75, 0.5, 0.5, 0.5]]))
    assert torch.equal(black[..., :4], torch.zeros(1, 1, 4, 4))
    torch.testing.assert_close(black[..., 4:], images[..., :4])


def test_translation_is_a_crop_of_the_reflect_padded_image() -> None:
    images = random_images(200, 3, 9, 7)
    spec = Translate(3)
    result = spec(images, seeded())
    padded = F.pad(images, (3, 3, 3, 3), mode="reflect")
    shifts = {(y, x): padded[:, :, y : y + 9, x : x + 7] for y in range(7) for x in range(7)}
    hits = torch.stack([(result == crop).flatten(1).all(1) for crop in shifts.values()])
    assert hits.any(0).all() and hits.any(1).float().mean() > 0.9
    with pytest.raises(UserError, match="less than the side of the images, 7"):
        Translate(7)(images, seeded())
    assert reflect(torch.arange(-2, 6), 4).tolist() == [2, 1, 0, 1, 2, 3, 2, 1]


def test_erasing_fills_a_box() -> None:
    ones = torch.ones(500, 3, 20, 20)
    noisy = RandomErasing(1.0, mode="noise")(ones, seeded())
    assert all(len(set(image.flatten().tolist())) == 2 for image in noisy[:20, 0])
    pixel = RandomErasing(1.0, mode="pixel")(ones, seeded())
    erased = pixel[pixel != 1]
    assert abs(erased.mean()) < 0.02 and abs(erased.std() - 1) < 0.02
    changed = (pixel != 1).any(1)  # a box is the product of its rows and columns
    assert torch.equal(changed.sum((1, 2)), changed.any(2).sum(1) * changed.any(1).sum(1))

    mean, std = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)
    shifted = RandomErasing(1.0, mean=mean, std=std)(ones, seeded())
    normalized = (shifted - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normalized[pixel != 1], erased, atol=1e-5, rtol=1e-5)
    gray = RandomErasing(1.0, mode="mean", mean=mean)(ones, seeded())
    assert torch.equal(gray[:, 1].unique(), torch.tensor([0.3, 1.0]))


def test_solarize_and_grayscale_of_known_values() -> None:
    images = torch.tensor([0.2, 0.5, 0.8])[None, :, None, None].expand(1, 3, 4, 4)
    solarized = Solarize(1.0, 0.5)(images, seeded())
    torch.testing.assert_close(solarized[0, :, 0, 0], torch.tensor([0.2, 0.5, 0.2]))
    luma = 0.299 * 0.2 + 0.587 * 0.5 + 0.114 * 0.8
    torch.testing.assert_close(Grayscale(1.0)(images, seeded()), torch.full((1, 3, 4, 4), luma))


def test_jitter_applies_in_random_order() -> None:
    images = random_images(1, 3, 8, 8).repeat(200, 1, 1, 1)
    uniforms = torch.rand(1, 8).repeat(200, 1)
    uniforms[:, 3:6] = torch.rand(200, 3)
    results = ColorJitter(0.8, 0.8, 0.8, 0.0).apply(images, uniforms)
    assert 3 <= len({tuple(image.flatten().tolist()) for image in results}) <= 6


# --- mixup and CutMix ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mixup",
    [
        Mixup(),
        Mixup(0.8, 0.0),
        Mixup(0.0, 1.0),
        Mixup(prob=0.5, partner="rolled"),
        Mixup(per_sample=False),
        presets.mixer_mixup(),
        presets.DEIT_MIXUP,
    ],
)
def test_targets_are_mixed_like_the_images(mixup: Mixup) -> None:
    count = 48
    # Every image is constant and its target holds the value, so both must be mixed with the same weight.
    images = torch.rand(count, 1, 1, 1, generator=seeded()).expand(count, 1, 16, 16)
    targets = torch.cat((images[:, 0, 0, :1], 1 - images[:, 0, 0, :1]), 1)
    mixed, mixed_targets = mixup(images, targets, seeded(1))
    torch.testing.assert_close(mixed.mean((1, 2, 3)), mixed_targets[:, 0])
    torch.testing.assert_close(mixed_targets.sum(1), torch.ones(count))
    again = mixup(images, targets, seeded(1))
    assert torch.equal(again[0], mixed) and torch.equal(again[1], mixed_targets)
    torch.compiler.reset()
    uniforms = mixup.draw_uniforms(images, seeded(1))
    compiled = torch.compile(mixup.apply, fullgraph=True, backend="eager")(images, targets, uniforms)
    torch.testing.assert_close(compiled, (mixed, mixed_targets))


def test_mixing_options() -> None:
    images, targets = random_images(64, 3, 8, 8), one_hot(torch.arange(64), 64)
    own_weight = lambda mixup: mixup(images, targets, seeded())[1].diagonal()  # noqa: E731
    assert own_weight(Mixup(prob=0.0)).eq(1).all() and own_weight(Mixup(0.0, 0.0)).eq(1).all()
    assert 0.3 < own_weight(Mixup(prob=0.5)).eq(1).float().mean() < 0.75
    assert own_weight(Mixup()).unique().numel() > 40
    assert own_weight(Mixup(0.5, 0.0, per_sample=False)).unique().numel() == 1
    assert own_weight(Mixup(0.5, 0.0, dominant=True)).min() >= 0.5 > own_weight(Mixup(0.5, 0.0)).min()
    rolled = Mixup(0.8, 0.0, partner="rolled")(images, targets, seeded())[1]
    assert (rolled[torch.arange(64), torch.arange(64) - 1] > 0).all()
    half = Mixup()(images.half(), targets.half(), seeded())
    assert half[0].dtype == half[1].dtype == torch.float16
    with pytest.raises(UserError, match="one_hot"):
        Mixup()(images, torch.arange(64), seeded())


def test_cutmix_pastes_a_box_of_the_partner() -> None:
    images, targets = random_images(32, 3, 16, 16), one_hot(torch.arange(32), 32, 0.1)
    mixed, mixed_targets = Mixup(0.0, 1.0)(images, targets, seeded())
    own, partner = (mixed == images).all(1), (mixed == images.flip(0)).all(1)
    assert (own | partner).all()
    area = partner.float().mean((1, 2))
    torch.testing.assert_close(mixed_targets, targets * (1 - area[:, None]) + targets.flip(0) * area[:, None])


def test_one_hot() -> None:
    targets = one_hot(torch.tensor([2, 0]), 4, label_smoothing=0.2)
    torch.testing.assert_close(targets, torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]))


# --- multi-crop ------------------------------------------------------------------------------------------


def test_multicrop() -> None:
    images = random_images(3, 3, 32, 32)
    spec = MultiCrop(num_local=4, global_size=24, local_size=(8, 12))
    large, small = spec(images, seeded())
    assert large.shape == (6, 3, 24, 24) and small.shape == (12, 3, 8, 12)
    assert torch.equal(spec(images, seeded())[1], small)
    assert len(spec.replace(num_local=0)(images, seeded())) == 1
    assert len({tuple(view.flatten().tolist()) for view in (*large[0::3],)}) == 2
    first, other, local = (spec.pipelines()[i] for i in (0, 1, 2))
    chances = [(view.transforms[4].p, view.transforms[5].p) for view in (first, other, local)]  # type: ignore[attr-defined]
    assert chances == [(1.0, 0.0), (0.1, 0.2), (0.5, 0.0)]
    assert presets.dino(32, 16)(images, seeded())[1].shape == (24, 3, 16, 16)
    assert from_json(to_json(presets.dino())) == presets.dino()


@pytest.mark.slow
def test_multicrop_compiles_into_one_graph() -> None:
    images, spec = random_images(3, 3, 32, 32), MultiCrop(num_local=2, global_size=24, local_size=(8, 12))
    torch.compiler.reset()
    uniforms = spec.draw_uniforms(images, seeded())
    compiled = torch.compile(spec.apply, fullgraph=True, backend="eager")(images, uniforms)
    torch.testing.assert_close(compiled, spec(images, seeded()))


# --- lists in specs --------------------------------------------------------------------------------------


class SpecList(Spec):
    parts: tuple[Spec, ...] = ()
    weights: tuple[float, ...] = ()


def test_specs_hold_lists() -> None:
    spec_list = SpecList((HorizontalFlip(), SpecList((Translate(3),), (1, 2.5))), [0.5])  # type: ignore[arg-type]
    assert spec_list.weights == (0.5,) and spec_list.parts[1] == SpecList((Translate(3),), (1.0, 2.5))
    assert from_json(to_json(spec_list)) == spec_list and from_json(to_json(SpecList())) == SpecList()
    assert [type(part).__name__ for part in spec_list.children()] == [
        "SpecList",
        "HorizontalFlip",
        "SpecList",
        "Translate",
    ]
    assert SpecList(HorizontalFlip(), 3).parts == (HorizontalFlip(),) and SpecList(weights=3).weights == (3.0,)  # type: ignore[arg-type]
    assert override(spec_list, "weights", "1,2,3").weights == (1.0, 2.0, 3.0)
    assert override(spec_list, "weights", "4").weights == (4.0,) and override(
        spec_list, "parts", "HorizontalFlip"
    ).parts == (HorizontalFlip(),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Augment((HorizontalFlip(), Mixup())), r"Augment.transforms\[1\] must be Transform, not Mixup()"),
        (lambda: SpecList(weights=(1.0, "x")), r"SpecList.weights\[1\] must be a number, not 'x'"),
        (lambda: SpecList(weights=math.nan), r"SpecList.weights\[0\] must be a number, not nan"),
        (lambda: SpecList(weights="3"), "SpecList.weights must be a list, each a number, not '3'"),
        (
            lambda: from_json('{"kind": "SpecList", "parts": [{"kind": "HorizontalFlipp"}]}'),
            r"kind of config.parts\[0\] 'HorizontalFlipp'; did",
        ),
        (lambda: from_json('{"kind": "SpecList", "parts": [{"p": 1}]}'), r"config.parts\[0\] has no 'kind'"),
        (lambda: RandomResizedCrop(scale=(0.5, 0.1)), "the smaller number first"),
        (lambda: RandomAffine(scale=(0.0, 1.1)), "scale must be positive"),
        (lambda: RandomErasing(scale=(0.2, 2.0)), "between 0 and 1"),
        (lambda: ColorJitter(hue=0.6), "half a turn"),
    ],
)
def test_invalid_values_give_one_line_errors(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_a_generator_elsewhere_is_refused() -> None:
    with pytest.raises(UserError, match="random generator is on cpu"):
        HorizontalFlip()(torch.zeros(1, 3, 2, 2, device="meta"), seeded())
