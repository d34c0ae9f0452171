"""Throughput counts the time of the examples, whatever is done between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allmlp import meter


def test_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation between two readings: the examples before it, and their time, belong to the second one."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(meter, "time", SimpleNamespace(monotonic=lambda: clock.now))
    task: Any = SimpleNamespace(flops=1, unit=("images", 1))
    found = meter.Meter(task, torch.device("cpu"), 1)
    clock.now += 10
    assert found.read(20) == {"images/s": 2.0}
    clock.now += 10
    with found.paused():
        clock.now += 1000
    clock.now += 10
    assert found.read(40) == {"images/s": 2.0}
