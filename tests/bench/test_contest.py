"""Who may compete: sides are compared before they are timed, and a row says why where there is no number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.bench import contest
from allmlp.bench.agree import allowed, error, randomise
from allmlp.bench.contest import Options, bench, compete
from allmlp.bench.sides import Entry, Side, default_sides
from allmlp.errors import UserError

CPU = torch.device("cpu")
REFERENCE = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])]


class Ticks:
    """A clock of one millisecond a call, that really calls."""

    def time(self, call: Callable[[], object], times: int) -> float:
        for _ in range(times):
            call()
        return times / 1000


def side(name: str, answer: list[Tensor], log: list[str]) -> Side:
    return Side(name, lambda: Entry(lambda: log.append(name), lambda: answer))


def test_the_error_is_that_of_the_worst_part() -> None:
    assert error(REFERENCE, REFERENCE) == 0
    off = [torch.tensor([3.0, 4.5]), torch.tensor([0.0, 2.1])]
    assert error(off, REFERENCE) == pytest.approx(0.1)  # 0.5 / 5 and 0.1 / 2
    assert error([REFERENCE[0], torch.zeros(2)], REFERENCE) == 1
    assert error(REFERENCE[:1], REFERENCE) == math.inf
    assert error([REFERENCE[0], torch.tensor([0.0, math.nan])], REFERENCE) == math.inf
    assert error([REFERENCE[0], torch.tensor([[0.0, 2.0]])], REFERENCE) == math.inf


def test_twice_the_error_of_eager_is_allowed() -> None:
    assert allowed([0.004, 0.006], torch.bfloat16) == 0.012
    assert allowed([1e-7], torch.float32) == 1e-4
    assert allowed([2e-4], torch.float32) == 4e-4


def test_what_disagrees_is_not_timed() -> None:
    log: list[str] = []
    wrong = [REFERENCE[0], torch.tensor([0.0, 2.5])]
    sides = [side("right", REFERENCE, log), side("wrong", wrong, log)]
    found = compete(sides, REFERENCE, 0.2, Ticks(), 0.1, CPU)
    assert found["right"].timing is not None and found["right"].error == 0
    assert found["wrong"].timing is None and found["wrong"].error == pytest.approx(0.25)
    assert found["wrong"].note == "refused: its answer is 2.5e-01 off, 2.0e-01 allowed"
    assert "wrong" not in log
    assert compete(sides, REFERENCE, 0.3, Ticks(), 0.1, CPU)["wrong"].timing is not None
    coarse = sides[1]._replace(coarse=1.5)  # of coarser numbers, whose error may be larger
    assert compete([coarse], REFERENCE, 0.2, Ticks(), 0.1, CPU)["wrong"].timing is not None
    assert compete([coarse], REFERENCE, 0.1, Ticks(), 0.1, CPU)["wrong"].note.endswith("1.5e-01 allowed")


def test_a_side_without_memory_is_a_row_and_the_peak_is_timed_beside() -> None:
    log: list[str] = []

    def too_large() -> Entry:
        raise torch.OutOfMemoryError("CUDA out of memory")

    sides = [Side("large", too_large), side("small", REFERENCE, log)]
    found = compete(sides, REFERENCE, 0.0, Ticks(), 0.1, CPU, side("peak", [], log))
    assert found["large"] == contest.Result(note="out of memory")
    assert found["small"].timing is not None and found["peak"].timing is not None
    assert log.count("peak") == log.count("small")


def test_nothing_is_timed_where_nothing_agrees() -> None:
    log: list[str] = []
    found = compete([side("wrong", [], log)], REFERENCE, 0.1, Ticks(), 0.1, CPU, side("peak", [], log))
    assert found["wrong"].note.startswith("refused") and not log


def test_a_package_with_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As were timm's copy of a model wrong: here ours is, by one weight."""
    pytest.importorskip("timm")

    def spoil(name: str, spec: object, device: torch.device) -> object:
        found = subject(name, spec, device)  # type: ignore[arg-type]
        with torch.no_grad():
            next(found.models["timm"].parameters())[0] += 0.5
        return found

    subject = contest.subject
    monkeypatch.setattr(contest, "subject", spoil)
    options = Options(("mixer_nano",), (2,), "cpu", "float32", seconds=0.01, sides=("ours-eager", "timm-eager"))
    report = bench(options)
    ours, theirs = report.rows
    assert ours.rate_per_s and not ours.note
    assert theirs.rate_per_s is None and theirs.note.startswith("refused: another model")
    assert report.disagree == [theirs]


def test_default_sides() -> None:
    cuda = torch.device("cuda")
    every = ["ours", "timm"]
    both = ["ours eager", "ours compiled", "ours fast", "timm eager", "timm compiled"]
    assert default_sides(every, cuda, 256) == both
    assert default_sides(every, cuda, 1) == [*both, "timm graphs"]
    assert default_sides(["ours"], CPU, 1) == ["ours eager", "ours compiled", "ours fast", "ours onnx"]
    assert "ours graphs" in default_sides(every, cuda, 256, train=True)
    assert default_sides(every, cuda, 256, brief=True) == ["ours fast", "timm compiled"]


def test_wishes_that_cannot_be_met() -> None:
    options = Options(("mixer_nano",), (1,), "cpu", "float32", seconds=0.01)
    for wrong, words in [
        (("ours-fats",), "unknown mode of a side 'fats'; did you mean 'fast'"),
        (("tim-eager",), "did you mean 'timm'"),
        (("hf-eager",), "no side of hf-eager has mixer_nano"),
    ]:
        with pytest.raises(UserError, match=words):
            bench(Options(**{**vars(options), "sides": wrong}))
    with pytest.raises(UserError, match="unknown mode of training 'fp8'"):
        bench(Options(**{**vars(options), "sides": ("ours-fp8",), "train": True}))
    with pytest.raises(UserError, match="reads"):
        bench(Options(**{**vars(options), "models": ("gmlp_causal_tiny",), "train": True}))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            bench(Options(**{**vars(options), "device": "cuda"}))


def test_random_weights_leave_no_branch_out() -> None:
    model = allmlp.create("resmlp_nano")  # LayerScale starts at 0.1 and the classifier near zero
    randomise(model)
    for name, weight in model.named_parameters():
        assert weight.std() > 0 or weight.numel() == 1, name
        assert weight.abs().mean() > 0.005, name


def test_every_mode_has_a_look_of_its_own() -> None:
    from allmlp.bench import plots, sides

    assert plots.MODES.keys() == sides.MODES.keys()
    assert len(set(plots.MODES.values())) == len(plots.MODES)
