"""Every kernel compiles for a GPU that need not be present, once for all batch sizes.

The compiler may reject what the interpreter accepts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.every_kernel import defined_kernels

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_kernel_compiles_for_h100(tmp_path: Path) -> None:
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_all.py")
    result = subprocess.run(
        [sys.executable, script, "1"], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    shared = [int(size) for size in re.findall(r"(\d+) shared", result.stdout)]
    assert max(shared) <= 227 * 1024  # of a block on an H100
    compiled = set(re.findall(r"^(\S+)", result.stdout, re.MULTILINE))
    assert compiled == defined_kernels("triton", "hopper")
