"""Local times with daylight saving time: hours that occur twice, days of 23 and 25 hours."""

from __future__ import annotations

import numpy as np

from allmlp.data.frequency import DAY, HOUR, steps_within

CHANGES = (2, 3, 4, 9, 10, 11)
"""Months in which clocks are set back somewhere."""
NIGHT = (23, 0, 1, 2, 3)
"""Hours that occur twice."""


def are_local_days(times: np.ndarray, series: np.ndarray, midnights: bool) -> bool:
    """Whether times, sorted within each series, are days starting at local midnight: according to their time zones
    (`midnights`), or because they have two times of day an hour apart, one in summer and one in winter.
    """
    steps = steps_within(times, series)
    if not len(steps) or steps[steps > 0].min(initial=DAY) < DAY - HOUR:
        return False
    clocks = np.unique(times % DAY)
    return midnights or (len(clocks) == 2 and int(clocks[1] - clocks[0]) in (HOUR, DAY - HOUR))


def local_days(times: np.ndarray) -> np.ndarray:
    """Dates of local midnights given in UTC, for time zones from UTC-10 to UTC+13."""
    return (times + 13 * HOUR) // DAY * DAY


def doubled_hours(times: np.ndarray, series: np.ndarray) -> np.ndarray:
    """First row of each pair with the same time, sorted within each series, if all pairs can be an hour repeated when
    clocks are set back: at most one, at night, per series and half-year; otherwise empty.
    """
    same = np.flatnonzero((np.diff(times) == 0) & (np.diff(series) == 0))
    if not len(same) or (np.diff(same) == 1).any() or np.median(steps_within(times, series)) > HOUR:
        return same[:0]
    found, months = times[same], times[same].astype("datetime64[ms]").astype("datetime64[M]").astype(np.int64)
    hours = np.unique(np.stack([series[same], months // 6, found // HOUR]), axis=1)
    once = len(np.unique(hours[:2], axis=1).T) == len(hours.T)
    at_night = np.isin(found // HOUR % 24, NIGHT) & np.isin(months % 12 + 1, CHANGES)
    return same if once and at_night.all() else same[:0]


def join_doubled(
    times: np.ndarray, series: np.ndarray, values: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Replace each row in `first` and the row after it by one with the means of their observed values."""
    both = np.stack([values[first], values[first + 1]])
    seen = np.isfinite(both)
    joined = values.copy()
    joined[first] = np.where(seen.any(0), np.where(seen, both, 0).sum(0) / np.maximum(seen.sum(0), 1), np.nan)
    return np.delete(times, first + 1), np.delete(series, first + 1), np.delete(joined, first + 1, axis=0)
