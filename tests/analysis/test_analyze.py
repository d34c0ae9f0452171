"""The whole analysis: every model family, the files it writes, the command."""

from __future__ import annotations

import csv
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allmlp
import command
from allmlp.analysis import examples, figures
from allmlp.analysis.analysis import Analysis, analyze
from allmlp.analysis.target import AnalysisTarget, NamedImages, default_preprocessing, load_target, split_arguments
from allmlp.data.cifar import CIFAR10_CLASSES
from allmlp.data.dataset import ImageDataset, InMemory
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.errors import UserError
from allmlp.models.resnet import ResNet
from allmlp.training import train
from allmlp.weights.bundled import BUNDLED, bundled
from emulated_device import EmulatedDevice
from tiny import IMAGES, tiny_model
from train.runs import small

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


def analyze_tiny(name: str, out: Path) -> Analysis:
    model = tiny_model(name, torch.float32).requires_grad_(False)
    size = model.spec.input_size
    images = NamedImages(("a", "b", "c"), torch.rand(3, 3, *size)) if size else None
    return analyze(AnalysisTarget(name, model, True, default_preprocessing(model.spec)), out, images)


FAMILIES = {
    "mixer_s32": "attention, layer scale",
    "mixer_mlm": "attention, layer scale, saliency, neighbors",
    "resmlp_s12": "attention",
    "resmlp_s12_class": "attention",
    "resmlp_s12_none": "token mixing, attention",
    "resmlp_s12_conv": "attention",
    "gmlp_ti16": "attention, layer scale",
    "gmlp_l18": "attention, layer scale, saliency, neighbors",
    "gmlp_causal_tiny": "attention, layer scale, saliency, neighbors",
    "amlp_ti16": "layer scale",
    "amlp_base": "layer scale, saliency, neighbors",
    "vit_ti16": "token mixing, layer scale",
    "bert_base": "token mixing, layer scale, saliency, neighbors",
    "gpt2_small": "token mixing, layer scale, saliency, neighbors",
    "llama3_8b": "token mixing, layer scale, saliency, neighbors",
    "resmlp_seq2seq_6": "saliency, neighbors",
    "transformer_seq2seq_base": "token mixing, layer scale, saliency, neighbors",
}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_command_runs_for_every_family(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], images: list[str]
) -> None:
    allmlp.save(tiny_model(name, torch.float32), tmp_path)
    code, out, err = run(capsys, str(tmp_path), *(images if name in IMAGES else []))
    assert code == 0, err
    skipped = [line.split(": ")[1] for line in out.splitlines() if line.startswith("skipped")]
    assert ", ".join(skipped) == FAMILIES[name] and max(map(len, out.splitlines())) <= 100
    # A path may be longer than a line.
    assert "written to" in out and (tmp_path / "analysis" / "analysis.json").is_file()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["amlp_ti16", "resmlp_seq2seq_6", "patchtsmixer_mix"])
def test_models_on_another_device(name: str, tmp_path: Path) -> None:
    allmlp.save(tiny_model(name, torch.float32), tmp_path / "model")
    found = []
    for device, mode in (("cpu", nullcontext()), ("meta", EmulatedDevice())):
        with mode:
            target = load_target(str(tmp_path / "model"), device)
            assert target.model.device == torch.device(device)
            size, generator = target.model.spec.input_size, torch.Generator().manual_seed(0)
            images = NamedImages(("a", "b", "c"), torch.rand(3, 3, *size, generator=generator)) if size else None
            found.append(analyze(target, tmp_path / device, images).sections)
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["hf:resnet50", "timm:resnet18"])
def test_networks_of_other_packages(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if name.startswith("hf:") else "timm")
    result = analyze(load_target(name), tmp_path)
    assert [section.name for section in result.sections if section.files] == ["cost", "sparsity", "activations"]


