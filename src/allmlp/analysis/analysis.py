"""Run every analysis of one model and write the results to a folder: `allmlp analyze`.

A section that does not apply to a model is skipped, with the reason in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from allmlp import __version__
from allmlp.analysis import figures
from allmlp.analysis.attention import attention_section
from allmlp.analysis.attention_maps import text_input
from allmlp.analysis.depth import activation_section, layer_scale_section, sparsity_section
from allmlp.analysis.examples import EXAMPLES, first, neighbor_section, saliency_section
from allmlp.analysis.mixing import mixing_sections
from allmlp.analysis.output_folder import OutputFolder, Section
from allmlp.analysis.saliency import SQUARES
from allmlp.analysis.series import series_sections
from allmlp.analysis.target import AnalysisTarget, NamedImages, affordable_images
from allmlp.errors import require


class Analysis(NamedTuple):
    folder: Path
    about: str
    sections: list[Section]


def analyze(
    target: AnalysisTarget,
    out: Path,
    given: NamedImages | None = None,
    bank: NamedImages | None = None,
    k: int = 5,
    texts: Sequence[str] = (),
) -> Analysis:
    """Run all sections and write their files to `out`.

    The first of the `given` images are explained, and their neighbors searched in the `bank` (the test split of a run)
    or among each other. Without given images those of the bank are used. Attention of a text model is shown for the
    first of the `texts`.
    """
    require("matplotlib", "analysis")  # before anything is written
    output = OutputFolder(out)
    few = affordable_images(target.model, EXAMPLES, passes=SQUARES)
    shown = first(given, EXAMPLES) if given else None if bank is None else first(bank, few)
    read = [text_input(target.model, target.tokenizer, text) for text in texts[:EXAMPLES]] if target.tokenizer else []
    sections = [
        cost_section(target, output),
        *mixing_sections(target, output),
        attention_section(target, output, shown, read),
        *series_sections(target, output),
        sparsity_section(target, output),
        activation_section(target, output, shown),
        layer_scale_section(target, output),
        saliency_section(target, output, shown, len((given or shown).names) if shown else 0),
        neighbor_section(target, output, given, bank, k),
    ]
    state = "trained" if target.trained else "untrained (initial weights, seed 0)"
    about = f"{target.name}: input {target.model.spec.input_spec}, {state}"
    section_rows = [section._asdict() for section in sections]
    output.close({"model": target.name, "about": about, "allmlp": __version__, "sections": section_rows})
    return Analysis(out, about, sections)


def cost_section(target: AnalysisTarget, output: OutputFolder) -> Section:
    cost = target.model.describe()
    output.table("cost", ("part", "parameters", "macs"), cost.parts, "Parameters, and multiply-adds per example.")
    output.figure("cost", figures.cost_bars(cost, target.name))
    macs = f"{cost.macs / 1e9:,.2f} G" if cost.macs >= 1e9 else f"{cost.macs / 1e6:,.2f} M"
    return output.section("cost", f"{cost.parameters / 1e6:,.2f} M parameters, {macs} multiply-adds")
