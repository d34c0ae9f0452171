"""What clocks do to equal steps: local days of 23 and 25 hours, hours that occur twice, and inexact times."""

from __future__ import annotations

import numpy as np

from allmlp.data.frequency import DAY, HOUR, MINUTE, Frequency, most_frequent, steps_within

CHANGES = (2, 3, 4, 9, 10, 11)
"""Months in which clocks are set back somewhere."""
NIGHT = (23, 0, 1, 2, 3)
"""Hours that occur twice."""
ROUND_STEPS = np.array(
    [
        *(1000 * count for count in (1, 2, 5, 10, 15, 20, 30)),
        *(MINUTE * count for count in (1, 2, 3, 5, 6, 10, 12, 15, 20, 30)),
        *(HOUR * count for count in (1, 2, 3, 4, 6, 8, 12)),
        DAY,
    ]
)
TOLERANCE = 0.2
"""Maximum deviation of a time, as a fraction of a step."""


# --- daylight saving time -----------------------------------------------------------------------------------


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
    doubled, months = times[same], times[same].astype("datetime64[ms]").astype("datetime64[M]").astype(np.int64)
    hours = np.unique(np.stack([series[same], months // 6, doubled // HOUR]), axis=1)
    once = len(np.unique(hours[:2], axis=1).T) == len(hours.T)
    at_night = np.isin(doubled // HOUR % 24, NIGHT) & np.isin(months % 12 + 1, CHANGES)
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


# --- nearly equal steps: an inexact sensor clock, weeks on changing days ------------------------------------


def even_times(times: np.ndarray, series: np.ndarray, given: Frequency | None, notes: list[str]) -> np.ndarray:
    """Round times, sorted within each series, to weeks or equal steps if they are close, with a note."""
    steps = steps_within(times, series)
    if not len(steps) or steps.min() <= 0 or (given and (given.unit != "ms" or given.without)):
        return times
    usual = most_frequent(steps)
    if usual >= 28 * DAY or not (steps % (given.step if given else usual)).any():
        return times
    if usual == 7 * DAY and not (steps % DAY).any() and (rounded_times := whole_weeks(times, series)) is not None:
        notes.append("weeks are on different days: they are read as on the last of these")
        return rounded_times
    step = given.step if given else round_step(float(np.median(steps)))
    rounded_times = rounded(times, step) if step else times
    if rounded_times is times or (steps_within(rounded_times, series) <= 0).any():
        return times
    notes.append(f"times are rounded to steps of {Frequency(step)}")
    return rounded_times


def whole_weeks(times: np.ndarray, series: np.ndarray) -> np.ndarray | None:
    """Move times to one day of the week, that of the last time, if some division into weeks has at most one time per
    series and week; the first day of the week is chosen for the fewest gaps.
    """
    days = times // DAY
    weeks = [(days - first) // 7 for first in range(7)]
    steps = [steps_within(week, series) for week in weeks]
    gaps = [int(step.sum()) if step.min() > 0 else None for step in steps]
    possible = [gap for gap in gaps if gap is not None]
    if not possible:
        return None
    first = gaps.index(min(possible))
    offset = (days[times.argmax()] - first) % 7
    return (7 * weeks[first] + first + offset) * DAY + times % DAY


def round_step(step: float) -> int:
    """The common step close to this one; 0 if there is none."""
    nearest = int(ROUND_STEPS[np.abs(ROUND_STEPS - step).argmin()])
    return nearest if abs(step - nearest) <= TOLERANCE / 2 * nearest else 0


def rounded(times: np.ndarray, step: int) -> np.ndarray:
    """Round times to the nearest multiple of the step, or with an offset in 24ths of a step if that fits better; the
    same array if some deviate too much.
    """
    angle = 2 * np.pi * (times % step) / step
    phase = round(float(np.angle(np.exp(1j * angle).mean())) * 24 / (2 * np.pi)) * (step // 24)
    for shift in (0, phase):
        error = (times - shift + step // 2) % step - step // 2
        if np.abs(error).max() <= TOLERANCE * step:
            return times - error
    return times
