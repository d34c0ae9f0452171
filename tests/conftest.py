"""What every test shares."""

from __future__ import annotations

import os
import shutil

# Without a GPU, kernels run in Triton's interpreter, which must be selected before Triton is imported.
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from allmlp.models.torchvision import define_missing_operators

# The models here are small: more threads only get in each other's way.
torch.set_num_threads(min(torch.get_num_threads(), 4))

# timm and transformers are imported by name in many tests.
define_missing_operators()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers whenever it runs."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves take a second, most of what a small run takes: they are drawn where a test is marked so."""
    if "curves" not in request.keywords:
        monkeypatch.setattr("allmlp.training.draw_curves", lambda out: [])
