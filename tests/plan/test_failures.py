"""Failures: closed form against simulation, against a search for the optimum, and by hand."""

from __future__ import annotations

import math

import pytest

from allmlp.plan.failures import (
    FailureModel,
    daly,
    expected_time,
    mtbf,
    simulate,
    young,
)

HOUR, DAY = 3600.0, 86_400.0


def test_mtbf_is_llama_3s() -> None:
    """Of 466 interruptions in 54 days on 16,384 GPUs 47 were planned: a failure every 3.1 h, 49.5 h on 1,024 GPUs."""
    assert mtbf(16 * 1024) == pytest.approx(54 * DAY / (466 - 47))
    assert mtbf(1024) == pytest.approx(49.49 * HOUR, rel=1e-3)
    assert mtbf(8, per_gpu_day=0.0) == math.inf


def test_young_by_hand() -> None:
    """Two minutes for a checkpoint and one failure in 10 hours: sqrt(2 * 120 * 36,000) = 2939 s."""
    assert young(FailureModel(36_000, 120, 0)) == pytest.approx(2939.39, abs=0.01)


@pytest.mark.parametrize(
    "model",
    [
        FailureModel(160_000, 2.6, 600),
        FailureModel(10_000, 60, 600),
        FailureModel(10_000, 600, 1800),
        FailureModel(600, 30, 60),
    ],
)
def test_daly_interval_is_optimal(model: FailureModel) -> None:
    """No interval found by search is faster than Daly's by more than 0.05 %."""
    work = 1000 * daly(model)
    best = min(expected_time(work, work / pieces, model) for pieces in range(300, 3000))
    assert expected_time(work, daly(model), model) <= best * 1.0005
    assert expected_time(work, daly(model), model) <= expected_time(work, young(model), model) * (1 + 1e-9)


def test_daly_interval_is_mtbf_for_slow_checkpoints() -> None:
    assert daly(FailureModel(mtbf=100, checkpoint=300, restart=0)) == 100


def test_only_checkpoints_cost_without_failures() -> None:
    model = FailureModel(math.inf, 10, 600)
    assert expected_time(1000, 100, model) == 1000 + 10 * 10
    assert expected_time(1050, 100, model) == 1050 + 11 * 10
    assert simulate(1050, 100, model, 3, seed=0).seconds == 1050 + 11 * 10
    assert simulate(1050, 100, model, 3, seed=0).failures == 0


def test_background_checkpoints_cost_more_per_failure_and_less_without() -> None:
    """Simulated: a failure while a checkpoint is written falls back to the one before."""
    waiting, background = FailureModel(2 * HOUR, 60, 600), FailureModel(2 * HOUR, 1, 600, background=60)
    assert expected_time(1000, 100, FailureModel(math.inf, 1, 600, 60)) == 1000 + 10 + 60
    assert daly(background) == pytest.approx(119.0, abs=0.5) and daly(FailureModel(2 * HOUR, 0.1, 600, 60)) == 60
    work = 20 * HOUR
    for interval in (daly(background), 600.0):
        found = simulate(work, interval, background, 600, seed=0)
        assert found.seconds == pytest.approx(
            expected_time(work, interval, background), abs=4 * found.error + 0.002 * work
        )
        assert found.seconds > simulate(work, interval, background._replace(background=0.0), 600, seed=0).seconds
    assert expected_time(work, daly(background), background) < expected_time(work, daly(waiting), waiting)


def test_one_segment_by_hand() -> None:
    """w + c = m and no restart: the expected time is m (e - 1)."""
    assert expected_time(90, 90, FailureModel(100, 10, 0)) == pytest.approx(100 * (math.e - 1))
    assert expected_time(90, 90, FailureModel(100, 10, 100)) == pytest.approx(100 * math.e * (math.e - 1))


@pytest.mark.parametrize(
    ("work", "model"),
    [
        (2 * DAY, FailureModel(44.5 * HOUR, 2.6, 600)),
        (20 * HOUR, FailureModel(2.8 * HOUR, 60, 600)),
        (5 * HOUR, FailureModel(0.5 * HOUR, 120, 900)),
        (3 * HOUR, FailureModel(0.25 * HOUR, 30, 1200)),
    ],
    ids=["rare", "Llama 3", "often", "restarts fail too"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_simulation_matches_closed_form(work: float, model: FailureModel, seed: int) -> None:
    """Within three standard errors, which are small enough to detect a wrong formula."""
    simulation = simulate(work, daly(model), model, runs=1000, seed=seed)
    closed = expected_time(work, daly(model), model)
    assert simulation.seconds == pytest.approx(closed, abs=3 * simulation.error)
    assert simulation.error < 0.1 * (closed - work)
    assert simulation.failures == pytest.approx(closed / model.mtbf, rel=0.15)
    wrong = expected_time(work, daly(model), model._replace(restart=0))
    if model.mtbf < 3 * HOUR:
        assert abs(simulation.seconds - wrong) > 3 * simulation.error, "a missing restart time must be detected"


def test_seed_determines_simulation() -> None:
    model = FailureModel(HOUR, 60, 600)
    assert simulate(DAY, HOUR, model, 50, seed=3) == simulate(DAY, HOUR, model, 50, seed=3)
    assert simulate(DAY, HOUR, model, 50, seed=3) != simulate(DAY, HOUR, model, 50, seed=4)


def test_endless_runs_are_infinite() -> None:
    assert expected_time(1e9, 1e9, FailureModel(1.0, 1, 1)) == math.inf
