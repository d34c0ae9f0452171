"""Distillation into one head: losses against their equations, frozen teachers, published weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import allmlp
from allmlp import training as loop
from allmlp.data.dataset import ImageDataset, InMemory
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.models import huggingface
from allmlp.models.resnet import ResNet
from allmlp.run import Budget
from allmlp.tasks.classify import Classify
from allmlp.tasks.distill import Distill, distillation_loss
from allmlp.weights.bundled import BUNDLED
from allmlp.weights.pretrained import pretrained
from train.runs import Blobs, small
from train.test_train import losses, same_weights, train_interrupted


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A classifier of the blobs."""
    out = tmp_path_factory.mktemp("runs") / "teacher"
    plain = Classify()
    run = small(task=plain, budget=Budget(steps=150), ema_decay=None, log_every=150, eval_every=150, save_every=150)
    assert loop.train(run, out, "cpu")["accuracy"] == 1.0
    return str(out)


def test_hard_loss_uses_the_argmax_of_the_teacher() -> None:
    z, y = torch.randn(5, 4), torch.randn(5, 4)
    chosen = z.log_softmax(1)[torch.arange(5), y.argmax(1)]
    torch.testing.assert_close(distillation_loss(z, y, "hard", 3.0), -chosen.mean())


def test_soft_loss_is_kl_at_a_temperature() -> None:
    z, y, t = torch.randn(5, 4), torch.randn(5, 4), 3.0
    p, q = (y / t).softmax(1), (z / t).softmax(1)
    torch.testing.assert_close(distillation_loss(z, y, "soft", t), t**2 * (p * (p / q).log()).sum(1).mean())
    assert distillation_loss(z, z, "soft", t).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("distillation_type", ["hard", "soft"])
def test_student_learns_from_the_teacher_alone(distillation_type: str, teacher: str, tmp_path: Path) -> None:
    task = Distill(teacher, distillation_type=distillation_type, alpha=1.0)
    run = small(task=task, budget=Budget(steps=100), ema_decay=None, log_every=50, eval_every=100, save_every=100)
    assert loop.train(run, tmp_path, "cpu")["accuracy"] > 0.9


def test_alpha_mixes_both_losses(teacher: str, tmp_path: Path) -> None:
    found = {}
    for alpha in (0.0, 0.25, 1.0):
        run = small(task=Distill(teacher, small().task, alpha=alpha), budget=Budget(steps=1))
        loop.train(run, tmp_path / str(alpha), "cpu")
        found[alpha] = losses(tmp_path / str(alpha))[1]
    assert found[0.25] == pytest.approx(0.75 * found[0.0] + 0.25 * found[1.0], rel=1e-5)
    loop.train(small(budget=Budget(steps=1)), tmp_path / "classify", "cpu")
    assert found[0.0] == pytest.approx(losses(tmp_path / "classify")[1], rel=1e-5)
    assert found[1.0] != pytest.approx(found[0.0], rel=1e-3)


def test_feature_weight_adds_the_cosine_distance(teacher: str) -> None:
    dataset, student = Blobs().load(), allmlp.create(small().model.configure(num_classes=4, drop_path=0.0), seed=1)
    images, labels = dataset.test.fetch(torch.arange(8))
    parts = {}
    for weight in (0.0, 3.0):
        torch.manual_seed(0)
        task = Distill(teacher, alpha=1.0, feature_weight=weight).build(student, dataset)
        none = torch.empty(8, 0)
        parts[weight] = task.compute_loss(images, labels, none, none)
    own = student.forward_features(task.normalize(images)).mean(1)  # type: ignore[operator]
    target = task.teacher(images.float() / 255).features  # type: ignore[operator]
    similarity = torch.cosine_similarity(own @ task.proj.weight.T, target).mean()  # type: ignore[union-attr]
    torch.testing.assert_close(parts[3.0].total - parts[0.0].total, 3 * (1 - similarity))
    torch.testing.assert_close(parts[3.0].metrics["similarity"], similarity)
    parts[3.0].total.backward()
    assert task.proj.weight.grad is not None  # type: ignore[union-attr]


def test_the_statistics_of_a_student_are_those_it_starts_with(teacher: str) -> None:
    student = allmlp.create(ResNet((4, 8), (1, 1), img_size=(8, 8), in_chans=1, num_classes=4), seed=0)
    before = {name: buffer.clone() for name, buffer in student.named_buffers()}
    task = Distill(teacher, feature_weight=1.0).build(student, Blobs().load())
    torch.testing.assert_close(dict(student.named_buffers()), before)
    assert student.training and task.proj.weight.shape[1] == 8  # type: ignore[union-attr]


