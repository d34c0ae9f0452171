"""Who may compete: sides are compared before they are timed, and a row says why where there is no number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.bench import backends as backends_module
from allmlp.bench import runner
from allmlp.bench.backends import Backend, PreparedBackend, default_backends
from allmlp.bench.parity import allowed, error, randomize
from allmlp.bench.runner import BackendResult, BenchOptions, Measurement, bench, prepare_backends, ratios
from allmlp.errors import UserError
from tiny import tiny

CPU = torch.device("cpu")
REFERENCE = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])]


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
    ready, found = prepare_backends(backends, REFERENCE, 0.2, CPU)
    assert list(ready) == ["right"] and found["right"] == BackendResult(error=0)
    assert found["wrong"].error == pytest.approx(0.25)
    assert found["wrong"].note == "rejected: output error 2.5e-01, 2.0e-01 allowed"
    assert list(prepare_backends(backends, REFERENCE, 0.3, CPU)[0]) == ["right", "wrong"]
    coarse = backends[1]._replace(tolerance_scale=1.5)  # of coarser numbers, whose error may be larger
    assert list(prepare_backends([coarse], REFERENCE, 0.2, CPU)[0]) == ["wrong"]
    assert prepare_backends([coarse], REFERENCE, 0.1, CPU)[1]["wrong"].note.endswith("1.5e-01 allowed")


def test_a_side_without_memory_is_a_row() -> None:
    def too_large() -> PreparedBackend:
        raise torch.OutOfMemoryError("CUDA out of memory")

    ready, found = prepare_backends([Backend("large", too_large), backend("small", REFERENCE, [])], REFERENCE, 0.0, CPU)
    assert found["large"] == BackendResult(note="out of memory") and list(ready) == ["small"]


@pytest.mark.slow
def test_a_package_with_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As were timm's copy of a model wrong: here ours is, by one weight."""
    pytest.importorskip("timm")

    def spoil(*given: Any) -> object:
        found = peer_group(*given)
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
    ours, theirs = ["ours eager", "ours compiled", "ours fast"], ["timm eager", "timm compiled", "timm channels-last"]
    assert default_backends(every, cuda, 256) == [*ours, *theirs, "timm cuda-graph"]
    assert default_backends(every, cuda, 1) == [*ours, *theirs, "timm cuda-graph", "timm reduce-overhead"]
    assert default_backends(["ours"], CPU, 1) == [*ours, "ours onnx"]
    both = default_backends(every, cuda, 256, train=True)
    assert {"ours cuda-graph", "timm cuda-graph"} <= set(both), "in training both sides are recorded"
    assert default_backends(every, cuda, 256, brief=True) == ["ours fast", "timm channels-last"]
    assert default_backends(every, CPU, 8, train=True, brief=True) == ["ours compiled", "timm compiled"]


def row(model: str, backend: str, calls: float, single: float = 0.0, batch: int = 256) -> Measurement:
    """Three rounds in which the machine is as fast, half as fast and a third as fast as told."""
    times = {"calls_s": (calls, 2 * calls, 3 * calls)}
    if single:
        times |= {"latencies_s": (single,) * 3, "device_times_s": (single / 2,) * 3}
    return Measurement("mixer_b16", model, None, "inference", backend, batch, "images", **times)


def test_ratios_are_over_the_best_of_every_other_package_and_model() -> None:
    ours, fp8 = row("mixer_b16", "ours fast", 2.0), row("mixer_b16", "ours fp8", 1.0)
    slow, best = row("mixer_b16", "timm compiled", 4.0), row("mixer_b16", "timm channels-last", 3.0)
    vit = row("vit_b16", "ours fast", 2.2), row("vit_b16", "timm compiled", 5.0)
    failed = row("mixer_b16", "timm max-autotune", 0.1)._replace(calls_s=(), note="out of memory")
    rows = [ours, fp8, slow, best, *vit, failed]
    found = {one.peer: one for one in ratios(ours, rows)}
    assert {name: (one.model, one.backend, one.median) for name, one in found.items()} == {
        "timm best": ("mixer_b16", "timm channels-last", 1.5),
        "vit_b16 ours best": ("vit_b16", "ours fast", pytest.approx(1.1)),
        "vit_b16 timm best": ("vit_b16", "timm compiled", 2.5),
    }
    assert {one.by for one in found.values()} == {"rate"} and found["timm best"].low == found["timm best"].high == 1.5
    assert {one.peer: one.median for one in ratios(fp8, rows)}["ours fast"] == 2
    over_ours = next(one for one in ratios(best, rows) if one.peer == "ours best")
    assert over_ours.backend == "ours fast", "FP8 is no fair best"
    assert not list(ratios(failed, rows))


