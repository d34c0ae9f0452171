"""Several nodes: one of two dies and the other one goes on; the launcher for Slurm."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.run import get_args_parser

from allmlp import checkpoint
from allmlp.plan.estimate import Job, checkpoint_bytes
from allmlp.plan.memory import memory
from allmlp.recipes import recipes
from allmlp.run import Run
from allmlp.spec import override
from allmlp.training import train
from train import runs
from train.launcher import TESTS, Launcher
from train.test_train import losses

EXAMPLE = TESTS.parent / "examples" / "slurm.sh"
CODE = """
import os, signal, sys
from pathlib import Path
from allmlp import training as loop
from train import runs
out, node = Path(sys.argv[1]), sys.argv[2]
fetch = loop.Loader.fetch

def die(loader, step):
    if (out / "checkpoints" / "step-000000004").exists():
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return fetch(loader, step)

if node == "1":
    loop.Loader.fetch = die
loop.train(runs.quiet().replace(sharding="fsdp", keep_checkpoints=5), out, "cpu")
"""


@pytest.mark.slow
def test_a_node_dies_and_the_other_one_goes_on_with_its_processes(launcher: Launcher, tmp_path: Path) -> None:
    """Two torchruns of four processes each. All processes of one are killed, and so is torchrun; the four of the other
    resume from the checkpoint that eight have written, with the losses of a single process, and every process holds
    what `allmlp plan` predicts.
    """
    train(runs.quiet(), tmp_path / "one", "cpu")
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(CODE)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = ["--nnodes", "1:2", "--nproc-per-node", "4", "--max-restarts", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    launches, waits = [], "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=4"
    for node in (0, 1):
        options = ["--rdzv-conf", f"is_host={1 - node},{waits}", str(script), str(out), str(node)]
        launches.append(([*command, *options], tmp_path / f"node{node}.log"))
    codes = launcher.run(launches)
    assert codes == [0, -signal.SIGKILL], (tmp_path / "node0.log").read_text()[-3000:]
    shards = {folder.name: len(list(folder.glob("*.distcp"))) for folder in checkpoint.complete(out)}
    assert shards["step-000000004"] == 8 and shards["step-000000012"] == 4
    assert losses(out) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    for step, processes in ((4, 8), (12, 4)):
        check_plan(runs.quiet(), processes, stored_bytes(out / "checkpoints" / f"step-{step:09}"))


def stored_bytes(folder: Path) -> list[int]:
    """Bytes of weights, their average and the optimizer's moments that each process has written, the smallest first."""
    metadata, found = FileSystemReader(folder).read_metadata(), Counter[str]()
    for place, storage in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[place.fqn]
        if isinstance(tensor, TensorStorageMetadata) and tensor.size.numel() > 1 and place.index is not None:
            chunk = tensor.chunks[place.index]
            if tensor.properties.dtype.is_floating_point:
                found[storage.relative_path] += chunk.sizes.numel() * tensor.properties.dtype.itemsize
    return sorted(found.values())


def check_plan(run: Run, processes: int, stored: list[int]) -> None:
    """`allmlp plan` predicts what the largest process holds, and the size of the checkpoint."""
    model = override(run.model, "head.num_classes", 4)
    options: dict[str, Any] = {"optim": run.optim, "ema": run.ema_decay is not None}
    planned = memory(model, run.batch_size // processes, gpus=processes, sharding="fsdp", **options)
    assert stored[-1] == planned.weights + planned.optimizer_state + planned.ema and len(stored) == processes
    job = Job("quiet", model, "resmlp", samples=64, epochs=1, gpus=processes, batch_size=24, **options)
    assert sum(stored) == checkpoint_bytes(job)


# --- Slurm ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")
def test_the_slurm_example_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    """Its command line, with a srun that prints its arguments in place of running them."""
    subprocess.run(["bash", "-n", str(EXAMPLE)], check=True)
    for name, line in {"srun": 'printf "%s\\n" "$@"', "scontrol": "printf 'node1\\nnode2\\n'"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    example = re.search(r"sbatch examples/slurm\.sh (.*)", EXAMPLE.read_text())
    assert example is not None
    passed = example[1].split()
    done = subprocess.run(["bash", str(EXAMPLE), *passed], env=environment, capture_output=True, text=True, check=True)
    srun, program, *arguments = done.stdout.splitlines()
    assert srun == "--kill-on-bad-exit=1" and program == "torchrun"
    found = get_args_parser().parse_args(arguments)
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == ("2", "8", 3)
    assert (found.rdzv_backend, found.rdzv_endpoint, found.rdzv_id) == ("c10d", "node1:29500", "7")
    assert found.module and found.training_script == "allmlp"
    assert found.training_script_args == ["train", *passed] and passed[0] in recipes()


def test_the_options_of_the_slurm_example_exist() -> None:
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue"}
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", EXAMPLE.read_text(), re.M)
    assert {name for name, _ in options} == known | {"open-mode", "output"}
    assert dict(options)["ntasks-per-node"] == "1"  # torchrun starts the processes of a node
