"""Definition of a study: rows of recipes with overrides, candidate settings, seeds, and the common budget."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from allmlp.errors import UserError, lookup, plural
from allmlp.recipes import runs
from allmlp.spec import MAX_COUNT, Spec, override_all

if TYPE_CHECKING:
    from allmlp.run import Run  # which imports plug-ins, and these this module

Overrides = Mapping[str, str]
"""Fields and values as after --set."""
Compared = Literal["seconds", "epochs", "tokens"]
Purpose = Literal["tune", "final"]
Key = tuple[str, str, str, int]
"""Purpose, row, candidate and seed of a trial."""
PARENT = "study:"
"""An override study:ROW is the model trained by ROW with the same seed, study:ROW@0 that of seed 0."""
AT_THE_END: Overrides = {"eval_every": str(MAX_COUNT), "save_every": str(MAX_COUNT)}
"""A run is evaluated once, when it ends, unless evaluations choose its weights or its end; it is not resumed, so it
needs no checkpoints before.
"""


@dataclass(frozen=True)
class Row:
    """A line of the table: a recipe (NAME, or NAME/ROW of a table of runs) with overrides."""

    recipe: str
    overrides: Overrides = field(default_factory=dict)
    candidates: Mapping[str, Overrides] = field(default_factory=dict)
    """Candidate settings, chosen on validation, by name; nothing is tuned if empty."""
    reference: str = ""
    """The row to which this one is compared, if it differs from the study's."""
    like: str = ""
    """An earlier row whose chosen setting is used, instead of candidates of this row."""
    curve: tuple[str, float] | None = None
    """For rows that are points of curves: name of the curve, and position on the study's `axis`."""
    metric: str = ""
    """Metric of this row, if it differs from the study's."""
    seeds: int | None = None
    """Number of seeds of this row, if it differs from the study's."""
    anchor: float | None = None
    """A published value to compare with, in the unit of the metric."""
    source: str = ""
    """Where the anchor was published."""

    @property
    def starts(self) -> list[str]:
        """Rows whose models this one starts from."""
        return [parent(value, 0)[0] for value in self.overrides.values() if value.startswith(PARENT)]

    @property
    def needs(self) -> list[str]:
        return [*self.starts, *([self.like] if self.like else [])]


@dataclass(frozen=True)
class Tuning:
    """Settings for comparing the candidates."""

    val_size: int
    """Training examples held out; 0 for data with a validation split of their own."""
    seeds: int = 1
    overrides: Overrides = field(default_factory=dict)
    """Overrides of tuning runs only, for example a smaller budget."""
    compared: Compared | None = None
    """The budget that is equal for the candidates of a row, if it differs from the study's: where candidates do not
    differ in speed, equal epochs take equal seconds, and their runs can take place at the same time."""


