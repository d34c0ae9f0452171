"""allmlp analyze."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allmlp.cli.app import app, console, examples
from allmlp.errors import UserError

if TYPE_CHECKING:
    from allmlp.analysis.subject import Pictures, Subject
    from allmlp.analysis.survey import Survey


@app.command(
    epilog=examples(
        "allmlp analyze",
        "allmlp analyze cat.jpg dog.jpg",
        "allmlp analyze runs/a",
        "allmlp analyze runs/a photos/*.png --out look/",
        "allmlp analyze mixer_l16",
    )
)
def analyze(
    things: Annotated[
        list[str] | None,
        typer.Argument(
            help="A model folder, a run or a name from `allmlp list`, then pictures; without a model the CIFAR-10 "
            "model that comes along."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; FOLDER/analysis, or analysis/NAME, if not given.")
    ] = None,
    neighbours: Annotated[int, typer.Option(help="How many neighbours to show of a picture.", min=1)] = 5,
    bank: Annotated[
        int | None,
        typer.Option(help="Test pictures of the run to look them up in; 20 to 500 by its size if not given.", min=2),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """What a model has learnt: token mixing as images, sparsity, what predictions rest on, neighbours, norms, cost."""
    from allmlp.analysis.subject import arguments, open_subject
    from allmlp.analysis.survey import as_json as sections_as_json
    from allmlp.analysis.survey import survey

    model, files = arguments(things or [])
    subject = open_subject(model)
    given = subject.files(files) if files else None
    place = out or (Path(model) / "analysis" if Path(model).is_dir() else Path("analysis") / name_of(subject))
    known, note = test_pictures(Path(model), subject, bank)
    done = survey(subject, place, given, known, neighbours)
    if as_json:
        sections = sections_as_json(done.sections)
        print(json.dumps({"folder": str(place), "about": done.about, "sections": sections, "note": note}))
    else:
        print_survey(done, note)


def name_of(subject: Subject) -> str:
    return subject.name.replace(":", "_").replace("/", "_")


def test_pictures(folder: Path, subject: Subject, most: int | None) -> tuple[Pictures | None, str]:
    """Those of a run's own data, and why there are none where they cannot be had."""
    from allmlp.analysis.subject import affordable
    from allmlp.train import RUN, read_run

    if not (folder / RUN).is_file() or subject.inputs is None:
        return None, ""
    try:
        run = read_run(folder)
        split = run.data.like(str(folder)).open().hold_out(run.hold_out).test
        return subject.split(split, most or affordable(subject.model, 500, least=20)), ""
    except UserError as reason:
        return None, f"the run's own pictures cannot be shown: {reason}"


def print_survey(done: Survey, note: str) -> None:
    from rich.table import Table
    from rich.text import Text

    screen = console()
    screen.print(Text(done.about))
    view = Table(box=None, pad_edge=False, header_style="bold")
    view.add_column("section", no_wrap=True)
    view.add_column("in short")
    view.add_column("files")
    for section in done.sections:
        if section.files:
            view.add_row(section.name, Text(section.text), Text(short_list(section.files)))
    screen.print(view)
    for section in done.sections:
        if not section.files:
            screen.print(Text(f"left out: {section.name}: {section.text}"))
    if note:
        screen.print(Text(note))
    screen.print(Text(f"all in {done.folder}"))


def short_list(files: tuple[str, ...]) -> str:
    """a.png a.svg b.csv -> a.{png,svg} b.csv."""
    stems: dict[str, list[str]] = {}
    for file in files:
        stem, _, suffix = file.rpartition(".")
        stems.setdefault(stem, []).append(suffix)
    return "  ".join(
        f"{stem}.{{{','.join(found)}}}" if len(found) > 1 else f"{stem}.{found[0]}" for stem, found in stems.items()
    )
