"""Compute src/allmlp/report/tables.json and src/allmlp/plan/speeds.json from the papers, the models and docs/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from allmlp.files import write_text_atomically
from allmlp.layers import Attention, ChannelMlp
from allmlp.layers.stem import SinusoidalPositionsLayer
from allmlp.models.catalog import read_catalog
from allmlp.models.cost import Cost, measure
from allmlp.models.encoder import Encoder
from allmlp.models.model import ModelSpec
from allmlp.models.zoo import preset
from allmlp.plan import hardware
from allmlp.plan.estimate import Estimate, estimate
from allmlp.plan.hardware import GPUS, Speed
from allmlp.plan.jobs import job
from allmlp.plan.time import training_flops
from allmlp.report import tables as package
from allmlp.report.tables import (
    EAGER,
    MEASURED_HERE,
    NO_MODEL,
    NO_RECIPE,
    NOT_MEASURED,
    Figure,
    PaperColumn,
    PaperRow,
    PaperTable,
)
from allmlp.spec import override
from paper_tables import language, vision
from paper_tables.measurements import LoggedFigure, attempts, measurements, speeds
from paper_tables.published import Cell, PublishedColumn, PublishedRow, PublishedTable, cell_of

DOCS = Path(__file__).parents[2]
GPU, NUM_GPUS = "h200", 8
"""Speeds are those measured on this GPU; costs of training are for so many of them."""
JFT = {"samples": 300e6, "epochs": 14.0}
"""Pre-training of Mixer-H/14. It has no recipe because JFT-300M is not public."""
RECIPES = (
    "imagenet_mixer_b16",
    "imagenet_mixer_l16",
    "imagenet21k_mixer_b16",
    "imagenet21k_mixer_l16",
    "mixer_h14",
    "imagenet_resmlp_s12",
    "imagenet_resmlp_s24",
    "imagenet_resmlp_s36",
    "imagenet21k_resmlp_b24_8",
    "imagenet_deit/s16",
    "imagenet_deit/b16",
    "imagenet_gmlp_ti16",
    "imagenet_gmlp_s16",
    "imagenet_gmlp_b16",
    "mlm_table3/bert",
    "mlm_table3/mixer",
    "mlm_table3/split",
    "mlm_table4/gmlp_l18",
    "mlm_table4/gmlp_l144",
    "mlm_table4/transformer_l48",
    "mlm_table6/gmlp_base",
    "mlm_table6/amlp_base",
    "mlm_table6/bert_base",
    "mlm_table6/gmlp_large",
    "mlm_table6/amlp_large",
    "mlm_table6/bert_large",
    "mlm_table6/gmlp_xlarge",
)
"""The rows of gpu_hours; `mixer_h14` is JFT-300M. Distillation and DINO are absent: their teacher is not counted."""
REASONS = dict.fromkeys(
    ("speed", "memory"),
    "no record of this model and batch size; on a GPU, `python -m paper_tables.bench {table}` writes it",
)
"""By source: why a figure that a GPU could measure is missing."""
FORMATS = {
    "measured": ".2f",
    "parameters": ",.2f",
    "macs": ",.2f",
    "flops": ",.1f",
    "token_macs": ",.1f",
    "position": ".4f",
    "gpu_hours": ",.0f",
    "size": ",.0f",
    "speed": ",.0f",
    "memory": ",.1f",
}


def published() -> dict[str, PublishedTable]:
    return {table.name: table for table in (*vision.TABLES, *language.TABLES)}


def generate(costs: Iterable[str] = RECIPES) -> list[PaperTable]:
    """All tables; the last one has the costs of these recipes."""
    measured = tuple(measurements(DOCS))
    return [*(complete(table, measured) for table in published().values()), gpu_hours(costs)]


def complete(table: PublishedTable, measured: Iterable[LoggedFigure]) -> PaperTable:
    """Add our figures to the published ones, and rows for measurements of models that the paper does not have."""
    found = {(one.row, one.column): one.value for one in measured if table.name in one.tables}
    labels = {row.label for row in table.rows}
    added = dict.fromkeys(row for row, _ in found if row not in labels)
    made = []
    for row in (*table.rows, *(PublishedRow(label, section=MEASURED_HERE) for label in added)):
        cells = iter(row.cells)
        texts = tuple(next(cells, "") if column.published else "" for column in table.columns)
        ours = tuple(figure(column, row, found) for column in table.columns)
        eager = tuple(column.name for column in table.columns if is_eager(cell_of(column, row)))
        made.append(PaperRow(row.section, row.label, row.model, texts, ours, eager))
    notes = (*table.notes, *reasons(table, made))
    columns = tuple(
        PaperColumn(column.name, column.published, column.format or FORMATS.get(column.source.partition(" ")[0], ""))
        for column in table.columns
    )
    return PaperTable(table.name, tuple(table.papers.split()), table.title, table.source, columns, tuple(made), notes)


def reasons(table: PublishedTable, rows: Iterable[PaperRow]) -> Iterator[str]:
    """Why columns have rows of the paper without a figure of ours, columns of one reason together; what the mark of
    figures measured in eager mode means.
    """
    printed = list(zip(table.rows, rows))  # rows that are measured here come last
    found: dict[str, list[str]] = {}
    for number, column in enumerate(table.columns):
        missing = [row for row, made in printed if made.ours[number] == NOT_MEASURED]
        tried = {row.label: failures().get(cell) for row in missing if (cell := cell_of(column, row))}
        parts = [f"{label}: {why}" for label, why in tried.items() if why]
        if len(parts) < len(missing):
            reason = column.reason or REASONS[column.source.partition(" ")[0]].format(table=table.name)
            parts.append(f"the others: {reason}" if parts else reason)
        if parts:
            found.setdefault("; ".join(parts), []).append(column.name)
    for reason, names in found.items():
        yield f"Not measured ({', '.join(names)}): {reason}."
    cells = {row.label: cell for row in table.rows for column in table.columns if (cell := cell_of(column, row))}
    eager = {label: failures().get(cell) for label, cell in cells.items() if is_eager(cell)}
    if eager:
        parts = [f"{EAGER}: measured in eager mode, slower than compiled and with more memory"]
        parts += [f"{label}: {why}" for label, why in eager.items() if why]
        if not all(eager.values()):
            parts.append(f"`python -m paper_tables.bench {table.name}` on a GPU adds the compiled ones")
        yield "; ".join(parts) + "."


def figure(column: PublishedColumn, row: PublishedRow, found: dict[tuple[str, str], float]) -> Figure:
    if (row.label, column.name) in found:
        return found[row.label, column.name]
    if not column.source:
        return None
    if column.source == "measured":
        return NOT_MEASURED
    if row.section == MEASURED_HERE:
        return ""
    source, *options = column.source.split()
    return SOURCES[source](row, *options)


# --- counted ---------------------------------------------------------------------------------------------------


def spec_of(model: str) -> ModelSpec:
    """NAME; NAME@SIZE, the same at another image size or sequence length; NAME/PATCH, with another patch size;
    NAME+MIXER, with another token mixer.
    """
    name, size, patch, mixer = re.fullmatch(r"([^@/+]+)(?:@(\d+))?(?:/(\d+))?(?:\+(\w+))?", model).groups()  # type: ignore[union-attr]
    spec = preset(name).spec
    spec = override(spec, "block.token", mixer) if mixer else spec
    if size:
        spec = spec.configure(**{"img_size" if spec.input_size else "seq_len": int(size)})
    return spec.configure(patch_size=int(patch)) if patch else spec


@cache
def cost_of(model: str) -> Cost:
    return measure(spec_of(model))


@cache
def counts() -> dict[str, tuple[int, int]]:
    """Parameters and multiply-adds of every preset; reading them imports none of the packages some presets need."""
    return {row.name: (row.parameters, row.macs) for row in read_catalog()}


def parameters(row: PublishedRow) -> Figure:
    if not row.model:
        return NO_MODEL
    printed = None if ":" in row.model else preset(re.split("[@/]", row.model)[0]).published
    if printed is not None and not printed.head:
        cost = cost_of(row.model)
        return (cost.parameters - cost.head_parameters) / 1e6
    return (counts()[row.model][0] if row.model in counts() else cost_of(row.model).parameters) / 1e6


def macs(row: PublishedRow) -> Figure:
    if not row.model:
        return NO_MODEL
    return macs_of(row.model) / 1e9


def macs_of(model: str) -> int:
    return counts()[model][1] if model in counts() else cost_of(model).macs


def flops(row: PublishedRow) -> Figure:
    """Of one forward pass with the output layer at the masked tokens: a third of a training step."""
    return training_flops(preset(row.model).spec) / 3 / 1e9


def token_macs(row: PublishedRow) -> Figure:
    """Of the token mixing in one block: the token mixer, or the gate inside the channel MLP."""
    if not row.model:
        return NO_MODEL
    spec = spec_of(row.model)
    assert isinstance(spec, Encoder), "the table has encoders only"
    mixing = [part.macs for part in measure(spec).parts if part.name.startswith("blocks.token") or "inner" in part.name]
    return sum(mixing) / spec.depth / 1e6


def position(row: PublishedRow, channel: str) -> Figure:
    waves = SinusoidalPositionsLayer()(torch.zeros(1, 4, 4, dtype=torch.float64), 0)[0]
    return float(waves[int(row.label.split()[-1]), int(channel)])


def size(row: PublishedRow, model: str) -> Figure:
    """Of a Llama, by the label of the row."""
    spec = spec_of(model)
    assert isinstance(spec, Encoder) and isinstance(spec.block.token, Attention)
    assert isinstance(spec.block.channel, ChannelMlp)
    swiglu = spec.block.channel.glu and spec.block.channel.act == "silu"
    return {
        "Number of layers": spec.depth,
        "Model dimension": spec.width,
        "Attention heads": spec.block.token.num_heads,
        "Activation": "SwiGLU" if swiglu else "",
        "Positional embedding": "RoPE" if spec.block.token.rotary else "",
        "Parameters M": cost_of(model).parameters / 1e6,
    }[row.label]


# --- measured --------------------------------------------------------------------------------------------------


def fastest(cell: Cell) -> Speed | None:
    wanted = cell.model, GPU, cell.task, cell.batch
    found = [s for s in hardware.speeds() if (s.model, s.gpu, s.task, s.batch_size) == wanted]
    return max(found, key=lambda speed: speed.throughput, default=None)


def is_eager(cell: Cell | None) -> bool:
    """Whether the figures of the cell are those of eager mode."""
    found = fastest(cell) if cell else None
    return found is not None and found.eager


def speed(row: PublishedRow, task: str, batch: str) -> Figure:
    """Images or tokens per second."""
    found = fastest(Cell(row.model, task, int(batch)))
    return found.throughput if found else NOT_MEASURED if row.model else NO_MODEL


def memory(row: PublishedRow, task: str, batch: str) -> Figure:
    """MB in inference, as in ResMLP's table, GiB in training."""
    found = fastest(Cell(row.model, task, int(batch)))
    if found is None or found.memory is None:
        return NOT_MEASURED if row.model else NO_MODEL
    return found.memory / (1e6 if task == "inference" else 2**30)


