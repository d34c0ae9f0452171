"""Who may compete: sides are compared before they are timed, and a row says why where there is no number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.bench import runner
from allmlp.bench.backends import Backend, PreparedBackend, default_backends
from allmlp.bench.parity import allowed, error, randomize
from allmlp.bench.runner import BenchOptions, bench, time_backends
from allmlp.errors import UserError

CPU = torch.device("cpu")
REFERENCE = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])]


class Ticks:
    """A clock of one millisecond a call, that really calls."""

    def time(self, call: Callable[[], object], times: int) -> float:
        for _ in range(times):
            call()
        return times / 1000


def backend(name: str, answer: list[Tensor], log: list[str]) -> Backend:
    return Backend(name, lambda: PreparedBackend(lambda: log.append(name), lambda: answer))


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
    backends = [backend("right", REFERENCE, log), backend("wrong", wrong, log)]
    found = time_backends(backends, REFERENCE, 0.2, Ticks(), 0.1, CPU)
    assert found["right"].timing is not None and found["right"].error == 0
    assert found["wrong"].timing is None and found["wrong"].error == pytest.approx(0.25)
    assert found["wrong"].note == "rejected: output error 2.5e-01, 2.0e-01 allowed"
    assert "wrong" not in log
    assert time_backends(backends, REFERENCE, 0.3, Ticks(), 0.1, CPU)["wrong"].timing is not None
    tolerance_scale = backends[1]._replace(tolerance_scale=1.5)  # of coarser numbers, whose error may be larger
    assert time_backends([tolerance_scale], REFERENCE, 0.2, Ticks(), 0.1, CPU)["wrong"].timing is not None
    assert time_backends([tolerance_scale], REFERENCE, 0.1, Ticks(), 0.1, CPU)["wrong"].note.endswith("1.5e-01 allowed")


def test_a_side_without_memory_is_a_row_and_the_peak_is_timed_beside() -> None:
    log: list[str] = []

    def too_large() -> PreparedBackend:
        raise torch.OutOfMemoryError("CUDA out of memory")

    backends = [Backend("large", too_large), backend("small", REFERENCE, log)]
    found = time_backends(backends, REFERENCE, 0.0, Ticks(), 0.1, CPU, backend("peak", [], log))
    assert found["large"] == runner.BackendResult(note="out of memory")
    assert found["small"].timing is not None and found["peak"].timing is not None
    assert log.count("peak") == log.count("small")


def test_nothing_is_timed_where_nothing_agrees() -> None:
    log: list[str] = []
    found = time_backends([backend("wrong", [], log)], REFERENCE, 0.1, Ticks(), 0.1, CPU, backend("peak", [], log))
    assert found["wrong"].note.startswith("rejected") and not log


def test_a_package_with_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As were timm's copy of a model wrong: here ours is, by one weight."""
    pytest.importorskip("timm")

    def spoil(name: str, spec: object, device: torch.device) -> object:
        found = peer_group(name, spec, device)  # type: ignore[arg-type]
        with torch.no_grad():
            next(found.models["timm"].parameters())[0] += 0.5
        return found

    peer_group = runner.peer_group
    monkeypatch.setattr(runner, "peer_group", spoil)
    options = BenchOptions(("mixer_nano",), (2,), "cpu", "float32", seconds=0.01, backends=("ours-eager", "timm-eager"))
    report = bench(options)
    ours, theirs = report.rows
    assert ours.rate_per_s and not ours.note
    assert theirs.rate_per_s is None and theirs.note.startswith("rejected: not the same model")
    assert report.rejected == [theirs]


def test_default_sides() -> None:
    cuda = torch.device("cuda")
    every = ["ours", "timm"]
    both = ["ours eager", "ours compiled", "ours fast", "timm eager", "timm compiled"]
    assert default_backends(every, cuda, 256) == both
    assert default_backends(every, cuda, 1) == [*both, "timm graphs"]
    assert default_backends(["ours"], CPU, 1) == ["ours eager", "ours compiled", "ours fast", "ours onnx"]
    assert "ours graphs" in default_backends(every, cuda, 256, train=True)
    assert default_backends(every, cuda, 256, brief=True) == ["ours fast", "timm compiled"]


def test_wishes_that_cannot_be_met() -> None:
    options = BenchOptions(("mixer_nano",), (1,), "cpu", "float32", seconds=0.01)
    for wrong, words in [
        (("ours-fats",), "unknown mode 'fats'; did you mean 'fast'"),
        (("tim-eager",), "did you mean 'timm'"),
        (("hf-eager",), "none of hf-eager supports mixer_nano"),
    ]:
        with pytest.raises(UserError, match=words):
            bench(BenchOptions(**{**vars(options), "backends": wrong}))
    with pytest.raises(UserError, match="unknown training mode 'fp8'"):
        bench(BenchOptions(**{**vars(options), "backends": ("ours-fp8",), "train": True}))
    with pytest.raises(UserError, match="training steps are for"):
        bench(BenchOptions(**{**vars(options), "models": ("gmlp_causal_tiny",), "train": True}))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            bench(BenchOptions(**{**vars(options), "device": "cuda"}))


def test_random_weights_leave_no_branch_out() -> None:
    model = allmlp.create("resmlp_nano")  # LayerScale starts at 0.1 and the classifier near zero
    randomize(model)
    for name, weight in model.named_parameters():
        assert weight.std() > 0 or weight.numel() == 1, name
        assert weight.abs().mean() > 0.005, name


def test_every_mode_has_a_look_of_its_own() -> None:
    from allmlp.bench import backends, plots

    assert plots.MODES.keys() == backends.MODES.keys()
    assert len(set(plots.MODES.values())) == len(plots.MODES)
