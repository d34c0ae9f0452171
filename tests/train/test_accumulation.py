"""Micro-batches of different size, or with different numbers of tokens, give the gradient of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from allmlp import parallel
from allmlp.data.corpus import Corpus
from allmlp.data.frequency import DAY, Frequency
from allmlp.data.sampler import Batch
from allmlp.data.series import SplitEnds, build_dataset
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.models.forecasting import patchtsmixer
from allmlp.models.zoo import create, preset
from allmlp.optim import Sgd
from allmlp.tasks.causal_lm import CausalLM
from allmlp.tasks.classify import Classify
from allmlp.tasks.forecast import Forecast
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.masked_patches import MaskedPatches
from allmlp.tasks.task import Losses, StepContext, TaskModule
from allmlp.train_step import TrainStep
from tiny import tiny
from train.runs import Blobs, small


def step_of(task: TaskModule, world: parallel.World) -> TrainStep:
    return TrainStep(task, Sgd(lr=0.1).build(task), world)


def gradient(task: TaskModule, micro_batches: list[tuple[Tensor, ...]], size: int = 1) -> tuple[Tensor, Losses]:
    """The gradient of one process of `size`, and what it logs."""
    task.zero_grad()
    losses = step_of(task, parallel.World(0, size, torch.device("cpu"))).backward(micro_batches)
    return torch.cat([weight.grad.flatten() for weight in task.parameters() if weight.grad is not None]), losses


def text_task(task: Any, name: str, folder: Path) -> tuple[TaskModule, Any]:
    """Rows of very different lengths."""
    texts = ["a short line", "the quick brown fox jumps over the lazy dog again and again and again", "two words"]
    (folder / "text.txt").write_text("\n".join(texts * 8), encoding="utf8")
    file = str(folder / "text.txt")
    config = TokenizerConfig(vocab_size=64)
    data = Corpus(file, file, config, seq_len=24, packing=False, sample_by="line", cache=str(folder)).load()
    model = create(task.configure_model(tiny(preset(name).spec), data), seed=0)
    return task.build(model, data).train(), data


def series_task(task: Forecast | MaskedPatches) -> tuple[TaskModule, Any]:
    values = np.random.default_rng(0).normal(size=(60, 2))
    values[20:40, 1] = np.nan
    data = build_dataset(
        values, [60], [SplitEnds(40, 50, 60)], ("a", "b"), Frequency(DAY), 8, 4, ids=("",), starts=(0,)
    )
    model = create(task.configure_model(patchtsmixer(1, 8, 2, 0.0, 0.0, patch_size=4, stride=4), data), seed=0)
    return task.build(model, data).train(), data


def cases(name: str, folder: Path) -> tuple[TaskModule, Any]:
    if name == "images":
        model = create(small().model.configure(drop_path=0.0), num_classes=4, seed=0)
        return Classify().build(model, Blobs().load()).train(), Blobs().load()
    if name in ("series", "patches"):
        return series_task(Forecast() if name == "series" else MaskedPatches())
    task, model = (CausalLM(), "gmlp_causal_tiny") if name == "causal" else (MaskedLM(), "gmlp_mlm_tiny")
    return text_task(task, model, folder)


@pytest.mark.parametrize("name", ["images", "causal", "masked", "series", "patches"])
def test_micro_batches_are_the_whole_batch(name: str, tmp_path: Path) -> None:
    task, data = cases(name, tmp_path)
    indices = torch.arange(10, 20)
    batch = Batch(0, 0.0, indices, data.train.fetch(indices))
    whole = task.prepare_batch(batch, StepContext(0.5, torch.Generator().manual_seed(0)))
    parts = [*zip(*(tensor.split([3, 3, 3, 1]) for tensor in whole), strict=True)]
    expected, logged = gradient(task, [whole])
    found, summed = gradient(task, parts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(summed.total, logged.total.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(summed.metrics, {name: value.detach() for name, value in logged.metrics.items()})


def test_processes_with_few_tokens_count_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over two processes, which DDP computes, is the gradient of both batches together."""
    task, data = cases("causal", tmp_path)
    rows = data.train.fetch(torch.arange(6)).ids.long()
    shares = [(rows[:5],), (rows[5:],)]
    total = sum(float(task.loss_weight(*share)) for share in shares)
    monkeypatch.setattr(parallel.World, "sum", lambda self, values: torch.full_like(values, total))
    found = torch.stack([gradient(task, [share], size=2)[0] for share in shares]).mean(0)
    torch.testing.assert_close(found, gradient(task, [(rows,)])[0], rtol=1e-4, atol=1e-6)
