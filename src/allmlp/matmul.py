"""Choice of the library for float32 matrix products on a CPU.

On Neoverse N1 (AWS Graviton2, Ampere Altra) PyTorch leaves all products to oneDNN, which takes up to a millisecond more
for a small one than OpenBLAS, and is no faster for large ones. PyTorch reads TORCH_MKLDNN_MATMUL_MIN_DIM at its first
product, and uses OpenBLAS for those with a smaller dimension. On Neoverse V1 it has its own limit.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

VARIABLE = "TORCH_MKLDNN_MATMUL_MIN_DIM"
NEOVERSE_N1 = re.compile(r"^CPU implementer\s*: 0x41$.*?^CPU part\s*: 0xd0c$", re.MULTILINE | re.DOTALL)


def choose_library(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Use OpenBLAS on a Neoverse N1, unless the variable is set."""
    if platform.machine() != "aarch64" or VARIABLE in os.environ:
        return
    try:
        text = cpuinfo.read_text(encoding="utf8")
    except OSError:  # not Linux
        return
    if NEOVERSE_N1.search(text):
        os.environ[VARIABLE] = str(10**9)
