"""Number of threads of PyTorch on a CPU, chosen by measurement and re-measured during use.

Threads synchronize many times in every layer. If other processes use the same cores, a thread that has lost its core
delays all others, and a small model is many times slower on all cores than on one. The best number depends on the model
and on other load, so it is measured on the work itself: from `limit()` down by halves, as long as it gets faster.

    threads = Threads()
    for batch in batches:
        with threads:
            model(batch)

The number of threads changes the order of summation, and thereby the last digits. With a `file`, numbers are recorded
there before they are used, and a resumed run uses them again: up to the end of the record it computes the same bits.
OMP_NUM_THREADS fixes the number; so does torchrun, which sets it to 1.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import torch

from allmlp.errors import UserError
from allmlp.files import write_text_atomically

T = TypeVar("T")
FILE = "threads.json"
SAMPLE = 0.3
"""Minimum seconds of measurement for each number of threads; at least one unit of work."""
STRETCH = 2.0
"""Seconds between checks of the speed."""
DRIFT = 1.5
"""Measure again if work takes longer or shorter than measured by this factor."""
REST = 5, 50
"""Time until the next measurement, in durations of the last one: if the speed has changed, and in any case."""
FLAT = 1.1
"""Fewer threads are tried as long as the last number was slower than the best by at most this factor."""
WORTH = 1.05
"""By default, the fewest threads are used that are slower than the fastest number by at most this factor."""


def limit() -> int:
    """Maximum number of threads that can run at once: cores available to the process, within its quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(math.floor(min(cores, quota())), 1)


def quota(root: Path = Path("/")) -> float:
    """CPU quota of this process in cores, from its control groups (v1, v2); infinite without a quota."""
    quotas = [math.inf]
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf8").splitlines()
    except OSError:
        return math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            place, files = root / "sys/fs/cgroup", ("cpu.max",)
        elif "cpu" in controllers.split(","):
            place, files = root / "sys/fs/cgroup" / controllers, ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        # Inside a container the path may be that of the host, while the container's own group is mounted at the root.
        group = place / path.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(place):
                break
            try:
                numbers = " ".join((folder / name).read_text(encoding="utf8") for name in files).split()
                allowed, period = map(float, numbers)
            except (OSError, ValueError):  # no such file, or "max": no quota
                continue
            if allowed > 0:
                quotas.append(allowed / period)
    return min(quotas)


def choose(work: Callable[[], object]) -> int:
    """Set and return the number of threads with which `work` is fastest. Call it in the thread that will compute."""
    threads = Threads()
    while threads.is_measuring:
        with threads:
            work()
    threads.apply()
    return torch.get_num_threads()


