"""Studies: what runs, what is recorded, what is chosen, and what the tables say."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allmlp.cli import main
from allmlp.cli.study import fit, print_tables
from allmlp.errors import UserError
from allmlp.optim import AdamW
from allmlp.run import Budget
from allmlp.spec import MAX_COUNT, from_dict
from allmlp.studies import studies
from allmlp.study import records, runner
from allmlp.study.definition import Row, Study, Trial, Tuning, grid, sweep
from allmlp.study.figure import costs_figure, curves_figure, draw, pareto_front
from allmlp.study.process import lifeline
from allmlp.study.runner import Progress, Runner, expected_seconds, portions, progress_of
from allmlp.study.statistics import interval, paired_difference, seconds_to, t_quantile
from allmlp.study.summary import at_the_edge, final_table, summarize, write
from test_studies import InProcess

# Stands for `allmlp train`: writes what a run would, without training. What it does is in $FAKE, as Python.
FAKE_TRAIN = """
import json, os, sys, time
recipe, out = sys.argv[1], os.path.join(sys.argv[2], sys.argv[1].partition("/")[2]).rstrip("/")
sets = dict(word.split("=", 1) for word in sys.argv[3:] if "=" in word)
with open(os.environ["CALLS"], "a") as calls: calls.write(json.dumps([recipe, sets]) + "\\n")
seed, lr = int(sets["seed"]), float(sets.get("optim.lr", 0))
os.makedirs(out, exist_ok=True)
write = lambda name, value: open(os.path.join(out, name), "w").write(json.dumps(value))
score = 0.5 + seed / 100
exec(os.environ["FAKE"])
write("metrics.jsonl", {})
split = "validation" if int(sets["val_size"]) else "test"
write("model.json", recipe)
metrics = {split: {"accuracy": score, "majority": 0.1}}
write("run.json", {"run": {}, "processes": 1, "environment": {"commit": "abc", "command": ["x"]},
    "data": {"sha256": "1", "train": 9, "test": 3},
    "result": metrics | {"steps": 90, "epochs": 6.0, "seconds": 12.0, "parameters": 7}})
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs are replaced by FAKE_TRAIN; the file of its calls."""
    script = tmp_path / "fake_train.py"
    script.write_text(FAKE_TRAIN)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls.jsonl"))
    monkeypatch.setenv("FAKE", "")
    original = Runner.command

    def command(self: Runner, trial: Trial, folder: Path) -> list[str]:
        words = original(self, trial, folder)
        return [sys.executable, str(script), *words[4:5], *words[6:]]

    monkeypatch.setattr(Runner, "command", command)
    return tmp_path / "calls.jsonl"


def calls(file: Path) -> list[dict[str, str]]:
    """The overrides of each run so far, with its recipe."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [{"recipe": recipe, **sets} for recipe, sets in map(json.loads, lines)]


def small(**changes: Any) -> Study:
    rows = {name: Row(f"digits_{name}", candidates=grid({"optim.lr": ("1e-3", "2e-3")})) for name in ("mixer", "vit")}
    options: dict[str, Any] = {"compared": "epochs", "seeds": 3, "tuning": Tuning(100), "reference": "vit"}
    return Study("small", **({"rows": rows} | options | changes))


def work(study: Study, out: Path, **options: Any) -> tuple[Progress, list[str]]:
    said: list[str] = []
    out.mkdir(exist_ok=True)
    return Runner(study, out, say=said.append, **({"locations": {}} | options)).run(), said


def read(out: Path) -> list[dict[str, Any]]:
    return records.read(out / records.FILE)


# --- what runs ----------------------------------------------------------------------------------------------


def test_tuned_on_validation_then_once_on_test(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "score += (lr if recipe == 'digits_vit' else -lr)")
    progress, _ = work(small(), tmp_path / "out")
    assert (
        progress.chosen == {"mixer": "optim.lr=1e-3", "vit": "optim.lr=2e-3"}
        and not progress.ready
        and not progress.later
    )
    found = calls(fake)
    tuning, final = [c for c in found if c["val_size"] == "100"], [c for c in found if c["val_size"] == "0"]
    assert len(found) == len(read(tmp_path / "out")) == 10 and len(tuning) == 4 and len(final) == 6
    assert {(c["recipe"], c["optim.lr"]) for c in final} == {("digits_mixer", "1e-3"), ("digits_vit", "2e-3")}
    assert [c["seed"] for c in final] == ["0", "1", "2"] * 2
    assert all(c["eval_every"] == c["save_every"] == str(MAX_COUNT) for c in found)
    assert all(("test" in r["result"]) == (r["purpose"] == "final") for r in read(tmp_path / "out"))
    assert [file.name for file in (tmp_path / "out").iterdir()] == [records.FILE], "only records are kept"
    work(small(), tmp_path / "out")
    assert len(calls(fake)) == 10, "what has a record runs again"


def test_evaluations_that_choose_the_weights_take_place(fake: Path, tmp_path: Path) -> None:
    rows = {"best": Row("ett_dlinear/etth1_96"), "last": Row("ett_dlinear/etth1_96", {"keep_best": "false"})}
    rows |= {"own": Row("digits_vit", {"patience": "2", "eval_every": "7"})}
    work(small(rows=rows, reference="", seeds=1), tmp_path / "out")
    assert [call.get("eval_every") for call in calls(fake)] == [None, str(MAX_COUNT), "7"]
    assert all(call["save_every"] == str(MAX_COUNT) for call in calls(fake))


def test_a_row_of_a_table_of_runs(fake: Path, tmp_path: Path) -> None:
    study = small(rows={"conv": Row("cifar10_ablations/conv")}, reference="", seeds=1)
    assert len(work(study, tmp_path / "out")[0].done) == 1
    with pytest.raises(UserError, match="is a table: name one row, such as cifar10_ablations/linear"):
        work(small(rows={"conv": Row("cifar10_ablations")}, reference=""), tmp_path / "out")


