"""The papers' tables again: what they print, and beside it what this library counts and has measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from allmlp.errors import UserError, did_you_mean
from allmlp.layers.stem import SinusoidalPositions
from allmlp.models.catalog import matching, rows
from allmlp.models.cost import Cost, measure
from allmlp.models.encoder import Encoder
from allmlp.models.zoo import preset
from allmlp.plan.failures import INTERRUPTIONS
from allmlp.plan.forecast import Forecast, forecast
from allmlp.plan.hardware import GPUS, Speed, speeds
from allmlp.plan.jobs import job
from allmlp.plan.time import training_flops
from allmlp.report import measured, published_language, published_vision
from allmlp.report.measured import Measured
from allmlp.report.published import Column, Published, Row

NOT_MEASURED = "not measured"
NOT_HERE = "no model"
NO_RECIPE = "no recipe"
HERE = "Measured here"
JFT = {"samples": 300e6, "epochs": 14.0}
"""How Mixer-H/14 was pre-trained: no recipe, since nobody else has the data."""


class Answer(NamedTuple):
    """What stands beside a printed figure."""

    text: str
    value: float | None = None


class Line(NamedTuple):
    section: str
    label: str
    model: str
    printed: tuple[str | None, ...]
    """For each column; None where the paper has no such column."""
    here: tuple[Answer | None, ...]
    """None where a column only describes."""


class Table(NamedTuple):
    name: str
    title: str
    source: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


class Setting(NamedTuple):
    """What the costs of training are computed for."""

    gpus: int = 8
    gpu: str = "h200"


def published() -> dict[str, Published]:
    return {table.name: table for table in (*published_vision.TABLES, *published_language.TABLES)}


def names() -> list[str]:
    return [*published(), "gpu_hours"]


def tables(pattern: str = "*", paper: str | None = None, setting: Setting = Setting()) -> list[Table]:
    """The tables whose names match a shell pattern or contain a word, of one paper or of all."""
    known = [name for name in names() if paper is None or paper in papers(name)]
    if not known:
        raise UserError(f"no table is of paper {paper!r}: they are 000 to 004")
    chosen = matching(known, pattern)
    if not chosen:
        raise UserError(f"no table matches {pattern!r}{did_you_mean(pattern, known)}; there are {', '.join(known)}")
    return [gpu_hours(setting) if name == "gpu_hours" else answered(published()[name], setting) for name in chosen]


def papers(name: str) -> list[str]:
    """The numbers of the papers that have it, as its source names them."""
    return re.findall(r"\b00\d\b", published()[name].source) if name in published() else []


def answered(table: Published, setting: Setting) -> Table:
    lines = [
        Line(row.section, row.label, row.model, spread(table.columns, row.cells), answers(table, row, setting))
        for row in table.rows
    ]
    known = {row.label for row in table.rows}
    for label in dict.fromkeys(entry.row for entry in entries(table.name) if entry.row not in known):
        row = Row(label, section=HERE)
        lines.append(Line(HERE, label, "", spread(table.columns, ()), answers(table, row, setting)))
    return Table(table.name, table.title, table.source, table.columns, tuple(lines), table.notes)


def spread(columns: tuple[Column, ...], cells: tuple[str, ...]) -> tuple[str | None, ...]:
    """Cells at their columns; a row of our own has none."""
    waiting = iter(cells)
    return tuple(next(waiting, "") if column.printed else None for column in columns)


def answers(table: Published, row: Row, setting: Setting) -> tuple[Answer | None, ...]:
    found = {entry.column: entry.text for entry in entries(table.name) if entry.row == row.label}
    return tuple(answer(column, row, found, setting) for column in table.columns)


def answer(column: Column, row: Row, found: dict[str, str], setting: Setting) -> Answer | None:
    if column.name in found:
        return Answer(found[column.name], float(found[column.name].replace(",", "")))
    if not column.answer:
        return None
    if column.answer == "measured":
        return Answer(NOT_MEASURED)
    if row.section == HERE:
        return Answer("")
    kind, *options = column.answer.split()
    return ANSWERS[kind](row, setting, *options)


@cache
def entries(table: str) -> tuple[Measured, ...]:
    """What was measured for a table."""
    found = (Measured(**entry) for entry in json.loads(measured.FILE.read_text(encoding="utf8")))
    return tuple(entry for entry in found if table in entry.tables)


# --- what the library counts -----------------------------------------------------------------------------


@cache
def cost_of(model: str) -> Cost:
    """NAME; NAME@SIZE, the same at another image size or length; NAME/PATCH, with other patches."""
    name, size, patch = re.fullmatch(r"([^@/]+)(?:@(\d+))?(?:/(\d+))?", model).groups()  # type: ignore[union-attr]
    spec = preset(name).spec
    if size:
        spec = spec.configure(**{"image" if spec.image_size else "length": int(size)})
    return measure(spec.configure(patch=int(patch)) if patch else spec)


@cache
def counts() -> dict[str, tuple[int, int]]:
    """Parameters and multiply-adds of the zoo: those of other packages too, without importing them."""
    return {row.name: (row.parameters, row.macs) for row in rows()}


def parameters(row: Row, setting: Setting) -> Answer:
    if not row.model:
        return Answer(NOT_HERE)
    printed = None if row.model.startswith("hf:") else preset(re.split("[@/]", row.model)[0]).published
    if printed is not None and not printed.head:
        cost = cost_of(row.model)
        count = cost.parameters - cost.head_parameters
    else:
        count = counts()[row.model][0] if row.model in counts() else cost_of(row.model).parameters
    return Answer(f"{count / 1e6:,.2f}", count / 1e6)


def macs(row: Row, setting: Setting) -> Answer:
    if not row.model:
        return Answer(NOT_HERE)
    count = counts()[row.model][1] if row.model in counts() else cost_of(row.model).macs
    return Answer(f"{count / 1e9:,.2f}", count / 1e9)


def flops(row: Row, setting: Setting) -> Answer:
    """Of one forward pass, the output layer where something is asked: a third of a training step."""
    value = training_flops(preset(row.model).spec) / 3 / 1e9
    return Answer(f"{value:,.1f}", value)


def token_macs(row: Row, setting: Setting) -> Answer:
    """Of what mixes tokens in one block: the token slot, or the gate inside the channel MLP."""
    if not row.model:
        return Answer(NOT_HERE)
    spec = preset(row.model).spec
    assert isinstance(spec, Encoder), "the table has encoders only"
    mixing = [part.macs for part in measure(spec).parts if part.name.startswith("blocks.token") or "inner" in part.name]
    value = sum(mixing) / spec.depth / 1e6
    return Answer(f"{value:,.1f}", value)


def position(row: Row, setting: Setting, channel: str) -> Answer:
    waves = SinusoidalPositions()(torch.zeros(1, 4, 4, dtype=torch.float64), 0)[0]
    value = float(waves[int(row.label.split()[-1]), int(channel)])
    return Answer(f"{value:.4f}", value)


def interruptions(row: Row, setting: Setting) -> Answer:
    value = INTERRUPTIONS * float(row.cells[1]) / 100
    return Answer(f"{value:.0f}", value)


def hours_of(row: Row, setting: Setting) -> Answer:
    if not row.recipe:
        return Answer(NO_RECIPE if row.model else NOT_HERE)
    value = alone(costed(row.recipe, setting))
    return Answer(f"{value:,.0f}", value)


# --- how fast it ran -------------------------------------------------------------------------------------------


def quickest(row: Row, setting: Setting, task: str, batch: str) -> Speed | None:
    found = [
        speed
        for speed in speeds()
        if (speed.model, speed.gpu, speed.task) == (row.model, setting.gpu, task) and batch in ("", str(speed.batch))
    ]
    return max(found, key=lambda speed: speed.rate, default=None)


def speed(row: Row, setting: Setting, task: str, batch: str = "") -> Answer:
    """Images or tokens per second of its quickest batch, or of one."""
    found = quickest(row, setting, task, batch)
    if found is None:
        return Answer(NOT_MEASURED if row.model else NOT_HERE)
    return Answer(f"{found.rate:,.0f}", found.rate)


def memory(row: Row, setting: Setting, task: str, batch: str = "") -> Answer:
    """At that batch: MB in inference, as ResMLP's paper has it, GiB in training."""
    found = quickest(row, setting, task, batch)
    if found is None or found.memory is None:
        return Answer(NOT_MEASURED if row.model else NOT_HERE)
    value = found.memory / (1e6 if task == "inference" else 2**30)
    return Answer(f"{value:,.1f}", value)


