"""Tables of Hugging Face `datasets` as training data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import allmlp
from allmlp import checkpoint
from allmlp.data.dataset import Data
from allmlp.data.decode import Decode
from allmlp.models.gmlp import gmlp_text
from allmlp.run import Budget
from allmlp.tasks.classify_text import ClassifyText
from peers.installed import peer
from train import runs

datasets = peer("datasets")


def table(examples: int = 48) -> Any:
    """Images whose brightest quarter is their class, encoded as datasets encodes them."""
    images = []
    for number in range(examples):
        pixels = np.random.default_rng(number).integers(0, 60, (8, 8, 3)).astype(np.uint8)
        row, column = divmod(number % 4, 2)
        pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 150
        images.append(Image.fromarray(pixels))
    names = ["north west", "north east", "south west", "south east"]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"image": images, "label": [i % 4 for i in range(examples)]}, features=features)


def test_our_loop_on_a_table_of_images(tmp_path: Path) -> None:
    """Trained with the table's class names, interrupted, and resumed to the same result."""
    rows = table()
    small = runs.small()
    run = small.replace(model=small.model.configure(in_chans=3), data=Data.of(rows, name="quarters"))
    images = run.data.load().train.fetch(torch.arange(5)).images
    assert images.shape == (5, 3, 8, 8) and images.dtype == torch.uint8
    expected = allmlp.train(run, tmp_path / "run")
    assert allmlp.load(tmp_path / "run").preprocessing.class_names == tuple(rows.features["label"].names)
    shutil.rmtree(checkpoint.complete(tmp_path / "run")[-1])
    again = run.replace(data=Data.of(table(), name="quarters"))
    assert allmlp.train(again, tmp_path / "run") == expected


def test_pixels_are_those_of_the_table() -> None:
    rows = table()
    split = Data.of(rows, table(8), decode=Decode(crop_pct=1.0)).load()
    for index in (0, 3, 7):
        found = split.test.fetch(torch.tensor([index]))
        expected = np.asarray(rows[index]["image"]).transpose(2, 0, 1)
        assert np.array_equal(found.images[0], expected) and found.labels.item() == index % 4


def test_a_table_of_several_splits_is_named(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="DatasetDict is a mapping, of train, test: pass its splits"):
        Data.of(datasets.DatasetDict({"train": table(), "test": table(8)}))


def test_our_loop_on_a_table_of_texts(tmp_path: Path) -> None:
    """With the class names of the table, and a model that predicts."""
    peer("tokenizers")
    texts = [f"{['an awful', 'a good'][i % 2]} film, seen {i} times" for i in range(300)]
    label = datasets.ClassLabel(names=["negative", "positive"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    rows = datasets.Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(300)]}, features=features)
    data = Data.of(rows, seq_len=16)
    run = runs.small().replace(model=gmlp_text(2, 16, 32), task=ClassifyText(), data=data, budget=Budget(steps=40))
    assert allmlp.train(run, tmp_path / "run")["accuracy"] > 0.9
    ((best, *_),) = allmlp.predict(tmp_path / "run", ["a good film, seen 7 times"])
    assert best.label == "positive"


def test_a_saved_table_is_found(tmp_path: Path) -> None:
    """`allmlp train FOLDER` on what `save_to_disk` has written."""
    datasets.DatasetDict({"train": table(), "test": table(8)}).save_to_disk(str(tmp_path / "quarters"))
    result = allmlp.train(str(tmp_path / "quarters"), tmp_path / "run", model="mixer_nano", epochs=1, size=8)
    assert 0 <= result["accuracy"] <= 1
    assert allmlp.load(tmp_path / "run").preprocessing.class_names[0] == "north west"
