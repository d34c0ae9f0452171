"""The importance of patches where the model or its classes are unusual."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

import allmlp
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.serve.app import create_app, load_service
from data.sample_images import encode, scene
from folders import CLASSES, image_folder


def test_importance_in_another_dtype(tmp_path: Path) -> None:
    """Of a model that fast() does not take, which is itself in this dtype."""
    narrow = {"widths": (8, 8, 8, 8)}  # bfloat16 takes long where a CPU has no instructions for it
    allmlp.save(allmlp.create("resnet18_cifar", seed=0, num_classes=3, overrides=narrow), tmp_path)
    write_preprocessing(tmp_path, ImagePreprocessing((0.5,) * 3, (0.5,) * 3, CLASSES))
    with TestClient(create_app({"small": load_service(tmp_path, dtype=torch.bfloat16)})) as client:
        response = client.post("/importance", content=encode(scene()))
    assert response.status_code == 200 and response.json()["label"] in CLASSES


@pytest.mark.parametrize("names", [("crane", "crane", "dog"), ("crane", "dog", "crane"), ("dog", "crane", "crane")])
def test_importance_of_a_name_of_two_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    """It is that of the more probable class."""
    folder, data = image_folder(tmp_path), encode(scene())
    write_preprocessing(folder, ImagePreprocessing((0.4,) * 3, (0.2,) * 3, names, crop_pct=0.9))
    with TestClient(create_app({"small": load_service(folder)})) as client:
        predicted = client.post("/predict", content=data).json()["predictions"]
        found = client.post("/importance", params={"label": "crane"}, content=data).json()
    best = next(one for one in predicted if one["label"] == "crane")
    assert found["probability"] == pytest.approx(best["probability"])
