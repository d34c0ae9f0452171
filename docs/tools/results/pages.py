"""Put what the records give into the pages, and compare the pages with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from allmlp.files import write_text_atomically
from allmlp.recipes import recipes
from results import highlights, images, language, own_data, properties, series, speed, studies
from results.markdown import accuracy
from results.records import ROOT, study

PAGES = (
    "README.md",
    "docs/results.md",
    "docs/further_results.md",
    "docs/study_tables.md",
    "docs/guides/adapting.md",
    "docs/guides/properties.md",
    "benchmarks/README.md",
    "weights/text/README.md",
    "weights/image/README.md",
)
ROOMS = (highlights, images, language, own_data, properties, series, speed, studies)
BLOCKS = {name: block for room in ROOMS for name, block in room.BLOCKS.items()}
BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
MEASURED = re.compile(r"^    Measured: .*\n", re.MULTILINE)
STUDIES = {f"cifar10_{row}": ("cifar10", row) for row in images.FAMILIES} | {
    "cifar10_resmlp_staged": ("cifar10_staged", "staged"),
    "cifar10_cyclemlp": ("cifar10_staged", "cyclemlp"),
    "cifar10_mlp": ("cifar10_staged", "mlp"),
}
"""Recipes whose docstrings give the result of a study's row."""


def texts() -> Iterator[tuple[Path, str]]:
    """Every page and module of recipes, as the records give it."""
    for name in PAGES:
        page = ROOT / name
        yield page, fill(page.read_text(encoding="utf8"))
    for module in sorted({recipes()[name].module.rpartition(".")[2] for name in STUDIES}):
        file = ROOT / "src" / "allmlp" / "recipes" / f"{module}.py"
        yield file, annotate(file.read_text(encoding="utf8"))


def fill(text: str) -> str:
    """The text with every block written anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}\n{match[3]}", text)


def annotate(source: str) -> str:
    """The source of recipes with a line `Measured: ...` after the command, where a study has run the recipe."""
    source = MEASURED.sub("", source)
    for name in STUDIES:
        line = measured(name)
        if line:
            command = re.compile(rf"^def {name}\(.*?^    allmlp train [^\n]*\n", re.MULTILINE | re.DOTALL)
            source = command.sub(lambda match, line=line: f"{match[0]}    {line}\n", source)
    return source


def measured(recipe: str) -> str:
    records = study(*STUDIES[recipe])
    if not records:
        return ""
    seconds, device = records[0]["result"]["seconds"], records[0]["environment"]["device"]
    seeds = "one seed" if len(records) == 1 else f"{len(records)} seeds"
    return f"Measured: {accuracy(records)} ({seeds}, {seconds:.0f} s alone on one {device})."


def outside(text: str) -> str:
    """The text without its blocks."""
    return BLOCK.sub("", text)


def write() -> Iterator[str]:
    """Write what differs; yields the names of the files."""
    for file, text in texts():
        if text != file.read_text(encoding="utf8"):
            write_text_atomically(file, text)
            yield str(file.relative_to(ROOT))
