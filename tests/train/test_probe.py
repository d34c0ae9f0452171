"""Frozen features: k-NN and linear probing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import allmlp
from allmlp import training as loop
from allmlp.cli import main
from allmlp.data.dataset import InMemory
from allmlp.errors import UserError
from allmlp.run import Budget
from allmlp.tasks.classify import Classify
from allmlp.tasks.probe import KnnEval, Probe, knn_scores, normalized_features, subsample
from train.runs import Blobs, language, small


def test_knn_scores_match_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    bank, queries = (F.normalize(torch.randn(n, 5, generator=generator), dim=1) for n in (30, 4))
    labels = torch.randint(3, (30,), generator=generator)
    scores = knn_scores(queries, bank, labels, num_classes=3, k=7, temperature=0.1)
    for query, row in zip(queries, scores):
        similar = [(float(query @ other), int(label)) for other, label in zip(bank, labels)]
        expected = [0.0, 0.0, 0.0]
        for value, label in sorted(similar, reverse=True)[:7]:
            expected[label] += torch.tensor(value / 0.1).exp().item()
        nearest = torch.tensor(max(similar)[0] / 0.1).exp().item()
        torch.testing.assert_close(row, torch.tensor(expected) / nearest, rtol=1e-4, atol=1e-4)
    assert knn_scores(queries, bank[:3], labels[:3], 3, k=20, temperature=0.1).shape == (4, 3)


def test_knn_at_a_low_temperature() -> None:
    """exp(cos / T) exceeds float32 below T = 0.011: two classes would be infinitely likely, and the first be chosen."""
    bank = F.normalize(torch.tensor([[1.0, 0.2], [1.0, 0.0], [1.0, 0.1]]), dim=1)
    query, labels = F.normalize(torch.tensor([[1.0, 0.0]]), dim=1), torch.tensor([0, 1, 2])
    scores = knn_scores(query, bank, labels, num_classes=3, k=3, temperature=0.01)
    assert scores.isfinite().all() and scores.argmax(1).item() == 1
    with pytest.raises(UserError, match="temperature must be a number between 1e-09"):
        KnnEval(temperature=0)


def test_knn_is_not_rounded_by_autocast() -> None:
    """Features of one model are alike: in bfloat16 most of these cosines would be equal."""
    bank, queries = (F.normalize(5 + torch.randn(n, 16, generator=torch.Generator().manual_seed(n))) for n in (200, 20))
    labels = torch.arange(200) % 7
    expected = knn_scores(queries, bank, labels, num_classes=7, k=5, temperature=0.07)
    with torch.autocast("cpu", torch.bfloat16):
        found = knn_scores(queries, bank, labels, num_classes=7, k=5, temperature=0.07)
    assert torch.equal(found, expected)


def test_bank_is_evenly_spaced() -> None:
    split = InMemory(torch.arange(100).view(-1, 1, 1, 1), torch.arange(100))
    assert subsample(split, 5).fetch(torch.arange(5)).labels.tolist() == [0, 24, 49, 74, 99]
    assert subsample(split, 200) is split


def test_features_are_pooled_and_normalized() -> None:
    for name in ("resmlp_nano", "vit_nano"):
        model = allmlp.create(name).eval()
        found = normalized_features(model, torch.rand(2, 3, 32, 32))
        torch.testing.assert_close(found.norm(dim=1), torch.ones(2))
        body = allmlp.create(model.spec.replace(head=None)).eval()
        body.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head.")})
        images = torch.rand(2, 3, 32, 32)
        torch.testing.assert_close(normalized_features(model, images), F.normalize(body(images), dim=1))


@pytest.mark.slow
def test_only_the_head_is_trained(tmp_path: Path) -> None:
    """A trained body with a fresh head: the probe learns the classes and leaves the body unchanged."""
    body = small(task=Classify(), budget=Budget(steps=100), ema_decay=None)
    body = body.replace(log_every=100, eval_every=100, save_every=100)
    loop.train(body, tmp_path / "body", "cpu")
    probe = body.replace(
        task=Probe(), optim=body.optim.replace(lr=0.1), init_from=str(tmp_path / "body"), budget=Budget(steps=60)
    )
    assert loop.train(probe, tmp_path / "probe", "cpu")["accuracy"] > 0.9
    before, after = allmlp.load(tmp_path / "body").state_dict(), allmlp.load(tmp_path / "probe").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.proj.weight", "head.proj.bias"}
    with pytest.raises(allmlp.UserError, match="image models"):
        Probe().configure_model(allmlp.create("resmlp_seq2seq_tiny").spec, Blobs().load())


def test_any_image_run_can_be_evaluated_by_knn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    loop.train(small(), out, "cpu")
    expected = loop.evaluate_checkpoint(out, "cpu", KnnEval(5))["knn_accuracy"]
    with pytest.raises(SystemExit) as caught:
        main(["eval", str(out), "--knn", "5", "--device", "cpu"])
    assert not caught.value.code
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed[1:] == [["knn_accuracy", f"{expected:.2%}"], ["largest", "class", "25.00%"]]
    loop.train(language(), tmp_path / "text", "cpu")
    with pytest.raises(allmlp.UserError, match="the task KnnEval needs labeled images, not "):
        loop.evaluate_checkpoint(tmp_path / "text", "cpu", KnnEval(5))
    with pytest.raises(allmlp.UserError, match="only evaluates"):
        loop.train(small(task=KnnEval()), tmp_path / "none", "cpu")