@dataclass(frozen=True)
class Study:
    name: str
    rows: Mapping[str, Row]
    compared: Compared
    """The budget that is equal for all rows. Runs that compare seconds take place one at a time."""
    metric: str = ""
    """The metric to tune and to report; the first one of the evaluation if not given."""
    also: tuple[str, ...] = ()
    """Further metrics to report."""
    seeds: int = 3
    overrides: Overrides = field(default_factory=dict)
    """Overrides of all rows, applied before their own."""
    options: Overrides = field(default_factory=dict)
    """The user's overrides of all runs, applied after all others."""
    tuning: Tuning | None = None
    reference: str = ""
    """The row to which the others are compared, over equal seeds."""
    floor: str = "majority"
    """Metric of a trivial baseline, which any row must exceed."""
    axis: str = ""
    """Axis over which the curves of the rows are drawn; if empty, rows are drawn below each other."""
    target: float | None = None
    """A value of the metric, as in the table; the seconds of training until each curve reaches it are reported."""
    inference_batch: int | None = None
    """Batch size at which the inference rate of every model is measured, after its first run; None to skip this."""

    def __post_init__(self) -> None:
        for reference in self.references:
            lookup(reference, self.rows, f"row of {self.name}")
        if self.inference_batch and self.compared != "seconds":
            raise UserError(f"study {self.name}: inference is measured alone, where runs that compare seconds are")
        earlier: dict[str, Row] = {}
        for name, row in self.rows.items():
            if row.candidates and self.tuning is None:
                raise UserError(f"study {self.name}: row {name} has candidates, but the study has no tuning")
            if row.like and lookup(row.like, earlier, f"earlier row of {self.name}").candidates and row.candidates:
                raise UserError(f"study {self.name}: row {name} has both candidates and those of {row.like}")
            earlier[name] = row
        for name, row in self.rows.items():
            for start in row.starts:
                lookup(start, self.rows, f"row of {self.name}")
                if row.candidates and self.data_of(start) == self.data_of(name):
                    raise UserError(f"study {self.name}: row {name} cannot be tuned, {start} has seen its examples")

    def is_timed(self, purpose: Purpose) -> bool:
        """Whether runs of this purpose compare seconds."""
        compared = self.tuning.compared if self.tuning and purpose == "tune" else None
        return (compared or self.compared) == "seconds"

    def check_jobs(self) -> None:
        """Raise UserError unless runs can take place at the same time without doing less work in their budget."""
        if self.is_timed("final") and (not self.tuning or self.is_timed("tune")):
            raise UserError(f"study {self.name} compares seconds: its runs take place one at a time, without --jobs")
        for row in self.rows:
            final = self.final_trials(row, next(iter(self.candidates(row))))
            for trial in (*itertools.islice(self.tuning_trials(row), 1), *itertools.islice(final, 1)):
                budget = trial.run.budget
                if not self.is_timed(trial.purpose) and budget.epochs is None and budget.steps is None:
                    raise UserError(
                        f"{trial.label} ends after {plural(budget.minutes or 0, 'minute', form='g')}, in which it does "
                        "less beside other runs: set budget.epochs, or leave out --jobs"
                    )

    @property
    def parents(self) -> set[tuple[str, int]]:
        """Rows and seeds whose models other rows start from."""
        finals = (self.final_trials(row, next(iter(self.candidates(row)))) for row in self.rows)
        return {needed for trial in itertools.chain.from_iterable(finals) for needed in trial.parents}

    def with_needed(self, patterns: Iterable[str]) -> set[str]:
        """Rows whose names match, and the rows that they start from or are tuned like."""
        names: set[str] = set()
        for pattern in patterns:
            matching = fnmatch.filter(self.rows, pattern)
            if not matching:
                raise UserError(f"study {self.name} has no row {pattern!r}, but {', '.join(self.rows)}")
            names.update(matching)
        missing = names
        while missing:
            missing = {needed for name in missing for needed in self.rows[name].needs} - names
            names |= missing
        return names

    def data_of(self, row: str) -> Spec:
        return self.trial(row, next(iter(self.candidates(row))), 0, "final", {}, 0).run.data

    def reference_of(self, row: str) -> str:
        return self.rows[row].reference or self.reference

    @property
    def references(self) -> list[str]:
        """All rows to which others are compared."""
        return [name for name in dict.fromkeys(map(self.reference_of, self.rows)) if name]

    def metric_of(self, row: str) -> str:
        return self.rows[row].metric or self.metric

    def candidates(self, row: str) -> Mapping[str, Overrides]:
        one = self.rows[row]
        return (self.rows[one.like] if one.like else one).candidates or {"": {}}

    def tuning_trials(self, row: str) -> Iterator[Trial]:
        """The runs that compare the candidates of a row; empty if there is only one candidate."""
        if self.tuning is None or len(self.rows[row].candidates) < 2:
            return
        for candidate, seed in itertools.product(self.rows[row].candidates, range(self.tuning.seeds)):
            yield self.trial(row, candidate, seed, "tune", self.tuning.overrides, self.tuning.val_size)

    def final_trials(self, row: str, candidate: str) -> Iterator[Trial]:
        for seed in range(self.rows[row].seeds or self.seeds):
            yield self.trial(row, candidate, seed, "final", {}, 0)

    def trial(
        self, row: str, candidate: str, seed: int, purpose: Purpose, overrides: Overrides, val_size: int
    ) -> Trial:
        one, tried = self.rows[row], self.candidates(row)[candidate]
        merged: dict[str, str] = {}
        for part in (AT_THE_END, self.overrides, one.overrides, tried, overrides, self.options):
            # If a spec is replaced, earlier settings of its fields are dropped, but not those that are compared.
            replaced = tuple(f"{field}." for field in part)
            merged = {
                field: value for field, value in merged.items() if field in tried or not field.startswith(replaced)
            }
            merged |= part
        merged |= {"val_size": str(val_size), "seed": str(seed)}
        trial = Trial(row, candidate, seed, purpose, one.recipe, merged)
        if (trial.run.keep_best or trial.run.patience) and merged["eval_every"] == AT_THE_END["eval_every"]:
            evaluated = {field: value for field, value in merged.items() if field != "eval_every"}
            return dataclasses.replace(trial, overrides=evaluated)
        return trial


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    row: str
    candidate: str
    seed: int
    purpose: Purpose
    recipe: str
    overrides: Overrides

    @property
    def key(self) -> Key:
        return self.purpose, self.row, self.candidate, self.seed

    @property
    def label(self) -> str:
        words = [self.row, self.candidate, f"seed {self.seed}", "on validation" if self.purpose == "tune" else ""]
        return " ".join(filter(None, words))

    @property
    def parents(self) -> list[tuple[str, int]]:
        """Rows and seeds whose models this run starts from."""
        return [parent(value, self.seed) for value in self.overrides.values() if value.startswith(PARENT)]

    @cached_property
    def run(self) -> Run:
        table = runs(self.recipe)
        if len(table) != 1:
            raise UserError(f"recipe {self.recipe} is a table: name one row, such as {next(iter(table))}")
        try:
            return override_all(next(iter(table.values())), self.overrides)
        except UserError as reason:
            raise UserError(f"{self.label}: {reason}") from None


