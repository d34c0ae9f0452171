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

pytest.importorskip("triton", minversion="3.6")


def compile_all(folder: Path, capability: int) -> str:
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, Path(__file__).with_name("compile_all.py"), "1", str(capability)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_every_kernel_compiles_for_h100(tmp_path: Path) -> None:
    printed = compile_all(tmp_path, 90)
    shared = [int(size) for size in re.findall(r"(\d+) shared", printed)]
    assert max(shared) <= 227 * 1024  # of a block on an H100
    assert set(re.findall(r"^(\S+)", printed, re.MULTILINE)) == defined_kernels("triton", "hopper")


@pytest.mark.slow
def test_products_over_tokens_copy_asynchronously_on_ampere(tmp_path: Path) -> None:
    """Below compute capability 9.0 loads by descriptor would wait for memory: those by pointer must be copies."""
    printed = compile_all(tmp_path, 80)
    shared = [int(size) for size in re.findall(r"(\d+) shared", printed)]
    assert max(shared) <= 163 * 1024  # of a block on an A100
    names = set(re.findall(r"^(\S+)", printed, re.MULTILINE))
    hopper = "linear.", "channel_mlp.", "unit_rows."
    assert names == {name for name in defined_kernels("triton") if not name.startswith(hopper)}
    found = re.findall(r"^token_mix\.triton\.kernel .* (\d+) bytes spilled .* (\d+) copies", printed, re.MULTILINE)
    assert len(found) == 3 and all(int(spilled) == 0 and int(copies) >= 16 for spilled, copies in found)
