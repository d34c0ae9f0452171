"""NVIDIA's multi-process service (MPS): kernels of several processes run on a GPU at the same time.

Without it processes take turns, and a small model leaves most of the GPU idle during its turn.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS, VISIBLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
CLIENT = "import torch; torch.ones(1, device='cuda')"
"""Fails if a process with the service cannot use the GPU, such as in a container without shared memory."""
TIMEOUT = 60.0


def is_running() -> bool:
    """Whether the user has started a service, which processes join without being told."""
    return PIPES in os.environ or (DEFAULT_PIPES / "control").exists()


@contextmanager
def multi_process_service(say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """The variables with which processes share a GPU; none if there is no service, or the user has started one."""
    control = shutil.which(CONTROL)
    if control is None or is_running():
        yield {}
        return
    folder = tempfile.mkdtemp(prefix="allmlp-mps-")
    variables = {PIPES: folder, LOGS: folder}
    # The service numbers its GPUs anew, and its clients would select among those numbers: only clients select.
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE} | variables

    def run(command: list[str], text: str = "") -> bool:
        done = subprocess.run(
            command,
            env=environment if command[0] == control else {**os.environ, **variables},
            input=text,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT,
            check=False,
        )
        return done.returncode == 0

    try:
        works = run([control, "-d"]) and run([sys.executable, "-c", CLIENT])
        say(f"runs {'share the GPU through' if works else 'take turns on the GPU: they cannot use'} NVIDIA's MPS")
        yield variables if works else {}
    finally:
        run([control], "quit\n")
        shutil.rmtree(folder, ignore_errors=True)