@pytest.mark.parametrize(("better", "note"), [("lr", "largest"), ("-lr", "smallest"), ("-abs(lr - 2e-3)", "")])
def test_a_choice_at_the_edge_of_a_sweep_is_noted(
    better: str, note: str, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", f"score += {better}")
    candidates = grid({"optim.lr": ("1e-3", "2e-3", "3e-3")})
    progress, _ = work(
        small(rows={"vit": Row("digits_vit", candidates=candidates)}, reference="", seeds=1), tmp_path / "out"
    )
    assert [text.split()[4] for text in at_the_edge(progress)] == ([note] if note else [])


def test_lower_is_better_for_a_loss(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake_train.py"
    script.write_text(FAKE_TRAIN.replace('"accuracy": score', '"perplexity": score'))
    monkeypatch.setenv("FAKE", "score += lr")
    assert work(small(), tmp_path / "out")[0].chosen["vit"] == "optim.lr=1e-3"


def test_a_record_says_how_to_repeat_the_run(fake: Path, tmp_path: Path) -> None:
    work(small(seeds=1), tmp_path / "out", locations={"data.img_size": "8"})
    record = read(tmp_path / "out")[-1]
    assert all(c["data.img_size"] == "8" for c in calls(fake)) and "data.img_size" not in record["overrides"]
    assert record["row"] == "vit" and record["seed"] == 0 and record["environment"]["commit"] == "abc"
    command = record["environment"]["command"]
    assert command[:3] == ["allmlp", "train", "digits_vit"] and "optim.lr=1e-3" in command and "--out" not in command
    assert from_dict(record["run"]).seed == 0 and record["result"]["parameters"] == 7 and record["wall"] >= 0


def test_a_portion_starts_only_what_fits(fake: Path, tmp_path: Path) -> None:
    rows = {"mixer": Row("digits_mixer"), "vit": Row("digits_vit", {"budget.minutes": "0.1"})}
    study = small(rows=rows, compared="seconds", overrides={"budget.minutes": "2", "budget.epochs": "none"}, seeds=1)
    progress, _ = work(study, tmp_path / "out", minutes=1.5)
    assert [c["recipe"] for c in calls(fake)] == ["digits_vit"], "two minutes and start-up do not fit in 1.5"
    assert [trial.row for trial in progress.ready] == ["mixer"]
    assert work(study, tmp_path / "out", minutes=0)[0].ready and len(calls(fake)) == 1
    assert not work(study, tmp_path / "out", minutes=4)[0].ready and len(calls(fake)) == 2


def test_a_portion_is_filled_from_the_longest_run_on(fake: Path, tmp_path: Path) -> None:
    minutes = {"gmlp": "0.5", "mixer": "3", "resmlp": "1", "vit": "3.2"}
    rows = {name: Row(f"digits_{name}", {"budget.minutes": one}) for name, one in minutes.items()}
    study = small(rows=rows, compared="seconds", overrides={"budget.epochs": "none"}, seeds=1, reference="")
    work(study, tmp_path / "out", minutes=5)
    assert [c["recipe"] for c in calls(fake)] == ["digits_vit", "digits_mixer", "digits_resmlp", "digits_gmlp"]
    work(study, tmp_path / "other")
    assert [c["recipe"] for c in calls(fake)[4:]] == [f"digits_{name}" for name in rows], "without portions by rows"


def test_a_run_longer_than_a_portion(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE", 0.0)
    first = {"kind": "train", "step": 1}
    monkeypatch.setenv("FAKE", f'write("metrics.jsonl", {first} | {{"time": time.time()}}); time.sleep(60)')
    study = small(rows={"mixer": Row("digits_mixer")}, reference="", seeds=1)
    began = time.monotonic()
    _, said = work(study, tmp_path / "out", minutes=0.02)
    assert time.monotonic() - began < 20 and "longer than a portion of 0.02" in read(tmp_path / "out")[0]["failed"]
    assert "failed" in said[-1]


def test_a_portion_shorter_than_start_up(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs were recorded as failed, and were not repeated in longer portions."""
    monkeypatch.setattr(runner, "GRACE", 0.0)
    monkeypatch.setenv("FAKE", "time.sleep(60)")
    study = small(rows={"mixer": Row("digits_mixer")}, reference="", seeds=1)
    with pytest.raises(UserError, match=r"mixer: the start of a run takes 0:0\d or more: use a --min"):
        work(study, tmp_path / "out", minutes=0.02)
    assert not read(tmp_path / "out")
    monkeypatch.setenv("FAKE", "")
    assert not work(study, tmp_path / "out", minutes=1)[0].ready


def test_seconds_are_compared_one_run_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one at a time"):
        work(small(compared="seconds"), tmp_path / "out", jobs=2)


def test_jobs_run_side_by_side(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes wait for each other."""
    meet = "os.mkdir(out + '.here'); n = lambda: sum(f.endswith('.here') for f in os.listdir(os.path.dirname(out)))\n"
    monkeypatch.setenv("FAKE", meet + "end = time.time() + 30\nwhile n() < 2 and time.time() < end: time.sleep(0.01)\n")
    study = small(rows={"mixer": Row("digits_mixer")}, reference="", seeds=2)
    progress, _ = work(study, tmp_path / "out", jobs=2)
    assert len(progress.done) == 2 and max(record["wall"] for record in read(tmp_path / "out")) < 20


def test_tuning_by_epochs_side_by_side_and_timed_runs_alone(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tuning runs of the row wait for each other; a final run counts the others that are under way."""
    under_way = "busy = out + '.busy'; os.mkdir(busy); folder = os.path.dirname(out)\n"
    under_way += "n = lambda: sum(f.endswith('.busy') for f in os.listdir(folder))\n"
    tuning = (
        "end = time.time() + 30 * (sets['val_size'] != '0')\nwhile n() < 2 and time.time() < end: time.sleep(0.01)\n"
    )
    final = "if sets['val_size'] == '0': time.sleep(0.3); score = float(n())\nelse: time.sleep(0.5)\nos.rmdir(busy)"
    monkeypatch.setenv("FAKE", under_way + tuning + final)
    rows = {"mixer": Row("digits_mixer", candidates=grid({"optim.lr": ("1e-3", "2e-3")}))}
    timed = {"compared": "seconds", "reference": "", "rows": rows, "overrides": {"budget.minutes": "1"}}
    progress, _ = work(small(**timed, tuning=Tuning(100, compared="epochs")), tmp_path / "out", jobs=2)
    found = [(one["purpose"], one["jobs"]) for one in read(tmp_path / "out")]
    assert found == [("tune", 2)] * 2 + [("final", 1)] * 3
    assert all(progress.value(one) == 1 for one in progress.done.values() if one["purpose"] == "final")
    assert max(one["wall"] for one in read(tmp_path / "out")) < 20


def test_runs_that_end_after_minutes_take_no_jobs(tmp_path: Path) -> None:
    """Although the study compares epochs, or tunes by them."""
    by_minutes = {"budget.epochs": "none", "budget.minutes": "1"}
    wrong = small(compared="seconds", overrides=by_minutes, tuning=Tuning(100, compared="epochs"))
    for study in (small(options=by_minutes), wrong):
        with pytest.raises(UserError, match=r"mixer .* seed 0 on validation ends after 1 minute.*: set budget.epochs"):
            Runner(study, tmp_path, {}, jobs=2)
        Runner(study, tmp_path, {})


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for nvidia-cuda-mps-control; the file of what it was told."""
    told = tmp_path / "told"
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(
        f'#!/bin/sh\necho "$* $(cat) ${{CUDA_VISIBLE_DEVICES-all}} $CUDA_MPS_PIPE_DIRECTORY" >> {told}\n',
        encoding="utf8",
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("FAKE", "write('mps', [os.environ.get('CUDA_MPS_PIPE_DIRECTORY')])")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr("allmlp.study.mps.CLIENT", "pass")
    monkeypatch.setattr("allmlp.study.mps.DEFAULT_PIPES", tmp_path / "none")
    return told


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_jobs_share_a_gpu(fake: Path, tmp_path: Path, mps: Path) -> None:
    study = small(rows={"mixer": Row("digits_mixer")}, reference="", seeds=2)
    work(study, tmp_path / "out", jobs=2, keep_models=True)
    begin, end = (line.split() for line in mps.read_text(encoding="utf8").splitlines())
    assert begin[:2] == ["-d", "all"] and end[:2] == ["quit", "all"] and begin[2] == end[2]
    used = [json.loads((tmp_path / "out" / "models" / f"mixer-{seed}" / "mps").read_bytes()) for seed in (0, 1)]
    assert used == [[begin[2]]] * 2 and not Path(begin[2]).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_one_job_does_not_share_and_a_service_that_fails_is_left(
    fake: Path, tmp_path: Path, mps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = small(rows={"mixer": Row("digits_mixer")}, reference="", seeds=2)
    work(study, tmp_path / "one")
    work(study, tmp_path / "cpu", jobs=2, device="cpu")
    assert not mps.exists()
    monkeypatch.setattr("allmlp.study.mps.CLIENT", "raise SystemExit(1)")
    progress, said = work(study, tmp_path / "out", jobs=2, keep_models=True)
    assert len(progress.done) == 2 and any("take turns" in line for line in said)
    assert [line.split()[0] for line in mps.read_text(encoding="utf8").splitlines()] == ["-d", "quit"]
    assert json.loads((tmp_path / "out" / "models" / "mixer-0" / "mps").read_bytes()) == [None]


# --- what goes wrong ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failed_run_does_not_stop_the_others(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = "if lr == 2e-3: print('a'); write('metrics.jsonl', {}); sys.exit('error: the loss became nan at step 3')"
    monkeypatch.setenv("FAKE", nan)
    progress, _ = work(small(), tmp_path / "out")
    assert set(progress.chosen.values()) == {"optim.lr=1e-3"} and not progress.ready
    failed = [record for record in read(tmp_path / "out") if "failed" in record]
    assert [record["failed"] for record in failed] == ["the loss became nan at step 3"] * 2
    assert not any("result" in record for record in failed) and failed[0]["log"][0] == "a"
    work(small(), tmp_path / "out")
    assert len(calls(fake)) == 10
    monkeypatch.setenv("FAKE", "score += lr")
    progress, _ = work(small(), tmp_path / "out", retry_failed=True)
    assert len(calls(fake)) == 10 + 2 + 6 and set(progress.chosen.values()) == {"optim.lr=2e-3"}


def test_without_a_candidate_that_works_a_row_is_given_up(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "write('metrics.jsonl', {}); sys.exit('out of memory') if 'vit' in recipe else 0")
    progress, _ = work(small(), tmp_path / "out")
    assert (
        list(progress.chosen) == ["mixer"]
        and list(progress.hopeless) == ["vit"]
        and not progress.ready
        and not progress.later
    )


def test_a_run_that_cannot_start_leaves_no_record(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing data are no property of the configuration: it is tried again next time."""
    monkeypatch.setenv("FAKE", "if 'mixer' in recipe: sys.exit('error: no cifar10 in data')")
    progress, said = work(small(), tmp_path / "out")
    assert {record["row"] for record in read(tmp_path / "out")} == {"vit"} and len(progress.ready) == 2
    assert any("did not start: no cifar10" in line for line in said) and len(calls(fake)) == 5 + 1
    with pytest.raises(UserError, match="mixer: no cifar10 in data"):
        work(small(), tmp_path / "out")


def test_a_record_cut_short_is_repeated(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work(small(seeds=1), out)
    file = out / records.FILE
    file.write_bytes(file.read_bytes()[:-40])
    assert len(read(out)) == 5
    progress, _ = work(small(seeds=1), out)
    assert len(calls(fake)) == 7 and len(progress.done) == len(read(out)) == 6, "the new record hangs on the cut one"


def test_records_of_another_configuration_are_stale(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work(small(seeds=1), out)
    changed = small(seeds=1, options={"batch_size": "25"})
    progress = progress_of(changed, read(out))
    assert (
        len(progress.ready) == 4
        and not progress.done
        and "batch_size" in progress.stale[0]
        and len(progress.stale) == 4
    )
    work(changed, out)
    assert len(calls(fake)) == 12 and not progress_of(changed, read(out)).stale
    assert len(progress_of(small(seeds=1), read(out)).done) == 6, "the records of the first definition are still there"


def test_a_new_field_does_not_make_records_stale(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work(small(seeds=1), out)
    found = read(out)
    for record in found:
        del record["run"]["nan"], record["run"]["optim"]["momentum"]
    assert len(progress_of(small(seeds=1), found).done) == 6
    found[0]["run"]["optim"]["unknown"] = 1
    assert "unknown" in progress_of(small(seeds=1), found).stale[0]


def test_an_interrupted_run_leaves_neither_process_nor_record(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    def terminate() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    with pytest.raises(KeyboardInterrupt):
        work(small(), tmp_path / "out")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not read(tmp_path / "out")


def test_a_run_ends_with_a_study_that_was_killed() -> None:
    script = "from allmlp.study.process import end_with_study; import time; end_with_study(); time.sleep(60)"
    with lifeline() as stdin:
        process = subprocess.Popen([sys.executable, "-c", script], stdin=stdin)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    assert process.wait(30) == -signal.SIGTERM
    command = Runner(small(), Path("out"), {}).bench_command(Path("run"), 1)
    assert command[1:4] == ["-m", "allmlp.study.process", "bench"]


def test_an_interrupted_measurement_loses_no_run_and_leaves_no_process(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    script = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    command = [sys.executable, "-c", script]
    monkeypatch.setattr(Runner, "bench_command", lambda self, folder, batch: command)

    def terminate() -> None:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    rows = {"vit": Row("digits_vit", {"budget.minutes": "1", "budget.epochs": "none"})}
    with pytest.raises(KeyboardInterrupt):
        work(small(rows=rows, compared="seconds", reference="", seeds=1, inference_batch=8), tmp_path / "out")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    (record,) = records.read(tmp_path / "out" / records.FILE)
    assert "result" in record and "inference" not in record


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with records.locked(tmp_path / "out"), pytest.raises(UserError, match="another"), records.locked(tmp_path / "out"):
        pass


# --- rows that start from other rows ------------------------------------------------------------------------


def test_models_of_final_runs_are_kept_on_demand(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work(small(seeds=2), out)
    assert not (out / "models").exists()
    again = tmp_path / "again"
    work(small(seeds=2), again, keep_models=True)
    finals = [record for record in read(again) if record["purpose"] == "final"]
    kept = {folder.name for folder in (again / "models").iterdir()}
    assert kept == {f"{record['row']}-{record['seed']}" for record in finals} != set()
    assert not list(again.glob(f"models/*/{runner.CHECKPOINTS}"))


def test_a_row_gets_the_model_of_another(fake: Path, tmp_path: Path) -> None:
    rows = {
        "student": Row("digits_mixer", {"init_from": "study:teacher"}),
        "judge": Row("digits_gmlp", {"init_from": "study:teacher@0"}),
        "teacher": Row("digits_vit"),
    }
    study, out = small(rows=rows, reference="", seeds=2), tmp_path / "out"
    progress, _ = work(study, out)
    assert not progress.ready and not progress.later and len(calls(fake)) == 6
    given = [(c["recipe"], c["seed"], Path(c["init_from"]).name) for c in calls(fake) if "init_from" in c]
    assert sorted(given) == [
        ("digits_gmlp", "0", "teacher-0"),
        ("digits_gmlp", "1", "teacher-0"),
        ("digits_mixer", "0", "teacher-0"),
        ("digits_mixer", "1", "teacher-1"),
    ]
    assert json.loads((out / "models" / "teacher-1" / "model.json").read_text()) == "digits_vit"
    assert read(out)[-1]["run"]["init_from"] in ("study:teacher", "study:teacher@0")

    # Only the records were kept: the teacher of what is left is trained again, and not recorded again.
    kept = [record for record in read(out) if not (record["row"] == "student" and record["seed"] == 1)]
    other = tmp_path / "other"
    other.mkdir()
    (other / records.FILE).write_text("".join(json.dumps(record) + "\n" for record in kept))
    progress, _ = work(study, other)
    assert [(c["recipe"], c["seed"]) for c in calls(fake)[6:]] == [("digits_vit", "1"), ("digits_mixer", "1")]
    assert len(read(other)) == 6 and not progress.ready


def test_a_row_without_its_teacher_is_given_up(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "write('metrics.jsonl', {}); sys.exit('out of memory') if 'vit' in recipe else 0")
    rows = {"student": Row("digits_mixer", {"init_from": "study:teacher"}), "teacher": Row("digits_vit")}
    rows["pupil"] = Row("digits_gmlp", {"init_from": "study:student"})
    progress, _ = work(small(rows=rows, reference="", seeds=1), tmp_path / "out")
    assert "teacher seed 0 has failed" in progress.hopeless["student"] and not progress.ready and not progress.later
    assert progress.hopeless["pupil"] == "it needs the model of student"


def test_a_model_that_needs_another_model(fake: Path, tmp_path: Path) -> None:
    """From the first to the last, and once more from the first where models are gone."""
    rows = {
        "pupil": Row("digits_gmlp", {"init_from": "study:student"}),
        "student": Row("digits_mixer", {"init_from": "study:teacher"}),
        "teacher": Row("digits_vit"),
    }
    study, out = small(rows=rows, reference="", seeds=1), tmp_path / "out"
    chain = ["digits_vit", "digits_mixer", "digits_gmlp"]
    assert not work(study, out)[0].later and [c["recipe"] for c in calls(fake)] == chain
    other = tmp_path / "other"
    other.mkdir()
    kept = [record for record in read(out) if record["row"] != "pupil"]
    (other / records.FILE).write_text("".join(json.dumps(record) + "\n" for record in kept))
    work(study, other)
    assert [c["recipe"] for c in calls(fake)] == 2 * chain and len(read(other)) == 3


# --- how long -----------------------------------------------------------------------------------------------


def test_expected_duration() -> None:
    study = small(
        rows={"a": Row("digits_mixer", {"budget.epochs": "30"}), "b": Row("digits_vit", {"budget.epochs": "25"})},
        reference="",
    )
    slow, timed = next(study.final_trials("a", "")), next(study.final_trials("b", ""))
    assert expected_seconds(slow, []) is None
    record = {"row": "a", "wall": 20.0, "result": {"seconds": 12.0, "epochs": 6.0, "steps": 90}}
    assert expected_seconds(slow, [record]) == pytest.approx(8 + 30 * 2)
    assert expected_seconds(timed, [record]) == pytest.approx(8 + 25 * 2), "of another row"
    alike = {"row": "c", "recipe": "digits_vit", "wall": 9.0, "result": {"seconds": 6.0, "epochs": 6.0, "steps": 90}}
    assert expected_seconds(timed, [record, alike]) == pytest.approx(3 + 25), "of another row with the same recipe"
    assert expected_seconds(slow, [record, alike]) == pytest.approx(3 + 30 * 2), "the longest start-up does not count"
    options = {"budget.minutes": "5", "budget.epochs": "none"}
    minutes = next(small(overrides=options, compared="seconds").final_trials("vit", "optim.lr=1e-3"))
    assert expected_seconds(minutes, []) == 360 and expected_seconds(minutes, [record]) == 308
    assert expected_seconds(minutes, [{"row": "vit", "failed": "x", "wall": 9.0}]) == 360


def test_portions() -> None:
    assert portions([360, 360, 100], 540, 1) == 2 and portions([100] * 6, 300, 2) == 1
    assert portions([700], 540, 1) == 1 and portions([], 540, 1) == 0


# --- numbers ------------------------------------------------------------------------------------------------


def test_intervals() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 5, 9, 10, 11, 30, 200):
        assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-4)
    low, high = stats.t.interval(0.95, 2, 2.0, stats.sem([1.0, 2.0, 3.0]))
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx((high - low) / 2, rel=1e-4)
    assert interval([1.5]) == (1.5, None, 1)


def test_differences_are_paired_by_seed() -> None:
    """Seeds vary by 10, the difference by 0.1: unpaired it would drown."""
    found = paired_difference({0: 10.1, 1: 20.0, 2: 30.2, 7: 99.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert found is not None and found.count == 3
    assert found.mean == pytest.approx(0.1) and found.half == pytest.approx(4.3027 * 0.1 / math.sqrt(3))
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_a_row_with_a_reference_of_its_own(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "score += 0.02 * ('vit' in recipe)")
    rows = {name: Row(f"digits_{name}") for name in ("mixer", "vit")} | {"wide": Row("digits_gmlp", reference="mixer")}
    progress, _ = work(small(rows=rows), tmp_path / "out")
    header, mixer, vit, wide = final_table(summarize(progress))
    column = header.index("to vit / mixer")
    assert [row[column] for row in (mixer, vit, wide)] == ["-2.00 ± 0.00", "", "+0.00 ± 0.00"]
    with pytest.raises(UserError, match="unknown row of small 'float'"):
        small(rows=rows | {"wide": Row("digits_gmlp", reference="float")})


@pytest.mark.slow
def test_tables_and_figure(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("FAKE", "score += 0.02 * ('vit' in recipe)")
    rows = {"mixer": Row("digits_mixer", anchor=60.0, source="a paper"), "vit": Row("digits_vit")}
    out = tmp_path / "out"
    progress, _ = work(small(rows=rows), out)
    summary = summarize(progress)
    header, mixer, vit = final_table(summary)
    assert header == ["row", "parameters", "seeds", "epochs", "seconds", "accuracy %", "to vit", "floor", "anchor"]
    half = 4.3027 * 1.0 / math.sqrt(3)
    assert mixer == ["mixer", "7", "3", "6", "12", f"51.00 ± {half:.2f}", "-2.00 ± 0.00", "10.00", "60.00 (a paper)"]
    assert vit[5:] == [f"53.00 ± {half:.2f}", "", "10.00", ""]
    brief, short, _ = final_table(summary, brief=True)
    assert brief[1] == "M params" and short[1] == "7e-06" and short[-1] == "60.00"
    print_tables(summary)
    printed = capsys.readouterr().out
    assert "60.00\n" in printed and "\nanchor of mixer: a paper\n" in printed
    wide = [["row", "GiB", "accuracy %", "floor"], ["mixer", "1.00", "51.00 ± 2.48", "10.00"]]
    assert fit(wide, 32) == wide and fit(wide, 31) == fit(wide, 26) == [[row[0], *row[2:]] for row in wide]
    assert fit(wide, 25) == fit(wide, 5) == [[row[0], row[2]] for row in wide]
    write(summary, out)
    assert "| mixer | 7 | 3 |" in (out / "table.md").read_text(encoding="utf8")
    with open(out / "table.csv", encoding="utf8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["value"]) for line in lines] == pytest.approx([50, 51, 52, 52, 53, 54])
    assert draw(summary, out) and (out / "figure.png").stat().st_size > 5000 and (out / "figure.svg").is_file()
    assert not draw(summarize(progress_of(small(), [])), out)


# --- definitions and the command ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", studies())
def test_every_study_is_complete(name: str) -> None:
    declared = studies()[name]
    study: Study = declared.make()
    assert study.name == name and f"allmlp study {name}" in declared.text
    trials = [trial for row in study.rows for trial in study.tuning_trials(row)]
    trials += [
        t for row in study.rows for candidate in study.candidates(row) for t in study.final_trials(row, candidate)
    ]
    configurations = [(trial.purpose, trial.run) for trial in trials]
    assert len({repr(one) for one in configurations}) == len(trials), "two candidates are the same run"
    for trial in trials:
        assert (trial.run.val_size > 0) == (trial.purpose == "tune") and trial.run.eval_every == MAX_COUNT
        budget = trial.run.budget
        if study.is_timed(trial.purpose):
            assert budget.minutes is not None and budget.epochs is None and budget.steps is None
        else:
            assert budget.minutes is None, "equal epochs or tokens must not depend on the machine"
    if study.compared == "seconds":
        seconds: dict[str, set[float | None]] = {}
        for trial in (trial for trial in trials if trial.purpose == "final"):
            curve = study.rows[trial.row].curve
            seconds.setdefault(curve[0] if curve else trial.row, set()).add(trial.run.budget.minutes)
        assert len({frozenset(found) for found in seconds.values()}) == 1, "a family has other budgets than another"


def test_a_row_has_the_setting_of_another(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "score += lr")
    tuned = small().rows["vit"]
    rows = {"vit": tuned, "longer": Row("digits_vit", {"budget.epochs": "9"}, like="vit")}
    progress, _ = work(small(rows=rows, reference="", seeds=1), tmp_path / "out")
    assert progress.chosen == {"vit": "optim.lr=2e-3", "longer": "optim.lr=2e-3"} and len(calls(fake)) == 4
    assert [c["optim.lr"] for c in calls(fake) if c.get("budget.epochs") == "9"] == ["2e-3"]
    with pytest.raises(UserError, match="unknown earlier row of small 'vit'"):
        small(rows=dict(reversed(rows.items())), reference="")
    with pytest.raises(UserError, match="both candidates and those of vit"):
        small(rows=rows | {"other": Row("digits_vit", like="vit", candidates=tuned.candidates)}, reference="")
    monkeypatch.setenv("FAKE", "write('metrics.jsonl', {}); sys.exit('out of memory')")
    progress, _ = work(small(rows=rows, reference="", seeds=1), tmp_path / "again")
    assert progress.hopeless == {"vit": "all candidates have failed", "longer": "it needs the setting of vit"}


def test_some_rows_with_what_they_need(fake: Path, tmp_path: Path) -> None:
    rows = {
        "student": Row("digits_mixer", {"init_from": "study:teacher"}),
        "teacher": Row("digits_vit"),
        "other": Row("digits_gmlp"),
    }
    study = small(rows=rows, reference="", seeds=1)
    progress, _ = work(study, tmp_path / "out", rows=("stud*",))
    assert [c["recipe"] for c in calls(fake)] == ["digits_vit", "digits_mixer"]
    assert [trial.row for trial in progress.ready] == ["other"] and not progress.later
    with pytest.raises(UserError, match="has no row 'techer', but student, teacher, other"):
        work(study, tmp_path / "out", rows=("techer",))


def test_curves(fake: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = {f"vit_{n}": Row("digits_vit", {"train_fraction": f"0.{n}"}, curve=("vit", n)) for n in (1, 5)}
    progress, _ = work(small(rows=rows, reference="", seeds=2, axis="images"), tmp_path / "out")
    summary = summarize(progress)
    assert [line.curve for line in summary.lines] == [("vit", 1), ("vit", 5)]
    (axis,) = curves_figure(summary, summary.lines).axes
    assert axis.get_xlabel() == "images" and axis.get_ylabel() == "accuracy %"
    assert axis.lines[0].get_xydata().tolist() == [[1, pytest.approx(50.5)], [5, pytest.approx(50.5)]]
    assert draw(summary, tmp_path / "out")


@pytest.mark.parametrize("drawn", [False, True])
def test_seeds_that_draw_their_examples_are_not_said_to_have_different_data(drawn: bool) -> None:
    row = Row("digits_mixer", {"train_per_class": "4"} if drawn else {})
    study = small(rows={"mixer": row}, reference="", seeds=2)
    result = {"test": {"accuracy": 0.5}, "seconds": 5.0, "epochs": 1.0, "steps": 9}
    found = [
        records.make("small", trial, 1, 99.0, {"result": result, "data": {"sha256": str(trial.seed)}})
        for trial in study.final_trials("mixer", "")
    ]
    assert summarize(progress_of(study, found)).data == {"mixer": set() if drawn else {"0", "1"}}


def test_seconds_until_a_loss_has_fallen_to_a_target() -> None:
    rows = {"mixer": Row("digits_mixer", curve=("mixer", 1), metric="mse")}
    study = small(rows=rows, reference="", seeds=1, axis="seconds", target=0.5)
    (trial,) = study.final_trials("mixer", "")
    evaluations = [{"step": n, "seconds": 10.0 * n, "mse": 2.0**-n} for n in range(5)]
    result = {"test": {"mse": 0.06}, "seconds": 50.0, "epochs": 1.0, "steps": 9, "evaluations": evaluations[1:]}
    summary = summarize(progress_of(study, [records.make("small", trial, 1, 99.0, {"result": result})]))
    assert summary.reached["mixer"] is not None and summary.reached["mixer"].mean == 10.0
    assert runner.is_better("mse", 0.1, 0.5) and not runner.is_better("accuracy", 0.1, 0.5)
    for metric in ("mse", "accuracy"):  # the first candidate may be the one that diverged
        assert runner.is_better(metric, 0.1, math.nan) and not runner.is_better(metric, math.nan, 0.1)


@pytest.mark.slow
def test_costs_and_seconds_to_a_target(fake: Path, tmp_path: Path) -> None:
    """Accuracies of a curve cross the target between 10 and 40 seconds; the inference rate is that of the model."""
    pytest.importorskip("matplotlib")
    rows = {
        f"{name}_{n}": Row(f"digits_{name}", {"budget.minutes": str(n / 60), "budget.epochs": "none"}, curve=(name, n))
        for name in ("mixer", "vit")
        for n in (10, 40)
    }
    study = small(rows=rows, compared="seconds", reference="", seeds=2, axis="seconds", target=60.0, inference_batch=8)
    found = []
    for name, row in rows.items():
        for trial in study.final_trials(name, ""):
            family, seconds = row.curve or ("", 0)
            accuracy = (0.5 if seconds == 10 else 0.7) - 0.3 * (family == "mixer") + 0.05 * trial.seed
            result = {"test": {"accuracy": accuracy}, "seconds": seconds, "epochs": 1.0, "steps": 9, "parameters": 7}
            result |= {"macs": 3_000_000, "peak_memory": 2**29, "evaluations": []}
            first = {"inference": {"rate_per_s": 5e4, "unit": "images"}} if name == "vit_10" and not trial.seed else {}
            found.append(records.make("small", trial, 1, 99.0, {"result": result, **first}))
    found[-1]["result"]["evaluations"] = [{"step": 3, "seconds": 20.0, "accuracy": 0.6}]
    summary = summarize(progress_of(study, found))
    assert summary.reached["mixer"] is None and summary.reached["vit"] is not None
    # Of the first seed 50 and 70 % by the logarithm: 20 s. Of the second 55 % after 10 s and 60 % after 20 s.
    assert summary.reached["vit"].mean == pytest.approx(20) and summary.reached["vit"].count == 2
    assert [line.rate for line in summary.lines] == [None, None, 5e4, 5e4]
    header, *lines = final_table(summary)
    assert header[1:5] == ["parameters", "M multiply-adds", "GiB of memory", "images/s of inference"]
    assert lines[2][:5] == ["vit_10", "7", "3", "0.50", "50,000"]
    write(summary, tmp_path)
    text = (tmp_path / "table.md").read_text(encoding="utf8")
    assert "seconds of training to 60 %" in text and "| mixer |  | 0 |" in text and "| vit | 20.00" in text
    figure = costs_figure(summary, summary.lines)
    assert [axis.get_xlabel() for axis in figure.axes[:5]] == [
        "seconds",
        "parameters",
        "multiply-adds",
        "memory of training, bytes",
        "images/s of inference",
    ]
    assert draw(summary, tmp_path)
    with pytest.raises(UserError, match="inference is measured alone"):
        small(inference_batch=8)


def test_pareto_front() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (2.0, 7.0), (4.0, 7.0), (8.0, 9.0)]
    assert pareto_front(points) == [(1.0, 5.0), (2.0, 7.0), (8.0, 9.0)]
    assert pareto_front(points, more=True) == [(8.0, 9.0)]
    assert seconds_to(3.0, []) is None and seconds_to(3.0, [(9.0, 4.0), (1.0, 3.5)]) == 1.0


def test_a_model_that_bench_cannot_measure(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "print('out of memory')"]
    monkeypatch.setattr(Runner, "bench_command", lambda self, folder, batch: command)
    rows = {"vit": Row("digits_vit", {"budget.minutes": "1", "budget.epochs": "none"})}
    progress, said = work(
        small(rows=rows, compared="seconds", reference="", seeds=1, inference_batch=8), tmp_path / "out"
    )
    assert any("inference was not measured: out of memory" in text for text in said)
    assert "result" in progress.records[0] and "inference" not in progress.records[0]


def test_what_a_start_has_seen_is_not_tuned_on() -> None:
    """A row may be tuned if the model that it starts from was trained on other data."""
    rates = grid({"optim.lr": ("1e-3", "2e-3")})
    with pytest.raises(UserError, match="b cannot be tuned, a has seen its examples"):
        small(rows={"a": Row("digits_vit"), "b": Row("digits_vit", {"init_from": "study:a"}, rates)}, reference="")
    small(rows={"a": Row("wiki_gmlp"), "b": Row("sst2", {"init_from": "study:a"}, rates)}, reference="")


def test_definitions_are_checked() -> None:
    with pytest.raises(UserError, match="unknown row"):
        small(reference="vti")
    with pytest.raises(UserError, match="no tuning"):
        small(tuning=None)
    with pytest.raises(UserError, match="unknown row of small 'techer'; did you mean 'teacher'"):
        small(rows={"a": Row("digits_vit", {"init_from": "study:techer"}), "teacher": Row("digits_vit")}, reference="")
    with pytest.raises(UserError, match=r"vit seed 0.*did you mean 'lr'"):
        _ = small(rows={"vit": Row("digits_vit", {"optim.lrr": "1"})}).trial("vit", "", 0, "final", {}, 0).run


def test_sweep_of_a_recipe() -> None:
    study = sweep("digits_mixer", {"optim.lr": ["1e-3", "2e-3"], "batch_size": ["50", "100"]}, {"compile": "false"}, {})
    assert study.tuning is not None and study.tuning.val_size == 150, "a tenth of 1,500"
    assert list(study.rows["digits_mixer"].candidates)[1] == "optim.lr=1e-3 batch_size=100"
    assert len(list(study.tuning_trials("digits_mixer"))) == 4 and study.compared == "epochs"
    assert list(sweep("cifar10_ablations", {}, {}, {}).rows)[:2] == ["linear", "layernorm"]
    other = sweep("digits_mixer", {"optim.lr": ["1e-3", "2e-3"]}, {"optim": "AdamW"}, {}, val_size=90)
    assert [trial.run.optim for trial in other.tuning_trials("digits_mixer")] == [AdamW(lr=1e-3), AdamW(lr=2e-3)]


def test_series_are_tuned_on_their_own_validation_split(tmp_path: Path) -> None:
    rows = [f"2016-07-{1 + hour // 24 % 28:02d} {hour % 24:02d}:00:00,{hour % 24},{hour % 7}" for hour in range(14_400)]
    (tmp_path / "ETTh1.csv").write_text("\n".join(["date,a,b", *rows]))
    places, choices = {"data.path": str(tmp_path)}, {"optim.lr": ["1e-3", "2e-3"]}
    study = sweep("ett_dlinear/etth1_96", choices, {}, places)
    assert study.tuning is not None and study.tuning.val_size == 0
    assert [trial.run.val_size for trial in study.tuning_trials("etth1_96")] == [0, 0]
    found = {"purpose": "tune", "result": {"validation": {"mse": 1.0}, "test": {"mse": 2.0}}}
    assert runner.scores(found) == {"mse": 1.0}


def test_a_spec_that_is_set_replaces_the_settings_of_the_study() -> None:
    rows = {"a": Row("digits_mixer", {"budget.epochs": "3"}, candidates={"slow": {"optim.lr": "1e-4"}})}
    options = {"budget": '{"kind": "Budget", "steps": 2}', "optim": "AdamW"}
    (trial,) = small(rows=rows, overrides={"budget.epochs": "7"}, options=options, seeds=1, reference="").final_trials(
        "a", "slow"
    )
    assert trial.run.budget == Budget(steps=2) and trial.run.optim == AdamW(lr=1e-4)
    with pytest.raises(UserError, match="both swept and set"):
        sweep("digits_mixer", {"optim.lr": ["1"]}, {"optim.lr": "2"}, {})
    with pytest.raises(UserError, match="did you mean 'lr'"):
        sweep("digits_mixer", {"optim.lrr": ["1"]}, {}, {})


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["study", *arguments])
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


def test_the_last_line_counts_failed_runs(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE", "if sets['seed'] == '1': write('metrics.jsonl', {}); sys.exit('error: nan')")
    code, out, err = run_command(capsys, "digits_mixer", "--seeds", "2")
    expected = "study digits_mixer: complete, 2 runs, of which 1 failed; --retry-failed repeats it"
    assert code == 0 and out.splitlines()[-1] == expected, err


def test_the_table_leaves_the_runs_of_another_process_alone(fake: Path, tmp_path: Path) -> None:
    at_work, own = tmp_path / "out" / runner.RUNNING / "final-vit--0", tmp_path / "out" / "runs" / "photos"
    for folder in (at_work, own):
        folder.mkdir(parents=True)
    work(small(), tmp_path / "out", minutes=0)
    assert at_work.is_dir()
    work(small(), tmp_path / "out")
    assert not at_work.exists(), "what was left by a process that was killed is removed"
    assert own.is_dir(), "a run of the user: the folder of a study may be the one that `allmlp train` works in"


def test_what_is_left_in_chosen_rows(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("digits", "--seeds", "1", "--rows", "vit")
    code, out, err = run_command(capsys, *few, "--minutes", "0")
    assert code == 0 and out == "study digits: 0 of 9 runs done, 9 left, 3 in the rows of --rows\n", err
    code, out, err = run_command(capsys, *few)
    assert code == 0, err
    assert out.splitlines()[-1] == "study digits: 3 of 9 runs done, 6 left, none in the rows of --rows"


@pytest.mark.slow
def test_command(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_command(capsys, "--list")
    assert code == 0 and out.startswith(min(studies()))
    sweeping = ("digits_mixer", "--sweep", "optim.lr=1e-3,2e-3", "--seeds", "2", "--set", "data.path=x")
    code, out, err = run_command(capsys, *sweeping, "--minutes", "0", "--val-size", "90")
    assert code == 0 and out == "study digits_mixer: 0 of 4 runs done, 4 left\n" and not err
    timed = ("--set", "budget.minutes=5", "--minutes", "1", "--val-size", "90")
    code, out, err = run_command(capsys, *sweeping, *timed)
    assert code == 0 and not err
    assert out.endswith("24:00; a run takes up to 6:00, longer than a portion: use --minutes 7 or more\n")
    code, out, err = run_command(capsys, *sweeping, "--val-size", "90")
    assert code == 0 and out.splitlines()[-1] == "study digits_mixer: complete, 4 runs" and err.count("started") == 4
    assert all(c["data.path"] == "x" for c in calls(fake)) and "50.50" in out and "50.50 ±" not in out
    assert (tmp_path / "studies" / "digits_mixer" / "table.md").is_file()
    code, out, _ = run_command(capsys, *sweeping[:-2], "--minutes", "0", "--val-size", "90")
    assert code == 0 and "complete" in out, "where data are is not part of a study"
    for wrong, words in (
        (("digit",), "did you mean 'digits'"),
        ((), "--list"),
        (("digits", "--sweep", "optim.lr=1,2"), "--sweep"),
        (("digits_vit", "--sweep", "optim.lr=1,,2"), "FIELD=A,B,C"),
        (("digits_vit", "--sweep", "optim.lr=1", "--sweep", "optim.lr=2"), "a field is swept twice"),
        (("digits_vit", "--val-size", "90"), "--sweep"),
        (("digits_vit", "--sweep", "optim.lr"), "--sweep takes FIELD=A,B,C with different values, not 'optim.lr'"),
        (("digits_vit", "--sweep", "seed=0,1"), "a study sets seed itself: --seeds N"),
        (("digits", "--set", "seed=1"), "a study sets seed itself: --seeds N"),
        (("digits_vit", "--set", "val_size=90"), "a study sets val_size itself: --val-size N"),
        (("cifar10", "--jobs", "2"), "one at a time"),
    ):
        code, _, err = run_command(capsys, *wrong)
        assert code == 2 and words in err and err.count("\n") == 1


@pytest.mark.parametrize("minutes", ["0", "1"])
def test_a_file_is_not_the_folder_of_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: str) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("{}\n")
    code, out, err = run_command(capsys, "digits", "--minutes", minutes, "--out", str(file))
    assert (code, out, err) == (2, "", f"error: {file} is not a folder: choose another --out\n")


@pytest.mark.slow
def test_a_real_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With real runs of two steps each, the final one in a process of its own: to import torch takes seconds."""

    def start(command: list[str], **options: Any) -> Any:
        return (subprocess.Popen if "val_size=0" in command else InProcess)(command, **options)

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))
    monkeypatch.chdir(tmp_path)
    arguments = ("digits_gmlp", "--sweep", "optim.lr=1e-3,3e-3", "--seeds", "1", "--set", "budget.steps=2")
    code, out, err = run_command(capsys, *arguments, "--device", "cpu", "--jobs", "3")
    assert code == 0 and "complete, 3 runs" in out, err
    *tuning, final = read(tmp_path / "studies" / "digits_gmlp")
    assert all(set(record["result"]) & {"validation", "test"} == {"validation"} for record in tuning)
    assert final["data"]["train"] == 1500 and final["result"]["test"]["accuracy"] >= 0
    assert tuning[0]["data"]["train"] == 1350 and final["result"]["steps"] == 2 and final["environment"]["torch"]
