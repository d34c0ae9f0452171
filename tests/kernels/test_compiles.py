"""Every kernel compiles for a GPU that is not there: what the interpreter runs, the compiler may still refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_h100(tmp_path: Path) -> None:
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_all.py")
    done = subprocess.run(
        [sys.executable, script, "1"], env=os.environ | own, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found = set(re.findall(r"^(\S+)", done.stdout, re.MULTILINE))
    here = Path(__file__).parents[2] / "src" / "allmlp" / "kernels"
    written = {
        f"{file.parent.name}.{file.stem}.{name}"
        for stem in ("triton", "hopper")
        for file in here.glob(f"*/{stem}.py")
        for name in re.findall(r"^def (\w*kernel)\(", file.read_text(encoding="utf8"), re.MULTILINE)
    }
    assert found == written