@cache
def failures() -> dict[Cell, str]:
    """Why what was tried on this GPU has no figure."""
    found = list(attempts(sorted((DOCS / "logs").glob("bench*.json"))))
    return {one.cell: one.note for one in found if one.rate is None and GPUS[GPU].name in one.device}


# --- cost of training ------------------------------------------------------------------------------------------


@cache
def planned(recipe: str) -> Estimate:
    return estimate(job(recipe, gpus=NUM_GPUS, gpu=GPU, **(JFT if recipe == "mixer_h14" else {})), runs=2)


def total_flops(plan: Estimate) -> float:
    return plan.chosen.step.flops * plan.job.steps


def hours(plan: Estimate) -> float:
    """Hours of one GPU for the model FLOPs alone."""
    return total_flops(plan) / (plan.mfu * plan.job.card.peak) / 3600


def hours_of(row: PublishedRow) -> Figure:
    if not row.recipe:
        return NO_RECIPE if row.model else NO_MODEL
    return hours(planned(row.recipe))


SOURCES: dict[str, Callable[..., Figure]] = {
    "parameters": parameters,
    "macs": macs,
    "flops": flops,
    "token_macs": token_macs,
    "position": position,
    "size": size,
    "gpu_hours": hours_of,
    "speed": speed,
    "memory": memory,
}


