"""What is trained when, and which weights are kept: freezing, the best evaluation, early stopping, a fitted head."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import allmlp
from allmlp import checkpoint, log
from allmlp import training as loop
from allmlp.best import Best, score
from allmlp.freezing import Freezing
from allmlp.head_init import HeadInit
from allmlp.optim import AdamW, Lamb, Muon, Sgd
from allmlp.run import Budget, Run
from allmlp.tasks.classify import Classify
from train.runs import Blobs, small
from train.test_train import die_at, losses, same_weights, train_interrupted

train = loop.train
HELD_OUT: dict[str, Any] = {"val_size": 16, "keep_best": True}


def weights_at(out: Path, step: int, part: str = "task") -> dict[str, torch.Tensor]:
    return load_file(out / checkpoint.FOLDER / f"step-{step:09d}" / f"{part}.safetensors")


def evaluations(out: Path) -> dict[int, float]:
    return {r["step"]: r["accuracy"] for r in log.read_metrics(out / log.METRICS) if r["kind"] == "eval"}


def script_evaluations(patch: pytest.MonkeyPatch, accuracies: dict[int, float]) -> None:
    """Evaluations of the run have these accuracies, by step."""
    steps: list[int] = []
    original = loop.RunLog.__init__

    def remember(self: loop.RunLog, *arguments: Any) -> None:
        original(self, *arguments)
        steps[:] = [step for step in sorted(accuracies) if step >= self.step]
        if self.step and self.step in accuracies and checkpoint_state(self.out)["evaluation_due"] is False:
            steps.pop(0)

    patch.setattr(loop.RunLog, "__init__", remember)
    patch.setattr(loop, "evaluate", lambda *_: {"accuracy": accuracies[steps.pop(0)] if steps else 0.0, "loss": 1.0})


def checkpoint_state(out: Path) -> dict[str, Any]:
    found = checkpoint.newest(out)
    assert found is not None
    return found[1]


# --- freezing ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim", [AdamW(weight_decay=0.5), Sgd(lr=1.0), Lamb(), Muon(lr=1e-2)], ids=lambda o: type(o).__name__
)
def test_only_the_head_is_trained_at_first(optim: Any, tmp_path: Path) -> None:
    """Six of twelve steps leave weights, their average and their optimizer state alone."""
    train(small(freeze_fraction=0.5, optim=optim, save_every=1, keep_checkpoints=20), tmp_path, "cpu")
    start = allmlp.create(small().model, num_classes=4, seed=0).state_dict()
    frozen, after = weights_at(tmp_path, 6), weights_at(tmp_path, 12)
    for name, weight in start.items():
        changed = not torch.equal(frozen[f"model.{name}"], weight)
        assert changed == name.startswith("head."), name
        assert not torch.equal(after[f"model.{name}"], weight), name
    average = weights_at(tmp_path, 6, "ema")
    assert all(torch.equal(average[name], start[name]) for name in start if not name.startswith("head."))
    assert all(name.startswith("model.head.") for name in weights_at(tmp_path, 6, "optimizer"))
    states = {name.rpartition("/")[0] for name in weights_at(tmp_path, 12, "optimizer")}
    assert states == {f"model.{name}" for name, _ in allmlp.create(small().model, num_classes=4).named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 7, 10])
@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), Lamb()], ids=lambda o: type(o).__name__)
def test_a_run_with_everything_resumes_exactly(
    step: int, optim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while frozen, before and after the best evaluation."""
    run = small(
        freeze_fraction=0.5,
        head_init=HeadInit((0.01,)),
        patience=9,
        eval_every=2,
        save_every=3,
        optim=optim,
        **HELD_OUT,
    )
    for out, trainer in ((tmp_path / "whole", train), (tmp_path / "cut", train_interrupted)):
        options = {"monkeypatch": monkeypatch, "step": step} if trainer is train_interrupted else {}
        trainer(run, out, device="cpu", **options)  # type: ignore[operator]
    whole, cut = (json.loads((tmp_path / name / "run.json").read_text())["result"] for name in ("whole", "cut"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")
    assert [list(one) for one in whole["evaluations"]] == [["step", "seconds", "accuracy"]] * 7
    for result in (whole, cut):
        seconds = [result.pop("seconds"), *(one.pop("seconds") for one in reversed(result["evaluations"]))]
        assert seconds == sorted(seconds, reverse=True), "of training, over both parts"
    assert whole == cut


def test_frozen_parts_are_in_evaluation_mode() -> None:
    """Running statistics do not move, also after an evaluation, which ends in training mode."""
    model = allmlp.create("resnet18_cifar", num_classes=4)
    task = Classify().build(model, Blobs().load()).train()
    freezing = Freezing(task, AdamW().build(task), 0.5)
    assert freezing.set(0.1) and not model.bn1.training and model.fc.training
    task.train()
    assert not freezing.set(0.2) and not model.bn1.training and model.fc.training
    assert freezing.set(0.5) and model.bn1.training and all(weight.requires_grad for weight in model.parameters())
    assert not freezing.set(0.6)


def test_bias_correction_counts_the_steps_of_each_part() -> None:
    """LAMB and Muon use one step count per group, so no group holds weights of both parts."""
    model = allmlp.create(small().model, num_classes=4)
    task = Classify().build(model, Blobs().load())
    optimizer = Lamb().build(task)
    before = sum(len(group["params"]) for group in optimizer.param_groups)
    Freezing(task, optimizer, 0.5)
    head = {id(weight) for weight in model.head.parameters()}
    for group in optimizer.param_groups:
        assert len({id(weight) in head for weight in group["params"]}) == 1
    assert sum(len(group["params"]) for group in optimizer.param_groups) == before


def test_what_cannot_be_frozen(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="freeze_fraction is not for sharding=fsdp"):
        small(freeze_fraction=0.5, sharding="fsdp")


def test_a_frozen_model_needs_memory_for_its_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(freeze_fraction=1.0, budget=Budget(steps=1))
    count = sum(weight.numel() for weight in allmlp.create(run.model.configure(num_classes=4)).parameters())
    monkeypatch.setattr("allmlp.plan.fits.free_memory", lambda device: 2 * 4.0 * count)
    train(run, tmp_path / "frozen", "cpu")
    with pytest.raises(allmlp.UserError, match="parameters need"):
        train(run.replace(freeze_fraction=0.0), tmp_path / "whole", "cpu")


# --- the best weights, and the end -------------------------------------------------------------------


def test_the_best_weights_are_saved_and_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = {2: 0.5, 4: 0.9, 6: 0.7, 8: 0.9, 10: 0.6, 12: 0.1}
    run = small(eval_every=2, save_every=1, keep_checkpoints=20, ema_decay=None, **HELD_OUT)
    script_evaluations(monkeypatch, accuracies)
    assert train(run, tmp_path, "cpu")["accuracy"] == 0.9
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], weights_at(tmp_path, 4)[f"model.{name}"]) for name in saved)
    assert not torch.equal(saved["head.proj.weight"], weights_at(tmp_path, 12)["model.head.proj.weight"])
    result = json.loads((tmp_path / "run.json").read_text())["result"]
    assert result["best_step"] == 4 and result["validation"]["accuracy"] == 0.9 and result["steps"] == 12


