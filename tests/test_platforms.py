"""Other platforms, emulated: without POSIX-only modules everything imports, and locks use what Windows has."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from allmlp import files

ROOT = Path(__file__).parent.parent

IMPORT_ALL = """
import importlib, pkgutil, sys
import psutil, transformers  # other packages have their own modules for other platforms
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
import allmlp
for module in pkgutil.walk_packages(allmlp.__path__, "allmlp."):
    if ".triton_" not in module.name and module.name != "allmlp.__main__":
        importlib.import_module(module.name)
"""


@pytest.mark.slow
def test_every_module_imports_without_posix() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_types_hold_on_other_platforms(platform: str) -> None:
    """What a platform does not have is used in branches for others only; also with the newest Python."""
    pytest.importorskip("pyrefly")
    command = [sys.executable, "-m", "pyrefly", "check", "--python-platform", platform, "--python-version", "3.14"]
    options = ["--python-interpreter-path", sys.executable]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout


class Msvcrt(types.ModuleType):
    """The part of Windows' module that locks use: a byte of a file that one handle holds."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.refusals = 2
        self.taken = 0

    def locking(self, handle: int, mode: int, count: int) -> None:
        assert mode == self.LK_NBLCK and count == 1
        if self.refusals:
            self.refusals -= 1
            raise PermissionError(13, "locked")
        self.taken += 1


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Msvcrt:
    module = Msvcrt()
    monkeypatch.setitem(sys.modules, "msvcrt", module)
    monkeypatch.setattr(files.sys, "platform", "win32")
    return module


def test_locks_of_windows(windows: Msvcrt, tmp_path: Path) -> None:
    """A lock that is waited for is tried again; one that is not is refused."""
    with pytest.raises(BlockingIOError), files.lock(tmp_path / "a.lock", wait=False):
        pass
    with files.lock(tmp_path / "a.lock"):
        assert windows.taken == 1 and windows.refusals == 0


def test_writes_are_atomic_on_windows(windows: Msvcrt, tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "a.txt", lambda file: file.write_text("a", encoding="utf8"))
    files.flush(tmp_path)
    assert (tmp_path / "a.txt").read_text(encoding="utf8") == "a"


def test_a_lock_is_exclusive(tmp_path: Path) -> None:
    with files.lock(tmp_path / "a.lock"), pytest.raises(BlockingIOError), files.lock(tmp_path / "a.lock", wait=False):
        pass
    with files.lock(tmp_path / "a.lock", wait=False):
        pass
