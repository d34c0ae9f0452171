"""Names of devices: accelerators that are not here are emulated."""

from __future__ import annotations

import pytest
import torch

from allmlp import device
from allmlp.device import own_device
from allmlp.errors import UserError


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
