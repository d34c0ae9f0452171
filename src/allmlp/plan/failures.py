"""Failures: how often they happen, how often to save a checkpoint, and the goodput that is left.

    Young, 1974        t = sqrt(2 c m)
    Daly, 2006         t = sqrt(2 c m) (1 + 1/3 sqrt(c / 2m) + 1/9 c / 2m) - c          where c < 2m, else m
    expected time      E(w) = m e^(r/m) (e^((w + c)/m) - 1)      of w seconds of work that end with a checkpoint

c is the time that training waits for a checkpoint, r the time to restart, m the mean time between failures (MTBF).
Failures are independent of each other. Each costs the work since the last checkpoint and a restart; a restart may fail
as well. A checkpoint that is written in the background counts when it is written, b seconds later: a failure before
that costs another interval t, which happens with the probability b / t, so that r + b stands for r, and t >= b.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import NamedTuple

INTERRUPTIONS, DAYS, GPUS = 419, 54, 16_384
"""Llama 3 405B: 466 interruptions in 54 days of pre-training on 16,384 H100 GPUs, 47 of them planned (firmware
upgrades, changes of configuration or dataset) and 419 unexpected ("The Llama 3 Herd of Models", section 3.3.4)."""

FAILURES_PER_GPU_DAY = INTERRUPTIONS / DAYS / GPUS

DAY = 86_400.0


class FailureModel(NamedTuple):
    """Parameters of the failure model, in seconds."""

    mtbf: float
    """Mean time between failures of the whole cluster."""
    checkpoint: float
    """Time to write a checkpoint, during which training waits."""
    restart: float
    """Time to replace the node, start, and load the checkpoint."""
    background: float = 0.0
    """Time to write a checkpoint while training goes on."""


class Simulation(NamedTuple):
    """Mean wall-clock seconds over the simulated runs, and the standard error of that mean."""

    seconds: float
    error: float
    failures: float
    """Mean number per run."""


def mtbf(gpus: int, per_gpu_day: float = FAILURES_PER_GPU_DAY) -> float:
    """Seconds between failures of any of `gpus`."""
    return DAY / (per_gpu_day * gpus) if per_gpu_day else math.inf


def young(model: FailureModel) -> float:
    """Seconds of work between checkpoints, to first order."""
    return math.sqrt(2 * model.checkpoint * model.mtbf)


def daly(model: FailureModel) -> float:
    """Seconds of work between checkpoints, to higher order: within a fraction of a percent of the optimum."""
    ratio = model.checkpoint / (2 * model.mtbf)
    if ratio >= 1:
        return model.mtbf
    return max(young(model) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - model.checkpoint, model.background)


def expected_time(work: float, interval: float, model: FailureModel) -> float:
    """Wall-clock seconds for `work` seconds of work with a checkpoint after every `interval` and at the end."""
    segments, rest = divmod(work, interval)
    last = segment_time(rest, model) if rest > 0 else 0.0
    return segments * segment_time(interval, model) + last + model.background


def segment_time(work: float, model: FailureModel) -> float:
    if math.isinf(model.mtbf):
        return work + model.checkpoint
    lost = model.restart + model.background
    try:
        return model.mtbf * math.exp(lost / model.mtbf) * math.expm1((work + model.checkpoint) / model.mtbf)
    except OverflowError:
        return math.inf  # so many failures that the segment is never completed


def simulate(work: float, interval: float, model: FailureModel, runs: int, seed: int) -> Simulation:
    """Wall-clock seconds as in `expected_time`, by Monte Carlo simulation of `runs` runs."""
    generator = random.Random(seed)
    seconds, failures = zip(*(simulate_run(work, interval, model, generator) for _ in range(runs)))
    error = statistics.stdev(seconds) / math.sqrt(runs) if runs > 1 else math.inf
    return Simulation(statistics.fmean(seconds), error, statistics.fmean(failures))


def simulate_run(work: float, interval: float, model: FailureModel, generator: random.Random) -> tuple[float, int]:
    """Wall-clock seconds and number of failures of one run."""

    def until_failure() -> float:
        return math.inf if math.isinf(model.mtbf) else generator.expovariate(1 / model.mtbf)

    wall = done = written = 0.0
    failures, left = 0, until_failure()
    while done < work:
        segment = min(interval, work - done)
        needed = segment + model.checkpoint
        if left > needed:
            segments = min((work - done) / segment, left / needed) // 1
            wall, left, written = wall + segments * needed, left - segments * needed, done + (segments - 1) * segment
            done += segments * segment
            continue
        done = written = done if left >= model.background else written
        wall, left, failures = wall + left, until_failure(), failures + 1
        while left <= model.restart:
            wall, left, failures = wall + left, until_failure(), failures + 1
        wall, left = wall + model.restart, left - model.restart
    return wall + model.background, failures
