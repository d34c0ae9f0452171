"""Studies from records alone: what a run is made of, what is chosen, expected and shown, without a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allmlp.study import records
from allmlp.study.definition import Row, Study, Trial, Tuning, grid
from allmlp.study.records import Record
from allmlp.study.runner import LAST, Runner, expected_seconds, progress_of
from allmlp.study.summary import at_the_edge, final_table, summarize, tuning_table

RATES = grid({"optim.lr": ("1e-3", "2e-3")})
SLOW, FAST = RATES


def small(**changes: Any) -> Study:
    options: dict[str, Any] = {"rows": {"mixer": Row("digits_mixer")}, "compared": "epochs", "seeds": 2}
    return Study("small", **(options | changes))


def tuned(row: Row | None = None, **changes: Any) -> Study:
    return small(rows={"mixer": row or Row("digits_mixer", candidates=RATES)}, tuning=Tuning(100, seeds=2), **changes)


def finished(trial: Trial, accuracy: float = 0.5, wall: float = 20.0, seconds: float = 12.0, **costs: Any) -> Record:
    metrics = {"accuracy": accuracy, "loss": 2.0, "majority": 0.1}
    result = {"validation" if trial.purpose == "tune" else "test": metrics, "epochs": 6.0, "steps": 90}
    return records.make("small", trial, 1, wall, {"result": result | {"seconds": seconds} | costs})


def failed(trial: Trial) -> Record:
    return records.make("small", trial, 1, 20.0, {"failed": "the loss became nan"})


def finals(study: Study, row: str = "mixer", candidate: str = "") -> list[Trial]:
    return list(study.final_trials(row, candidate))


# --- what runs ----------------------------------------------------------------------------------------------


def test_later_overrides_replace_earlier_ones() -> None:
    """Of the study, of the row, of the candidate, of tuning, of the user."""
    names = ("batch_size", "log_every", "keep_checkpoints", "grad_accum_steps", "aug_repeats")
    study = Study(
        "small",
        rows={"mixer": Row("digits_mixer", dict.fromkeys(names[1:], "2"), {"one": dict.fromkeys(names[2:], "3")})},
        compared="epochs",
        overrides=dict.fromkeys(names, "1"),
        tuning=Tuning(100, overrides=dict.fromkeys(names[3:], "4")),
        options=dict.fromkeys(names[4:], "5"),
    )
    for purpose, overrides, expected in (
        ("tune", study.tuning.overrides if study.tuning else {}, [1, 2, 3, 4, 5]),
        ("final", {}, [1, 2, 3, 3, 5]),
    ):
        run = study.trial("mixer", "one", 0, purpose, overrides, 0).run  # type: ignore[arg-type]
        assert [getattr(run, name) for name in names] == expected, purpose


def test_a_candidate_of_which_a_run_has_failed_is_not_chosen() -> None:
    study = tuned()
    slow, broken, *fast = study.tuning_trials("mixer")
    found = [finished(slow, 0.9), failed(broken), *(finished(trial, 0.4) for trial in fast)]
    assert progress_of(study, found).chosen == {"mixer": FAST}


def test_of_many_records_of_a_run_the_last_result_counts() -> None:
    study = small(seeds=1)
    (trial,) = finals(study)
    for found, accuracy in (
        ([failed(trial), finished(trial, 0.6)], 0.6),
        ([finished(trial, 0.6), failed(trial)], 0.6),
        ([finished(trial, 0.6), finished(trial, 0.7)], 0.7),
    ):
        progress = progress_of(study, found)
        assert not progress.ready and progress.value(progress.done[trial.key]) == accuracy


def test_a_record_of_another_recipe_is_stale() -> None:
    study = small(seeds=1)
    (trial,) = finals(study)
    progress = progress_of(study, [finished(trial) | {"recipe": "digits_gmlp"}])
    assert progress.stale == ["mixer seed 0: recipe"] and progress.ready == [trial]


def test_lines_that_are_no_records_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / records.FILE
    file.write_text('3\nnull\n["row"]\n{"row": "mixer"}\n{"row": "vi', encoding="utf8")
    assert records.read(file) == [{"row": "mixer"}]


def test_the_inference_rate_is_measured_once_after_a_final_run(tmp_path: Path) -> None:
    timed = {"budget.minutes": "1", "budget.epochs": "none"}
    study = tuned(overrides=timed, compared="seconds", inference_batch=8)
    runner, (final, *_) = Runner(study, tmp_path, {}), finals(study, candidate=SLOW)
    assert runner.is_measured(final) and not runner.is_measured(next(study.tuning_trials("mixer")))
    (tmp_path / records.FILE).write_text(json.dumps(finished(final) | {"inference": {}}), encoding="utf8")
    assert not runner.is_measured(final)


def test_rows_without_a_model_of_their_own_do_not_share_an_inference_rate(tmp_path: Path) -> None:
    timed = {"budget.minutes": "1", "budget.epochs": "none", "model": "none"}
    rows = {name: Row("digits_mixer", {**timed, "init_from": name}) for name in ("small", "large")}
    study = small(rows=rows, compared="seconds", reference="", seeds=1, inference_batch=8)
    trials = [trial for row in rows for trial in finals(study, row)]
    measured, other = (finished(trial) for trial in trials)
    measured["inference"] = {"rate_per_s": 5.0, "unit": "images"}
    (tmp_path / records.FILE).write_text(json.dumps(measured), encoding="utf8")
    assert [Runner(study, tmp_path, {}).is_measured(trial) for trial in trials] == [False, True]
    assert [line.rate for line in summarize(progress_of(study, [measured, other])).lines] == [5.0, None]


# --- how long -----------------------------------------------------------------------------------------------


def test_the_last_run_of_a_row_says_how_long_the_next_takes() -> None:
    study = small(rows={"mixer": Row("digits_mixer", {"budget.epochs": "30"})})
    first, second = finals(study)
    found = [finished(first, wall=26.0, seconds=18.0), finished(first, wall=14.0, seconds=6.0)]
    assert expected_seconds(second, found) == pytest.approx(8 + 30 * 1)


def test_early_start_ups_do_not_count() -> None:
    study = small(rows={"mixer": Row("digits_mixer", {"budget.epochs": "30"})})
    first, second = finals(study)
    found = [finished(first, wall=112.0)] * 2 + [finished(first, wall=20.0)] * LAST
    assert expected_seconds(second, found) == pytest.approx(8 + 30 * 2)


# --- tables -------------------------------------------------------------------------------------------------


def test_further_metrics_are_reported_if_asked_for() -> None:
    for also, titles in (((), []), (("loss", "unknown"), ["loss"])):
        study = small(seeds=1, floor="", **({"also": also} if also else {}))
        (trial,) = finals(study)
        summary = summarize(progress_of(study, [finished(trial)]))
        assert summary.study.also == also and list(summary.lines[0].others) == titles
        header, row = final_table(summary)
        assert header == ["row", "seeds", "epochs", "seconds", "accuracy %", *titles], row


def test_only_equal_metrics_are_subtracted() -> None:
    rows = {"vit": Row("digits_vit"), "mixer": Row("digits_mixer"), "gmlp": Row("digits_gmlp", metric="loss")}
    study = small(rows=rows, reference="vit")
    found = [finished(trial, 0.5 + 0.1 * (row == "mixer")) for row in rows for trial in finals(study, row)]
    vit, mixer, gmlp = summarize(progress_of(study, found)).lines
    assert vit.difference is None and gmlp.difference is None and gmlp.metric == "loss"
    assert mixer.difference is not None and mixer.difference.mean == pytest.approx(10)


def test_memory_is_the_largest_of_the_runs() -> None:
    study = small()
    found = [finished(trial, peak_memory=memory) for trial, memory in zip(finals(study), (2**30, 2**29), strict=True)]
    assert summarize(progress_of(study, found)).lines[0].memory == 2**30


def test_the_tuning_table_has_every_candidate() -> None:
    study = tuned()
    found = [
        finished(trial, 0.4 + 0.2 * (trial.candidate == FAST) + 0.1 * trial.seed)
        for trial in study.tuning_trials("mixer")
    ]
    header, *lines = tuning_table(summarize(progress_of(study, found)))
    assert header == ["row", "setting", "runs", "validation accuracy %", "chosen"]
    assert [(line[1], line[2], line[3].split()[0], line[4]) for line in lines] == [
        (SLOW, "2", "45.00", ""),
        (FAST, "2", "65.00", "yes"),
    ]


def test_the_better_of_two_values_is_not_at_an_edge() -> None:
    study = tuned()
    found = [finished(trial) for trial in study.tuning_trials("mixer")]
    progress = progress_of(study, found)
    assert progress.chosen and not at_the_edge(progress)
