"""allmlp analyze."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allmlp.cli.app import (
    app,
    complete_model,
    console,
    examples,
    next_command,
    next_prediction,
    plain_table,
    print_json,
)
from allmlp.cli.job import DeviceOption
from allmlp.errors import UserError

if TYPE_CHECKING:
    from allmlp.analysis.analysis import Analysis
    from allmlp.analysis.target import AnalysisTarget, NamedImages


@app.command(
    epilog=examples(
        "allmlp analyze",
        "allmlp analyze cat.jpg dog.jpg",
        "allmlp analyze runs/a",
        "allmlp analyze runs/a photos/*.png --out figures/",
        "allmlp analyze mixer_l16",
        "allmlp analyze runs/translate 'Ein Mann fährt Fahrrad.'",
    )
)
def analyze(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|IMAGE|TEXT",
            help="A model folder, a run or a name from `allmlp list`, then image files or, for a text model, texts. "
            "Without a model, the bundled CIFAR-10 model.",
            autocompletion=complete_model,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files. Default: FOLDER/analysis, or analysis/NAME.")
    ] = None,
    neighbors: Annotated[int, typer.Option(help="Number of neighbors per image.", min=1)] = 5,
    bank: Annotated[
        int | None,
        typer.Option(
            help="Number of the run's test images to search neighbors in. Default: 20 to 500, by model size.", min=2
        ),
    ] = None,
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a model has learned: token mixing, attention, sparsity, saliency, neighbors, activation norms, cost."""
    from allmlp.analysis.analysis import analyze
    from allmlp.analysis.target import load_target, split_arguments
    from allmlp.data.decode import SUFFIXES
    from allmlp.device import own_device
    from allmlp.report.runs import is_run

    model, inputs = split_arguments(arguments or [])
    target = load_target(model, own_device(device))
    texts = [name for name in inputs if target.tokenizer and Path(name).suffix.lower() not in SUFFIXES]
    files = [Path(name) for name in inputs if name not in texts]
    given = target.load_images(files) if files else None
    name = target.name.replace(":", "_").replace("/", "_")
    folder = out or (Path(model) / "analysis" if Path(model).is_dir() else Path("analysis") / name)
    images, test_texts, note = run_examples(Path(model), target, bank)
    result = analyze(target, folder, given, images, neighbors, texts or test_texts)
    if as_json:
        sections = [section._asdict() for section in result.sections]
        print_json({"folder": str(folder), "about": result.about, "sections": sections, "note": note})
    else:
        print_analysis(result, note)
        if is_run(Path(model)):
            next_command("report", model)
        elif target.trained and Path(model).is_dir():
            next_prediction(Path(model))
        elif target.trained:
            next_command("predict", model, "IMAGE" if target.preprocessing else "TEXT")
        else:
            next_command("show", model)


def run_examples(folder: Path, target: AnalysisTarget, most: int | None) -> tuple[NamedImages | None, list[str], str]:
    """Test images or texts of a run's dataset, or why there are none."""
    from allmlp.analysis.examples import EXAMPLES
    from allmlp.analysis.target import affordable_images
    from allmlp.files import RUN
    from allmlp.record import read_run

    if not (folder / RUN).is_file() or (target.preprocessing is None and target.tokenizer is None):
        return None, [], ""
    try:
        run = read_run(folder)
        split = run.data.for_model(str(folder)).load().split_validation(run.val_size).test
        if target.tokenizer is not None:
            return None, target.sample_texts(split, EXAMPLES), ""
        return target.sample(split, most or affordable_images(target.model, 500, least=20)), [], ""
    except UserError as reason:
        return None, [], f"the run's test examples are not available: {reason}"


def print_analysis(result: Analysis, note: str) -> None:
    from rich.text import Text

    screen = console()
    screen.print(Text(result.about))
    view = plain_table(("section", "result", "files"))
    view.columns[0].no_wrap = True
    for section in result.sections:
        if section.files:
            view.add_row(section.name, Text(section.text), Text(short_list(section.files)))
    screen.print(view)
    for section in result.sections:
        if not section.files:
            screen.print(Text(f"skipped: {section.name}: {section.text}"))
    if note:
        screen.print(Text(note))
    screen.print(Text(f"written to {result.folder}"))


def short_list(files: tuple[str, ...]) -> str:
    """a.png a.svg b.csv -> a.{png,svg} b.csv."""
    stems: dict[str, list[str]] = {}
    for file in files:
        stem, _, suffix = file.rpartition(".")
        stems.setdefault(stem, []).append(suffix)
    return "  ".join(
        f"{stem}.{{{','.join(suffixes)}}}" if len(suffixes) > 1 else f"{stem}.{suffixes[0]}"
        for stem, suffixes in stems.items()
    )
