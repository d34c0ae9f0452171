"""The installation of `make`: which index serves torch, with stand-ins for Python, pip and uname."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
PYTHON = """#!/bin/sh
case "$1" in
    -m) mkdir -p "$3/bin"; cp pip "$3/bin/pip" ;;
    *) echo "$2" | grep -q urlopen && exit "$UNREACHABLE" ;;
esac
exit 0
"""
PIP = '#!/bin/sh\necho "$@" >> calls\n'

pytestmark = pytest.mark.skipif(not shutil.which("make") or sys.platform == "win32", reason="needs make")


def install(folder: Path, target: str, reachable: bool = True, system: str = "Linux", gpu: bool = False) -> list[str]:
    """What pip is asked for, call by call."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-cpu.txt"):
        shutil.copy(ROOT / name, folder)
    programs = folder / "programs"
    programs.mkdir()
    tools = {"uname": f"#!/bin/sh\necho {system}\n"} | ({"nvidia-smi": "#!/bin/sh\n"} if gpu else {})
    for name in ("sh", "mkdir", "cp", "grep", "touch", "make"):
        (programs / name).symlink_to(str(shutil.which(name)))
    scripts = {folder / "python": PYTHON, folder / "pip": PIP, **{programs / name: tools[name] for name in tools}}
    for file, script in scripts.items():
        file.write_text(script)
        file.chmod(0o755)
    env = {"PATH": str(programs), "UNREACHABLE": str(int(not reachable))}
    command = [str(shutil.which("make")), target, "PYTHON=./python", f"SHELL={programs / 'sh'}"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / target).exists()
    return (folder / "calls").read_text().splitlines()


def test_without_a_gpu_torch_comes_from_the_cpu_index(tmp_path: Path) -> None:
    """Alone, by itself; everything else comes from the plain index."""
    torch, rest = install(tmp_path, ".venv/.run")
    assert torch.endswith(f"-c constraints-cpu.txt --no-deps --index-url {CPU_WHEELS} torch")
    assert rest.endswith("-c constraints-cpu.txt -e .[train,analysis,serve]") and CPU_WHEELS not in rest


@pytest.mark.parametrize("target", [".venv/.dev", ".venv-peers/.done"])
def test_torchvision_has_the_same_origin(tmp_path: Path, target: str) -> None:
    torch, rest = install(tmp_path, target)
    assert torch.endswith(f"--index-url {CPU_WHEELS} torch torchvision") and CPU_WHEELS not in rest


@pytest.mark.parametrize("machine", [{"reachable": False}, {"system": "Darwin"}, {"gpu": True}])
def test_otherwise_the_plain_index_serves_everything(tmp_path: Path, machine: dict[str, Any]) -> None:
    (only,) = install(tmp_path, ".venv/.run", **machine)
    pins = "constraints.txt" if machine.get("gpu") else "constraints-cpu.txt"
    assert only.endswith(f"-c {pins} -e .[train,analysis,serve]")
