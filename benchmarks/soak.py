"""Train, kill, resume, evaluate and serve for an hour: nothing may be lost, and memory, files and threads stay level.

    python benchmarks/soak.py                   # an hour on two cores; writes result.json and result.md to runs/soak
    python benchmarks/soak.py --minutes 2 --out runs/short

For half of the time, runs are trained, killed without warning at random moments, resumed until they are finished, and
evaluated: their records must be those of a run that was not killed. For the other half, a server gets requests at half
and at twice its capacity: it must answer what it accepts. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from allmlp.files import write_json_atomically, write_text_atomically
from allmlp.provenance import environment
from serve import COMPLETED, quantile, read_load, server, start_load

RUN = ("digits_mixer", "--device", "cpu", "--set", "budget.steps=100", "--set", "save_every=20", "--set", "log_every=5")
KEEP_ALIVE = 20.0
"""Seconds after which the server has closed the connections of the clients."""
GROWTH = 1.1
"""Memory, files and threads are level if the last quarter has at most so many times those of the second."""


def open_files(process: int) -> tuple[list[str], list[str]]:
    """What a process has open: files, and sockets."""
    found = list[str]()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed in between
            found.append(os.readlink(file))
    return [name for name in found if "socket" not in name], [name for name in found if "socket" in name]


class Usage:
    """Memory, open files other than sockets, and threads of a process, sampled while it runs."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {"MiB": [], "files": [], "threads": []}
        self.load: list[float] = []
        """Processes of the whole machine that want to run."""

    @contextmanager
    def watch(self, process: int, every: float) -> Iterator[None]:
        ended = threading.Event()

        def sample() -> None:
            place = Path(f"/proc/{process}")
            while not ended.wait(every):
                try:
                    pages = int((place / "statm").read_text().split()[1])
                    found = len(open_files(process)[0]), len(list((place / "task").iterdir()))
                except OSError:  # the process has ended
                    return
                self.load.append(os.getloadavg()[0])
                for name, value in zip(self.samples, (pages * resource.getpagesize() / 2**20, *found)):
                    self.samples[name].append(value)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def summary(self) -> dict[str, dict[str, float]]:
        """Medians of the second and of the last quarter, and the largest value."""
        found = {}
        for name, values in self.samples.items():
            quarter = max(len(values) // 4, 1)
            early, late = values[quarter : 2 * quarter] or values, values[-quarter:]
            found[name] = {"early": statistics.median(early), "late": statistics.median(late), "most": max(values)}
        return found

    def faults(self, where: str) -> list[str]:
        return [
            f"{where}: {name} grow from {row['early']:.0f} to {row['late']:.0f}"
            for name, row in self.summary().items()
            if row["late"] > GROWTH * row["early"] + 2
        ]


# --- training --------------------------------------------------------------------------------------------------------


def allmlp(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums in one order: equal losses are equal in every bit
    command = [sys.executable, "-m", "allmlp", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def records(folder: Path) -> list[tuple[str, int, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    return [(record["kind"], record["step"], record["loss"]) for record in map(json.loads, lines)]


def accuracy(folder: Path) -> float:
    out, err = (process := allmlp("eval", str(folder), "--json")).communicate()
    if process.returncode:
        raise SystemExit(f"eval fails: {err}")
    return json.loads(out)["accuracy"]


def train(seconds: float, folder: Path, rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what is wrong."""
    end, faults, kills, runs, peak = time.monotonic() + seconds, list[str](), 0, 0, 0.0
    whole, start = folder / "whole", time.monotonic()
    process = allmlp("train", *RUN, "--out", str(whole))
    if process.wait():
        raise SystemExit(f"training fails: {process.communicate()[1]}")
    length, expected, reference = time.monotonic() - start, records(whole), accuracy(whole)
    while time.monotonic() < end or not runs:
        out, usage, longest = folder / f"run{runs}", Usage(), 0.9  # each is killed once at least
        while True:
            process = allmlp("train", *RUN, "--out", str(out))
            with usage.watch(process.pid, 0.5):
                try:
                    _, err = process.communicate(timeout=rng.uniform(0.2, longest) * length)
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    kills, longest = kills + 1, 1.5
        if process.returncode:
            faults.append(f"run {runs}: exit status {process.returncode}: {err[-300:]}")
        elif records(out) != expected:
            faults.append(f"run {runs}: its records differ from those of a run that was not killed")
        elif accuracy(out) != reference:
            faults.append(f"run {runs}: another accuracy")
        peak, runs = max(peak, max(usage.samples["MiB"], default=0.0)), runs + 1
        print(f"run {runs}: {kills} kills so far, {len(faults)} faults", flush=True)
        shutil.rmtree(out)
    return {"runs": runs, "kills": kills, "accuracy": reference, "most_MiB": peak}, faults


# --- serving ---------------------------------------------------------------------------------------------------------


def serve(seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what is wrong."""
    figures, faults, usage = dict[str, Any](), list[str](), Usage()
    with server() as served, usage.watch(served.process.pid, max(seconds / 400, 0.1)):
        warm = read_load(start_load(served.port, 64, min(seconds / 6, 30.0)))
        capacity = warm.statuses["200"] / warm.seconds
        figures["capacity"], at_rest = capacity, len(open_files(served.process.pid)[1])
        for name, rate in (("half", capacity / 2), ("twice", 2 * capacity)):
            before = served.metrics()["allmlp_requests_accepted_total"]
            with ThreadPoolExecutor(1) as pool:
                load = pool.submit(read_load, start_load(served.port, 400, seconds * 5 / 12, rate)).result()
            accepted = int(served.metrics()["allmlp_requests_accepted_total"] - before)
            lost = accepted - sum(load.statuses[status] for status in COMPLETED)
            good = load.latencies.get("200", [])
            figures[name] = {
                "seconds": round(load.seconds, 1),
                "statuses": dict(load.statuses),
                "lost": lost,
                "closed": load.closed,
                "p50_ms": quantile(good, 0.5),
                "p99_ms": quantile(good, 0.99),
            }
            print(f"{name}: {figures[name]}", flush=True)
            if lost or load.closed or set(load.statuses) - {"200", "503"}:
                faults.append(f"serving at {name} capacity: {figures[name]}")
        time.sleep(KEEP_ALIVE)
        if len(sockets := open_files(served.process.pid)[1]) > at_rest:
            faults.append(f"serving: {len(sockets)} sockets are open after the load, {at_rest} before it")
        code, out, err = served.terminate()
    if code or err or ", 0 unfinished" not in out:
        faults.append(f"the server ends with {code}: {out} {err[-300:]}")
    return figures | {"usage": usage.summary(), "load": statistics.median(usage.load)}, faults + usage.faults("serving")


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    training, serving, machine = result["training"], result["serving"], result["environment"]
    rows = [
        f"| {name} | {row['statuses'].get('200', 0):,} | {row['statuses'].get('503', 0):,} | {row['lost']} "
        f"| {row['p50_ms']} ms | {row['p99_ms']} ms |"
        for name, row in serving.items()
        if name in ("half", "twice")
    ]
    used = [
        f"| {name} | {row['early']:.0f} | {row['late']:.0f} | {row['most']:.0f} |"
        for name, row in serving["usage"].items()
    ]
    count = len(result["faults"])
    lines = [
        f"# Soak of {result['minutes']:g} minutes, seed {result['seed']}",
        "",
        f"{machine['device']}, {machine['cores']} cores, with a load average of {serving['load']:.1f} while it served; "
        f"torch {machine['torch']}, {machine['date'][:10]}, commit {machine['commit']}.",
        "",
        f"**{f'{count} faults' if count else 'Nothing was lost; memory, files and threads stayed level.'}**",
        *(f"- {fault}" for fault in result["faults"]),
        "",
        f"Training: {training['runs']} runs, killed {training['kills']} times, resumed, each with the records and the "
        f"accuracy ({training['accuracy']:.2%}) of a run that was not killed; at most {training['most_MiB']:.0f} MiB.",
        "",
        f"Serving: {serving['capacity']:.1f} images a second.",
        "",
        "| load, times capacity | answered | told 503 with Retry-After | accepted and lost | p50 | p99 |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "| of the server | early | late | most |",
        "|---|---|---|---|",
        *used,
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which runs are killed")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    options = parser.parse_args()
    runs = options.out / "runs"
    training, faults = train(30 * options.minutes, runs, random.Random(options.seed))
    shutil.rmtree(runs)
    serving, more = serve(30 * options.minutes)
    result = {"minutes": options.minutes, "seed": options.seed, "environment": environment(torch.device("cpu"))}
    result |= {"training": training, "serving": serving}
    result["faults"] = faults + more
    write_json_atomically(options.out / "result.json", result)
    write_text_atomically(options.out / "result.md", page(result))
    print(page(result), end="")
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