def test_the_run_ends_after_evaluations_without_a_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(eval_every=2, save_every=5, patience=2, **HELD_OUT)
    script_evaluations(monkeypatch, {2: 0.5, 4: 0.9, 6: 0.7, 8: 0.9, 10: 0.95, 12: 1.0})
    assert train(run, tmp_path, "cpu")["accuracy"] == 0.9
    assert max(losses(tmp_path)) == 8 and checkpoint_state(tmp_path)["best"]["waited"] == 2
    monkeypatch.setattr(loop.TrainStep, "__call__", None)
    assert train(run, tmp_path, "cpu")["accuracy"] == 0.9


def test_the_counter_survives_a_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(eval_every=2, save_every=2, patience=3, **HELD_OUT)
    script_evaluations(monkeypatch, {2: 0.9, 4: 0.5, 6: 0.5, 8: 0.5, 10: 0.5, 12: 0.5})
    train_interrupted(run, tmp_path, monkeypatch, step=7)
    assert max(losses(tmp_path)) == 8


def test_a_fitted_head_is_evaluated_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that makes it worse is not kept."""
    run = small(head_init=HeadInit(), optim=AdamW(lr=1.0), ema_decay=None, **HELD_OUT)
    result = train(run, tmp_path, "cpu")
    found = evaluations(tmp_path)
    assert list(found) == [0, 6, 12] and found[0] == result["accuracy"] > max(found[6], found[12])
    assert json.loads((tmp_path / "run.json").read_text())["result"]["best_step"] == 0
    assert loop.evaluate_checkpoint(tmp_path, "cpu")["accuracy"] == result["accuracy"]


def test_ctrl_c_at_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation that is left out then is made up for when the run is resumed."""
    run = small(eval_every=2, **HELD_OUT)
    train(run, tmp_path / "whole", "cpu")
    with monkeypatch.context() as patch:
        original = loop.TrainStep.backward

        def interrupted(step: loop.TrainStep, batches: Any) -> Any:
            if len(losses(tmp_path / "cut")) == 5:
                signal.raise_signal(signal.SIGINT)
            return original(step, batches)

        patch.setattr(loop.TrainStep, "backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path / "cut", "cpu")
    assert checkpoint_state(tmp_path / "cut")["step"] == 6 and max(evaluations(tmp_path / "cut")) == 4
    train(run, tmp_path / "cut", "cpu")
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")


def test_the_test_split_chooses_nothing(tmp_path: Path) -> None:
    for change in ({"keep_best": True}, {"patience": 2}):
        with pytest.raises(allmlp.UserError, match="need a validation split"):
            train(small(**change), tmp_path / "run", "cpu")
    assert not (tmp_path / "run").exists()


def test_what_is_better() -> None:
    assert score({"accuracy": 0.5, "loss": 1.0}) > score({"accuracy": 0.4, "loss": 0.1})
    assert score({"accuracy": 0.5, "loss": 0.9}) > score({"accuracy": 0.5, "loss": 1.0})
    assert score({"perplexity": 3.0, "loss": 1.0}) > score({"perplexity": 4.0, "loss": 1.2})
    assert score({"loss": 5.0}) > score({"loss": float("nan")})
    best: Any = Best(keep=False, patience=1)
    model: Any = torch.nn.Linear(1, 1)
    assert best.update(1, {"loss": 1.0}, model) and not best.is_exhausted and not best.weights
    assert not best.update(2, {"loss": 1.0}, model) and best.is_exhausted


def test_the_start_is_kept_unless_training_gains_more_than_the_margin() -> None:
    best: Any = Best(keep=True, patience=2, start_margin=0.02)
    model: Any = torch.nn.Linear(1, 1)
    for step, accuracy in ((0, 0.90), (1, 0.91), (2, 0.92)):
        best.update(step, {"accuracy": accuracy}, model)
    assert best.step == 0 and best.waited == 0  # small gains: not kept, and yet no reason to stop
    state = json.loads(json.dumps(best.state()))
    resumed: Any = Best(keep=True, patience=2, start_margin=0.02)
    resumed.load(state, model)
    for one in (best, resumed):
        assert not one.update(3, {"accuracy": 0.915}, model) and one.waited == 1
        assert one.update(4, {"accuracy": 0.93}, model) and one.step == 4
        assert one.update(5, {"accuracy": 0.931}, model) and one.step == 5  # from there on, any gain counts
    loss: Any = Best(keep=True, patience=None, start_margin=0.1)
    assert loss.update(0, {"loss": 1.0}, model) and not loss.update(1, {"loss": 0.95}, model)
    assert loss.update(2, {"loss": 0.8}, model)


# --- saving by time ---------------------------------------------------------------------------------


def run_saving(minutes: float) -> Run:
    return small(save_every=1000, save_minutes=minutes, keep_checkpoints=20, budget=Budget(steps=4))


def test_checkpoints_by_the_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(run_saving(60.0), tmp_path / "rarely", "cpu")
    assert len(checkpoint.complete(tmp_path / "rarely")) == 1
    now = [0.0]
    original = loop.TrainStep.__call__

    def slow(step: loop.TrainStep, batches: Any) -> Any:
        now[0] += 40.0
        return original(step, batches)

    monkeypatch.setattr(loop.TrainStep, "__call__", slow)
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    train(run_saving(1.0), tmp_path / "often", "cpu")
    names = [folder.name for folder in checkpoint.complete(tmp_path / "often")]
    assert names == ["step-000000002", "step-000000004"]


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ({"budget": Budget()}, {"init_from": str(tmp_path / "missing")}, {"val_size": 1000}):
        with pytest.raises(allmlp.UserError):
            train(small(**change), tmp_path / "run", "cpu")
        assert not (tmp_path / "run").exists(), change
    (tmp_path / "file").write_text("")
    with pytest.raises(allmlp.UserError, match=r"cannot write to .*: .*file is not a folder"):
        train(small(), tmp_path / "file" / "run", "cpu")
    with monkeypatch.context() as patch:
        die_at(0, patch)
        with pytest.raises(RuntimeError, match="dies here"):
            train(small(), tmp_path / "run", "cpu")
    assert (tmp_path / "run" / "run.json").exists()  # it has begun