@pytest.fixture
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    names = []
    for number in range(3):
        pixels = torch.randint(0, 255, (12, 16, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / f"{number}.png")
        names.append(str(folder / f"{number}.png"))
    return names


def table(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return command.run(capsys, "analyze", *arguments)


@pytest.mark.usefixtures("without_figures")
def test_an_untrained_preset_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "mixer_nano", "--json")
    printed = json.loads(out)
    assert code == 0 and "untrained" in printed["about"] and printed["folder"] == "analysis/mixer_nano"
    assert (tmp_path / "analysis" / "mixer_nano" / "filters.csv").is_file()


@pytest.mark.usefixtures("undrawn")
def test_the_convolutional_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str], images: list[str]) -> None:
    spec = ResNet(widths=(4, 6), depths=(1, 2), img_size=(8, 8), num_classes=3)
    allmlp.save(allmlp.create(spec), tmp_path / "resnet")
    code, _, err = run(capsys, str(tmp_path / "resnet"), *images, "--out", str(tmp_path / "out"))
    assert code == 0, err
    norms = {row["name"]: float(row["norm"]) for row in table(tmp_path / "out" / "activations.csv")}
    assert list(norms) == ["conv1", "bn1", "layer1", "layer2", "fc"] and all(norms.values())
    assert (tmp_path / "out" / "neighbors.csv").is_file() and (tmp_path / "out" / "saliency.csv").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_without_a_model_the_bundled_one(tmp_path: Path, capsys: pytest.CaptureFixture[str], images: list[str]) -> None:
    before = sorted(bundled().iterdir())
    code, out, err = run(capsys, images[0], "--out", str(tmp_path))
    assert code == 0, err
    assert "cifar10: input 32x32 image, trained" in out and sorted(bundled().iterdir()) == before
    maps = table(tmp_path / "saliency.csv")
    assert len(maps) == 3 * 64 and {row["image"] for row in maps} == {"0.png"}
    assert {row["class"] for row in maps} <= set(CIFAR10_CLASSES)
    fractions = [float(row["toeplitz_grid"]) for row in table(tmp_path / "locality.csv")]
    assert len(fractions) == 12 and max(fractions) > 0.9  # its gates have learned to be convolutions


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_neighbors_are_searched_in_the_test_images_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small(), tmp_path, device="cpu")
    capsys.readouterr()
    code, out, err = run(capsys, str(tmp_path), "--bank", "20", "--neighbors", "2")
    assert code == 0, err
    assert "8 queries in 20 images" in out and "same class for" in out
    rows = table(tmp_path / "analysis" / "neighbors.csv")
    assert len(rows) == 16 and rows[0]["query"].startswith("test 0: ")
    assert all(row["query"] != row["neighbor"] and -1 <= float(row["cosine"]) <= 1.00001 for row in rows)


def text_of(result: Analysis, name: str) -> str:
    (text,) = (section.text for section in result.sections if section.name == name)
    return text


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("labels", [torch.rand(6), torch.arange(6), torch.rand(6, 2)])
def test_a_regression_has_no_classes(labels: Tensor, tmp_path: Path) -> None:
    """Neither predictions nor targets are classes, also where the targets are integers."""
    model = tiny_model("resmlp_s12", torch.float32).requires_grad_(False)
    known = default_preprocessing(model.spec)
    assert known is not None
    bank = NamedImages(tuple("abcdef"), torch.rand(6, 3, 6, 8), labels)
    result = analyze(AnalysisTarget("regressor", model, True, known.replace(task="values")), tmp_path, bank=bank)
    skipped = "the model outputs values, not classes: there is no prediction to explain"
    assert text_of(result, "saliency") == skipped and text_of(result, "neighbors") == "6 queries in 6 images"
    first = " ".join(f"{value:.3g}" for value in labels[0].flatten().tolist())
    assert table(tmp_path / "neighbors.csv")[0]["query"] == f"a: {first}"
    # A classifier's own labels are classes; floats never are.
    result = analyze(AnalysisTarget("classifier", model, True, known), tmp_path, bank=bank)
    assert ("same class for" in text_of(result, "neighbors")) == (not labels.is_floating_point())


