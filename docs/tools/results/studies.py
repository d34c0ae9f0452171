"""The tables and figures of all studies, from the records that are there."""

from __future__ import annotations

from collections.abc import Iterator

from allmlp.plan.scaling import MIN_RUNS, Point, fit_points
from allmlp.plan.time import training_flops
from allmlp.run import Run
from allmlp.spec import from_dict
from allmlp.studies import studies
from allmlp.study import figure
from allmlp.study.runner import progress_of
from allmlp.study.summary import Summary, final_table, markdown, summarize, target_table, tuning_table
from results.markdown import table
from results.records import ROOT, Record, lines

IMAGES = ROOT / "docs" / "images" / "study"


def summary(name: str) -> Summary | None:
    """Of the records of a study; None where there are none."""
    found = lines(f"study/{name}")
    return summarize(progress_of(studies()[name].make(), found)) if found else None


def all_studies() -> str:
    parts = []
    for name, declared in studies().items():
        text = f"## {name}\n\n{declared.text.splitlines()[0]}\n\n`allmlp study {name}`"
        found = summary(name)
        if found is None:
            parts.append(f"{text}: not run yet.")
            continue
        text += (
            f", equal {found.study.compared} ([records](logs/study/{name}.jsonl)).\n\n{markdown(final_table(found))}"
        )
        if found.tuning:
            text += f"\nChosen on validation:\n\n{markdown(tuning_table(found))}"
        if found.reached:
            text += f"\n{markdown(target_table(found))}"
        if name == "depth":
            text += scaling_laws(lines("study/depth"))
        if any(line.result for line in found.lines):
            text += f"\n![{name}](images/study/{name}.svg)\n"
        parts.append(text.rstrip())
    return "\n\n".join(parts)


def scaling_laws(found: list[Record]) -> str:
    """A table of L = E + A C^-alpha, C in training FLOPs, for every family with enough runs."""
    families: dict[str, list[Point]] = {}
    for record in (record for record in found if "result" in record):
        result, run = record["result"], from_dict(record["run"])
        assert isinstance(run, Run) and run.model is not None
        examples = result["epochs"] * record["data"]["train"]
        flops = examples * training_flops(run.model)
        point = Point(record["row"], flops, result["parameters"], examples, result["test"]["loss"])
        families.setdefault(record["row"].partition("_")[0], []).append(point)
    rows = []
    for family, points in families.items():
        if len({point.flops for point in points}) >= MIN_RUNS:
            law = fit_points(points)
            low, high = law.alpha_range
            floors = f"{law.law.floor:.2f} ({law.floor_range[0]:.2f} to {law.floor_range[1]:.2f})"
            rows.append((family, str(len(points)), f"{law.law.alpha:.3f} ({low:.3f} to {high:.3f})", floors))
    header = ("L = E + A C^-alpha", "runs", "alpha, 95 % interval", "E, nats")
    return f"\n{table(header, rows)}\n" if rows else ""


def draw() -> Iterator[str]:
    """Draw the figure of every study that has results; yields the names of the files."""
    for name in studies():
        found = summary(name)
        if found is not None and any(line.result for line in found.lines):
            IMAGES.mkdir(exist_ok=True)
            yield figure.write(found, IMAGES / f"{name}.svg").name


BLOCKS = {"studies": all_studies}
