"""Failures: closed form against simulation, against a search for the optimum, and by hand."""

from __future__ import annotations

import math

import pytest

from allmlp.plan.failures import (
    Failures,
    daly,
    expected,
    mean_time_between,
    simulate,
    young,
)

HOUR, DAY = 3600.0, 86_400.0


def test_the_rate_is_llama_3s() -> None:
    """466 interruptions in 54 days on 16 K GPUs: one in 2.78 hours there, in 44.5 hours on a sixteenth of it."""
    assert mean_time_between(16 * 1024) == pytest.approx(54 * DAY / 466)
    assert mean_time_between(1024) == pytest.approx(16 * 54 * DAY / 466)
    assert mean_time_between(8, per_gpu_day=0.0) == math.inf


def test_young_by_hand() -> None:
    """Two minutes for a checkpoint and one failure in 10 hours: sqrt(2 * 120 * 36,000) = 2939 s."""
    assert young(Failures(36_000, 120, 0)) == pytest.approx(2939.39, abs=0.01)


@pytest.mark.parametrize(
    "known",
    [Failures(160_000, 2.6, 600), Failures(10_000, 60, 600), Failures(10_000, 600, 1800), Failures(600, 30, 60)],
)
def test_daly_is_the_best_interval(known: Failures) -> None:
    """Nothing found by trying intervals is quicker than Daly's by more than a twentieth of a per cent."""
    work = 1000 * daly(known)
    best = min(expected(work, work / pieces, known) for pieces in range(300, 3000))
    assert expected(work, daly(known), known) <= best * 1.0005
    assert expected(work, daly(known), known) <= expected(work, young(known), known) * (1 + 1e-9)


def test_daly_of_checkpoints_longer_than_the_time_between_failures() -> None:
    assert daly(Failures(between=100, checkpoint=300, restart=0)) == 100


def test_without_failures_only_checkpoints_cost() -> None:
    known = Failures(math.inf, 10, 600)
    assert expected(1000, 100, known) == 1000 + 10 * 10
    assert expected(1050, 100, known) == 1050 + 11 * 10
    assert simulate(1050, 100, known, 3, seed=0).seconds == 1050 + 11 * 10
    assert simulate(1050, 100, known, 3, seed=0).failures == 0


def test_one_piece_by_hand() -> None:
    """w + c = m and no restart: the expected time is m (e - 1)."""
    assert expected(90, 90, Failures(100, 10, 0)) == pytest.approx(100 * (math.e - 1))
    assert expected(90, 90, Failures(100, 10, 100)) == pytest.approx(100 * math.e * (math.e - 1))


@pytest.mark.parametrize(
    ("work", "known"),
    [
        (2 * DAY, Failures(44.5 * HOUR, 2.6, 600)),
        (20 * HOUR, Failures(2.8 * HOUR, 60, 600)),
        (5 * HOUR, Failures(0.5 * HOUR, 120, 900)),
        (3 * HOUR, Failures(0.25 * HOUR, 30, 1200)),
    ],
    ids=["rare", "Llama 3", "often", "restarts fail too"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_simulation_agrees_with_the_closed_form(work: float, known: Failures, seed: int) -> None:
    """Within three standard errors, which are small enough to tell a wrong formula."""
    played = simulate(work, daly(known), known, runs=1000, seed=seed)
    closed = expected(work, daly(known), known)
    assert played.seconds == pytest.approx(closed, abs=3 * played.error)
    assert played.error < 0.1 * (closed - work)
    assert played.failures == pytest.approx(closed / known.between, rel=0.15)
    wrong = expected(work, daly(known), known._replace(restart=0))
    if known.between < 3 * HOUR:
        assert abs(played.seconds - wrong) > 3 * played.error, "a restart that is forgotten is seen"


def test_the_same_seed_gives_the_same_runs() -> None:
    known = Failures(HOUR, 60, 600)
    assert simulate(DAY, HOUR, known, 50, seed=3) == simulate(DAY, HOUR, known, 50, seed=3)
    assert simulate(DAY, HOUR, known, 50, seed=3) != simulate(DAY, HOUR, known, 50, seed=4)


def test_what_never_ends_is_infinite() -> None:
    assert expected(1e9, 1e9, Failures(1.0, 1, 1)) == math.inf