def test_a_dataset_without_class_names_describes_a_regression() -> None:
    images = InMemory(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.rand(2))
    for names, task in (((), "values"), (("a", "b"), "classes")):
        (text,) = ImageDataset(images, images, names, (0.5,) * 3, (0.5,) * 3).files().values()
        assert json.loads(text)["task"] == task


@pytest.mark.usefixtures("without_figures")
def test_a_model_without_a_head_has_no_prediction(tmp_path: Path) -> None:
    model = tiny_model("resmlp_s12", torch.float32).spec.replace(head=None).build().eval().requires_grad_(False)
    images = NamedImages(("a", "b"), torch.rand(2, 3, 6, 8))
    result = analyze(AnalysisTarget("features", model, True, default_preprocessing(model.spec)), tmp_path, images)
    assert text_of(result, "saliency").startswith("the model outputs features, not classes")


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("name", ["resmlp_s12", "resmlp_seq2seq_6"])
def test_the_summary_has_the_first_and_the_last_block_of_the_figure(name: str, tmp_path: Path) -> None:
    text = text_of(analyze_tiny(name, tmp_path), "activations")
    rows = [row for row in table(tmp_path / "activations.csv") if row["branch"] == "channel"]
    assert len(rows) == (2 if name == "resmlp_s12" else 4)
    for row in rows:
        assert f"{float(row['norm']):.3g} after block {row['block']}" in text


@pytest.mark.usefixtures("without_figures")
def test_positive_offsets_are_later_tokens(tmp_path: Path) -> None:
    model = tiny_model("resmlp_s12", torch.float32).requires_grad_(False)
    for block in model.blocks:
        block.token.mix.weight.copy_(torch.diag(torch.ones(10), 2))  # token i reads token i + 2
    analyze(AnalysisTarget("shift", model, True), tmp_path)
    for row in table(tmp_path / "lines.csv"):
        assert {key for key, value in row.items() if key != "name" and float(value)} == {"2"}


@pytest.mark.usefixtures("without_figures")
def test_images_without_a_near_one_have_no_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corners = iter((torch.eye(3), torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])))
    monkeypatch.setattr(examples, "features", lambda model, images: next(corners))
    alone = analyze_tiny("resmlp_s12", tmp_path)
    assert text_of(alone, "neighbors") == "no two of the images have a cosine similarity of 0.5 or more"
    assert not (tmp_path / "neighbors.csv").exists()
    assert text_of(analyze_tiny("resmlp_s12", tmp_path), "neighbors") == "3 queries in 3 images, 1 without a neighbor"
    assert [(row["query"], row["neighbor"]) for row in table(tmp_path / "neighbors.csv")] == [("a", "b"), ("b", "a")]


