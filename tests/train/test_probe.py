"""Frozen features: nearest neighbours and a linear classifier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import allmlp
from allmlp import train as loop
from allmlp.cli import main
from allmlp.data.source import Resident
from allmlp.run import Budget, Cadence
from allmlp.tasks.classify import Classify
from allmlp.tasks.probe import Neighbours, Probe, directions, spread, vote
from train.runs import Blobs, language, small


def test_the_nearest_vote_by_their_similarity() -> None:
    generator = torch.Generator().manual_seed(0)
    bank, queries = (F.normalize(torch.randn(n, 5, generator=generator), dim=1) for n in (30, 4))
    labels = torch.randint(3, (30,), generator=generator)
    scores = vote(queries, bank, labels, classes=3, k=7, temperature=0.1)
    for query, row in zip(queries, scores):
        similar = [(float(query @ other), int(label)) for other, label in zip(bank, labels)]
        expected = [0.0, 0.0, 0.0]
        for value, label in sorted(similar, reverse=True)[:7]:
            expected[label] += torch.tensor(value / 0.1).exp().item()
        torch.testing.assert_close(row, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert vote(queries, bank[:3], labels[:3], 3, k=20, temperature=0.1).shape == (4, 3)


def test_the_bank_is_spread_over_the_split() -> None:
    split = Resident(torch.arange(100).view(-1, 1, 1, 1), torch.arange(100))
    assert spread(split, 5).fetch(torch.arange(5)).labels.tolist() == [0, 24, 49, 74, 99]
    assert spread(split, 200) is split


def test_directions_are_pooled_and_of_length_one() -> None:
    for name in ("resmlp_nano", "vit_nano"):
        model = allmlp.create(name).eval()
        found = directions(model, torch.rand(2, 3, 32, 32))
        torch.testing.assert_close(found.norm(dim=1), torch.ones(2))
        body = allmlp.create(model.spec.replace(head=None)).eval()
        body.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head.")})
        images = torch.rand(2, 3, 32, 32)
        torch.testing.assert_close(directions(model, images), F.normalize(body(images), dim=1))


def test_only_the_head_learns(tmp_path: Path) -> None:
    """A body that has learnt the blobs, a fresh head: the probe finds the classes and leaves the body alone."""
    body = small(task=Classify(), budget=Budget(steps=100), ema=None)
    body = body.replace(cadence=Cadence(log=100, evaluate=100, save=100))
    loop.train(body, tmp_path / "body", "cpu")
    probe = body.replace(
        task=Probe(), optim=body.optim.replace(lr=0.1), init_from=str(tmp_path / "body"), budget=Budget(steps=60)
    )
    assert loop.train(probe, tmp_path / "probe", "cpu")["accuracy"] > 0.9
    before, after = allmlp.load(tmp_path / "body").state_dict(), allmlp.load(tmp_path / "probe").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.proj.weight", "head.proj.bias"}
    with pytest.raises(allmlp.UserError, match="encoders"):
        Probe().fit(allmlp.create("resmlp_seq2seq_tiny").spec, Blobs().open())


def test_any_run_can_be_judged_by_its_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    loop.train(small(), out, "cpu")
    expected = loop.judge_again(out, "cpu", Neighbours(5))["knn_accuracy"]
    with pytest.raises(SystemExit) as caught:
        main(["eval", str(out), "--knn", "5", "--device", "cpu"])
    assert not caught.value.code
    assert capsys.readouterr().out == f"{out} knn_accuracy {expected:.2%}\n"
    loop.train(language(), tmp_path / "text", "cpu")
    with pytest.raises(
        allmlp.UserError, match="the task Neighbours learns from labelled pictures, not from running text"
    ):
        loop.judge_again(tmp_path / "text", "cpu", Neighbours(5))
    with pytest.raises(allmlp.UserError, match="only judges"):
        loop.train(small(task=Neighbours()), tmp_path / "none", "cpu")
