"""Several processes: the same losses as one, checkpoints for any number of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allmlp.train import train
from train.runs import quiet
from train.test_train import losses

TESTS = Path(__file__).parent.parent
CODE = """
import sys
from pathlib import Path
from allmlp.train import train
from train.runs import quiet
train(quiet().replace(sharding=sys.argv[2]), Path(sys.argv[1]), "cpu")
"""


def torchrun(out: Path, processes: int, sharding: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = out.with_suffix(".py")
    script.write_text(CODE)
    paths = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(out), sharding],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:

    out = tmp_path_factory.mktemp("distributed") / "alone"
    train(quiet(), out, "cpu")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(alone: Path, tmp_path: Path, sharding: str) -> None:
    torchrun(tmp_path / "two", 2, sharding)
    assert losses(tmp_path / "two") == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_loads_into_one(alone: Path, tmp_path: Path) -> None:
    from allmlp import checkpoint

    torchrun(tmp_path / "two", 2, "fsdp")
    newest = checkpoint.complete(tmp_path / "two")[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    train(quiet().replace(sharding="fsdp"), tmp_path / "two", "cpu")
    assert losses(tmp_path / "two") == pytest.approx(losses(alone), rel=1e-4)
