"""The uncertainty of a measured accuracy."""

from __future__ import annotations

import math

Z = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a proportion, within [0, 1]; valid for few examples and for 0 % and 100 % too.

        (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n),   p = correct / n

    Source: Wilson, Probable Inference, the Law of Succession, and Statistical Inference, 1927.
    """
    if not 0 <= correct <= total or total < 1:
        raise ValueError(f"{correct} of {total} is not a proportion")
    p, weight = correct / total, Z**2 / total
    middle, half = p + weight / 2, Z * math.sqrt(p * (1 - p) / total + weight / (4 * total))
    return max((middle - half) / (1 + weight), 0.0), min((middle + half) / (1 + weight), 1.0)


def format_accuracy(correct: int, total: int) -> str:
    """92.40% (95% interval 90.6% to 93.9%)."""
    low, high = wilson_interval(correct, total)
    return f"{correct / total:.2%} (95% interval {low:.1%} to {high:.1%})"
