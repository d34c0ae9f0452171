"""The files of an analysis: figures that can be opened, tables with the same rows as CSV and as JSON."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from allmlp.analysis import output_folder
from allmlp.analysis.analysis import Analysis, analyze
from allmlp.analysis.figures import Chart, Series, by_depth, mosaic, save, shrink
from allmlp.analysis.target import AnalysisTarget, NamedImages, default_preprocessing
from tiny import tiny_model

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


def analyze_tiny(name: str, out: Path) -> Analysis:
    model = tiny_model(name, torch.float32).requires_grad_(False)
    size = model.spec.input_size
    images = NamedImages(("a", "b", "c"), torch.rand(3, 3, *size)) if size else None
    return analyze(AnalysisTarget(name, model, True, default_preprocessing(model.spec)), out, images)


def drawn(folder: Path) -> set[str]:
    """The figures in a folder, each as a PNG that can be opened and an SVG with text."""
    names = {file.stem for file in folder.glob("*.png")}
    assert names == {file.stem for file in folder.glob("*.svg")}
    for name in names:
        with Image.open(folder / f"{name}.png") as image:
            image.load()
            assert image.width >= 400 and image.height >= 150 and image.convert("L").getextrema()[0] < 128
        root = ElementTree.parse(folder / f"{name}.svg").getroot()
        words = "".join(root.itertext())
        assert root.tag.endswith("svg") and len(words.strip()) > 40, name
    return names


FIGURES = {
    "resmlp_s12": {
        *("cost", "filters", "lines", "matrices", "kernels", "locality", "sparsity", "activations", "layerscale"),
        *("saliency", "neighbors"),
    },
    "mixer_s32": {"cost", "filters", "units", "sparsity", "activations", "saliency", "neighbors"},
    "vit_ti16": {"cost", "attention", "heads", "rollout", "sparsity", "activations", "saliency", "neighbors"},
    "gmlp_l18": {"cost", "lines", "matrices", "locality", "sparsity", "activations"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_figures_and_tables(name: str, tmp_path: Path) -> None:
    result = analyze_tiny(name, tmp_path)
    assert drawn(tmp_path) == FIGURES[name]
    index = json.loads((tmp_path / "analysis.json").read_text())
    named = [file for section in result.sections for file in section.files]
    assert index["files"] == named and {*named, "analysis.json"} == {file.name for file in tmp_path.iterdir()}
    for file in tmp_path.glob("*.csv"):
        with open(file, newline="") as lines:
            columns, *rows = csv.reader(lines)
        table = json.loads(file.with_suffix(".json").read_text())
        assert columns == table["columns"] and table["about"] and len(rows) == len(table["rows"]) > 0
        assert rows == [["" if value is None else str(value) for value in row] for row in table["rows"]]


@pytest.mark.slow
def test_the_same_model_gives_the_same_files(tmp_path: Path) -> None:
    for out in ("a", "b"):
        torch.manual_seed(0)
        analyze_tiny("transformer_l6", tmp_path / out)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_a_mosaic_scales_each_tile_and_keeps_their_order() -> None:
    tiles = torch.stack([torch.full((2, 3), 5.0), torch.full((2, 3), -0.1), torch.zeros(2, 3)])
    image = mosaic(tiles, across=2)
    assert image.shape == (2 * 8 + 3 * 3, 2 * 12 + 3 * 3)  # four pixels a weight, gaps of three
    assert (image[3:11, 3:15] == 1).all() and (image[3:11, 18:30] == -1).all()
    assert (image[14:22, 3:15] == 0).all()
    assert np.isfinite(image).sum() == 3 * 8 * 12


def test_a_large_matrix_is_drawn_as_the_means_of_blocks() -> None:
    matrix = torch.randn(256, 384)
    small = shrink(matrix)
    assert small.shape == (128, 128) and torch.allclose(small, matrix.view(128, 2, 128, 3).mean((1, 3)), atol=1e-6)
    assert shrink(torch.ones(5, 7)).shape == (5, 7)


def test_names_are_no_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dollar signs in the names of files and models are those signs, and bytes that are not UTF-8 are escaped."""
    named = ("saliency", "neighbors")
    monkeypatch.setattr(
        output_folder, "save", lambda figure, file, kind: file.name[1:].startswith(named) and save(figure, file, kind)
    )
    model = tiny_model("mixer_s32", torch.float32).requires_grad_(False)
    name, target = "from_$5_to_$9", AnalysisTarget("a_$1_$", model, True, default_preprocessing(model.spec))
    size = model.spec.input_size
    assert size is not None
    images = NamedImages((f"{name}.png", "caf\udce9"), torch.rand(1, 3, *size).repeat(2, 1, 1, 1))
    analyze(target, tmp_path, images)
    for figure in named:
        drawing = (tmp_path / f"{figure}.svg").read_text()
        assert name in drawing and "caf\\udce9" in drawing


def test_the_largest_value_is_inside_its_chart() -> None:
    """Values near each other, whose automatic limit is just above them; a band; a model that has diverged."""
    for ys, band in (([4.1, 4.2], None), ([1.0, 2.0], ([0.5, 1.0], [2.0, 6.0])), ([1.0, math.nan], None)):
        chart = Chart("", "", [Series("", [0, 1], ys, band), Series("", [0, 1], [0.1, 0.1], dashed=True)])
        (axes,) = by_depth([chart], "", "").axes
        low, high = axes.get_ylim()
        assert low == 0 and high >= 1.04 * max(v for v in (*ys, *(band[1] if band else ())) if math.isfinite(v))
