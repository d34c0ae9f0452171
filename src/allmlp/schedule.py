"""Learning-rate schedules: pure functions of progress from 0 to 1.

Progress is the fraction of the budget that has passed, so every schedule ends where the budget ends.
"""

from __future__ import annotations

import math

from allmlp.spec import Rate, Spec


class Schedule(Spec, abstract=True):
    """Linear warm-up over the first `warmup_fraction` of the run, then a decay to `min_lr_ratio` of the peak."""

    warmup_fraction: Rate = 0.05
    min_lr_ratio: Rate = 0.0

    def at(self, progress: float) -> float:
        """The factor on the peak learning rate."""
        if progress < self.warmup_fraction:
            return progress / self.warmup_fraction
        after = (progress - self.warmup_fraction) / max(1 - self.warmup_fraction, 1e-12)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * self.decay(min(after, 1.0))

    def decay(self, progress: float) -> float:
        """The factor over the steps after warm-up, by default from 1 to 0."""
        raise NotImplementedError

    def whole(self, after: float) -> float:
        """Convert progress after warm-up to progress of the whole run."""
        return self.warmup_fraction + after * (1 - self.warmup_fraction)


class CosineSchedule(Schedule):
    def decay(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


class LinearSchedule(Schedule):
    """With a long warm-up this is the triangle of fast CIFAR training."""

    def decay(self, progress: float) -> float:
        return 1 - progress


class InverseSqrtSchedule(Schedule):
    """The original Transformer's: sqrt(warm-up steps / steps), which does not end at zero."""

    def decay(self, progress: float) -> float:
        return math.sqrt(self.warmup_fraction / self.whole(progress)) if self.warmup_fraction else 1.0


class StepSchedule(Schedule):
    """ResNet's: a tenth at each of the `milestones`, fractions of the run."""

    milestones: tuple[Rate, ...] = (1 / 3, 2 / 3, 8 / 9)

    def decay(self, progress: float) -> float:
        return 0.1 ** sum(self.whole(progress) >= milestone for milestone in self.milestones)
