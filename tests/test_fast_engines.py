"""What `fast` chooses by the capabilities of a device, what it measures and keeps, and ONNX Runtime underneath."""

from __future__ import annotations

import copy
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp import inference
from allmlp.inference import FastModel, fast, measurement
from allmlp.inference.capabilities import Capabilities, choose
from allmlp.inference.cpu import CpuFastEncoder
from allmlp.inference.measurement import Times, time_engines
from allmlp.inference.model import UnfusedModel
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model
from tiny import tiny_model

pytestmark = pytest.mark.usefixtures("onnx_registry")
PLAIN = Capabilities("cpu")
CPU = Capabilities("cpu", compiler=True, onnx=True)


def gpu(major: int, minor: int = 0, amd: bool = False, triton: bool = True) -> Capabilities:
    return Capabilities("cuda", (major, minor), amd, triton)


@pytest.mark.parametrize(
    ("capabilities", "fused", "unfused"),
    [
        (CPU, "fused eager compiled onnx", "eager compiled onnx"),
        (PLAIN, "fused eager", "eager"),
        (Capabilities("mps", compiler=True, onnx=True), "eager", "eager"),
        (Capabilities("xpu"), "eager", "eager"),
        (gpu(9), "kernels compiled", "compiled"),
        (gpu(9, triton=False), "eager", "eager"),
        (gpu(9)._replace(old_triton=True), "compiled eager", "compiled eager"),
        (gpu(7, 5), "compiled eager", "compiled eager"),
        (gpu(8), "compiled kernels", "compiled"),
        (gpu(8, 9), "compiled kernels", "compiled"),
        (gpu(10), "compiled kernels", "compiled"),
        (gpu(12), "compiled kernels", "compiled"),
        (gpu(9, 4, amd=True), "compiled eager", "compiled eager"),
    ],
    ids=[
        "CPU",
        "bare CPU",
        "MPS",
        "XPU",
        "H200",
        "no Triton",
        "old Triton",
        "T4",
        "A100",
        "Ada",
        "B200",
        "RTX 50",
        "MI300",
    ],
)
def test_engines_by_capability(capabilities: Capabilities, fused: str, unfused: str) -> None:
    for can_fuse, expected in ((True, fused), (False, unfused)):
        choice = choose(capabilities, can_fuse, can_export=True)
        assert " ".join([choice.engine, *choice.alternatives]) == expected
        assert choice.reason and "onnx" not in (choice.engine, *choose(capabilities, can_fuse).alternatives)
        small = choose(capabilities, can_fuse, can_export=True, is_small=True)
        assert small.engine == "onnx" if capabilities.onnx and capabilities.device == "cpu" else small == choice
        assert {small.engine, *small.alternatives} == {choice.engine, *choice.alternatives}
        assert choose(capabilities, can_fuse, is_small=True).engine == choice.engine


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a CPU without compiler and ONNX Runtime: two engines are left."""
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Capabilities, "of", classmethod(lambda cls, device: PLAIN))
    monkeypatch.setattr(measurement, "SECONDS", 0.01)
    return tmp_path / "cache" / "fast.json"


def timed(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    def times(calls: Any, device: torch.device) -> Times:
        for call in calls.values():
            call()
        return Times({name: seconds[name] for name in calls})

    monkeypatch.setattr(inference, "time_engines", times)


def test_the_fastest_is_returned_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixer_s32", torch.float32).eval()
    assert isinstance(fast(model), CpuFastEncoder) and not cache.exists()
    assert fast(model).report() == "fused on cpu in float32: the blocks are fused for a CPU"
    timed(monkeypatch, fused=2e-3, eager=1e-3)
    first = fast(model, measure=True)
    assert isinstance(first, UnfusedModel) and not first.compiled
    assert first.report() == "eager on cpu in float32: the fastest here on batches of 1: fused 2 ms, eager 1 ms"
    timed(monkeypatch)  # a second measurement would fail
    for again in (fast(model, measure=True), fast(model)):
        assert again.report() == first.report()
    assert isinstance(fast(model, batch_size=2), CpuFastEncoder), "the answer is that of one batch size"
    assert isinstance(fast(model, torch.float64), CpuFastEncoder), "and of one dtype"
    assert isinstance(fast(tiny_model("mixer_s32", torch.float32, shallow=True)), CpuFastEncoder), "and of one config"
    for damaged in ("{", "[]", json.dumps({key: {"eager": "x"} for key in json.loads(cache.read_text())})):
        cache.write_text(damaged)
        assert isinstance(fast(model), CpuFastEncoder)
    timed(monkeypatch, fused=1e-3, eager=2e-3)
    assert isinstance(fast(model, measure=True), CpuFastEncoder)


def test_an_engine_that_fails_is_left_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: FastModel, *args: Any) -> None:
        raise RuntimeError("no such operator\nat line 3")

    monkeypatch.setattr(UnfusedModel, "forward", fail)
    assert isinstance(fast(tiny_model("mixer_s32", torch.float32), measure=True), CpuFastEncoder)
    assert [one.message for one in caplog.records] == ["fast() does not use eager: no such operator at line 3"]
    assert list(*json.loads(cache.read_text()).values()) == ["fused"]


def test_a_cache_that_cannot_be_written(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.write_text("a file in its place")
    assert fast(tiny_model("mixer_s32", torch.float32), measure=True).report()
    assert caplog.records[-1].message.startswith("cannot store the measurements of fast(): ")


def test_times_are_medians_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "SECONDS", 0.1)
    order: list[str] = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    times = time_engines({"a": lambda: call("a", 0.01), "b": lambda: call("b", 0.1)}, torch.device("cpu"))
    assert times.fastest == "a" and 0.01 <= times["a"] < times["b"]
    assert order[-1] == "b" and "ab" * 3 in "".join(name for name, last in zip(order, ["", *order]) if name != last)


def series_model() -> Model:
    return allmlp.create("patchtsmixer", seq_len=64, horizon=16, seed=0, overrides={"depth": 1}).eval()


def test_series(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of series keep their blocks, and float32 also where the default is 16 bits."""
    monkeypatch.setattr(inference, "default_dtype", lambda device: torch.bfloat16)
    model = series_model()
    (x,) = model.dummy_inputs(3)
    converted = fast(model)
    assert converted.report() == "eager on cpu in float32: blocks of this kind are not fused"
    mask = torch.arange(64)[:, None].expand(3, 64, 7) > 3
    assert torch.equal(converted(x, mask), model(x, mask)) and not torch.equal(converted(x), converted(x, mask))
    for parameter in model.parameters():
        parameter.data.zero_()
    assert float(converted(x).norm()) > 0, "the weights are copies"