def parent(value: str, seed: int) -> tuple[str, int]:
    """Row and seed of study:ROW or study:ROW@SEED."""
    row, at, number = value.removeprefix(PARENT).partition("@")
    return row, int(number) if at else seed


def grid(choices: Mapping[str, Iterable[str]]) -> dict[str, Overrides]:
    """Every combination of values, named by its overrides: grid({"optim.lr": ("1e-3", "2e-3")})."""
    named = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    return {" ".join(f"{field}={value}" for field, value in one.items()): one for one in named}


def sweep(
    recipe: str,
    choices: Mapping[str, Iterable[str]],
    options: Overrides,
    locations: Overrides,
    val_size: int | None = None,
) -> Study:
    """A study of one recipe, or of every row of a table: tune on validation, then evaluate seeds on test.

    Without `val_size`, a tenth of the training examples is held out, for which data are loaded from `locations`; time
    series have a validation split.
    """
    if both := choices.keys() & options.keys():
        raise UserError(f"{sorted(both)[0]} is both swept and set: use either --sweep or --set")
    table = {name: override_all(run, options) for name, run in runs(recipe).items()}
    first = next(iter(table.values()))
    candidates = grid(choices) if choices else {}
    for run, one in itertools.product(table.values(), candidates.values()):
        override_all(run, one)  # wrong fields or values are reported before data are loaded
    val_size = val_size or first.val_size
    if candidates and not val_size:
        dataset = override_all(first, locations).data.load()
        if dataset.split_by_time and dataset.validation is None:
            raise UserError(f"{recipe} has no validation split to choose on: set data.val_fraction")
        val_size = 0 if dataset.split_by_time else max(len(dataset.train) // 10, 1)
    tuning = Tuning(val_size or 0) if candidates else None
    rows = {name.rpartition("/")[2]: Row(name, candidates=candidates) for name in table}
    compared: Compared = "seconds" if any(run.budget.minutes for run in table.values()) else "epochs"
    return Study(recipe.replace("/", "_"), rows, compared, tuning=tuning, options=options)
