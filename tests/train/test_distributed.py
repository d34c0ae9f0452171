"""Several processes: the same losses as one, checkpoints for any number of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allmlp.train import train
from train.runs import language, quiet, selfsupervised
from train.test_train import losses

TESTS = Path(__file__).parent.parent
CODE = """
import os, signal, sys
from pathlib import Path
from allmlp import train as loop
from train import runs
out = Path(sys.argv[1])
if len(sys.argv) > 4 and os.environ["RANK"] == sys.argv[4] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    backward = loop.backward

    def die(run, world, wrapped, example, moment):
        if example.number == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(run, world, wrapped, example, moment)

    loop.backward = die
loop.train(getattr(runs, sys.argv[3])().replace(sharding=sys.argv[2]), out, "cpu")
"""


def torchrun(out: Path, processes: int, sharding: str, run: str = "quiet", dies: int | None = None) -> None:
    """Run under torchrun; process `dies` is killed at the seventh step of its first life."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [] if dies is None else ["--max-restarts", "1"]
    script = out.with_suffix(".py")
    script.write_text(CODE)
    paths = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(out), sharding, run, *([] if dies is None else [str(dies)])],
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
@pytest.mark.parametrize(("sharding", "dies"), [("ddp", 0), ("fsdp", 1)])
def test_a_dead_process_is_replaced_and_nothing_changes(alone: Path, tmp_path: Path, sharding: str, dies: int) -> None:
    torchrun(tmp_path / "two", 2, sharding, dies=dies)
    assert losses(tmp_path / "two") == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.slow
def test_two_processes_share_a_centre(tmp_path: Path) -> None:
    """DINO's centre is the mean over all processes, and small crops train together too."""
    train(selfsupervised(), tmp_path / "one", "cpu")
    torchrun(tmp_path / "two", 2, "ddp", "selfsupervised")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_read_like_one(tmp_path: Path, sharding: str) -> None:
    train(language(), tmp_path / "one", "cpu")
    torchrun(tmp_path / "two", 2, sharding, "language")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


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
