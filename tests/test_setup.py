"""The installation of `make`: which index serves torch, with stand-ins for Python, pip and uname; lock files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
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

needs_make = pytest.mark.skipif(not shutil.which("make") or sys.platform == "win32", reason="needs make")
LOCK = "--no-deps --require-hashes -r requirements/"


def install(folder: Path, target: str, reachable: bool = True, system: str = "Linux", gpu: bool = False) -> list[str]:
    """What pip is asked for, call by call."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-cpu.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "requirements").mkdir()
    for name in ("run.txt", "dev.txt"):
        (folder / "requirements" / name).touch()
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


@needs_make
def test_without_a_gpu_torch_comes_from_the_cpu_index(tmp_path: Path) -> None:
    """Alone, by itself; everything else comes from the plain index."""
    torch, locked, rest = install(tmp_path, ".venv/.run")
    assert torch.endswith(f"--no-deps -c constraints-cpu.txt --index-url {CPU_WHEELS} torch")
    assert locked.endswith(f"{LOCK}run.txt") and CPU_WHEELS not in locked + rest
    assert rest.endswith("-c constraints-cpu.txt --no-build-isolation -e .[train,analysis,serve]")


@needs_make
@pytest.mark.parametrize("target", [".venv/.dev", ".venv-peers/.done"])
def test_torchvision_has_the_same_origin(tmp_path: Path, target: str) -> None:
    torch, *rest = install(tmp_path, target)
    assert torch.endswith(f"--index-url {CPU_WHEELS} torch torchvision") and CPU_WHEELS not in "".join(rest)


@needs_make
@pytest.mark.parametrize("machine", [{"reachable": False}, {"system": "Darwin"}, {"gpu": True}])
def test_otherwise_the_plain_index_serves_everything(tmp_path: Path, machine: dict[str, Any]) -> None:
    locked, rest = install(tmp_path, ".venv/.run", **machine)
    pins = "constraints.txt" if machine.get("gpu") else "constraints-cpu.txt"
    assert locked.endswith(f"{LOCK}run.txt") and rest.endswith(
        f"-c {pins} --no-build-isolation -e .[train,analysis,serve]"
    )


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(file: str) -> dict[str, str]:
    """The pins of a lock or constraints file by canonical name."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / file).read_text(encoding="utf8"), re.MULTILINE)
    return {canonical(name): version for name, version in found}


def required(extra: str) -> set[str]:
    """What pyproject.toml asks for with an extra, those that it names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    found: set[str] = set()
    for line in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        name, several = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", line).groups()  # type: ignore[union-attr]
        if name == "allmlp":
            found = found.union(*(required(one) for one in several.split(",")))
        else:
            found.add(canonical(name))
    return found


WITHOUT = {"torch", "torchvision", "triton"}
"""Their CPU wheels have other hashes than those of the plain index."""


@pytest.mark.parametrize(("lock", "extras"), [("run", ["train", "analysis", "serve"]), ("dev", ["dev"])])
def test_a_lock_has_every_package_with_hashes(lock: str, extras: list[str]) -> None:
    """What pyproject.toml asks for, at the versions of constraints.txt, and what torch asks for: `make lock`."""
    text, locked = (
        (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf8"),
        versions(f"requirements/{lock}.txt"),
    )
    assert set(locked).isdisjoint(WITHOUT) and not any(name.startswith("nvidia") for name in locked)
    needed = set().union(*(required(extra) for extra in extras), {"hatchling", "editables"}) - WITHOUT
    plain = [one for one in metadata.requires("torch") or () if "extra ==" not in one and "platform" not in one]
    needed |= {canonical(re.split(r"[^\w.-]", one)[0]) for one in plain}
    assert not needed - set(locked), "run `make lock`"
    pins = versions("constraints.txt")
    assert {name: locked[name] for name in locked.keys() & pins} == {name: pins[name] for name in locked.keys() & pins}
    entries = re.findall(r"^[\w.-]+==.*?(?=^\w|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(entries) == len(locked) and all("--hash=sha256:" in one for one in entries)
    assert "://" not in text and "--index" not in text
