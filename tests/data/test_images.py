"""Augmentations: repeatable, each picture its own, free of host syncs, in any precision, with the right frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import allmlp.models.zoo  # noqa: F401  (all kinds together: no two may share a name)
from allmlp.data.augment import standard
from allmlp.data.augment.erase import noise
from allmlp.data.augment.geometry import reflect, scramble
from allmlp.data.augment.policy import OPERATIONS
from allmlp.data.augment.transform import beta, normal
from allmlp.data.images import (
    AlternatingFlip,
    Augment,
    AutoAugment,
    ColourJitter,
    Cutout,
    Erasing,
    Flip,
    Greyscale,
    Mix,
    MultiCrop,
    Normalise,
    RandAugment,
    RandomResizedCrop,
    Solarise,
    Step,
    ThreeAugment,
    Transform,
    Translate,
    Warp,
    floats,
    one_hot,
)
from allmlp.errors import UserError
from allmlp.spec import Spec, from_json, override, to_json

PLAIN = [kind() for kind in Spec.kinds.values() if issubclass(kind, Transform)]
TRANSFORMS: list[Transform] = [
    *PLAIN,
    AutoAugment("cifar10"),
    RandAugment(3, 15, std=0.0, increasing=False, ceiling=15, p=1.0),
    RandomResizedCrop(size=(12, 18), filter="bicubic"),
    Warp(0.5, (0.3, 1.0), (0.7, 1.4), 20.0, 0.2, 0.1, size=(10, 14), outside=0.5),
    Warp(0.5, (0.5, 1.5), degrees=180.0, filter="bicubic"),
    Erasing(1.0, mode="noise"),
    Erasing(1.0, mode="mean"),
    Augment((Flip(), RandAugment(), Normalise((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), Erasing(1.0))),
    standard.deit(),
    standard.mixer(),
    standard.gmlp(),
    standard.cifar(),
    Augment((AlternatingFlip(), ColourJitter(0.3, 0.3, 0.3, 0.0), Cutout(6))),
]
each = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda spec: repr(spec)[:50])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(*shape: int) -> Tensor:
    return torch.rand(shape or (6, 3, 20, 20), generator=seeded(7))


def step(batch: int, epoch: int = 0) -> Step:
    return Step(epoch, torch.arange(batch))


def bounded(transform: Transform) -> bool:
    return not any(isinstance(part, (Normalise, Erasing)) for part in transform.children())


# --- what holds for all --------------------------------------------------------------------------------


@each
def test_the_same_seed_gives_the_same_pictures(transform: Transform) -> None:
    images = pictures()
    before = images.clone()
    first, second, third = (transform.apply(images, seeded(seed), step(6)) for seed in (3, 3, 4))
    assert torch.equal(first, second) and torch.equal(images, before)
    assert transform.numbers() == 0 or not torch.equal(first, third) or isinstance(transform, tuple(quiet()))
    assert first.shape[:2] == images.shape[:2] and first.isfinite().all()
    if bounded(transform):
        assert first.min() >= 0 and first.max() <= 1


def quiet() -> list[type]:
    """Kinds whose defaults are not random."""
    return [type(spec) for spec in PLAIN if getattr(spec, "p", 0) == 1.0 or type(spec).__name__ == "Warp"]


@each
def test_a_picture_does_not_depend_on_its_neighbours(transform: Transform) -> None:
    images, place = pictures(), step(6)
    draws = torch.rand(6, transform.numbers(), generator=seeded(1))
    together = transform.transform(images, draws, place)
    for i in (0, 5):
        alone = transform.transform(images[i : i + 1], draws[i : i + 1], Step(0, place.indices[i : i + 1]))
        torch.testing.assert_close(alone, together[i : i + 1], atol=1e-5, rtol=1e-4)


@each
def test_compiles_into_one_graph(transform: Transform) -> None:
    torch.compiler.reset()
    images, place = pictures(), Step(torch.tensor(1), torch.arange(6))
    draws = transform.draw(images, seeded(2))
    compiled = torch.compile(transform.transform, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images, draws, place), transform.transform(images, draws, place))


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keeps_half_precision(transform: Transform, dtype: torch.dtype) -> None:
    images, place = pictures(4, 3, 16, 16), step(4)
    draws = transform.draw(images, seeded(5))
    result = transform.transform(images.to(dtype), draws, place)
    assert result.dtype == dtype and result.isfinite().all()
    # Thresholds and tables may fall to the other side for a few pixels.
    difference = (result.float() - transform.transform(images, draws, place)).abs()
    assert difference.median() < 0.05


@each
def test_grey_pictures_and_bytes(transform: Transform) -> None:
    if any(len(getattr(part, "mean", ())) > 1 for part in transform.children()):
        transform = Augment(tuple(t for t in getattr(transform, "transforms", ()) if not hasattr(t, "mean")))
    assert transform.apply(pictures(4, 1, 20, 20), seeded(), step(4)).shape[:2] == (4, 1)
    grains = (pictures() * 255).byte()
    whole = Augment((transform,)).apply(grains, seeded(), step(6))
    assert torch.equal(whole, Augment((transform,)).apply(floats(grains), seeded(), step(6)))


@each
def test_is_a_value_that_json_keeps(transform: Transform) -> None:
    assert from_json(to_json(transform)) == transform and hash(transform) == hash(from_json(to_json(transform)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each
def test_never_waits_for_the_device(transform: Transform) -> None:
    images, place = pictures().cuda(), Step(torch.zeros((), device="cuda"), torch.arange(6, device="cuda"))
    draws = transform.draw(images, torch.Generator("cuda").manual_seed(0))
    expected = transform.transform(images, draws, place)  # also fills the tables
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a host sync would be an error
        captured = transform.transform(images, draws, place).clone()  # a graph must not be empty
    graph.replay()
    torch.testing.assert_close(captured, expected)
    close = transform.transform(images.cpu(), draws.cpu(), Step(0, place.indices.cpu()))
    assert (captured.cpu() - close).abs().median() < 1e-4


# --- frequencies and distributions ---------------------------------------------------------------------


def test_pictures_of_a_batch_get_different_operations() -> None:
    images = pictures(1, 3, 16, 16).repeat(64, 1, 1, 1)
    result = RandAugment(1, p=1.0).apply(images, seeded())
    assert len({tuple(picture.flatten().tolist()) for picture in result}) > 15


def test_operations_are_equally_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "allmlp.data.augment.policy.operate", lambda images, operation, *_: seen.append(operation) or images
    )
    RandAugment(2, p=0.5).apply(pictures(20_000, 1, 1, 1), seeded())
    assert len(seen) == 2
    for operation in seen:
        counts = torch.bincount(operation + 1, minlength=len(OPERATIONS) + 1) / 20_000
        assert abs(counts[0] - 0.5) < 0.015 and (counts[1:] - 0.5 / 15).abs().max() < 0.006
    assert abs(((seen[0] >= 0) & (seen[1] >= 0)).float().mean() - 0.25) < 0.015  # layers are independent

    seen.clear()
    AutoAugment("cifar10").apply(pictures(20_000, 1, 1, 1), seeded())
    assert abs((seen[0] == OPERATIONS.index("invert")).float().mean() - 0.1 / 25) < 0.002


def test_magnitudes_are_normal_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = []
    monkeypatch.setattr(
        "allmlp.data.augment.policy.arguments", lambda operation, level, *_: levels.append(level) or level
    )
    RandAugment(1).apply(pictures(20_000, 1, 3, 3), seeded())
    level = levels[0]
    assert level.max() <= 10 and abs((level == 10).float().mean() - 0.0228) < 0.006
    assert abs(level.mean() - 9) < 0.02 and abs(level.quantile(0.16) - 8.5) < 0.03


@pytest.mark.parametrize("spec", [Flip(0.3), Greyscale(0.3), Solarise(0.3), Erasing(0.3)])
def test_probability(spec: Transform) -> None:
    images = pictures(4000, 3, 8, 8)
    changed = (spec.apply(images, seeded()) != images).flatten(1).any(1).float().mean()
    assert abs(changed - 0.3) < 0.03


def test_normal_beta_and_noise() -> None:
    draws = torch.rand(50_000, 2, generator=seeded())
    assert abs(normal(draws[:, 0]).std() - 1) < 0.02 and normal(torch.zeros(1)).isfinite().all()
    for alpha in (0.2, 0.5, 1.0, 3.0):
        values = beta(draws[:, 0], draws[:, 1], alpha)
        assert values.min() >= 0 and values.max() <= 1 and abs(values.mean() - 0.5) < 0.01
        assert abs(values.var() - 1 / (4 * (2 * alpha + 1))) < 0.003
        skewless = torch.distributions.Beta(alpha, alpha).sample((50_000,))
        assert abs(values.quantile(0.1) - skewless.quantile(0.1)) < 0.02
    assert beta(torch.zeros(2), torch.tensor([0.0, 0.25]), 0.2).isfinite().all()

    values = noise(torch.rand(16, generator=seeded()), (3, 64, 64))
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    assert abs((values**4).mean() - 3) < 0.1  # kurtosis of a normal
    rows = values.flatten(1)
    assert (torch.corrcoef(rows) - torch.eye(16)).abs().max() < 0.05  # pictures do not share their noise
    for lag in (1, 64, 4096):
        assert abs((rows[:, lag:] * rows[:, :-lag]).mean()) < 0.02


def test_crops_are_torchvisions() -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    crop = RandomResizedCrop()
    ours = torch.stack(crop.boxes(40, 60, torch.rand(4000, crop.numbers(), generator=seeded())), 1)
    image = torch.zeros(3, 40, 60)
    theirs = torch.tensor(
        [transforms.RandomResizedCrop.get_params(image, crop.scale, crop.ratio) for _ in range(4000)]
    ).float()
    assert (ours == ours.round()).all() and (ours >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= 40).all() and (ours[:, 1] + ours[:, 3] <= 60).all()
    for column in range(4):
        for share in (0.1, 0.5, 0.9):
            assert abs(ours[:, column].quantile(share) - theirs[:, column].quantile(share)) <= 2
    narrow = RandomResizedCrop(scale=(1.0, 1.0))
    boxes = narrow.boxes(20, 60, torch.rand(8, narrow.numbers()))
    assert [b.tolist() for b in boxes] == [[0.0] * 8, [16.0] * 8, [20.0] * 8, [27.0] * 8]  # the centred fallback


def test_a_crop_shows_the_box() -> None:
    images = pictures(5, 3, 24, 24)
    crop = RandomResizedCrop(size=(12, 12))
    draws = torch.rand(5, crop.numbers(), generator=seeded(3))
    result = crop.transform(images, draws)
    for i, (top, left, rows, columns) in enumerate(torch.stack(crop.boxes(24, 24, draws), 1).int().tolist()):
        box = images[i : i + 1, :, top : top + rows, left : left + columns]
        if rows <= 12 and columns <= 12:  # torch's interpolate stops at the box's edge, grid_sample at the picture's
            expected = F.interpolate(box, (12, 12), mode="bilinear", align_corners=False)
            torch.testing.assert_close(result[i : i + 1, :, 2:-2, 2:-2], expected[:, :, 2:-2, 2:-2])
    assert result.shape == (5, 3, 12, 12)


# --- one by one ----------------------------------------------------------------------------------------


def test_translation_is_a_crop_of_the_reflected_picture() -> None:
    images = pictures(200, 3, 9, 7)
    spec = Translate(3)
    result = spec.apply(images, seeded())
    padded = F.pad(images, (3, 3, 3, 3), mode="reflect")
    shifts = {(y, x): padded[:, :, y : y + 9, x : x + 7] for y in range(7) for x in range(7)}
    hits = torch.stack([(result == crop).flatten(1).all(1) for crop in shifts.values()])
    assert hits.any(0).all() and hits.any(1).float().mean() > 0.9
    with pytest.raises(UserError, match="less than the picture's side 7"):
        Translate(7).apply(images, seeded())
    assert reflect(torch.arange(-2, 6), 4).tolist() == [2, 1, 0, 1, 2, 3, 2, 1]


def test_flips_alternate() -> None:
    images, indices = pictures(400, 1, 2, 2), torch.randperm(400, generator=seeded())
    flipped = []
    for epoch in range(4):
        result = AlternatingFlip().apply(images, seeded(epoch), Step(epoch, indices))
        flipped.append((result == images.flip(-1)).flatten(1).all(1))
    assert abs(flipped[0].float().mean() - 0.5) < 0.1
    assert torch.equal(flipped[0], ~flipped[1]) and torch.equal(flipped[0], flipped[2])
    other = AlternatingFlip(seed=1).apply(images, seeded(), Step(0, indices))
    assert 0.3 < (other == images.flip(-1)).flatten(1).all(1).eq(flipped[0]).float().mean() < 0.7
    assert scramble(torch.arange(1000)).unique().numel() == 1000
    with pytest.raises(UserError, match="needs a Step"):
        AlternatingFlip().apply(images, seeded())


def test_a_warp_that_does_nothing_or_only_flips() -> None:
    images = pictures()
    torch.testing.assert_close(Warp(flip=0.0).apply(images, seeded()), images, atol=1e-5, rtol=0)
    torch.testing.assert_close(Warp(flip=1.0).apply(images, seeded()), images.flip(-1), atol=1e-5, rtol=0)
    still = Warp(0.0, degrees=90.0)
    draws = torch.rand(6, 9)
    draws[:, 3] = 1.0
    turned = still.transform(images, draws)
    torch.testing.assert_close(turned, images.rot90(1, (2, 3)), atol=1e-4, rtol=0)
    filled = Warp(0.0, scale=(4.0, 4.0), outside=0.25)  # the picture at half its size
    draws[:, 5:] = 0.5
    small = filled.transform(images, draws)
    assert (small[:, :, :5] == 0.25).all() and (small[:, :, 5:15, 5:15] != 0.25).any()


def test_cutout_and_erasing_paint_boxes() -> None:
    ones = torch.ones(500, 3, 20, 20)
    cut = Cutout(8).apply(ones, seeded())
    areas = (cut == 0).float().sum((2, 3))
    assert areas.max() == 64 and areas.min() >= 16 and torch.equal(areas[:, 0], areas[:, 2])
    assert torch.equal(Cutout(8, p=0.0).apply(ones, seeded()), ones)

    colour = Erasing(1.0, mode="noise").apply(ones, seeded())
    assert all(len(set(picture.flatten().tolist())) == 2 for picture in colour[:20, 0])
    pixel = Erasing(1.0, mode="pixel").apply(ones, seeded())
    inside = pixel[pixel != 1]
    assert abs(inside.mean()) < 0.02 and abs(inside.std() - 1) < 0.02

    mean, std = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)
    before = Normalise(mean, std).apply(Erasing(1.0, mean=mean, std=std).apply(ones, seeded()), seeded())
    torch.testing.assert_close(before[pixel != 1], inside, atol=1e-5, rtol=1e-5)
    grey = Erasing(1.0, mode="mean", mean=mean).apply(ones, seeded())
    assert torch.equal(grey[:, 1].unique(), torch.tensor([0.3, 1.0]))


def test_normalise() -> None:
    images = pictures()
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    expected = (images - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(Normalise(tuple(mean.tolist()), tuple(std.tolist())).apply(images, seeded()), expected)
    torch.testing.assert_close(Normalise().apply(images, seeded()), images * 2 - 1)
    with pytest.raises(UserError, match="2 means, the pictures have 3"):
        Normalise((0.1, 0.2), (1.0, 1.0)).apply(images, seeded())


def test_three_augment_is_one_of_three() -> None:
    images = pictures(3000, 3, 8, 8)
    result = ThreeAugment().apply(images, seeded())
    grey = (result[:, 0] == result[:, 2]).flatten(1).all(1)
    solar = (result == torch.where(images >= 0.5, 1 - images, images)).flatten(1).all(1)
    assert abs(grey.float().mean() - 1 / 3) < 0.03 and abs(solar.float().mean() - 1 / 3) < 0.03


def test_jitter_applies_in_random_order() -> None:
    images = pictures(1, 3, 8, 8).repeat(200, 1, 1, 1)
    draws = torch.rand(1, 8).repeat(200, 1)
    draws[:, 3:6] = torch.rand(200, 3)
    results = ColourJitter(0.8, 0.8, 0.8, 0.0).transform(images, draws)
    assert 3 <= len({tuple(picture.flatten().tolist()) for picture in results}) <= 6


# --- mixing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        Mix(),
        Mix(0.8, 0.0),
        Mix(0.0, 1.0),
        Mix(probability=0.5, partner="rolled"),
        Mix(per_sample=False),
        standard.mixer_mix(),
        standard.DEIT_MIX,
    ],
)
def test_targets_are_the_share_of_the_picture(mix: Mix) -> None:
    count = 48
    # Every picture is one constant value, and its target says which: both must be mixed alike.
    images = torch.rand(count, 1, 1, 1, generator=seeded()).expand(count, 1, 16, 16)
    targets = torch.cat((images[:, 0, 0, :1], 1 - images[:, 0, 0, :1]), 1)
    mixed, shares = mix.apply(images, targets, seeded(1))
    torch.testing.assert_close(mixed.mean((1, 2, 3)), shares[:, 0])
    torch.testing.assert_close(shares.sum(1), torch.ones(count))
    again = mix.apply(images, targets, seeded(1))
    assert torch.equal(again[0], mixed) and torch.equal(again[1], shares)
    torch.compiler.reset()
    draws = mix.draw(images, seeded(1))
    compiled = torch.compile(mix.transform, fullgraph=True, backend="eager")(images, targets, draws)
    torch.testing.assert_close(compiled, (mixed, shares))


def test_mixing_options() -> None:
    images, targets = pictures(64, 3, 8, 8), one_hot(torch.arange(64), 64)
    share = lambda mix: mix.apply(images, targets, seeded())[1].diagonal()  # noqa: E731
    assert share(Mix(probability=0.0)).eq(1).all() and share(Mix(0.0, 0.0)).eq(1).all()
    assert 0.3 < share(Mix(probability=0.5)).eq(1).float().mean() < 0.75
    assert share(Mix()).unique().numel() > 40
    assert share(Mix(0.5, 0.0, per_sample=False)).unique().numel() == 1
    assert share(Mix(0.5, 0.0, dominant=True)).min() >= 0.5 > share(Mix(0.5, 0.0)).min()
    rolled = Mix(0.8, 0.0, partner="rolled").apply(images, targets, seeded())[1]
    assert (rolled[torch.arange(64), torch.arange(64) - 1] > 0).all()
    half = Mix().apply(images.half(), targets.half(), seeded())
    assert half[0].dtype == half[1].dtype == torch.float16
    with pytest.raises(UserError, match="one_hot"):
        Mix().apply(images, torch.arange(64), seeded())


def test_cutmix_pastes_a_box_of_the_partner() -> None:
    images, targets = pictures(32, 3, 16, 16), one_hot(torch.arange(32), 32, 0.1)
    mixed, shares = Mix(0.0, 1.0).apply(images, targets, seeded())
    own, partner = (mixed == images).all(1), (mixed == images.flip(0)).all(1)
    assert (own | partner).all()
    area = partner.float().mean((1, 2))
    torch.testing.assert_close(shares, targets * (1 - area[:, None]) + targets.flip(0) * area[:, None])


def test_one_hot() -> None:
    targets = one_hot(torch.tensor([2, 0]), 4, smoothing=0.2)
    torch.testing.assert_close(targets, torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]))


# --- views ---------------------------------------------------------------------------------------------


def test_views() -> None:
    images = pictures(3, 3, 32, 32)
    spec = MultiCrop(local=4, global_size=24, local_size=(8, 12))
    large, small = spec.apply(images, seeded())
    assert large.shape == (6, 3, 24, 24) and small.shape == (12, 3, 8, 12)
    assert torch.equal(spec.apply(images, seeded())[1], small)
    assert len(spec.replace(local=0).apply(images, seeded())) == 1
    assert len({tuple(view.flatten().tolist()) for view in (*large[0::3],)}) == 2
    torch.compiler.reset()
    draws = spec.draw(images, seeded())
    compiled = torch.compile(spec.transform, fullgraph=True, backend="eager")(images, draws)
    torch.testing.assert_close(compiled, [large, small])
    first, other, local = (spec.views()[i] for i in (0, 1, 2))
    chances = [(view.transforms[4].p, view.transforms[5].p) for view in (first, other, local)]  # type: ignore[attr-defined]
    assert chances == [(1.0, 0.0), (0.1, 0.2), (0.5, 0.0)]
    assert standard.dino(32, 16).apply(images, seeded())[1].shape == (24, 3, 16, 16)
    assert from_json(to_json(standard.dino())) == standard.dino()


# --- lists in specs ------------------------------------------------------------------------------------


class Shelf(Spec):
    parts: tuple[Spec, ...] = ()
    weights: tuple[float, ...] = ()


def test_specs_hold_lists() -> None:
    shelf = Shelf((Flip(), Shelf((Cutout(3),), (1, 2.5))), [0.5])  # type: ignore[arg-type]
    assert shelf.weights == (0.5,) and shelf.parts[1] == Shelf((Cutout(3),), (1.0, 2.5))
    assert from_json(to_json(shelf)) == shelf and from_json(to_json(Shelf())) == Shelf()
    assert [type(part).__name__ for part in shelf.children()] == ["Shelf", "Flip", "Shelf", "Cutout"]
    assert Shelf(Flip(), 3).parts == (Flip(),) and Shelf(weights=3).weights == (3.0,)  # type: ignore[arg-type]
    assert override(shelf, "weights", "1,2,3").weights == (1.0, 2.0, 3.0)
    assert override(shelf, "weights", "4").weights == (4.0,) and override(shelf, "parts", "Flip").parts == (Flip(),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Augment((Flip(), Mix())), r"Augment.transforms\[1\] must be Transform, not Mix()"),
        (lambda: Shelf(weights=(1.0, "x")), r"Shelf.weights\[1\] must be a number, not 'x'"),
        (lambda: Shelf(weights=math.nan), r"Shelf.weights\[0\] must be a number, not nan"),
        (lambda: Shelf(weights="3"), "Shelf.weights must be a list, each a number, not '3'"),
        (
            lambda: from_json('{"kind": "Shelf", "parts": [{"kind": "Flipp"}]}'),
            r"kind of config.parts\[0\] 'Flipp'; did",
        ),
        (lambda: from_json('{"kind": "Shelf", "parts": [{"p": 1}]}'), r"config.parts\[0\] has no 'kind'"),
        (lambda: RandomResizedCrop(scale=(0.5, 0.1)), "the smaller number first"),
        (lambda: Warp(ratio=(0.0, 1.0)), "must be positive"),
        (lambda: Erasing(area=(0.2, 2.0)), "between 0 and 1"),
        (lambda: ColourJitter(hue=0.6), "half a turn"),
        (lambda: Normalise((0.5,), (0.0,)), "positive deviations"),
    ],
)
def test_wrong_values_are_told_in_one_line(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_a_generator_elsewhere_is_refused() -> None:
    with pytest.raises(UserError, match="random generator is on cpu"):
        Flip().apply(torch.zeros(1, 3, 2, 2, device="meta"), seeded())
