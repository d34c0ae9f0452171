"""Means over seeds with 95 % intervals, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5 % quantiles of Student's t distribution with 1 to 9 degrees of freedom."""


class Interval(NamedTuple):
    """A mean and half the width of its 95 % confidence interval; None for a single value."""

    mean: float
    half: float | None
    count: int


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution, for many degrees of freedom by its expansion around 1.96."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = 1.959964
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent values, with t s / sqrt(n) on either side."""
    count = len(values)
    half = t_quantile(count - 1) * stdev(values) / math.sqrt(count) if count > 1 else None
    return Interval(mean(values), half, count)


def seconds_to(target: float, points: Iterable[tuple[float, float]]) -> float | None:
    """Time at which (seconds, value) first reach the target, interpolated in the logarithm of the seconds; the first
    time if it is already reached there, None if it never is.
    """
    before: tuple[float, float] | None = None
    for seconds, value in sorted(points):
        if value >= target:
            if before is None or before[0] <= 0:
                return seconds
            fraction = (target - before[1]) / (value - before[1])
            return before[0] * (seconds / before[0]) ** fraction
        before = (seconds, value)
    return None


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval | None:
    """Mean difference over common seeds; None if there are none."""
    shared = [values[seed] - reference[seed] for seed in values if seed in reference]
    return interval(shared) if shared else None
