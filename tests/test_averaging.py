"""The average of weights: of checkpoints, of runs, and what has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import allmlp
from allmlp import checkpoint
from allmlp.averaging import average, average_checkpoints, average_models
from allmlp.cli import main
from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.lora import Lora, linear_maps
from allmlp.quantization import Quantization
from allmlp.training import evaluate_checkpoint, train
from train.runs import small


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds with and one without moving average, three checkpoints each."""
    places = [tmp_path_factory.mktemp(name) for name in ("first", "second", "plain")]
    for seed, place in enumerate(places):
        changes = {"ema_decay": None} if place is places[2] else {}
        train(small(seed=seed, keep_checkpoints=3, **changes), place, "cpu")
    return places


@pytest.mark.slow
def test_the_mean_of_runs(runs: list[Path], tmp_path: Path) -> None:
    found = load_file(average_models(runs, tmp_path / "out") / "model.safetensors")
    states = [load_file(run / "model.safetensors") for run in runs]
    for name, weight in found.items():
        torch.testing.assert_close(weight, sum(state[name] for state in states) / 3)
    assert allmlp.load(tmp_path / "out").preprocessing == allmlp.load(runs[0]).preprocessing


def test_the_mean_of_checkpoints(runs: list[Path], tmp_path: Path) -> None:
    """Of the moving averages where the run has them, else of the weights."""
    for run, part, prefix in ((runs[0], "ema", ""), (runs[2], "task", "model.")):
        found = load_file(average_checkpoints(run, 2, tmp_path / part) / "model.safetensors")
        states = [load_file(place / f"{part}.safetensors") for place in checkpoint.complete(run)[-2:]]
        for name, weight in found.items():
            torch.testing.assert_close(weight, sum(state[prefix + name] for state in states) / 2)


def test_models_with_their_classes_in_another_order_have_no_average(tmp_path: Path) -> None:
    model = allmlp.create("mixer_nano", num_classes=2)
    for order in (("cat", "dog"), ("dog", "cat")):
        model.preprocessing = ImagePreprocessing((0.5,) * 3, (0.5,) * 3, order)
        allmlp.save(model, tmp_path / order[0])
    with pytest.raises(allmlp.UserError, match="another order"):
        average_models([tmp_path / "cat", tmp_path / "dog"], tmp_path / "out")


def test_models_with_other_normalization_have_no_average(tmp_path: Path) -> None:
    model = allmlp.create("mixer_nano", num_classes=2)
    for name, std in (("a", 0.5), ("b", 0.25), ("c", 0.5)):
        model.preprocessing = ImagePreprocessing((0.5,) * 3, (std,) * 3, ("cat", "dog"))
        allmlp.save(model, tmp_path / name)
    with pytest.raises(allmlp.UserError, match="another mean or std"):
        average_models([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    average_models([tmp_path / "a", tmp_path / "c"], tmp_path / "out")


def test_models_with_other_tokenizers_have_no_average(tmp_path: Path) -> None:
    for name, word in (("a", "cat"), ("b", "dog"), ("c", "cat")):
        allmlp.save(allmlp.create("gmlp_mlm_tiny", vocab_size=8, seq_len=8, seed=0), tmp_path / name)
        (tmp_path / name / "vocab.txt").write_text(f"[PAD]\n{word}\n")
    with pytest.raises(allmlp.UserError, match="another tokenizer"):
        average_models([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    average_models([tmp_path / "a", tmp_path / "c"], tmp_path / "out")


def test_weights_that_are_not_finite_have_no_average(tmp_path: Path) -> None:
    for name, value in (("whole", 1.0), ("broken", torch.nan)):
        model = allmlp.create("mixer_nano", seed=0)
        torch.nn.init.constant_(model.head.proj.bias, value)
        allmlp.save(model, tmp_path / name)
    with pytest.raises(allmlp.UserError, match=r"broken: head\.proj\.bias contains NaN"):
        average_models([tmp_path / "whole", tmp_path / "broken"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_average_of_few_bits_has_few_bits(tmp_path: Path) -> None:
    quantization = Quantization(bits=3)
    train(small(quantize=quantization, keep_checkpoints=2), tmp_path / "run", "cpu")
    average_checkpoints(tmp_path / "run", 2, tmp_path / "checkpoints")
    average_models([tmp_path / "run", tmp_path / "checkpoints"], tmp_path / "models")
    for name in ("run", "checkpoints", "models"):
        for module in linear_maps(allmlp.load(tmp_path / name), "all"):
            assert all(len(row.unique()) <= 7 for row in module.weight), name


def test_integers_are_those_of_the_last() -> None:
    states = [{"w": torch.tensor([value]), "n": torch.tensor(count)} for value, count in ((1.0, 3), (2.0, 5))]
    assert {name: value.tolist() for name, value in average(states).items()} == {"w": [1.5], "n": 5}


def test_the_command_evaluates(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["average", str(runs[0]), str(runs[1]), "--out", str(tmp_path / "soup"), "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert not caught.value.code and lines[0].endswith("the average of 2 models")
    for line, folder in zip(lines[1:4], (runs[0], runs[1], tmp_path / "soup"), strict=True):
        result = evaluate_checkpoint(runs[0], "cpu", model=folder)
        assert line.startswith(f"{folder}  accuracy {result['accuracy']:.2%}")


def test_a_device_without_an_evaluation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = allmlp.save(allmlp.create("mixer_nano"), tmp_path / "a")
    with pytest.raises(SystemExit) as caught:
        main(["average", str(model), str(model), "--out", str(tmp_path / "out"), "--device", "cpu"])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and "--device is for evaluations" in error
    assert not (tmp_path / "out").exists()


def test_what_has_no_average(runs: list[Path], tmp_path: Path) -> None:
    other = allmlp.save(allmlp.create("resmlp_nano"), tmp_path / "other")
    with pytest.raises(allmlp.UserError, match="a different config"):
        average_models([runs[0], other], tmp_path / "out")
    with pytest.raises(allmlp.UserError, match="at least two models"):
        average_models(runs[:1], tmp_path / "out")
    with pytest.raises(allmlp.UserError, match="has 3 checkpoints, not 4: train with --set keep_checkpoints=4"):
        average_checkpoints(runs[0], 4, tmp_path / "out")
    adapted = small(init_from=str(runs[0]), lora=Lora(rank=2))
    train(adapted, tmp_path / "adapted", "cpu")
    with pytest.raises(allmlp.UserError, match="of a run with lora, average runs"):
        average_checkpoints(tmp_path / "adapted", 2, tmp_path / "out")
    with pytest.raises(allmlp.UserError, match="holds a run"):
        average_models(runs[1:], runs[0])