@pytest.mark.slow
def test_student_learns_the_features_of_a_network_of_another_package(tmp_path: Path) -> None:
    """The teacher is a convnet of timm in a model folder; the projection is not saved."""
    pytest.importorskip("timm")
    convnet = allmlp.create("timm:resnet10t", num_classes=4, img_size=32, in_chans=1)
    allmlp.save(convnet, tmp_path / "convnet")
    write_preprocessing(tmp_path / "convnet", ImagePreprocessing((0.3,), (0.25,)))
    task = Distill(str(tmp_path / "convnet"), small().task, "soft", alpha=1.0, feature_weight=1.0)
    run = small(task=task, budget=Budget(steps=30), ema_decay=None, log_every=1, eval_every=30, save_every=30)
    loop.train(run, tmp_path / "run", "cpu")
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    similarity = [record["similarity"] for record in found if record["kind"] == "train"]
    assert sum(similarity[-5:]) / 5 > sum(similarity[:5]) / 5 + 0.2
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert weights.keys() == allmlp.load(tmp_path / "run").state_dict().keys()


def test_teacher_is_neither_trained_nor_saved(teacher: str) -> None:
    dataset = Blobs().load()
    model = allmlp.create(small().model.configure(num_classes=4))
    task = Distill(teacher).build(model, dataset)
    assert {name.partition(".")[0] for name in task.state_dict()} == {"model"}
    assert not any(weight.requires_grad for weight in task.teacher.model.parameters())  # type: ignore[union-attr]
    assert not task.train().teacher.model.training  # type: ignore[union-attr]
    assert task.flops > 6 * model.describe().macs


def test_resume_is_exact_and_evaluation_needs_no_teacher(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small(task=Distill(teacher, small().task))
    loop.train(run, tmp_path / "whole", "cpu")
    before = train_interrupted(run, tmp_path / "cut", monkeypatch)
    assert same_weights(tmp_path / "cut", tmp_path / "whole")
    monkeypatch.setattr("allmlp.tasks.distill.pretrained", None)
    assert loop.evaluate_checkpoint(tmp_path / "cut", "cpu") == before


def test_teacher_of_another_image_size(teacher: str, tmp_path: Path) -> None:
    """The student reads 8 pixels, the teacher 16."""
    model = allmlp.create(small().model.configure(num_classes=4, img_size=16))
    allmlp.save(model, tmp_path / "large")
    write_preprocessing(tmp_path / "large", ImagePreprocessing((0.3,), (0.25,)))
    loop.train(small(task=Distill(str(tmp_path / "large")), budget=Budget(steps=1)), tmp_path / "run", "cpu")


def test_a_teacher_with_more_classes_is_asked_about_those_of_the_data(tmp_path: Path) -> None:
    """By name, or by the places of ImageNet's classes where the teacher has none."""
    images = torch.randint(0, 255, (6, 3, 16, 16), dtype=torch.uint8)
    split = InMemory(images, torch.arange(6) % 3)
    model = allmlp.create("resmlp_nano", img_size=16, num_classes=1000)
    for known, classes, columns in (
        ((), ("tench", "n03888257", "church"), [0, 701, 497]),
        (tuple(f"class {number}" for number in range(1000)), ("class_7", "Class 3", "class 999"), [7, 3, 999]),
    ):
        allmlp.save(model, tmp_path / "large")
        write_preprocessing(tmp_path / "large", ImagePreprocessing((0.5,) * 3, (0.5,) * 3, known))
        dataset = ImageDataset(split, split, classes, (0.5,) * 3, (0.5,) * 3)
        student = allmlp.create("resmlp_nano", img_size=16, num_classes=3)
        task = Distill(str(tmp_path / "large"), alpha=1.0).build(student, dataset)
        pixels = images.float() / 255
        logits = task.teacher(pixels).logits  # type: ignore[operator]
        torch.testing.assert_close(logits, model.eval()((pixels - 0.5) / 0.5)[:, columns])
    other = ImageDataset(split, split, ("tench", "class 1", "gate"), (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(allmlp.UserError, match="does not have the classes of the data: the model has no class 'tench'"):
        Distill(str(tmp_path / "large")).build(student, other)


def test_unsuitable_teachers_are_refused(teacher: str, tmp_path: Path) -> None:
    def learn_from(name: str, **changes: Any) -> None:
        loop.train(small(task=Distill(name), budget=Budget(steps=1), **changes), tmp_path / "run", "cpu")

    with pytest.raises(allmlp.UserError, match="nowhere is not a folder; use a model folder"):
        learn_from("nowhere")
    with pytest.raises(allmlp.UserError, match="reads 3 channels, the data have 1"):
        learn_from(BUNDLED)
    folder = tmp_path / "five"
    allmlp.save(allmlp.create(small().model.configure(num_classes=5)), folder)
    write_preprocessing(folder, ImagePreprocessing((0.3,), (0.25,)))
    with pytest.raises(allmlp.UserError, match="has 5 classes, the data have 4"):
        learn_from(str(folder))
    allmlp.save(allmlp.create(small().model.configure(num_classes=4)), tmp_path / "swapped")
    write_preprocessing(tmp_path / "swapped", ImagePreprocessing((0.3,), (0.25,), ("b", "a", "c", "d")))
    with pytest.raises(allmlp.UserError, match="other classes than the data, or in another order"):
        learn_from(str(tmp_path / "swapped"))
    with pytest.raises(allmlp.UserError, match="hf:bert_base is not an image classifier"):
        learn_from("hf:bert_base")
    with pytest.raises(allmlp.UserError, match="temperature must be a number between 1e-09"):
        Distill(teacher, temperature=0.0)


# --- published weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fraction"),
    [
        ({"size": {"height": 256, "width": 256}, "crop_size": {"height": 224, "width": 224}}, 0.875),  # DeiT
        ({"size": {"height": 256, "width": 256}, "do_center_crop": False}, 1.0),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875, "do_center_crop": None}, 0.875),  # ResNet
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875, "do_center_crop": None}, 1.0),
    ],
)
def test_the_crop_of_an_image_processor(settings: dict[str, object], fraction: float) -> None:
    assert huggingface.crop_fraction(SimpleNamespace(**{"do_center_crop": True} | settings)) == fraction


