"""Everything this room can say about one model, written to a folder: what `allmlp analyze` runs.

A section is one question. What does not apply to a model is left out, with the reason in one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from allmlp import __version__
from allmlp.analysis import plots
from allmlp.analysis.depth import norms, scales, weights
from allmlp.analysis.looks import SHOWN, alike, explain, first
from allmlp.analysis.mixing import mixing
from allmlp.analysis.record import Record
from allmlp.analysis.saliency import SQUARES
from allmlp.analysis.section import Answer, Section
from allmlp.analysis.subject import Pictures, Subject, affordable
from allmlp.errors import require


class Survey(NamedTuple):
    folder: Path
    about: str
    sections: list[Section]


def survey(
    subject: Subject, out: Path, given: Pictures | None = None, bank: Pictures | None = None, k: int = 5
) -> Survey:
    """Ask everything and write the answers to `out`.

    The first of the `given` pictures are explained and looked up in the `bank` (the test split of a run), or among
    each other. Where none are given the bank stands in for them.
    """
    require("matplotlib", "analysis")  # before anything is written
    record = Record(out)
    few = affordable(subject.model, SHOWN, passes=SQUARES)
    shown = first(given, SHOWN) if given else None if bank is None else first(bank, few)
    sections = [
        cost(subject, record),
        *mixing(subject, record),
        weights(subject, record),
        norms(subject, record, shown),
        scales(subject, record),
        explain(subject, record, shown, len((given or shown).names) if shown else 0),
        alike(subject, record, given, bank, k),
    ]
    state = "trained" if subject.trained else "untrained: start weights, seed 0"
    about = f"{subject.name} reads {subject.model.spec.reads}; {state}"
    record.close({"model": subject.name, "about": about, "allmlp": __version__, "sections": as_json(sections)})
    return Survey(out, about, sections)


def as_json(sections: list[Section]) -> list[dict[str, Any]]:
    return [section._asdict() for section in sections]


def cost(subject: Subject, record: Record) -> Section:
    answer, found = Answer(record, "cost"), subject.model.describe()
    record.table("cost", ("part", "parameters", "macs"), found.parts, "Parameters and multiply-adds of one example.")
    record.figure("cost", plots.cost_bars(found, subject.name))
    work = f"{found.macs / 1e9:,.2f} G" if found.macs >= 1e9 else f"{found.macs / 1e6:,.2f} M"
    return answer.section(f"{found.parameters / 1e6:,.2f} M parameters, {work} multiply-adds")
