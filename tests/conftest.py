"""What every test shares."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache

# Without a GPU, kernels run in Triton's interpreter, which must be selected before Triton is imported.
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

# On a GPU, kernels run in their default configuration: compiling all of them would take most of the time.
os.environ.setdefault("ALLMLP_AUTOTUNE", "0")

import pytest
import torch
import typer

from allmlp.log import draw_curves
from allmlp.models.torchvision import define_missing_operators
from train.launcher import Launcher

# The models are small: more threads would slow them down.
THREADS = min(torch.get_num_threads(), 4)
# A number that is measured would change the last digits from run to run.
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

# timm and transformers are imported by name in many tests.
define_missing_operators()


def pytest_configure() -> None:
    gc.disable()  # modules and tests stay


frozen_modules = [sys.maxsize]
"""How many modules there were each time that garbage collection was told not to visit them again; first the value for
the process of pytest-xdist that runs no tests.
"""


def pytest_collection_finish() -> None:
    """Runs collect garbage, which takes longer than they do if it visits all modules and tests each time."""
    freeze()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """The modules that tests import, hundreds of thousands of objects, stay as well."""
    if len(sys.modules) > frozen_modules[-1] + 20:
        gc.collect()
        freeze()


def freeze() -> None:
    gc.freeze()
    frozen_modules.append(len(sys.modules))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test has the same random numbers in every run, and runs as fast as it would alone."""
    # For GPUs not in use yet, torch.manual_seed formats the stack: in all tests together, that takes many seconds.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    torch.set_num_threads(THREADS)  # a server sets its own number
    # On a CPU without bfloat16, autocast switches oneDNN off for the whole process, and convolutions become slow.
    torch.backends.mkldnn.enabled = torch.backends.mkldnn.is_available()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a file; pytest-xdist sets the width of its processes to 80."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True, scope="session")
def quick() -> Iterator[None]:
    """Measuring the peak of a GPU, drawing curves, making the options of every command and waiting for the disk take
    most of the time of a small run. Tests that start processes of their own do wait for the disk there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allmlp.meter.peak_flops", lambda device: 1e11)
        patch.setattr("allmlp.training.draw_curves", lambda out: [])
        patch.setattr("typer.main.get_command", cache(typer.main.get_command))
        patch.setattr("os.fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked tests draw their curves."""
    if "curves" in request.keywords:
        monkeypatch.setattr("allmlp.training.draw_curves", draw_curves)


@pytest.fixture
def uncached_operators() -> Iterator[None]:
    """Exports of one block with a dynamic batch: storing what each operator returns takes longer than asking again."""
    from torch._dynamo import config

    with config.patch(fake_tensor_cache_enabled=False):
        yield


@pytest.fixture(scope="session")
def onnx_registry() -> Iterator[None]:
    """The operators of ONNX, which each export would read anew, are read once."""
    registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
    with pytest.MonkeyPatch.context() as patch:
        read = staticmethod(cache(registration.ONNXRegistry.from_torchlib))
        patch.setattr(registration.ONNXRegistry, "from_torchlib", read)
        yield


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    with Launcher() as started:
        yield started
