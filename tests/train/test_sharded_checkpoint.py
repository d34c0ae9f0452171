"""Checkpoints of FSDP: written in the background, whole or not at all, safe to read."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allmlp import UserError, averaging, checkpoint, parallel, sharded_checkpoint
from allmlp.ema import ModelEma
from allmlp.models.zoo import create
from train import runs


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def alone() -> parallel.World:
    return parallel.World(0, 1, torch.device("cpu"))


class Training:
    """A model under FSDP, one process of which is this one, after a step."""

    def __init__(self, fsdp: bool = True) -> None:
        self.task = nn.Sequential(OrderedDict(model=create(runs.quiet().model, seed=1)))
        model: Any = self.task[0]
        self.world = parallel.World(0, 2 if fsdp else 1, torch.device("cpu"))
        self.world.wrap(self.task, "fsdp")
        self.optimizer, self.ema = torch.optim.AdamW(self.task.parameters(), lr=0.1), ModelEma(model, 0.9)
        self.step(model)

    def step(self, model: Any) -> None:
        model(*model.dummy_inputs(2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        parts = checkpoint.state_parts(self.task, self.optimizer, self.ema, None)
        whole = {part: checkpoint.full_state_dict(named, alone()) for part, named in parts.items()}
        return {f"{part}/{name}": tensor.clone() for part, named in whole.items() for name, tensor in named.items()}

    def saver(self, out: Path, saved: list[int] | None = None) -> checkpoint.Saver:
        found = [] if saved is None else saved
        return checkpoint.Saver(out, alone(), self.task, 2, lambda step, folder: found.append(step))

    def load(self, out: Path) -> None:
        found = checkpoint.newest(out)
        assert found is not None
        checkpoint.load(found[0], self.task, self.optimizer, self.ema)


def test_what_is_written_is_the_state_when_it_was_saved(group: None, tmp_path: Path) -> None:
    """Training goes on while the shards are written; they are read back under FSDP, and by a process without it."""
    training, saved = Training(), list[int]()
    before = training.state()
    left = tmp_path / checkpoint.FOLDER / ".step-000000003"
    left.mkdir(parents=True)
    (left / "__7_0.distcp").write_bytes(b"by a process that was killed")
    with training.saver(tmp_path, saved) as saver:
        saver.save(training.task, training.optimizer, training.ema, {"step": 3})
        training.step(training.task[0])
        assert not saved and not checkpoint.complete(tmp_path)
        saver.wait()
    assert not list(checkpoint.complete(tmp_path)[0].glob("__7*")) and not left.exists()
    assert saved == [3] and [folder.name for folder in checkpoint.complete(tmp_path)] == ["step-000000003"]
    assert not torch.equal(training.state()["task/model.head.proj.weight"], before["task/model.head.proj.weight"])
    training.load(tmp_path)
    assert_same(training.state(), before)
    plain = Training(fsdp=False)
    plain.load(tmp_path)
    assert_same(plain.state(), before)
    weights = averaging.model_weights(checkpoint.complete(tmp_path)[-1])
    assert_same({f"ema/{name}": weight for name, weight in weights.items()}, before)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found and found.keys() <= expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_damaged_shard_is_noticed(group: None, tmp_path: Path) -> None:
    training = Training()
    with training.saver(tmp_path) as saver:
        for step in (1, 2, 3):
            saver.save(training.task, training.optimizer, training.ema, {"step": step})
        saver.wait()
    first, last = checkpoint.complete(tmp_path)
    (shard,) = last.glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert checkpoint.resumed(tmp_path, alone())[0] == first  # type: ignore[index]
    assert (last.with_name("damaged-step-000000003")).is_dir()


def test_a_failed_write_leaves_the_older_checkpoint(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()

    def fail(file: Path) -> str:
        raise OSError(28, "No space left on device")

    with training.saver(tmp_path) as saver:
        saver.save(training.task, training.optimizer, training.ema, {"step": 1})
        saver.wait()
        monkeypatch.setattr(sharded_checkpoint, "digest", fail)
        saver.save(training.task, training.optimizer, training.ema, {"step": 2})
        with pytest.raises(
            UserError, match=r"cannot write .*: .*No space left on device; older checkpoints are untouched"
        ):
            saver.wait()
    assert [folder.name for folder in checkpoint.complete(tmp_path)] == ["step-000000001"]


def test_a_checkpoint_of_another_model_is_refused(group: None, tmp_path: Path) -> None:
    training = Training()
    with training.saver(tmp_path) as saver:
        saver.save(training.task, training.optimizer, training.ema, {"step": 1})
        saver.wait()
    training.ema.average = {}
    with pytest.raises(UserError, match="belongs to another model"):
        training.load(tmp_path)


class Call:
    def __reduce__(self) -> Any:
        return os.mkdir, ("called",)


def test_metadata_call_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".metadata").write_bytes(pickle.dumps(Call()))
    with pytest.raises(UserError, match="mkdir is not part of the metadata of a checkpoint"):
        checkpoint.read_part(tmp_path, "task")
    assert not Path("called").exists()
