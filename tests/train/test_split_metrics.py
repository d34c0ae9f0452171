"""Metrics of the user's own, computed from the logits and labels of a whole split."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.data.labeled_text import LabeledText
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.errors import UserError
from allmlp.evaluation import evaluate_model
from allmlp.log import read_metrics
from allmlp.models.gmlp import gmlp_text
from allmlp.run import Budget, Run
from allmlp.split_metrics import interleave
from allmlp.tasks.classify_any_size import ClassifyAnySize
from allmlp.tasks.classify_corrupted import ClassifyCorrupted
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.task import Task
from train import runs
from train.launcher import Launcher
from train.test_distributed import launch


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(1) == labels).double().mean().item()


def position(logits: Tensor, labels: Tensor) -> Tensor:
    """Changes with the order of the examples, and not a mean over batches."""
    assert logits.dtype == torch.float32 and labels.device.type == "cpu" and not logits.requires_grad
    weights = torch.arange(1, len(labels) + 1, dtype=torch.float64)
    return ((logits.argmax(1) + labels) * weights).sum() * len(labels)


METRICS = {"plain": accuracy, "position": position, "examples": lambda logits, labels: len(labels)}


def test_metrics_are_logged_and_in_the_result(tmp_path: Path) -> None:
    """Over the whole split, whose batches are of 24, 8 and other sizes."""
    found = allmlp.train(runs.small(), tmp_path / "a", metrics=METRICS)
    assert found["plain"] == found["accuracy"] and found["examples"] == 32
    other = allmlp.train(runs.small(batch_size=24, val_size=16), tmp_path / "b", metrics=METRICS)
    assert other["examples"] == 16
    evaluations = [record for record in read_metrics(tmp_path / "a" / "metrics.jsonl") if "position" in record]
    assert [record["step"] for record in evaluations] == [6, 12] and evaluations[-1]["position"] == found["position"]
    assert json.loads((tmp_path / "a" / "run.json").read_text())["result"]["test"]["position"] == found["position"]
    without = allmlp.train(runs.small(), tmp_path / "c")
    assert {name: value for name, value in found.items() if name not in METRICS} == without, "training is the same"


def test_a_metric_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(logits: Tensor, labels: Tensor) -> Any:
        raise ZeroDivisionError("no\npositives")

    wrong: dict[str, Any] = {"broken": broken, "text": lambda *_: "much", "nan": lambda *_: float("nan"), **METRICS}
    with caplog.at_level(logging.WARNING, "allmlp.metrics"):
        found = allmlp.train(runs.small(), tmp_path / "run", metrics=wrong)
    assert found["plain"] == found["accuracy"] and not {"broken", "text", "nan"} & found.keys()
    messages = [record.getMessage() for record in caplog.records]
    assert (
        len(messages) == 3 and messages[0] == "the metric broken failed and is skipped: ZeroDivisionError: no positives"
    )
    assert allmlp.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"f1": 3}, "the metric 'f1' is int, not a function"),
        ({"accuracy": accuracy}, "accuracy is part of every evaluation"),
    ],
)
def test_wrong_metrics(metrics: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        allmlp.train(runs.small(), tmp_path / "run", metrics=metrics)


def test_tasks_without_logits_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which Dino does not have"):
        allmlp.train(runs.selfsupervised(), tmp_path / "run", metrics=METRICS)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "task", [ClassifyCorrupted(corruptions=("contrast",), severities=(1,)), ClassifyAnySize(eval_sizes=(8,))]
)
def test_classifiers_with_evaluations_of_their_own(task: Task, tmp_path: Path) -> None:
    """In training, and when the run is evaluated later, in the precision that is asked for."""
    found = allmlp.train(runs.small(task=task), tmp_path, metrics=METRICS)
    assert found["plain"] == found["accuracy"] and found["examples"] == 32
    again = evaluate_model(str(tmp_path), metrics=METRICS)
    assert again.metrics == pytest.approx(found)
    coarse = evaluate_model(str(tmp_path), dtype=torch.bfloat16).metrics["loss"]
    assert coarse != found["loss"] and coarse == pytest.approx(found["loss"], rel=0.05)


def test_texts_with_two_test_files(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    rows = [
        f"the film {number} was {word}\t{label}" for number in range(9) for word, label in (("good", 1), ("bad", 0))
    ]
    for name, part in (("train", rows), ("near", rows[:7]), ("far", rows[7:12])):
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(part))
    files = f"{tmp_path / 'near.tsv'},{tmp_path / 'far.tsv'}"
    words = TokenizerConfig(vocab_size=60)
    data = LabeledText(str(tmp_path / "train.tsv"), files, tokenizer=words, seq_len=12, cache=str(tmp_path))
    run = Run(gmlp_text(1, 8, 16), ClassifyText(dropout=0.0), data, batch_size=4, budget=Budget(steps=3))
    found = allmlp.train(run, tmp_path / "run", metrics=METRICS)
    names = [name for name in found if name.endswith("accuracy")]
    sizes = [found[name.replace("accuracy", "examples")] for name in names]
    assert sorted(sizes) == [5, 7] and all(found[name.replace("accuracy", "plain")] == found[name] for name in names)


CODE = """
import sys
import allmlp
from train import runs
from train.test_split_metrics import METRICS
allmlp.train(runs.quiet(), f"{sys.argv[1]}/two", device="cpu", metrics=METRICS)
"""


@pytest.mark.parametrize("examples", [7, 8])
def test_shares_are_put_together_in_order(examples: int) -> None:
    whole = torch.randn(examples, 3), torch.arange(examples)
    for size in (1, 2, 3):
        found = interleave([tuple(column[rank::size] for column in whole) for rank in range(size)])
        assert all(map(torch.equal, found, whole))


@pytest.mark.slow
def test_two_processes_compute_what_one_does(launcher: Launcher, tmp_path: Path) -> None:
    single = allmlp.train(runs.quiet(), tmp_path / "one", device="cpu", metrics=METRICS)
    launch(launcher, CODE, tmp_path)
    result = json.loads((tmp_path / "two" / "run.json").read_text())["result"]["test"]
    assert {name: result[name] for name in METRICS} == {name: single[name] for name in METRICS}