ANSWERS: dict[str, Callable[..., Answer]] = {
    "parameters": parameters,
    "macs": macs,
    "flops": flops,
    "token_macs": token_macs,
    "position": position,
    "interruptions": interruptions,
    "gpu_hours": hours_of,
    "speed": speed,
    "memory": memory,
}


# --- what a published recipe would cost --------------------------------------------------------------------

RECIPES = (
    "imagenet_mixer_b16",
    "imagenet_mixer_l16",
    "imagenet21k_mixer_b16",
    "imagenet21k_mixer_l16",
    "mixer_h14",
    "imagenet_resmlp_s12",
    "imagenet_resmlp_s24",
    "imagenet_gmlp_ti16",
    "imagenet_gmlp_s16",
    "imagenet_gmlp_b16",
    "mlm_table3/bert",
    "mlm_table3/mixer",
    "mlm_table3/split",
    "mlm_gmlp_l18",
    "mlm_gmlp_base",
    "mlm_amlp_base",
    "mlm_bert_base",
)
"""As published; `mixer_h14` is JFT-300M. Distillation and DINO also compute a teacher, which is not counted."""


@cache
def costed(recipe: str, setting: Setting) -> Forecast:
    return forecast(job(recipe, gpus=setting.gpus, gpu=setting.gpu, **(JFT if recipe == "mixer_h14" else {})), runs=2)


