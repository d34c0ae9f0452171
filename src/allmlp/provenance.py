"""Provenance of a measurement: command, commit, software versions, device and time."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allmlp import __version__

if TYPE_CHECKING:
    import torch

PACKAGES = ("triton", "timm", "transformers", "onnxruntime", "numpy", "pillow", "simplejpeg")
QUERIES = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
COMMIT_VARIABLE = "ALLMLP_COMMIT"
"""Names the commit where the package is not in a git checkout: a container, a copy on another machine."""
COMMIT_FILE = Path(__file__).with_name("COMMIT")
"""Written into wheel and sdist when they are built (hatch_build.py)."""


def environment(device: torch.device) -> dict[str, Any]:
    """Everything that may affect a measurement. `command` is the command line, without the path of the program."""
    import torch

    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": typed_command(),
        "allmlp": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    record |= installed_versions()
    if device.type == "cuda":
        record["cuda"] = torch.version.cuda
        # nvidia-smi counts all GPUs, CUDA those of CUDA_VISIBLE_DEVICES.
        record |= gpu_state(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return record


@cache
def installed_versions() -> dict[str, str]:
    """Versions of the installed packages in PACKAGES."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def version_line() -> str:
    """`allmlp 0.1.0 (commit 0123456789ab, torch 2.13.0)`, without importing torch."""
    return f"allmlp {__version__} (commit {commit() or 'unknown'}, torch {metadata.version('torch')})"


def typed_command() -> list[str]:
    """The command line, with a name in place of the program's path."""
    program = Path(sys.argv[0]).name
    return ["allmlp" if program in ("allmlp", "__main__.py") else program, *sys.argv[1:]]


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu_state(identifier: str) -> dict[str, str]:
    """Driver, clocks, power limit and temperature of a GPU from nvidia-smi, if available."""
    if not shutil.which("nvidia-smi"):
        return {}
    answer = command_output(
        "nvidia-smi", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader", f"--id={identifier}"
    )
    return dict(zip(QUERIES, (part.strip() for part in answer.split(",")))) if answer else {}


def commit() -> str | None:
    """The commit in ALLMLP_COMMIT, else of the wheel or sdist, else of the checkout, with a + if files differ from it;
    None if unknown.
    """
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    if COMMIT_FILE.is_file():
        return COMMIT_FILE.read_text(encoding="utf8").strip()
    return checked_out() if shutil.which("git") else None


@cache  # imported code does not change during a process
def checked_out() -> str | None:
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    if not command_output(*git, "ls-files", here.name):
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
