"""Pruning removes the smallest token-mixing weights and changes nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.analysis.pruning_curve import (
    FRACTIONS,
    PruningPoint,
    draw_curve,
    load_test_images,
    pruned,
    pruning_curve,
)
from allmlp.cli import main
from allmlp.data.dataset import LabeledImages
from allmlp.data.image_folder import ImageFolder
from allmlp.data.preprocessing import ImagePreprocessing, read_preprocessing, write_preprocessing
from allmlp.spec import to_json
from allmlp.weights.pruning import low_rank, prune, token_matrices, without_blocks, without_smallest
from emulated_device import EmulatedDevice


@pytest.mark.parametrize("name", ["mixer_nano", "resmlp_nano", "gmlp_nano", "amlp_nano"])
def test_every_matrix_loses_its_smallest_weights(name: str) -> None:
    model = allmlp.create(name, seed=0, overrides={"depth": 2})
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    names = set(token_matrices(model))
    assert len(names) == (4 if name == "mixer_nano" else 2)
    prune(model, 0.75)
    for key, weight in model.state_dict().items():
        if key not in names:
            assert torch.equal(weight, before[key])
            continue
        gone = weight == 0
        assert gone.sum() == round(0.75 * weight.numel())
        assert torch.equal(weight[~gone], before[key][~gone])
        assert before[key][gone].abs().max() <= before[key][~gone].abs().min()


def test_pruning_again_counts_what_is_left() -> None:
    model = allmlp.create("resmlp_nano", seed=0, overrides={"depth": 1})
    prune(model, 0.5)
    prune(model, 0.5)
    (matrix,) = token_matrices(model).values()
    assert (matrix != 0).float().mean() == 0.25


def test_a_model_without_matrices_says_why() -> None:
    text = allmlp.create("gmlp_mlm_tiny", overrides={"depth": 1})
    with pytest.raises(allmlp.UserError, match="no token-mixing matrices to prune: its Toeplitz weights are"):
        prune(text, 0.5)
    with pytest.raises(allmlp.UserError, match=r"no token-mixing matrices to prune$"):
        prune(allmlp.create("vit_nano", overrides={"depth": 1}), 0.5)


def test_a_causal_matrix_has_a_lower_triangle_only() -> None:
    model = allmlp.create("resmlp_seq2seq_tiny", seed=0, seq_len=8)
    before = token_matrices(model)["decoder.blocks.0.token.mix.weight"].clone()
    assert torch.equal(before, before.tril())
    prune(model, 0.5)
    assert (token_matrices(model)["decoder.blocks.0.token.mix.weight"] != 0).sum() == 36 - 18


def test_blocks_and_ranks_by_hand() -> None:
    matrix = torch.zeros(4, 4)
    matrix[:2, :2], matrix[:2, 2:], matrix[2:, :2], matrix[2:, 2:] = 4.0, 1.0, 2.0, 3.0
    assert without_blocks(matrix, 0.5, 2).tolist() == [[4, 4, 0, 0]] * 2 + [[0, 0, 3, 3]] * 2
    assert without_blocks(torch.ones(5, 3), 0.0, 4).equal(torch.ones(5, 3))
    assert without_smallest(torch.tensor([[1.0, -3.0], [0.5, 2.0]]), 2).tolist() == [[0, -3], [0, 2]]
    torch.manual_seed(0)
    low = torch.randn(6, 2) @ torch.randn(2, 5)
    torch.testing.assert_close(low_rank(low, 2), low)
    assert torch.linalg.matrix_rank(low_rank(torch.randn(6, 5), 3)) == 3
    # 1 - R (m + n) / (m n) of the numbers are saved: R = 16 for half of a 64 x 64 matrix.
    assert torch.linalg.matrix_rank(pruned(torch.randn(64, 64), "rank", 0.5)) == 16


def test_the_curve_measures_accuracy_and_restores_the_weights(tmp_path: Path) -> None:
    model = allmlp.create("gmlp_nano", seed=0, overrides={"depth": 1}).eval()
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    inputs = ImagePreprocessing((0.5,) * 3, (0.25,) * 3)
    images = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        labels = model((images / 255 - 0.5) / 0.25).argmax(1)
    labels[:3] = (labels[:3] + 1) % 10
    points = list(pruning_curve(model, inputs, LabeledImages(images, labels)))
    assert points[0] == PruningPoint("none", 0.0, 0.75) and len(points) == 1 + sum(map(len, FRACTIONS.values()))
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
    draw_curve(points).savefig(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    with EmulatedDevice():
        assert list(pruning_curve(model.to("meta"), inputs, LabeledImages(images, labels))) == points


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allmlp.save(allmlp.create("mixer_nano", seed=0), tmp_path / "a")
    inputs = ImagePreprocessing((0.5,) * 3, (0.25,) * 3, tuple("abcdefghij"))
    write_preprocessing(tmp_path / "a", inputs)
    with pytest.raises(SystemExit) as end:
        main(["prune", str(tmp_path / "a"), str(tmp_path / "b"), "--fraction", "0.5"])
    count = sum(matrix.numel() for matrix in token_matrices(allmlp.load(tmp_path / "a")).values())
    assert end.value.code == 0
    assert f"{count // 2:,} of {count:,} token-mixing weights are left" in capsys.readouterr().out
    assert read_preprocessing(tmp_path / "b") == inputs
    zeros = [(matrix == 0).float().mean().item() for matrix in token_matrices(allmlp.load(tmp_path / "b")).values()]
    assert zeros == [0.5] * len(zeros)
    with pytest.raises(SystemExit):
        main(["prune", str(tmp_path / "b"), str(tmp_path / "c"), "--fraction", "0.5"])
    assert f"{count // 4:,} of {count // 2:,} token-mixing weights are left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["b", "--fraction", "1"], "below 1"),
        (["b", "--fraction", "0.5", "--device", "cpu"], "--curve with its options"),
        (["b"], "give a folder to write and a --fraction"),
        (["--fraction", "0.5"], "give a folder to write and a --fraction"),
        (["--curve"], "--curve needs --data"),
        (["--curve", "--data", "Cifar10", "--figure", "x.pdf"], ".png or .svg"),
        (["--curve", "--data", "Cifar11"], "did you mean 'Cifar10'"),
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
    allmlp.save(allmlp.create("gmlp_nano", overrides={"depth": 1}), "a")
    write_preprocessing(Path("a"), ImagePreprocessing((0.5,) * 3, (0.25,) * 3))
    with pytest.raises(SystemExit) as end:
        main(["prune", "a", *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err and not Path("b").exists()


def test_a_part_of_a_folder_has_all_classes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for split, name in itertools.product(("train", "test"), "ab"):
        (tmp_path / split / name).mkdir(parents=True)
        for number in range(6):
            image.new("RGB", (8, 8)).save(tmp_path / split / name / f"{number}.png")
    data = ImageFolder(str(tmp_path), img_size=(8, 8))
    assert load_test_images(to_json(data), 4).labels.tolist() == [0, 0, 1, 1]
    assert len(load_test_images(to_json(data), 99, ("a", "b")).labels) == 12
    with pytest.raises(allmlp.UserError, match="other classes than the model, or in another order"):
        load_test_images(to_json(data), 99, ("b", "a"))
    assert load_test_images(str(tmp_path), 4, size=(6, 6)).images.shape == (4, 3, 6, 6)
    assert load_test_images("digits", 10, size=(8, 8)).images.shape == (10, 1, 8, 8)


def test_a_regression_has_no_accuracy_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allmlp.save(allmlp.create("gmlp_nano", overrides={"depth": 1}), tmp_path)
    write_preprocessing(tmp_path, ImagePreprocessing((0.5,) * 3, (0.25,) * 3, task="values"))
    with pytest.raises(SystemExit) as end:
        main(["prune", str(tmp_path), "--curve", "--data", "Cifar10"])
    assert end.value.code == 2 and "outputs values, not classes" in capsys.readouterr().err


def test_nothing_to_prune() -> None:
    with pytest.raises(allmlp.UserError, match="no token-mixing matrices"):
        prune(allmlp.create("vit_nano", overrides={"depth": 1}), 0.5)