def operations(made: Forecast) -> float:
    """Useful ones of the whole run."""
    return made.chosen.step.flops * made.job.steps


def alone(made: Forecast) -> float:
    """Hours of one GPU, for the useful operations alone."""
    return operations(made) / (made.share * made.job.card.peak) / 3600


def gpu_hours(setting: Setting) -> Table:
    """Every published recipe on N GPUs, at the share of peak that training its family has reached."""
    columns = (
        Column("TPUv3 core-days"),
        Column("samples M", "plan", printed=False),
        Column("EFLOP", "plan", printed=False),
        Column("share", "plan", printed=False),
        Column("GPU-hours", "plan", printed=False),
        Column(f"hours on {setting.gpus}", "plan", printed=False),
    )
    core_days = {row.recipe: row.cells[-1] for row in published()["mixer_table2"].rows}
    lines, sources = [], {}
    for recipe in RECIPES:
        made = costed(recipe, setting)
        seen, work = made.job.samples * made.job.epochs, operations(made)
        sources[made.shared_from] = f"{made.share:.1%} by {made.shared_from}"
        own = (
            Answer(f"{seen / 1e6:,.0f}", seen / 1e6),
            Answer(f"{work / 1e18:,.1f}", work / 1e18),
            Answer(f"{made.share:.1%}", made.share),
            Answer(f"{alone(made):,.0f}", alone(made)),
            Answer(f"{made.expected / 3600:,.1f}", made.expected / 3600),
        )
        lines.append(Line("", recipe, recipe, (core_days.get(recipe, ""), *[None] * 5), (None, *own)))
    notes = (
        f"GPU-hours are those of the useful operations alone; hours on {setting.gpus} come with blocks computed again "
        "where memory is short, network, checkpoints and failures, as `allmlp plan RECIPE` says. ResMLP's recipes are "
        "in float32, which runs as TF32 at half the peak.",
        f"Share of the published peak, as measured on the nearest model: {'; '.join(sources.values())}. Small models "
        "of small pictures are held up by launching kernels: a large one reaches more (`allmlp plan --share`).",
    )
    title = f"What the published recipes would cost on {GPUS[setting.gpu].name}"
    return Table("gpu_hours", title, "recipes of this library", columns, tuple(lines), notes)
