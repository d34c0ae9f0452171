"""Failures: how often, how often to save, and what share of the time is left for work.

    Young, 1974        t = sqrt(2 c m)
    Daly, 2006         t = sqrt(2 c m) (1 + 1/3 sqrt(c / 2m) + 1/9 c / 2m) - c          where c < 2m, else m
    expected time      E(w) = m e^(r/m) (e^((w + c)/m) - 1)      of a piece of work w that ends with a checkpoint

c is the time of a checkpoint, r of a restart, m the mean time between failures, which come independently of each other.
A failure costs the work since the last checkpoint and a restart; a restart may fail as well.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import NamedTuple

INTERRUPTIONS, DAYS, GPUS = 466, 54, 16_384
"""Llama 3 405B: 466 interruptions in 54 days of pre-training on 16 K H100 GPUs (paper 004)."""

DAY = 86_400.0


class Failures(NamedTuple):
    """Seconds."""

    between: float
    """Mean time between failures of the whole machine."""
    checkpoint: float
    """To write one, while nothing else happens."""
    restart: float
    """To find a new machine, start, and read the checkpoint."""


class Simulated(NamedTuple):
    """Mean wall-clock seconds of a run over several draws, and the standard error of that mean."""

    seconds: float
    error: float
    failures: float
    """Mean number of them in a run."""


def mean_time_between(gpus: int, per_gpu_day: float = INTERRUPTIONS / DAYS / GPUS) -> float:
    """Seconds between failures of any of `gpus`, each failing at Llama 3's rate."""
    return DAY / (per_gpu_day * gpus) if per_gpu_day else math.inf


def young(failures: Failures) -> float:
    """Seconds of work between checkpoints, to first order."""
    return math.sqrt(2 * failures.checkpoint * failures.between)


def daly(failures: Failures) -> float:
    """The same to higher order, which is within a fraction of a per cent of the true optimum."""
    ratio = failures.checkpoint / (2 * failures.between)
    if ratio >= 1:
        return failures.between
    return young(failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - failures.checkpoint


def expected(work: float, interval: float, failures: Failures) -> float:
    """Wall-clock seconds for `work` seconds of work, saved after every `interval` and at the end."""
    pieces, rest = divmod(work, interval)
    return pieces * piece(interval, failures) + (piece(rest, failures) if rest > 0 else 0.0)


def piece(work: float, failures: Failures) -> float:
    if math.isinf(failures.between):
        return work + failures.checkpoint
    m = failures.between
    try:
        return m * math.exp(failures.restart / m) * math.expm1((work + failures.checkpoint) / m)
    except OverflowError:
        return math.inf  # so many failures that the piece is never done


def simulate(work: float, interval: float, failures: Failures, runs: int, seed: int) -> Simulated:
    """The same by playing `runs` of them through, failure by failure."""
    random_numbers = random.Random(seed)
    walls, counts = zip(*(play(work, interval, failures, random_numbers) for _ in range(runs)))
    error = statistics.stdev(walls) / math.sqrt(runs) if runs > 1 else math.inf
    return Simulated(statistics.fmean(walls), error, statistics.fmean(counts))


def play(work: float, interval: float, failures: Failures, numbers: random.Random) -> tuple[float, int]:
    """One run: its wall-clock seconds and its failures."""

    def draw() -> float:
        return math.inf if math.isinf(failures.between) else numbers.expovariate(1 / failures.between)

    wall = done = 0.0
    count, left = 0, draw()
    while done < work:
        now = min(interval, work - done)
        needed = now + failures.checkpoint
        if left > needed:
            wall, left, done = wall + needed, left - needed, done + now
            continue
        wall, left, count = wall + left, draw(), count + 1
        while left <= failures.restart:
            wall, left, count = wall + left, draw(), count + 1
        wall, left = wall + failures.restart, left - failures.restart
    return wall, count