# --- ONNX Runtime -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> EncoderModel:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = tiny_model("gmlp_ti16", torch.float32).eval()
    assert isinstance(model, EncoderModel)
    return model


@pytest.mark.slow
def test_onnx_runtime_is_a_fast_model(trained: EncoderModel) -> None:
    (x,) = trained.dummy_inputs(5)
    expected = trained(x).detach()
    plain = fast(trained)
    assert plain.report() == (
        "onnx on cpu in float32: measured fastest on a CPU for one example at a time of a small model"
    )
    torch.testing.assert_close(plain(x.double()), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain(x.clone().requires_grad_()), plain(x))
    assert plain(x[:0]).shape == expected[:0].shape
    with pytest.raises(allmlp.UserError, match=r"expected images: tensor\(float\) of shape .*, got uint8"):
        plain(x.to(torch.uint8))
    with pytest.raises(allmlp.UserError, match="takes a tensor, not a ndarray"):
        plain(x.numpy())
    with pytest.raises(allmlp.UserError, match="does not take pre_logits: call the original"):
        plain(x, pre_logits=True)
    small = fast(trained, torch.int8)
    assert small.report() == "onnx on cpu in int8: int8 was requested"
    error = float((small(x) - expected).norm() / expected.norm())
    assert 1e-5 < error < 0.1
    assert b"MatMulInteger" in small.file.numpy().tobytes()  # type: ignore[operator]
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(twin(x), small(x))
    with pytest.raises(allmlp.UserError, match="stays on cpu in int8"):
        small.to(torch.float16)


@pytest.mark.slow
def test_series_in_onnx_runtime() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = series_model()
    (x,) = model.dummy_inputs(3)
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) > 0.2
    plain, small = inference.build("onnx", model, torch.float32), fast(model, torch.int8)
    for given in ((x,), (x, mask)):
        expected = model(*given).detach()
        torch.testing.assert_close(plain(*given), expected, rtol=1e-4, atol=1e-4)
        assert 1e-6 < float((small(*given) - expected).norm() / expected.norm()) < 0.1
    assert plain(x[:0]).shape == (0, 16, 7)
    for given, got in (((x[:, 1:],), r"float32 \[3, 63, 7\]"), ((x, mask.float()), "float32"), ((x, mask[:2]), "bool")):
        with pytest.raises(allmlp.UserError, match=rf"^expected (series|mask): .* of shape \[B, 64, 7\], got {got}"):
            plain(*given)


def test_a_model_that_cannot_be_exported_is_fused(
    trained: EncoderModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such operator\nat line 3")

    monkeypatch.setattr("allmlp.inference.onnx.write_onnx", fail)
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path))
    assert fast(trained).report() == "fused on cpu in float32: the blocks are fused for a CPU"
    assert [one.message for one in caplog.records] == ["fast() does not use ONNX Runtime: no such operator at line 3"]
    assert isinstance(fast(trained, batch_size=2), CpuFastEncoder) and len(caplog.records) == 1
    caplog.clear()
    monkeypatch.setattr(Capabilities, "of", classmethod(lambda cls, device: CPU._replace(compiler=False)))
    monkeypatch.setattr(measurement, "SECONDS", 0.01)
    assert "onnx" not in fast(trained, measure=True, batch_size=1).report()
    assert [one.message for one in caplog.records] == ["fast() does not use onnx: no such operator at line 3"]
    caplog.clear()
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(inference, "SMALL_MACS", allmlp.measure(trained.spec).macs)
    assert isinstance(fast(trained), CpuFastEncoder) and not caplog.records


def test_where_int8_runs(trained: EncoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(allmlp.UserError, match="images and series in ONNX Runtime, not of texts"):
        fast(allmlp.create("bert_tiny"), torch.int8)
    monkeypatch.setattr(EncoderModel, "device", torch.device("cuda"))
    with pytest.raises(allmlp.UserError, match=r"int8 is for a CPU: move the model there, or use torch\.float8"):
        fast(trained, torch.int8)
