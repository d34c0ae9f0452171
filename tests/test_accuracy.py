"""The interval of an accuracy."""

from __future__ import annotations

from math import comb

import pytest

from allmlp.accuracy import format_accuracy, wilson_interval


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    # Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_published_intervals(correct: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=5e-5)
    flipped = wilson_interval(total - correct, total)
    assert flipped == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_the_interval_holds_the_true_accuracy_in_95_percent() -> None:
    """The mean over accuracies of the probability that 50 examples give an interval with the true one in it."""
    n, truths = 50, [0.5 + number / 200 for number in range(100)]
    intervals = [wilson_interval(k, n) for k in range(n + 1)]
    held = [
        sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k, (low, high) in enumerate(intervals) if low <= p <= high)
        for p in truths
    ]
    assert sum(held) / len(held) == pytest.approx(0.95, abs=0.01)


def test_text() -> None:
    assert format_accuracy(924, 1000) == "92.40% (95% interval 90.6% to 93.9%)"


@pytest.mark.parametrize("pair", [(1, 0), (3, 2), (-1, 5)])
def test_no_proportion(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not a proportion"):
        wilson_interval(*pair)
