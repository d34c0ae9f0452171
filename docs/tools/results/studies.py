"""The tables and figures of all studies, from the records that are there."""

from __future__ import annotations

from collections.abc import Iterator

from allmlp.studies import studies
from allmlp.study import figure
from allmlp.study.runner import progress
from allmlp.study.summary import Summary, final_table, markdown, summarize, tuning_table
from results.records import ROOT, lines

IMAGES = ROOT / "docs" / "images" / "study"


def summary(name: str) -> Summary | None:
    """Of the records of a study; None where there are none."""
    found = lines(f"study/{name}")
    return summarize(progress(studies()[name].make(), found)) if found else None


def all_studies() -> str:
    parts = []
    for name, declared in studies().items():
        text = f"## {name}\n\n{declared.text.splitlines()[0]}\n\n`allmlp study {name}`"
        found = summary(name)
        if found is None:
            parts.append(f"{text}: not run yet.")
            continue
        text += f", equal {found.compared} ([records](logs/study/{name}.jsonl)).\n\n{markdown(final_table(found))}"
        if found.tuning:
            text += f"\nChosen on validation:\n\n{markdown(tuning_table(found))}"
        if any(line.result for line in found.lines):
            text += f"\n![{name}](images/study/{name}.svg)\n"
        parts.append(text.rstrip())
    return "\n\n".join(parts)


def draw() -> Iterator[str]:
    """Draw the figure of every study that has results; yields the names of the files."""
    for name in studies():
        found = summary(name)
        if found is not None and any(line.result for line in found.lines):
            IMAGES.mkdir(exist_ok=True)
            yield figure.write(found, IMAGES / f"{name}.svg").name


BLOCKS = {"studies": all_studies}
