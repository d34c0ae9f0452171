"""Predictions of image models that are not classifiers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.cli import main
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.layers import Block, ChannelMlp, ClassifierHead, MeanPool, PatchEmbed, TokenMlp
from allmlp.models.encoder import Encoder
from tiny import randomize

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pil = pytest.importorskip("PIL.Image")
    pil.new("RGB", (12, 8), (100, 150, 200)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def image_model(folder: Path, outputs: int, preprocessing: ImagePreprocessing) -> torch.Tensor:
    """Save a model with this number of outputs; returns its outputs for the image."""
    stem = PatchEmbed((8, 12), (4, 4), in_chans=3)
    block = Block(TokenMlp(10), channel=ChannelMlp(32))
    spec = Encoder(width=16, depth=1, block=block, stem=stem, pool=MeanPool(), head=ClassifierHead(outputs))
    model = allmlp.create(spec, seed=0).eval()
    randomize(model)
    allmlp.save(model, folder)
    write_preprocessing(folder, preprocessing)
    color = (torch.tensor([100, 150, 200]) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    with torch.no_grad():
        return model(color.view(1, 3, 1, 1).expand(1, 3, 8, 12))[0]


@pytest.mark.parametrize("names", [("age",), ("age", "height", "weight"), ()])
def test_regressor_predicts_its_outputs(
    names: tuple[str, ...], image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, labels = tmp_path / "model", list(names or "01")
    expected = image_model(folder, len(labels), ImagePreprocessing(MEAN, STD, names, task="values")).tolist()
    (found,) = allmlp.predict(folder, image, top_k=1)  # top_k limits classes only
    assert [one.label for one in found] == labels and all(one.probability is None for one in found)
    assert [one.value for one in found] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(SystemExit) as end:
        main(["predict", str(folder), str(image)])
    printed = "  ".join(f"{label} {one.value:.6g}" for label, one in zip(labels, found, strict=True))
    assert end.value.code == 0 and capsys.readouterr().out == f"{image}: {printed}\n"
    with pytest.raises(SystemExit) as end:
        main(["predict", str(folder), str(image), "--json"])
    ((row,), code) = json.loads(capsys.readouterr().out), end.value.code
    assert code == 0 and row["predictions"] == [{"label": one.label, "value": one.value} for one in found]


def test_single_output_without_description_is_refused(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    image_model(folder, 1, ImagePreprocessing(MEAN, STD))
    with pytest.raises(allmlp.UserError, match=r'has a single output.* set "task": "values" in its'):
        allmlp.predict(folder, image)
    with pytest.raises(SystemExit) as end:
        main(["predict", str(folder), str(image)])
    captured = capsys.readouterr()
    assert end.value.code == 2 and not captured.out
    assert captured.err.startswith("error: the model in") and captured.err.count("\n") == 1