def test_published_weights_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder saved by transformers stands in for the hub."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 8, 8], embedding_size=8, num_labels=1000
    )
    network = transformers.ResNetForImageClassification(config).eval()
    network.save_pretrained(tmp_path)
    statistics = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    transformers.ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.8, **statistics).save_pretrained(
        tmp_path
    )
    options = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 8, 8], "embedding_size": 8}
    tiny = huggingface.Architecture("ResNet", options, 32, str(tmp_path))
    monkeypatch.setitem(huggingface.IMAGES, "resnet50", tiny)
    found = pretrained("hf:resnet50")
    assert found.preprocessing.mean == pytest.approx((0.1, 0.2, 0.3))
    assert found.preprocessing.std == pytest.approx((0.4, 0.5, 0.6)) and found.preprocessing.crop_pct == 0.8
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(found.model(images), network(images).logits)
    monkeypatch.setitem(huggingface.IMAGES, "resnet50", tiny._replace(hub=str(tmp_path / "nowhere")))
    with pytest.raises(allmlp.UserError, match="from the cache or the Hub"):
        pretrained("hf:resnet50")
    with pytest.raises(allmlp.UserError, match="no weights of hf:bit_r152x4 are published"):
        pretrained("hf:bit_r152x4")


def test_published_weights_of_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    network = timm.create_model("resnet10t").eval()
    torch.save(network.state_dict(), tmp_path / "model.pth")
    original = timm.create_model
    overlay = {"file": str(tmp_path / "model.pth")}
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: original(*a, pretrained_cfg_overlay=overlay, **k))
    found = pretrained("timm:resnet10t")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(found.model(images), network(images))
    assert found.preprocessing.mean == (0.485, 0.456, 0.406)
    monkeypatch.setattr(timm, "create_model", original)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(allmlp.UserError, match=r"timm cannot build .* and its weights"):
        pretrained("timm:resnet10t.c3_in1k")


def test_bundled_model_is_a_teacher() -> None:
    split = InMemory(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    names = pretrained(BUNDLED).preprocessing.class_names
    dataset = ImageDataset(split, split, names, (0.5,) * 3, (0.5,) * 3)
    student = allmlp.create("mixer_nano")
    task = Distill(BUNDLED).build(student, dataset)
    found = task.teacher(torch.rand(2, 3, 32, 32))  # type: ignore[operator]
    assert found.logits.shape == (2, 10) and math.isfinite(found.logits.sum().item())
    assert found.features.shape == (2, 256)
