"""The training loop does not wait for the GPU: steps are queued while earlier ones are computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from allmlp import training as loop
from allmlp.parallel import World
from allmlp.run import Budget, Run
from train.test_golden import RECIPES, TEACHERS, small_run, texts  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty", "ignore:Synchronization debug mode is a prototype"),
]
FIRST, LAST = 8, 12
"""Steps that must not wait: the first ones allocate and record."""


@pytest.fixture(autouse=True)
def waiting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    seed_step = loop.generator

    def generator(world: World, seed: int, step: int) -> torch.Generator:
        torch.cuda.set_sync_debug_mode("error" if FIRST <= step < LAST else "default")
        return seed_step(world, seed, step)

    monkeypatch.setattr(loop, "generator", generator)
    yield
    torch.cuda.set_sync_debug_mode("default")


def train(name: str, texts: Path, out: Path) -> Path:  # noqa: F811
    teacher = train(TEACHERS[name], texts, out) if name in TEACHERS else None
    run: Run = small_run(name, texts, teacher)
    run = run.replace(budget=Budget(steps=LAST + 2), log_every=1000, eval_every=1000, save_every=1000)
    loop.train(run.replace(precision="bfloat16"), out / name, "cuda")
    return out / name


@pytest.mark.parametrize("name", RECIPES)
def test_steps_do_not_wait(name: str, texts: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("tokenizers")
    train(name, texts, tmp_path)
