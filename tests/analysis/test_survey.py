"""The whole analysis: every family, the files it leaves, the command."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.analysis import record
from allmlp.analysis.subject import Pictures, Subject, arguments, default_inputs, open_subject
from allmlp.analysis.survey import Survey, survey
from allmlp.cli import main
from allmlp.data.cifar import CIFAR10
from allmlp.data.inputs import Inputs, write_inputs
from allmlp.errors import UserError
from allmlp.train import train
from allmlp.weights.pretrained import SHIPPED, shipped
from tiny import IMAGES, tiny_model
from train.runs import small

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made but not painted: painting is most of the time, and is looked at elsewhere."""
    monkeypatch.setattr(record, "save", lambda figure, file, kind: file.write_text(f"{kind} of {figure}"))


def look(name: str, out: Path) -> Survey:
    model = tiny_model(name, torch.float32).requires_grad_(False)
    size = model.spec.image_size
    pictures = Pictures(("a", "b", "c"), torch.rand(3, 3, *size)) if size else None
    return survey(Subject(name, model, True, default_inputs(model.spec)), out, pictures)


FAMILIES = {
    "mixer_s32": "layer scale",
    "mixer_mlm": "layer scale, saliency, neighbours",
    "resmlp_s12": "",
    "resmlp_s12_class": "",
    "resmlp_s12_none": "token mixing",
    "resmlp_s12_conv": "",
    "gmlp_ti16": "layer scale",
    "gmlp_l18": "layer scale, saliency, neighbours",
    "gmlp_causal_tiny": "layer scale, saliency, neighbours",
    "amlp_ti16": "layer scale",
    "amlp_base": "layer scale, saliency, neighbours",
    "vit_ti16": "token mixing, layer scale",
    "bert_base": "token mixing, layer scale, saliency, neighbours",
    "resmlp_seq2seq_6": "saliency, neighbours",
    "transformer_seq2seq_base": "token mixing, layer scale, saliency, neighbours",
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_command_runs_for_every_family(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: list[str]
) -> None:
    allmlp.save(tiny_model(name, torch.float32), tmp_path)
    code, out, err = run(capsys, str(tmp_path), *(pictures if name in IMAGES else []))
    assert code == 0, err
    left = [line.split(": ")[1] for line in out.splitlines() if line.startswith("left out")]
    assert ", ".join(left) == FAMILIES[name] and max(map(len, out.splitlines())) <= 100
    # A path may be longer than a line.
    assert "all in" in out and (tmp_path / "analysis" / "analysis.json").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["hf:resnet50", "timm:resnet18"])
def test_networks_of_other_packages(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if name.startswith("hf:") else "timm")
    done = survey(open_subject(name), tmp_path)
    assert [section.name for section in done.sections if section.files] == ["cost", "sparsity", "activations"]


@pytest.fixture
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
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
    with pytest.raises(SystemExit) as caught:
        main(["analyze", *arguments])
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


@pytest.mark.usefixtures("undrawn")
def test_an_untrained_preset_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "mixer_nano", "--json")
    told = json.loads(out)
    assert code == 0 and "untrained" in told["about"] and told["folder"] == "analysis/mixer_nano"
    assert (tmp_path / "analysis" / "mixer_nano" / "filters.csv").is_file()


@pytest.mark.usefixtures("undrawn")
def test_without_a_model_the_one_that_comes_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: list[str]
) -> None:
    before = sorted(shipped().iterdir())
    code, out, err = run(capsys, pictures[0], "--out", str(tmp_path))
    assert code == 0, err
    assert "cifar10 reads 32x32 image; trained" in out and sorted(shipped().iterdir()) == before
    maps = table(tmp_path / "saliency.csv")
    assert len(maps) == 3 * 64 and {row["picture"] for row in maps} == {"0.png"}
    assert {row["class"] for row in maps} <= set(CIFAR10)
    shares = [float(row["toeplitz_grid"]) for row in table(tmp_path / "locality.csv")]
    assert len(shares) == 12 and max(shares) > 0.9  # its gates have learnt to be convolutions


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_looked_up_in_its_own_test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small(), tmp_path, device="cpu")
    capsys.readouterr()
    code, out, err = run(capsys, str(tmp_path), "--bank", "20", "--neighbours", "2")
    assert code == 0, err
    assert "8 queries among 20 pictures" in out and "same class for" in out
    rows = table(tmp_path / "analysis" / "neighbours.csv")
    assert len(rows) == 16 and rows[0]["query"].startswith("test 0: ")
    assert all(row["query"] != row["neighbour"] and -1 <= float(row["cosine"]) <= 1.00001 for row in rows)


@pytest.mark.usefixtures("undrawn")
def test_a_second_analysis_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    look("resmlp_s12", tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    index = json.loads((tmp_path / "analysis.json").read_text())
    index["files"] += ["../outside.png", "mine.txt"]
    (tmp_path / "analysis.json").write_text(json.dumps(index))
    (tmp_path.parent / "outside.png").write_text("kept")
    done = look("bert_base", tmp_path)
    named = {file for section in done.sections for file in section.files}
    assert {file.name for file in tmp_path.iterdir()} == named | {"analysis.json", "mine.txt"}
    assert (tmp_path.parent / "outside.png").read_text() == "kept"


@pytest.mark.usefixtures("undrawn")
def test_a_model_that_has_diverged_can_be_looked_at(tmp_path: Path) -> None:
    model = tiny_model("resmlp_s12", torch.float32).requires_grad_(False)
    model.blocks[0].token.mix.weight.fill_(math.nan)
    subject = Subject("broken", model, True, default_inputs(model.spec))
    survey(subject, tmp_path, Pictures(("a", "b"), torch.rand(2, 3, 6, 8)))
    table = json.loads((tmp_path / "locality.json").read_text())
    assert table["rows"][0][table["columns"].index("reach")] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mixer_b61"], "unknown model 'mixer_b61'; did you mean 'mixer_b16'"),
        (["nowhere/run"], "nowhere/run is not a folder"),
        (["cat.jpg"], "cannot read cat.jpg: No such file or directory"),
        (["gmlp_mlm_tiny", "cat.jpg"], "gmlp_mlm_tiny reads 128 tokens: it cannot be shown pictures"),
        (["."], "is not a model folder: it has no config.json"),
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
        look("bert_base", tmp_path / "file")


def test_arguments(tmp_path: Path) -> None:
    assert arguments([]) == (SHIPPED, [])
    assert arguments(["a.JPG", "b.png"]) == (SHIPPED, [Path("a.JPG"), Path("b.png")])
    assert arguments(["runs/a", "b.png"]) == ("runs/a", [Path("b.png")])


def test_pictures_are_read_as_the_model_was_taught(tmp_path: Path, pictures: list[str]) -> None:
    model = tiny_model("gmlp_ti16", torch.float32)
    allmlp.save(model, tmp_path)
    write_inputs(tmp_path, Inputs((0.25, 0.5, 0.75), (0.5, 0.5, 0.25), ("x", "y"), 1.0))
    subject = open_subject(str(tmp_path))
    found = subject.files([Path(pictures[0])])
    assert found.pixels.shape == (1, 3, 6, 8) and found.names == ("0.png",) and found.pixels.min() >= 0
    mean, std = torch.tensor([0.25, 0.5, 0.75]).view(3, 1, 1), torch.tensor([0.5, 0.5, 0.25]).view(3, 1, 1)
    assert torch.allclose(subject.read(found.pixels), (found.pixels - mean) / std)
    assert subject.class_name(1) == "y" and subject.class_name(4) == "class 4"