def gpu_hours(recipes: Iterable[str]) -> PaperTable:
    """Costs of published recipes at the MFU measured for their model families."""
    columns = (
        PaperColumn("TPUv3 core-days", True, ""),
        PaperColumn("samples M", False, ",.0f"),
        PaperColumn("EFLOP", False, ",.1f"),
        PaperColumn("MFU", False, ".1%"),
        PaperColumn("GPU-hours", False, ",.0f"),
        PaperColumn(f"hours on {NUM_GPUS}", False, ",.1f"),
    )
    core_days = {row.recipe: row.cells[-1] for row in published()["mixer_table2"].rows}
    made, sources = [], {}
    for recipe in recipes:
        plan = planned(recipe)
        sources[plan.mfu_from] = f"{plan.mfu:.1%}: {plan.mfu_from}"
        samples = plan.job.samples * plan.job.epochs
        ours = (samples / 1e6, total_flops(plan) / 1e18, plan.mfu, hours(plan), plan.expected_seconds / 3600)
        made.append(PaperRow("", recipe, recipe, (core_days.get(recipe, ""), *[""] * 5), (None, *ours)))
    notes = (
        f"GPU-hours count the model FLOPs alone; hours on {NUM_GPUS} include recomputation where memory is short, "
        "communication, checkpoints and failures, as in `allmlp plan RECIPE`, which also takes --gpus and --gpu. "
        "ResMLP recipes run in float32, that is TF32 at half the peak.",
        f"MFU measured on the nearest model: {'; '.join(sources.values())}. Small models on small images are bound by "
        "kernel launches; large ones reach more.",
    )
    title = f"Cost of the published recipes on {NUM_GPUS} {GPUS[GPU].name}"
    return PaperTable("gpu_hours", (), title, "recipes of allmlp", columns, tuple(made), notes)


