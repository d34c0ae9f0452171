"""Run every kernel under NVIDIA's compute-sanitizer: `python tests/kernels/sanitize.py`, on a GPU, in a minute or two.

memcheck finds accesses out of bounds, racecheck races in shared memory, synccheck misused barriers. Every tensor is an
allocation of its own, so that memcheck sees where it ends; kernels run in their default configuration, untimed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

TOOLS = "memcheck", "racecheck", "synccheck"
SCRIPT = Path(__file__).with_name("every_kernel.py")


def main() -> int:
    env = os.environ | {"ALLMLP_AUTOTUNE": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    subprocess.run([sys.executable, SCRIPT], env=env, check=True, stdout=subprocess.DEVNULL)  # compiles the kernels
    failures = 0
    for tool in TOOLS:
        start = time.perf_counter()
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", sys.executable, str(SCRIPT)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        report = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        summary = re.sub(r"^=+ ", "", report[-1]) if report else done.stderr[-300:]
        print(f"{tool:<10} {summary}, {time.perf_counter() - start:.0f} s", flush=True)
        if done.returncode:
            failures += 1
            print("\n".join(report[:60]))
    return failures


if __name__ == "__main__":
    sys.exit(main())