class Threads:
    """Sets the number of threads for each unit of work, such as a training step, inside `with threads`.

    `start` is the index of the first unit. If not `active`, torch's setting is unchanged. The fewest threads are used
    that are at most `worth` times slower than the fastest number. With `spare_only` the first unit has one thread, and
    at most as many are tried as there are processors that other processes leave free.
    """

    def __init__(
        self,
        file: Path | None = None,
        start: int = 0,
        active: bool = True,
        worth: float = WORTH,
        spare_only: bool = False,
    ) -> None:
        chosen_by_user = "OMP_NUM_THREADS" in os.environ
        self.file, self.unit, self.active, self.worth = file, start, active and not chosen_by_user, worth
        self.spare = Spare() if spare_only else None
        self.candidates = [1] if spare_only else halves(limit())
        self.plan: list[tuple[int, int]] = [(start, self.candidates[0])]
        """(First unit, number of threads) of each change."""
        self.until = start
        """The plan holds for the units before this one."""
        if self.active and file is not None and file.exists():
            self.plan, self.until = read(file)
        self.seconds: dict[int, float] = {}
        """Last measured duration of a unit, by number of threads."""
        self.spent, self.units, self.is_warm = 0.0, 0, False
        self.began, self.measured, self.cost = time.monotonic(), -math.inf, 0.0
        self.is_measuring = self.active and self.until <= start and len(self.candidates) > 1

    def sibling(self) -> Threads:
        """Threads for units of the same kind but another size: starts with the same number, and measures it later."""
        made = Threads(active=self.active, worth=self.worth)
        made.plan, made.is_measuring = [(0, self.count)], self.is_measuring
        made.spare, made.candidates = self.spare, self.candidates
        made.measured, made.cost = self.measured, self.cost
        return made

    @property
    def count(self) -> int:
        """Number of threads for the next unit."""
        return next((count for first, count in reversed(self.plan) if first <= self.unit), self.plan[0][1])

    def apply(self) -> None:
        if self.active and torch.get_num_threads() != self.count:
            torch.set_num_threads(self.count)

    def __enter__(self) -> Self:
        if self.active and self.unit >= self.until and not self.units:
            self.use(self.plan[-1][1], 1)
        self.apply()
        self.entered = time.monotonic()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self.active or error is not None:
            return
        self.spent, self.units, self.unit = self.spent + time.monotonic() - self.entered, self.units + 1, self.unit + 1
        if self.unit >= self.until:
            (self.measure if self.is_measuring else self.watch)()

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches; the caller's processing of each batch is a unit of work."""
        for batch in batches:
            with self:
                yield batch

    def measure(self) -> None:
        """Continue measuring the current number of threads, try the next one, or finish with the best."""
        count, first = self.plan[-1][1], not self.is_warm
        self.is_warm = True
        # The first unit after a change starts threads, the first of a process allocates and compiles: not counted.
        if first and (self.spent < SAMPLE or not self.seconds):
            self.use(count, 1)
        elif self.spent < SAMPLE:
            self.until += self.units
            self.record()
        else:
            self.seconds[count] = self.spent / self.units
            # A recorded number may come from another machine and not be among the candidates.
            smaller = [candidate for candidate in self.candidates if candidate < count]
            fastest = min(self.seconds.values())
            self.is_warm = False
            if smaller and self.seconds[count] <= FLAT * fastest:
                self.use(smaller[0], 1)
                return
            best = min(count for count, seconds in self.seconds.items() if seconds <= self.worth * fastest)
            self.measured = time.monotonic()
            self.is_measuring, self.cost = False, self.measured - self.began
            self.use(best, stretch(self.seconds[best]))

    def watch(self) -> None:
        """Continue, or measure again: when the speed has changed, and from time to time."""
        count, now, duration = self.plan[-1][1], time.monotonic(), self.spent / self.units
        drifted = not 1 / DRIFT < duration / self.seconds.get(count, math.inf) < DRIFT
        if now - self.measured > self.cost * REST[not drifted] and (candidates := halves(self.most())) != [count]:
            self.is_measuring, self.began, self.candidates = True, now, candidates
            self.seconds.clear()
            self.use(self.candidates[0], 1)
        else:
            self.use(count, stretch(duration))

    def most(self) -> int:
        """The largest number of threads to try."""
        return limit() if self.spare is None else max(min(self.spare.processors(), limit()), 1)

    def use(self, count: int, units: int) -> None:
        """Compute the next `units` with `count` threads, and time them."""
        self.spent, self.units, self.until = 0.0, 0, self.unit + units
        if self.plan[-1][1] != count:
            self.plan = [*self.plan, (self.unit, count)] if self.file is not None else [(self.unit, count)]
        self.record()

    def record(self) -> None:
        if self.file is not None:
            text = json.dumps({"plan": self.plan, "until": self.until})
            write_text_atomically(self.file, text)


class Spare:
    """Number of processors that other processes leave to this one."""

    def __init__(self) -> None:
        self.since, self.free, self.found = time.monotonic(), free_seconds(), 1

    def processors(self) -> int:
        """Average since the last call, rounded; 1 at first."""
        now = time.monotonic()
        if now - self.since >= SAMPLE:  # the system counts in hundredths of a second
            free = free_seconds()
            self.found = round((free - self.free) / (now - self.since))
            self.since, self.free = now, free
        return self.found


def free_seconds() -> float:
    """Processor time, in seconds, that was idle or used by this process; that of all processors if unknown."""
    if sys.platform != "win32":
        with suppress(OSError, ValueError, IndexError):
            fields = Path("/proc/stat").read_text(encoding="utf8").split(maxsplit=6)
            return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK") + time.process_time()
    return time.monotonic() * (os.cpu_count() or 1)


def stretch(duration: float) -> int:
    """Number of units of this duration between checks of the speed."""
    return max(math.floor(STRETCH / max(duration, 1e-6)), 1)


def halves(most: int) -> list[int]:
    """`most`, and its halves down to 1."""
    return [most, *halves(most // 2)] if most > 1 else [1]


def read(file: Path) -> tuple[list[tuple[int, int]], int]:
    """The recorded (first unit, number of threads), and the unit up to which the record holds."""
    try:
        record = json.loads(file.read_text(encoding="utf8"))
        return [(int(first), int(count)) for first, count in record["plan"]], int(record["until"])
    except (OSError, ValueError, TypeError, KeyError) as reason:
        raise UserError(f"cannot read {file}: {reason}; remove it to measure the number of threads again") from None
