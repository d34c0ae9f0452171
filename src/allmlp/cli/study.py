"""allmlp study."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allmlp.cli.app import (
    app,
    assignments,
    cell,
    complete_recipe,
    console,
    examples,
    next_command,
    plain_table,
    print_described,
    width,
)
from allmlp.errors import UserError, did_you_mean, plural

if TYPE_CHECKING:
    from allmlp.study.definition import Overrides, Study, Trial
    from allmlp.study.runner import Progress, Runner
    from allmlp.study.summary import Summary

LOCATIONS = ("path", "train", "val", "test", "cache", "download", "tokenizer.path")
"""Fields of data for their location on this machine, which are not part of a study."""
SWEEP_USAGE = "--sweep takes FIELD=A,B,C with different values"
OF_THE_STUDY = {"seed": "--seeds N trains with the seeds 0 to N - 1", "val_size": "--val-size N is for --sweep"}
"""Fields that a study sets in each run, and how its runs differ in them."""


@app.command(
    epilog=examples(
        "allmlp study --list",
        "allmlp study digits",
        "allmlp study cifar10 --minutes 9 --set data.path=data/cifar10",
        "allmlp study cifar10_mixer --sweep optim.lr=1e-3,2e-3,4e-3 --seeds 3",
        "allmlp study cifar10 --minutes 0    # only write the table and figure of the finished runs",
    )
)
def study(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A study from `allmlp study --list`, or a recipe from `allmlp list recipes`.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="For a recipe: values to choose from on validation, FIELD=A,B,C. Repeat it for a grid."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds evaluated on test [default: 3].", min=1)] = None,
    val_size: Annotated[
        int | None, typer.Option(help="With --sweep: training examples to hold out [default: 10 %].", min=1)
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Any field, for all runs: compile=false.")
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option(help="Run only these rows and the rows they start from: 'gmlp*'. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; studies/NAME if not given.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Start only runs that will end within this time.", min=0)
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at the same time; those that compare seconds run alone.", min=1)] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Repeat runs that have failed.")] = False,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Keep the model of every final run, in the folder models/ROW-SEED.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the studies.")] = False,
) -> None:
    """Run a table of runs with seeds: tune on validation, evaluate once on test. Can be stopped and continued.

    Every run is a process of its own and leaves one line in records.jsonl; the same command continues where it stopped,
    also on another machine that has this file. The table (table.md, table.csv) and the figure are made from it.
    """
    if list_all:
        list_studies()
        return
    if name is None:
        raise UserError("name a study or a recipe; `allmlp study --list` shows the studies")

    from allmlp.study import records
    from allmlp.study.runner import Runner

    chosen = assignments(overrides or [])
    places = {f"data.{field}" for field in LOCATIONS}
    locations = {field: value for field, value in chosen.items() if field in places}
    options = {field: value for field, value in chosen.items() if field not in places}
    made = make_study(name, sweep or [], seeds, options, locations, val_size)
    made.with_needed(rows or ())  # a row that does not exist is refused before there is a folder
    folder = out or Path("studies") / made.name
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder: choose another --out")
    terminal = sys.stderr.isatty()
    # Tables can be looked at while another process works on the study.
    with nullcontext() if minutes == 0 else records.locked(folder):
        options = (device, jobs, minutes, retry_failed, tuple(rows or ()), keep_models)
        runner = Runner(made, folder, locations, *options, say, show if terminal else None)
        try:
            progress = runner.run()
        except KeyboardInterrupt:
            say(f"stopped; nothing that is recorded is lost. Continue with the same command: {repeat()}")
            raise
        report(progress, runner)


def make_study(
    name: str, sweeps: list[str], seeds: int | None, options: Overrides, locations: Overrides, val_size: int | None
) -> Study:
    import dataclasses

    from allmlp.recipes import recipes
    from allmlp.studies import studies
    from allmlp.study.definition import sweep

    refuse_own(options)
    if name in studies():
        if sweeps or val_size:
            raise UserError(f"{name} is a study with its own settings: --sweep and --val-size are for recipes")
        study = dataclasses.replace(studies()[name].make(), options=options)
    elif name.partition("/")[0] in recipes():
        if val_size and not sweeps:
            raise UserError("--val-size holds out examples for --sweep: without it nothing is chosen on validation")
        choices = {field: split_values(values) for field, values in assignments(sweeps, SWEEP_USAGE).items()}
        refuse_own(choices)
        if len(choices) < len(sweeps):
            raise UserError("a field is swept twice: write --sweep FIELD=VALUE,VALUE once, with all its values")
        study = sweep(name, choices, options, locations, val_size)
    else:
        hint = did_you_mean(name, [*studies(), *recipes()])
        raise UserError(
            f"{name!r} is neither a study (`allmlp study --list`) nor a recipe (`allmlp list recipes`){hint}"
        )
    return dataclasses.replace(study, seeds=seeds or study.seeds)


def split_values(text: str) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    if not all(values) or len(set(values)) < len(values):
        raise UserError(f"{SWEEP_USAGE}, not {text!r}")
    return values


def refuse_own(fields: Iterable[str]) -> None:
    """The study would replace these values by its own."""
    for field in fields:
        if field in OF_THE_STUDY:
            raise UserError(f"a study sets {field} itself: {OF_THE_STUDY[field]}")


def list_studies() -> None:
    from allmlp.studies import studies

    print_described({name: declared.text for name, declared in studies().items()}, width())


def say(text: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{text}", file=sys.stderr, flush=True)


def show(line: str) -> None:
    print(f"\r\x1b[K  {line[:90]}", end="", file=sys.stderr, flush=True)


def repeat() -> str:
    import shlex

    return shlex.join(["allmlp", *sys.argv[1:]])


def report(progress: Progress, runner: Runner) -> None:
    """Write the tables and the figure, print them with notes, and say in a last line what is left."""
    from allmlp.study.figure import draw
    from allmlp.study.summary import at_the_edge, summarize, write

    summary = summarize(progress)
    if progress.done:
        write(summary, runner.out)
        drawn = draw(summary, runner.out)
        print_tables(summary)
        print(f"table.md, table.csv{' and figure.png, figure.svg' if drawn else ''} in {runner.out}")
    for text in at_the_edge(progress):
        print(f"note: {text}")
    for text in progress.stale:
        print(f"stale, not used, runs again: {text} changed")
    for row in [row for row, checksums in summary.data.items() if len(checksums) > 1]:
        print(f"warning: the final runs of {row} had different data (data.sha256 in records.jsonl)")
    for row, reason in {**progress.hopeless, **runner.unstarted}.items():
        print(f"{row}: {reason}")
    left = [*progress.ready, *progress.later]
    total = len(progress.done) + len(left)
    if left:
        done = f"study {summary.study.name}: {len(progress.done)} of {total} runs done, {len(left)} left"
        print(f"{done}{describe_left(left, progress, runner)}")
        return
    failed = sum("failed" in record for record in progress.done.values())
    hint = f", of which {failed:,} failed; --retry-failed repeats {'it' if failed == 1 else 'them'}"
    print(f"study {summary.study.name}: complete, {plural(total, 'run')}{hint if failed else ''}")
    next_command("study", "--list")


def describe_left(left: list[Trial], progress: Progress, runner: Runner) -> str:
    """The end of the last line: how many runs are in the chosen rows, how long they take, how to continue."""
    from allmlp.log import format_duration
    from allmlp.study.runner import portions

    chosen = [trial for trial in left if trial.row in runner.wanted]
    if not chosen:
        return ", none in the rows of --rows"
    text = f", {len(chosen)} in the rows of --rows" if len(chosen) < len(left) else ""
    durations = [(runner.jobs_for(trial), runner.expected_seconds(trial, progress)) for trial in chosen]
    timed = [(jobs, duration) for jobs, duration in durations if duration is not None]
    if len(timed) == len(durations):
        text += f", about {format_duration(sum(duration / jobs for jobs, duration in timed))}"
        longest = max(duration for _, duration in timed)
        if runner.minutes and longest > 60 * runner.minutes:
            reason = f"a run takes up to {format_duration(longest)}, longer than a portion"
            return f"{text}; {reason}: use --minutes {int(longest / 60) + 1} or more"
        if runner.minutes:
            by_jobs = {jobs: [duration for others, duration in timed if others == jobs] for jobs, _ in timed}
            count = sum(portions(seconds, 60 * runner.minutes, jobs) for jobs, seconds in by_jobs.items())
            text += f" in {plural(count, 'portion')} of {plural(runner.minutes, 'minute', form='g')}"
    return text if runner.minutes == 0 else f"{text}; continue with: {repeat()}"


def sources(summary: Summary) -> dict[str, list[str]]:
    """Where the anchors come from -> the rows that have them."""
    rows: dict[str, list[str]] = {}
    for line in summary.lines:
        if line.source:
            rows.setdefault(line.source, []).append(line.row)
    return rows


def fit(table: list[list[str]], width: int) -> list[list[str]]:
    """Leave out columns, which table.md has, where the table would be wider than the terminal."""
    for name in ("GiB", "M MACs", "floor"):
        columns = list(zip(*table, strict=True))
        if sum(max(map(len, column)) + 2 for column in columns) - 2 > width:
            table = [list(row) for row in zip(*(column for column in columns if column[0] != name), strict=True)]
    return table


def print_tables(summary: Summary) -> None:
    from allmlp.study.summary import final_table, target_table, tuning_table

    tables = {"Chosen on validation": tuning_table(summary)} if summary.tuning else {}
    tables[f"On test, equal {summary.study.compared}; mean ± half a 95 % interval"] = final_table(summary, brief=True)
    if summary.reached:
        tables["Between the durations of the rows by the logarithm of the seconds"] = target_table(summary)
    for title, table in tables.items():
        print(title)
        header, *rows = fit(table, console().width)
        words = 2 if "setting" in header else 1
        view = plain_table(header[:words], header[words:])
        for row in rows:
            view.add_row(*map(cell, row))
        console().print(view)
        print()
    for source, rows in sources(summary).items():
        print(f"anchor of {', '.join(rows)}: {source}")
