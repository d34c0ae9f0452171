"""Training beside other processes: examples a second on busy cores, relative to quiet ones, in one run.

    python benchmarks/busy.py                                a process for every core, the recipe digits_mixer
    python benchmarks/busy.py --busy 4 --recipe cifar10_gmlp --rounds 5

One run trains on the CPU. Quiet and busy spells take turns; in a busy one `--busy` processes use a core each. The rate
of a spell is the median over its second half, after the number of threads has been measured again; the ratio of a round
is that of its two spells. The machine must be quiet otherwise: the load before the start is part of the record.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

import allmlp
from allmlp.callbacks import Callback
from allmlp.files import write_json_atomically
from allmlp.provenance import environment
from allmlp.run import Budget
from allmlp.threads import limit


class Spells(Callback):
    """Starts and ends the other processes as time goes by, and keeps the rates of each spell."""

    def __init__(self, seconds: float, busy: int) -> None:
        self.seconds, self.busy = seconds, busy
        self.others: list[subprocess.Popen[bytes]] = []
        self.rates: list[list[float]] = []
        self.began = 0.0

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        self.began = self.began or now
        spell, since = divmod(now - self.began, self.seconds)
        if spell >= len(self.rates):
            self.rates.append([])
            self.end()
            if len(self.rates) % 2 == 0:
                self.others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(self.busy)]
        elif since > self.seconds / 2:
            self.rates[-1].append(values["images/s"])

    def end(self) -> None:
        for other in self.others:
            other.kill()
            other.wait()
        self.others = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="digits_mixer", help="of a classifier of images")
    parser.add_argument("--busy", type=int, default=limit(), help="other processes; default: one for every core")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a spell")
    parser.add_argument("--out", type=Path, help="JSON file for the record")
    options = parser.parse_args()
    load, spells = os.getloadavg(), Spells(options.seconds, options.busy)
    minutes = (2 * options.rounds + 0.5) * options.seconds / 60
    longer = {"budget": Budget(minutes=minutes), "log_every": 5, "eval_every": 2**24, "save_every": 2**24}
    with tempfile.TemporaryDirectory() as folder:
        try:
            allmlp.train(options.recipe, folder, device="cpu", overrides=longer, callbacks=[spells])
        finally:
            spells.end()
    medians = [statistics.median(rates) for rates in spells.rates if rates][: 2 * options.rounds]
    if len(medians) < 2:
        sys.exit("too few steps were logged in a spell: use more --seconds, and a machine that is quiet otherwise")
    quiet, beside = medians[::2], medians[1::2]
    ratios = sorted(b / a for a, b in zip(quiet, beside))
    print(f"{options.recipe} beside {options.busy} busy processes on {limit()} cores, load {load[0]:.1f} before")
    print(f"  quiet {statistics.median(quiet):,.0f} images/s, busy {statistics.median(beside):,.0f} images/s")
    print(
        f"  busy / quiet: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} rounds)"
    )
    if options.out:
        found = {"recipe": options.recipe, "busy": options.busy, "load": list(load), "quiet": quiet, "beside": beside}
        record = found | {"ratio": statistics.median(ratios), "environment": environment(torch.device("cpu"))}
        write_json_atomically(options.out, record)


if __name__ == "__main__":
    main()