# --- files -----------------------------------------------------------------------------------------------------


def as_json(table: PaperTable) -> str:
    """One line per column and row, so that a change is a readable diff; figures with eight significant digits."""
    head = {"name": table.name, "papers": table.papers, "title": table.title, "source": table.source}
    rows = [row._replace(ours=tuple(map(rounded, row.ours)))._asdict() for row in table.rows]
    rows = [{name: value for name, value in row.items() if name != "eager" or value} for row in rows]
    lists = {"columns": [column._asdict() for column in table.columns], "rows": rows, "notes": table.notes}
    parts = [f"  {json.dumps(key)}: {dumps(value)}" for key, value in head.items()]
    parts += [f"  {json.dumps(key)}: [\n{lines(values, 3)}\n  ]" for key, values in lists.items() if values]
    return " {\n" + ",\n".join(parts) + "\n }"


def rounded(value: Figure) -> Figure:
    return float(f"{value:.8g}") if isinstance(value, (int, float)) else value


def lines(values: Iterable[Any], indent: int) -> str:
    return ",\n".join(f"{' ' * indent}{dumps(value)}" for value in values)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tables_text() -> str:
    return "[\n" + ",\n".join(map(as_json, generate())) + "\n]\n"


def speeds_text() -> str:
    return f"[\n{lines((speed._asdict() for speed in speeds(DOCS)), 1)}\n]\n"


def write() -> None:
    write_text_atomically(hardware.FILE, speeds_text())
    hardware.speeds.cache_clear()  # the costs of training depend on them
    write_text_atomically(package.FILE, tables_text())
