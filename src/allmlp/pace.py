"""Progress of a run from 0 to 1, on which learning rate and weight decay depend.

The progress of step t of a run of N steps is (t + 1/2) / N, the middle of the step: so no step has the learning rate 0
of either end of a schedule.

Under `budget.minutes` N is not known in advance. It is estimated from the duration of steps (the first ones of a
process, which compile, excluded) at growing intervals, at last every twentieth of the remaining steps. If the estimate
differs from the plan by more than 1 %, a new plan spreads the remaining progress over the remaining steps. Plans, and
the step up to which they hold, are written to pace.json before they are used: progress depends on the step alone, and a
run that was killed repeats the same learning rates when it is resumed. Evaluations and checkpoints during the run count
as training time, the final ones do not; the budget is exceeded by about one step.

Compilation is excluded: each of the first steps of a process counts as long as the shortest of them, so that a run gets
the same training time whether or not its kernels are cached.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from allmlp.device import sum_dtype
from allmlp.errors import UserError
from allmlp.files import write_text_atomically
from allmlp.parallel import World

FILE = "pace.json"
WARMUP_STEPS = 5
"""Steps of a process that are not measured: they compile, record and allocate."""
FIRST_STEPS = 10_000
"""Number of steps assumed before any measurement; large, so that the first steps have almost no progress."""
CHECKS = 20
"""The interval between measurements is at most the remaining steps divided by this."""
TOLERANCE = 0.01
ESTIMATE_AFTER = 3.0
"""Seconds of training before the duration of a run is estimated."""


class Plan(NamedTuple):
    """From `step` on, progress rises from `progress` to 1 at step `steps`."""

    step: int
    progress: float
    steps: int


class Pace:
    """The number of steps of a run, and its progress at each of them.

    `limit` is the budget in steps, `seconds` the budget in time, of which `spent` had passed when this process started
    at step `start`.
    """

    def __init__(self, path: Path, world: World, limit: int | None, seconds: float, start: int, spent: float) -> None:
        self.file, self.world, self.limit, self.seconds, self.start = path / FILE, world, limit, seconds, start
        self.plans, self.next_check = [Plan(0, 0.0, limit or FIRST_STEPS)], 1
        if math.isfinite(seconds) and self.file.exists():
            self.plans, self.next_check = read(self.file)
        self.began, self.spent = time.monotonic() - spent, spent
        self.excluded, self.shortest = 0.0, math.inf
        self.measured: tuple[int, float] | None = None
        self.timed: tuple[int, float] | None = None

    @property
    def steps(self) -> int:
        """Number of steps of the run, according to the current plan."""
        return self.plans[-1].steps

    @property
    def elapsed(self) -> float:
        """Training time in seconds."""
        return time.monotonic() - self.began - self.excluded

    def progress(self, step: float) -> float:
        """Progress after `step` steps."""
        plan = [plan for plan in self.plans if plan.step <= step][-1]
        return min(plan.progress + (1 - plan.progress) * (step - plan.step) / max(plan.steps - plan.step, 1), 1.0)

    def seconds_left(self, step: int) -> float:
        by_time = self.seconds - self.elapsed
        # Without a budget in steps, their number is planned from the time.
        return by_time if self.limit is None else min(by_time, self.elapsed * (self.steps - step) / step)

    def first_estimate(self, step: int, settled: bool) -> float | None:
        """Seconds left, once a few steps have been timed; None before, and while the speed has not `settled`."""
        now = time.monotonic()
        if not settled or self.timed is None:
            self.timed = (step, now)  # not from the start: the first step allocates and compiles
        first, began = self.timed
        if now - began < ESTIMATE_AFTER or math.isfinite(self.seconds):
            return None
        return (now - began) / (step - first) * (self.steps - step)

    def update(self, step: int) -> None:
        """Called after `step` steps: measure their duration, and make a new plan if the current one does not hold."""
        own_steps = step - self.start
        if not math.isfinite(self.seconds) or (own_steps > WARMUP_STEPS + 1 and step < self.next_check):
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        # The mean, so that all processes make the same plan.
        device = self.world.device
        passed = torch.tensor(time.monotonic() - self.began, dtype=sum_dtype(device), device=device)
        now, before = float(self.world.mean(passed)), self.measured
        self.measured = (step, now)
        if own_steps <= WARMUP_STEPS + 1:
            self.exclude_compilation(own_steps, now, before)
        if step < self.next_check:
            return
        elapsed = now - self.excluded
        steps, interval = self.steps, 0
        if elapsed >= self.seconds:
            steps = step
        # At the end of the plan progress is 1: another step would have learning rate 0.
        elif (step < self.steps and before) and (
            own_steps > WARMUP_STEPS or elapsed > self.seconds / CHECKS or len(self.plans) > 1
        ):
            interval = step - before[0]
            per_step = (now - before[1]) / interval
            left = round((self.seconds - elapsed) / per_step)
            if left == 1 and own_steps <= WARMUP_STEPS:
                left = 2  # this step may have compiled: the next one shows whether there is time for more
            steps = min(step + left, self.limit or sys.maxsize)
        if abs(steps - self.steps) > TOLERANCE * (self.steps - step):
            self.plans.append(Plan(step, self.progress(step), steps))
        self.next_check = step + max(min(2 * interval, (steps - step) // CHECKS), 1)
        if self.world.is_main:
            text = json.dumps({"plans": self.plans, "next_check": self.next_check})
            write_text_atomically(self.file, text)

    def exclude_compilation(self, own_steps: int, now: float, before: tuple[int, float] | None) -> None:
        """Count the first steps of this process with the duration of the shortest one, from the second step on."""
        if before is not None:
            self.shortest = min(self.shortest, now - before[1])
        counted = own_steps * self.shortest if before is not None else 0.0
        self.excluded = max(now - self.spent - counted, 0.0)


def read(file: Path) -> tuple[list[Plan], int]:
    """The plans of a run, and the step up to which they hold."""
    try:
        record = json.loads(file.read_text(encoding="utf8"))
        return [Plan(*plan) for plan in record["plans"]], record["next_check"]
    except (OSError, ValueError, TypeError, KeyError) as reason:
        raise UserError(f"cannot read {file}: {reason}; remove it to plan the rest of the run again") from None
