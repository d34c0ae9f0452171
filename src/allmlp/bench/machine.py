"""Peak matmul and copy throughput, memory, software versions and GPU clocks."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from allmlp import __version__
from allmlp.bench.clock import Call, Clock
from allmlp.bench.timing import Timing, time_interleaved

PACKAGES = ("triton", "timm", "transformers", "onnxruntime", "numpy")
QUERIES = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def peak_matmul(device: torch.device, precision: torch.dtype) -> tuple[Call, int]:
    """A large matmul and its FLOPs; timed between the models, it is the reference for their utilization."""
    size = 8192 if device.type == "cuda" else 1024
    a, b, c = (torch.randn(size, size, device=device, dtype=precision) for _ in range(3))
    return lambda: torch.mm(a, b, out=c), 2 * size**3


def copy_rate(device: torch.device, clock: Clock, seconds: float) -> float:
    """Bytes read and written per second by a copy larger than any cache."""
    size = 2**30 if device.type == "cuda" else 2**27
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    timing = time_interleaved({"copy": lambda: target.copy_(source)}, clock, seconds)["copy"]
    return 2 * size / timing.call.median if isinstance(timing, Timing) else 0.0


class Memory:
    """Peak GPU memory of a backend beyond what was allocated before: weights, activations, captured graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = self.held = 0
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            self.before, self.held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def peak(self, call: Call) -> int | None:
        """Bytes, or None on a CPU. Replaying a graph allocates nothing, so its reserved memory counts."""
        if self.device.type != "cuda":
            return None
        call()  # an optimizer allocates its state in the first step
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - self.before
        torch.cuda.empty_cache()
        return max(most, torch.cuda.memory_reserved() - self.held)


def environment(device: torch.device) -> dict[str, Any]:
    """Everything that may affect a measurement."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["allmlp", *sys.argv[1:]],
        "allmlp": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found |= gpu_state(torch.cuda.current_device())
    return found


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu_state(number: int) -> dict[str, str]:
    """Driver, clocks, power limit and temperature from nvidia-smi, if available."""
    if not shutil.which("nvidia-smi"):
        return {}
    answer = command_output("nvidia-smi", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader", f"--id={number}")
    return dict(zip(QUERIES, (part.strip() for part in answer.split(",")))) if answer else {}


def commit() -> str | None:
    """The checked-out commit, with a + if files differ from it; None outside a checkout."""
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    if not shutil.which("git") or not command_output(*git, "ls-files", here.name):
        return None
    return command_output(*git, "rev-parse", "--short=12", "HEAD") + (
        "+" if command_output(*git, "status", "--porcelain", "..") else ""
    )


def command_output(*command: str) -> str:
    """Standard output of a command; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
