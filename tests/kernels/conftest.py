"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors


@pytest.fixture(autouse=True)
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialized memory with NaN, so that a kernel that leaves part of its output unwritten is caught."""

    def fill(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_and_fill(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return allocate_and_fill

    _device_constructors()  # cached: with the functions below in it, `torch.device("cuda")` would not be obeyed
    monkeypatch.setattr(torch, "empty", fill(torch.empty))
    monkeypatch.setattr(torch, "empty_like", fill(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", fill(Tensor.new_empty))