@pytest.mark.usefixtures("without_figures")
def test_references_are_those_of_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent weights are at chance and reach as far as equal ones in every stage, whatever its grid."""
    charts: list[figures.Chart] = []
    by_depth = figures.by_depth

    def watched(drawn: list[figures.Chart], title: str, xlabel: str) -> Any:
        charts.extend(drawn if title.startswith("Locality") else [])
        return by_depth(drawn, title, xlabel)

    monkeypatch.setattr(figures, "by_depth", watched)
    result = analyze(load_target("resmlp_staged_micro"), tmp_path)
    texts = {section.name: section.text for section in result.sections}
    assert texts["matrices"] == "13 matrices over 256 or 64 or 16 tokens"
    assert texts["locality"].endswith("(chance 0.01 to 0.19)")
    (*fractions, on_grid, in_sequence), (model, equal) = (chart.series for chart in charts)
    for found, chance in zip(fractions, (in_sequence, on_grid), strict=True):  # each has a reference of its own
        assert list(chance.ys) == pytest.approx(list(found.ys), rel=0.5)
    assert list(equal.ys) == pytest.approx(list(model.ys), rel=0.15)


def test_the_middle_of_a_centered_heatmap_is_zero() -> None:
    panels = [figures.Panel("a", torch.randn(3, 5)), figures.Panel("b", torch.randn(1, 3))]
    figure = figures.heatmaps(panels, figures.FigureText("", "", "", ""), centered=True)
    assert [axes.images[0].get_extent() for axes in figure.axes[:2]] == [[-2.5, 2.5, 1.5, -1.5], [-1.5, 1.5, 0.5, -0.5]]
    plain = figures.heatmaps(panels, figures.FigureText("", "", "", ""))
    assert plain.axes[0].images[0].get_extent() == [-0.5, 4.5, 2.5, -0.5]


@pytest.mark.usefixtures("undrawn")
def test_a_second_analysis_removes_the_files_of_the_first(tmp_path: Path) -> None:
    analyze_tiny("resmlp_s12", tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    index = json.loads((tmp_path / "analysis.json").read_text())
    index["files"] += ["../outside.png", "mine.txt"]
    (tmp_path / "analysis.json").write_text(json.dumps(index))
    (tmp_path.parent / "outside.png").write_text("kept")
    result = analyze_tiny("bert_base", tmp_path)
    named = {file for section in result.sections for file in section.files}
    assert {file.name for file in tmp_path.iterdir()} == named | {"analysis.json", "mine.txt"}
    assert (tmp_path.parent / "outside.png").read_text() == "kept"


@pytest.mark.usefixtures("without_figures")
def test_a_diverged_model_can_be_analyzed(tmp_path: Path) -> None:
    model = tiny_model("resmlp_s12", torch.float32).requires_grad_(False)
    model.blocks[0].token.mix.weight.fill_(math.nan)
    target = AnalysisTarget("broken", model, True, default_preprocessing(model.spec))
    analyze(target, tmp_path, NamedImages(("a", "b"), torch.rand(2, 3, 6, 8)))
    table = json.loads((tmp_path / "locality.json").read_text())
    assert table["rows"][0][table["columns"].index("reach")] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mixer_b61"], "unknown model 'mixer_b61'; did you mean 'mixer_b16'"),
        (["nowhere/run"], "nowhere/run is not a folder"),
        (["cat.jpg"], "cannot read cat.jpg: No such file or directory"),
        (["gmlp_mlm_tiny", "cat.jpg"], "gmlp_mlm_tiny reads 128 tokens, not images"),
        (["."], "is not a model folder: it has no config.json"),
        (["mixer_nano", "--device", "gpu"], "unknown device 'gpu'"),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2 and message in err and err.count("\n") == 1 and not out and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the analysis"):
        analyze_tiny("bert_base", tmp_path / "file")


def test_arguments(tmp_path: Path) -> None:
    assert split_arguments([]) == (BUNDLED, [])
    assert split_arguments(["a.JPG", "b.png"]) == (BUNDLED, ["a.JPG", "b.png"])
    assert split_arguments(["runs/a", "b.png"]) == ("runs/a", ["b.png"])


def test_images_are_preprocessed_as_in_training(tmp_path: Path, images: list[str]) -> None:
    model = tiny_model("gmlp_ti16", torch.float32)
    allmlp.save(model, tmp_path)
    write_preprocessing(tmp_path, ImagePreprocessing((0.25, 0.5, 0.75), (0.5, 0.5, 0.25), ("x", "y"), 1.0))
    target = load_target(str(tmp_path))
    found = target.load_images([Path(images[0])])
    assert found.pixels.shape == (1, 3, 6, 8) and found.names == ("0.png",) and found.pixels.min() >= 0
    mean, std = torch.tensor([0.25, 0.5, 0.75]).view(3, 1, 1), torch.tensor([0.5, 0.5, 0.25]).view(3, 1, 1)
    assert torch.allclose(target.normalize(found.pixels), (found.pixels - mean) / std)
    assert target.class_name(1) == "y" and target.class_name(4) == "class 4"
