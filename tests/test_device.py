"""Devices and their number formats: accelerators that are not here are emulated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import allmlp
from allmlp import device, kernels, provenance
from allmlp.device import own_device, sum_dtype
from allmlp.errors import UserError
from allmlp.inference.model import UnfusedModel
from allmlp.kernels import has_kernels
from allmlp.models.encoder import EncoderModel
from allmlp.parallel import World
from allmlp.prediction import open_predictor
from allmlp.run import Run
from allmlp.training import evaluate
from folders import image_folder
from tiny import tiny_model
from train.runs import language, selfsupervised, small


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The accelerators of the machine, to be set by a test."""
    counts: dict[str, int] = {}
    monkeypatch.setattr(device, "count_devices", lambda kind: counts.get(kind, 0))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return counts


def test_the_default_is_the_accelerator(devices: dict[str, int]) -> None:
    assert own_device() == torch.device("cpu")
    devices["mps"] = 1
    assert own_device() == torch.device("mps") and own_device("cpu") == torch.device("cpu")
    devices["cuda"] = 2
    assert own_device() == torch.device("cuda") and own_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "unknown device 'gpu': use cpu, cuda, cuda:1, mps or xpu"),
        ("cuda:x", "unknown device 'cuda:x'"),
        ("cpu:1", "unknown device 'cpu:1'"),
        ("xpu", "torch sees no xpu device here: use --device cpu, or install torch for Intel GPUs"),
        ("cuda:2", "there is no device cuda:2: torch sees 2, numbered from 0"),
    ],
)
def test_devices_that_are_not_there(devices: dict[str, int], name: str, message: str) -> None:
    devices["cuda"] = 2
    with pytest.raises(UserError, match=message):
        own_device(name)


def test_processes_of_torchrun_have_their_own(devices: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    devices |= {"cuda": 2, "mps": 1}
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device() == torch.device("cuda", 1) and own_device("cpu") == torch.device("cpu")
    for name in ("mps", "cuda:0"):
        with pytest.raises(UserError, match="every process has its own GPU"):
            own_device(name)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="there is no device cuda:2"):
        own_device()


def test_sums_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's GPUs, and some of Intel's, have no float64."""
    assert sum_dtype(torch.device("cpu")) == sum_dtype(torch.device("cuda")) == torch.float64
    assert sum_dtype(torch.device("mps")) == torch.float32
    for wide, dtype in ((True, torch.float64), (False, torch.float32)):
        found = SimpleNamespace(has_fp64=wide)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device, found=found: found)
        assert sum_dtype(torch.device("xpu", 1)) == dtype


class RefuseFloat64(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        assert all(one.dtype != torch.float64 for one in tree_leaves(found) if isinstance(one, torch.Tensor)), func
        return found


@pytest.mark.parametrize("made", [small, selfsupervised, language])
def test_evaluation_without_float64(made: Callable[[], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = made()
    assert run.model is not None
    dataset = run.data.load()
    model = run.task.configure_model(run.model, dataset).build()
    task, world = run.task.build(model, dataset), World(0, 1, torch.device("cpu"))
    expected = evaluate(task, model, dataset.test, world, run)
    for module in list(sys.modules.values()):
        if getattr(module, "sum_dtype", None) is sum_dtype:
            monkeypatch.setattr(module, "sum_dtype", lambda device: torch.float32)
    with RefuseFloat64():
        found = evaluate(task, model, dataset.test, world, run)
    assert found == pytest.approx(expected, rel=1e-6)


def test_sums_of_tasks_ask_the_device() -> None:
    """Of those that are not evaluated above too."""
    folder = Path(allmlp.__file__).parent
    lines = [line for file in (folder / "tasks").glob("*.py") for line in file.read_text().splitlines()]
    assert [line for line in lines if "float64" in line and "device=" in line] == []


# --- float16 ----------------------------------------------------------------------------------------------


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models say that they are on a T4."""
    monkeypatch.setattr(EncoderModel, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")


def test_fast_on_an_old_gpu_compiles(old_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    """Its kernels need compute capability 8.0."""
    converted = allmlp.fast(tiny_model("mixer_s32"))
    assert isinstance(converted, UnfusedModel) and converted.dtype == torch.float16
    assert [one.message for one in caplog.records] == [
        "fast() uses compiled: the kernels need a GPU of compute capability 8.0"
    ]
    assert not has_kernels(torch.device("cuda"))


def test_fast_on_other_accelerators(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(EncoderModel, "device", torch.device("mps"))
    converted = allmlp.fast(tiny_model("mixer_s32"))
    assert isinstance(converted, UnfusedModel) and converted.dtype == torch.float32
    assert [one.message for one in caplog.records] == [
        "fast() uses eager: there are no kernels for this kind of device"
    ]


def test_which_gpus_have_kernels_is_a_constant_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HAS_TRITON", False)

    @torch.compile(backend="eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if has_kernels(x.device) else x - 1

    assert function(torch.ones(1)).item() == 0


@pytest.mark.parametrize("fast", [False, True])
def test_predictions_in_float16(fast: bool, tmp_path: Path) -> None:
    folder = image_folder(tmp_path)
    images = list(torch.randint(0, 256, (5, 3, 8, 12), dtype=torch.uint8))
    expected, found = (
        open_predictor(folder, device="cpu", dtype=dtype, fast=fast).probabilities(images)  # type: ignore[arg-type]
        for dtype in (torch.float32, torch.float16)
    )
    assert found.dtype == torch.float32 and not torch.equal(found, expected)
    assert torch.allclose(found, expected, atol=5e-3)


def test_the_state_of_the_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts from the first that CUDA_VISIBLE_DEVICES leaves, nvidia-smi from the first of the machine."""
    asked: list[tuple[str, ...]] = []

    def answer(*command: str) -> str:
        asked.append(command)
        return ", ".join(map(str, range(len(provenance.QUERIES)))) if command[0] == "nvidia-smi" else ""

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(provenance.shutil, "which", lambda name: name)
    monkeypatch.setattr(provenance, "command_output", answer)
    assert provenance.environment(torch.device("cuda"))["temperature.gpu"] == "5"
    (command,) = [command for command in asked if command[0] == "nvidia-smi"]
    assert command[-1] == "--id=GPU-12-34"


def test_slow_formats_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bits on a CPU, where a user asks for them: fast(), prediction, training; nothing is said on a GPU."""
    device.warn_of_slow_format.cache_clear()
    assert device.has_cpu_bfloat16() in (True, False)
    monkeypatch.setattr(device, "has_cpu_bfloat16", lambda: False)
    model = tiny_model("mixer_s32")
    for _ in range(2):
        allmlp.fast(model, torch.float16)
    allmlp.fast(model, batch_size=2)
    open_predictor("allmlp:cifar10", device="cpu", dtype="bfloat16")
    assert [record.getMessage().split(" on a CPU")[0] for record in caplog.records] == [
        f"{name} is many times slower than float32" for name in ("float16", "bfloat16")
    ]
    monkeypatch.setattr(device, "has_cpu_bfloat16", lambda: True)
    assert not device.slow_format(torch.device("cpu"), torch.bfloat16)
    assert not device.slow_format(torch.device("cuda"), torch.float16)
    assert not device.slow_format(torch.device("cpu"), torch.float32)
