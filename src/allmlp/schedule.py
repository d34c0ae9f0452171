"""The learning rate over a run, as a pure function of its progress from 0 to 1.

Progress is the share of the steps or of the time that has passed, so every schedule ends where the budget ends.
"""

from __future__ import annotations

import math

from allmlp.spec import Rate, Spec


class Schedule(Spec, abstract=True):
    def at(self, progress: float) -> float:
        """The factor on the peak learning rate."""
        raise NotImplementedError


class Warmup(Schedule, abstract=True):
    """A straight rise over the first `warmup` share of the run, then the schedule's own fall to `floor`."""

    warmup: Rate = 0.05
    floor: Rate = 0.0

    def at(self, progress: float) -> float:
        if progress < self.warmup:
            return progress / self.warmup
        left = (progress - self.warmup) / max(1 - self.warmup, 1e-12)
        return self.floor + (1 - self.floor) * self.fall(min(left, 1.0))

    def fall(self, progress: float) -> float:
        raise NotImplementedError


class Cosine(Warmup):
    def fall(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


class Linear(Warmup):
    """A straight fall; with a long warm-up it is the triangle of fast CIFAR training."""

    def fall(self, progress: float) -> float:
        return 1 - progress


class Flat(Warmup):
    """Constant, with a straight fall over the last `cooldown` share (the trapezoid)."""

    cooldown: Rate = 0.2

    def fall(self, progress: float) -> float:
        return min(1.0, (1 - progress) / self.cooldown) if self.cooldown else 1.0


class OneCycle(Schedule):
    """Smith's one cycle: cosine up from peak / 25 over the first `rise`, cosine down to peak / 250,000."""

    rise: Rate = 0.3

    def at(self, progress: float) -> float:
        def between(a: float, b: float, share: float) -> float:
            return b + (a - b) * (1 + math.cos(math.pi * share)) / 2

        if progress < self.rise:
            return between(1 / 25, 1.0, progress / self.rise)
        return between(1.0, 4e-6, min((progress - self.rise) / max(1 - self.rise, 1e-12), 1.0))