def test_a_single_image_is_compared_by_latency_and_device_time_too() -> None:
    ours = row("mixer_b16", "ours fast", 1.0, 4.0, batch=1)
    launched = row("mixer_b16", "timm compiled", 1.5, 3.0, batch=1)
    found = {one.by: (one.backend, one.median) for one in ratios(ours, [ours, launched])}
    assert found == {by: ("timm compiled", value) for by, value in (("rate", 1.5), ("latency", 0.75), ("device", 0.75))}


def test_other_packages_get_channels_last_where_it_is_faster() -> None:
    """timm's convolution, its weights and its input; ours keep their layout."""
    pytest.importorskip("timm")
    group = runner.peer_group("mixer_nano", allmlp.preset("mixer_nano").spec, CPU)
    layouts = {}
    for name in ("timm eager", "timm channels-last", "ours channels-last"):
        seen: list[bool] = []

        def look(model: torch.nn.Module, precision: torch.dtype, seen: list[bool] = seen) -> object:
            weights = [x for x in model.parameters() if x.dim() == 4]
            seen += [x.is_contiguous(memory_format=torch.channels_last) for x in weights]
            return lambda x: seen.append(x.is_contiguous(memory_format=torch.channels_last)) or x

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(backends_module.MODES, name.partition(" ")[2], look)
            inputs = backends_module.random_inputs(group.first, 2)
            backends_module.inference(group, name, inputs, torch.float32).build().call()
        layouts[name] = set(seen)
    assert layouts == {"timm eager": {False}, "timm channels-last": {True}, "ours channels-last": {False}}


def test_no_model_is_left_uncompiled_in_silence() -> None:
    """Dynamo gives up on a function that it has compiled recompile_limit times, and runs it as it is."""
    config = torch._dynamo.config
    before = config.recompile_limit, torch.backends.cudnn.benchmark
    with runner.fastest_settings():
        assert config.recompile_limit >= 100 and config.fail_on_recompile_limit_hit
        assert torch.backends.cudnn.benchmark and torch.get_float32_matmul_precision() == "high"
    assert (config.recompile_limit, torch.backends.cudnn.benchmark) == before


@pytest.mark.slow
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
        with pytest.raises(UserError, match="no cuda device"):
            bench(BenchOptions(**{**vars(options), "device": "cuda"}))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "unit"), [("gmlp_base", "tokens"), ("patchtsmixer", "windows")])
def test_texts_and_series(name: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ONNX graphs take a mask too."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(runner, "spec_of", lambda name: tiny(allmlp.preset(name).spec))
    backends = ("ours-eager", "ours-onnx")
    report = bench(BenchOptions((name,), (2,), "cpu", "float32", seconds=0.02, backends=backends))
    assert [(row.backend, row.unit, row.note) for row in report.rows] == [
        ("ours eager", unit, ""),
        ("ours onnx", unit, ""),
    ]
    assert all(row.rate_per_s for row in report.rows)


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


def test_folders_that_end_alike_are_told_apart(tmp_path: Path) -> None:
    """Otherwise the second model would be timed twice, once under the name of the first."""
    places = [str(tmp_path / part / "model") for part in ("a", "b")]
    for place, width in zip(places, (32, 64), strict=True):
        allmlp.save(allmlp.create("mixer_nano", overrides={"width": width, "depth": 1}), place)
    options = BenchOptions(tuple(places), (1,), "cpu", "float32", seconds=0.01, backends=("ours-eager",))
    rows = bench(options).rows
    assert [row.model for row in rows] == places and rows[0].macs < rows[1].macs
    assert runner.labels(places[:1]) == {places[0]: "model"}
