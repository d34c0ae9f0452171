"""Run every kernel under NVIDIA's compute-sanitizer: `python tests/kernels/sanitize.py`, on a GPU, in a minute or two.

memcheck finds accesses out of bounds, racecheck races in shared memory, synccheck misused barriers. Every tensor is an
allocation of its own, so that memcheck sees where it ends; kernels run in their default configuration, untimed.

racecheck reports Triton's own code too: the bytes in which `warp_specialize` leaves worker warps what to run, written
at the call and read where the kernel begins. A kernel of two lines with nothing but one barrier in shared memory gets
the same reports. Such pairs are counted apart.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

TOOLS = {"memcheck": (), "racecheck": ("--racecheck-report", "hazard", "--print-limit", "0"), "synccheck": ()}
SCRIPT = Path(__file__).with_name("every_kernel.py")
KERNELS = Path(__file__).parents[2] / "src" / "allmlp" / "kernels"
ACCESS = re.compile(r"(?:Write|Read) Thread .* in (\S+\.py):(\d+)")


def main() -> int:
    env = os.environ | {"ALLMLP_AUTOTUNE": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    subprocess.run([sys.executable, SCRIPT], env=env, check=True, stdout=subprocess.DEVNULL)  # compiles the kernels
    failures = 0
    for tool, options in TOOLS.items():
        start = time.perf_counter()
        checked = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--show-backtrace", "no", *options]
        command = [*checked, sys.executable, str(SCRIPT)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        report = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        summary = re.sub(r"^=+ ", "", report[-1]) if report else done.stderr[-300:]
        dispatch, others = split_hazards(report)
        known = f", {dispatch} of them in Triton's dispatch of warps" if dispatch else ""
        print(f"{tool:<10} {summary}{known}, {time.perf_counter() - start:.0f} s", flush=True)
        if done.returncode and (others or not dispatch):
            failures += 1
            print("\n".join(others or report[:60]))
    return failures


def split_hazards(report: list[str]) -> tuple[int, list[str]]:
    """The number of hazards in Triton's dispatch of warps, and the accesses of the others."""
    accesses = [line for line in report if ACCESS.search(line)]
    pairs = list(zip(accesses[::2], accesses[1::2]))
    others = [line for pair in pairs if not all(map(is_dispatch, pair)) for line in pair]
    return len(pairs) - len(others) // 2, others


def is_dispatch(access: str) -> bool:
    """Whether an access is located at the beginning of a kernel, or where it starts its partitions."""
    found = ACCESS.search(access)
    assert found is not None
    lines = [
        file.read_text(encoding="utf8").splitlines()[int(found[2]) - 1]
        for file in KERNELS.rglob(found[1])
        if len(file.read_text(encoding="utf8").splitlines()) >= int(found[2])
    ]
    return bool(lines) and all(re.match(r"def kernel\(|\s*gl\.warp_specialize\(", line) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
