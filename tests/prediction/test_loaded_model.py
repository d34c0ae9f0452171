"""`model.predict` and `model.transform`: the answers of the command from a loaded model, which stays as it is."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import allmlp
from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.models.model import Model
from folders import text_folder
from prediction.conftest import Command

SENTENCES = ["the red cat sat", "a dog jumped over the fence", "seven"]


def state(model: Model) -> Any:
    """Everything about a model that a prediction could change."""
    weights = [
        (name, weight, weight.dtype, weight.requires_grad, weight.grad) for name, weight in model.named_parameters()
    ]
    return weights, [(name, module.training) for name, module in model.named_modules()]


def same(first: Any, second: Any) -> bool:
    pairs = zip(first[0], second[0], strict=True)
    return first[1] == second[1] and all(a[1] is b[1] and a[0] == b[0] and a[2:4] == b[2:4] for a, b in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_images_as_by_the_command(images: Path, photos: Path, command: Command, dtype: str) -> None:
    files = sorted(photos.rglob("[0-9].png"))
    options = ("--device", "cpu", "--dtype", dtype, "--no-fast", "--json", "--top-k", 3)
    printed = [row["predictions"] for row in json.loads(command("predict", images, *files, *options)[1])]
    model = allmlp.load(images, dtype=getattr(torch, dtype))
    decoded = [Image.open(file).convert("RGB") for file in files]
    for inputs in (files, list(map(str, files)), decoded, list(map(np.asarray, decoded))):
        assert [[one.to_json() for one in row] for row in model.predict(inputs, top_k=3)] == printed
    tensors = [torch.from_numpy(np.array(image)).movedim(-1, 0) for image in decoded]
    assert model.predict(tensors) == model.predict(files) == allmlp.predict(model, files)
    assert model.predict(files[0], top_k=1) == [row[:1] for row in model.predict(files[:1])]
    logits = model(model.transform(files)).float().softmax(1)
    for row, probabilities in zip(model.predict(files), logits, strict=True):
        assert row[0].label == model.preprocessing.class_names[int(probabilities.argmax())]
        assert row[0].probability == pytest.approx(probabilities.max().item(), rel=1e-5)
    assert np.array_equal(allmlp.embed(model, files), allmlp.embed(images, files, device="cpu", dtype=model.dtype))


def test_compiled_and_foreign_models(images: Path, photos: Path) -> None:
    files, model = sorted(photos.rglob("[0-9].png")), allmlp.load(images)
    assert allmlp.predict(torch.compile(model), files) == allmlp.predict(model, files)
    compiled: Any = torch.compile(model)
    assert allmlp.resize_model(compiled, img_size=(8, 16)).spec.input_size == (8, 16)
    assert allmlp.fast(compiled, batch_size=8).spec == model.spec
    with pytest.raises(allmlp.UserError, match="not a Linear"):
        allmlp.predict(torch.nn.Linear(2, 2), files)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["classes", "text", "span", "translation"])
def test_texts_as_by_the_command(task: str, tmp_path: Path, command: Command) -> None:
    folder = text_folder(tmp_path, task)
    texts = [f"{text} [MASK]" for text in SENTENCES] if task == "text" else SENTENCES
    context = "the cat sat on the red mat" if task == "span" else ""
    options = ["--device", "cpu", "--json", "--top-k", 2, *(["--context", context] if context else [])]
    printed = json.loads(command("predict", folder, *texts, *options)[1])
    model = allmlp.load(folder)
    rows = model.predict(texts, top_k=2, context=context)
    found = [[one.to_json() for one in row] for row in rows]
    assert [row.get("predictions", row.get("masks")) for row in printed] in (found, [[row] for row in found])
    if task == "classes":
        assert rows[0][0].label in model.preprocessing.class_names
        batch = model.transform([(text, "a dog") for text in texts])
        assert torch.equal(
            model(**batch).softmax(1).max(1).values.double(),
            torch.tensor([row[0].probability for row in model.predict([(text, "a dog") for text in texts])]).double(),
        )


@pytest.mark.parametrize("inputs", ["images", "texts"])
def test_the_model_stays_as_it_is(inputs: str, images: Path, texts: Path) -> None:
    """Also one that is trained, with some modules in evaluation mode and some weights frozen."""
    model = allmlp.load(images if inputs == "images" else texts).train()
    example: Any = np.zeros((20, 30, 3), np.uint8) if inputs == "images" else "the cat"
    expected = model.predict(example)
    next(model.children()).eval()
    next(model.parameters()).requires_grad_(False)
    before = state(model)
    assert model.predict(example) == expected
    allmlp.predict(model, example, dtype=torch.bfloat16)
    allmlp.embed(model, example)
    assert same(state(model), before)
    batch = model.transform(example)
    (model(**batch) if isinstance(batch, dict) else model(batch)).sum().backward()  # no inference tensors are left


def test_predictions_follow_the_weights(images: Path) -> None:
    model, image = allmlp.load(images), np.full((20, 30, 3), 99, np.uint8)
    first = model.predict(image)
    with torch.no_grad():
        next(model.head.parameters()).neg_()
    assert model.predict(image) != first


@pytest.mark.parametrize("change", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_what_they_need(change: Any, images: Path, texts: Path) -> None:
    for folder, inputs in ((images, np.zeros((20, 30, 3), np.uint8)), (texts, "the cat")):
        model = allmlp.load(folder)
        assert change(model).predict(inputs) == model.predict(inputs)
        assert not {"folder", "preprocessing"} & model.state_dict().keys()


def test_changed_models_keep_what_they_need(images: Path, texts: Path) -> None:
    image = np.zeros((20, 30, 3), np.uint8)
    assert allmlp.load(images, img_size=(16, 24)).transform(image).shape == (1, 3, 16, 24)
    model = allmlp.resize_model(allmlp.load(images), img_size=(16, 24))
    assert model.predict(image) == allmlp.load(images, img_size=(16, 24)).predict(image)
    assert allmlp.load(images, dynamic=True).predict(image) == allmlp.load(images).predict(image)
    assert allmlp.load(texts, seq_len=16).predict("the cat sat on the red mat " * 9)
    # The names of the old classes are not those of a new head, of the same size or not.
    for changed in (allmlp.load(images, num_classes=2), allmlp.load(images).reset_classifier(3)):
        assert {one.label for one in changed.predict(image)[0]} <= {"0", "1", "2"}


def test_a_batch_has_device_and_dtype_of_the_model(images: Path) -> None:
    image = np.zeros((20, 30, 3), np.uint8)
    batch = allmlp.load(images, dtype=torch.float64).transform([image] * 3)
    assert batch.shape == (3, 3, 8, 12) and batch.dtype == torch.float64
    assert torch.allclose(batch, torch.tensor(-0.4 / 0.2, dtype=torch.float64))


def test_what_is_missing_is_said_in_one_line(images: Path, texts: Path) -> None:
    image = np.zeros((20, 30, 3), np.uint8)
    model = allmlp.create(allmlp.load(images).spec)
    with pytest.raises(
        allmlp.UserError, match=r"set model\.preprocessing = ImagePreprocessing\(mean, std\) of"
    ) as found:
        model.predict(image)
    assert "\n" not in str(found.value)
    model.preprocessing = ImagePreprocessing((0.4,) * 3, (0.2,) * 3, ("a", "b", "c"))
    assert {one.label for one in model.predict(image)[0]} == {"a", "b", "c"}
    model.preprocessing = model.preprocessing.replace(class_names=("a", "b"))
    with pytest.raises(allmlp.UserError, match="the model in memory has 3 outputs, but 2 class names"):
        model.predict(image)
    text = allmlp.create(allmlp.load(texts).spec)
    with pytest.raises(allmlp.UserError, match=r"TextPreprocessing\(task, seq_len\)"):
        text.predict("the cat")
    text.preprocessing = allmlp.load(texts).preprocessing
    with pytest.raises(allmlp.UserError, match=r"no tokenizer: set model\.folder"):
        text.predict("the cat")
    text.folder = str(texts)
    assert len(text.predict("the cat")[0]) == 3
    loaded = allmlp.load(images)
    for wrong, message in (
        (torch.zeros(3, 20, 30), "input 0: pixels must be uint8 from 0 to 255, not float32; normalized images go"),
        ([image, 7], "input 1: an image is a path"),
        ([], "there are no images"),
    ):
        with pytest.raises(allmlp.UserError, match=message):
            loaded.transform(wrong)
    with pytest.raises(allmlp.UserError, match="there are no images"):
        allmlp.embed(loaded, [])
    with pytest.raises(allmlp.UserError, match="reads text, not ndarray"):
        allmlp.load(texts).predict(image)


def test_bundled_models() -> None:
    assert allmlp.from_pretrained("allmlp:text").predict("a wonderful film")[0][0].label == "positive"
    model = allmlp.from_pretrained("allmlp:cifar10")
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    assert model.predict(pixels) == allmlp.predict("allmlp:cifar10", pixels, device="cpu")
