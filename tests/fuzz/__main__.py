"""python -m fuzz --minutes 2 --seed 0 [--target NAME]: run cases until the time is over, then print what was found."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

os.environ["OMP_NUM_THREADS"] = "1"  # a fork does not copy the threads of OpenMP
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RUST_BACKTRACE"] = "0"

from fuzz import sandbox
from fuzz.crash_points import crash_points
from fuzz.http_requests import http_requests
from fuzz.targets import TARGETS, run_case, seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=[*TARGETS, "http", "crash_points"], action="append")
    parser.add_argument("--case", type=int, help="run this case only, and print its output")
    given = parser.parse_args()
    names = [name for name in TARGETS if not given.target or name in given.target]
    seeds()
    root, counts, worst = Path(mkdtemp(prefix="fuzz-cases-")), Counter[str](), [0, 0.0]
    faults: Counter[str] = Counter()
    end = time.monotonic() + 60 * given.minutes

    def judge(name: str, outcome: sandbox.Outcome, fault: str) -> None:
        counts[name.split(maxsplit=1)[0]] += 1
        worst[:] = max(worst[0], outcome.grown), max(worst[1], outcome.seconds)
        if fault:
            faults[fault[:120]] += 1
            if faults[fault[:120]] == 1:
                print(f"FAULT {name}: {fault}", flush=True)

    number = given.case or 0
    while names and time.monotonic() < end - 30 * given.minutes:  # a half of the time is for what follows
        for name in names:
            folder = root / f"{name}{number}"
            folder.mkdir()
            outcome = sandbox.run(partial(run_case, name, given.seed, number, folder), folder)
            judge(f"{name} seed {given.seed} case {number}", outcome, outcome.fault)
            if given.case is not None:
                print(outcome)
            shutil.rmtree(folder, ignore_errors=True)
        number += 1
        if given.case is not None:
            break
    chosen = [name for name in ("http", "crash_points") if name in (given.target or [name]) and given.case is None]
    if "http" in chosen:
        for name, outcome, fault in http_requests(root, given.seed, 15 * given.minutes):
            judge(f"http seed {given.seed} {name}", outcome, fault)
    if "crash_points" in chosen:
        for name, outcome, fault in crash_points(root, given.seed):
            judge(f"crash_points {name}", outcome, fault)
            if time.monotonic() > end:
                break
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(seeds(), ignore_errors=True)
    print(", ".join(f"{count:,} {name}" for name, count in counts.items()))
    print(
        f"{counts.total():,} cases, {faults.total():,} faults; at most {worst[0] / 2**20:,.0f} MiB and "
        f"{worst[1]:.1f} s for a case"
    )
    return 1 if faults else 0


sys.exit(main())
