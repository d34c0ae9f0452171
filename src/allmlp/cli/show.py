"""allmlp show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allmlp.cli.app import app, assignments, billions, console, examples, millions

if TYPE_CHECKING:
    from rich.console import Console

    from allmlp.show import Page


@app.command(
    epilog=examples(
        "allmlp show gmlp_s16",
        "allmlp show mixer_b16 --classes 10 --image 160x256",
        "allmlp show gmlp_l36 --set block.channel.inner.combine=add",
        "allmlp show path/to/model --json",
    )
)
def show(
    model: Annotated[str, typer.Argument(help="A name from `allmlp list`, timm:NAME, or a model folder.")],
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    image: Annotated[str | None, typer.Option(help="Image size: 224 or 160x256 (height x width).")] = None,
    patch: Annotated[str | None, typer.Option(help="Patch size: 16 or 8x16.")] = None,
    in_channels: Annotated[int | None, typer.Option(help="Colour channels of the image.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    length: Annotated[int | None, typer.Option(help="Longest sequence.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Any field: block.channel.hidden=512.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """One page about one model: its sentence, equations, cost by part, published figures, state-dict keys."""
    from allmlp.models.zoo import configure, preset
    from allmlp.show import page
    from allmlp.spec import parse
    from allmlp.weights.folder import read_spec

    is_folder = Path(model).is_dir()
    spec = read_spec(Path(model)) if is_folder else preset(model).spec
    size = tuple[int, int]
    changed = configure(
        spec,
        classes=classes,
        image=None if image is None else parse(image, size, "--image"),
        patch=None if patch is None else parse(patch, size, "--patch"),
        in_channels=in_channels,
        vocabulary=vocabulary,
        length=length,
        overrides=assignments(overrides or []),
    )
    if is_folder or changed != spec:
        sheet = page(model, changed)
    else:
        sheet = page(model, spec, preset(model).published, preset(model).about)
    if as_json:
        print(json.dumps(sheet.as_json(), indent=2))
    else:
        print_page(sheet)


def print_page(sheet: Page) -> None:
    from rich.table import Table
    from rich.text import Text

    from allmlp.show import equations, files, sentence, state_dict_keys

    screen = console()

    def heading(text: str) -> None:
        screen.print(Text(f"\n{text}", style="bold"))

    about = f", {sheet.about}" if sheet.about else ""
    screen.print(Text(sheet.name, style="bold"), f"reads {sheet.spec.reads}{about}")
    heading("Sentence")
    screen.print(Text(sentence(sheet.spec)))
    heading("Equations")
    for kind, lines in equations(sheet.spec).items():
        for number, line in enumerate(lines):
            screen.print(Text(f"{kind if number == 0 else '':<18}{line}"))
    heading("Cost of one example")
    view = Table(box=None, pad_edge=False, header_style="bold")
    view.add_column("part")
    for title in ("parameters", "MACs", "share of MACs"):
        view.add_column(title, justify="right")
    for part in sheet.cost.parts:
        view.add_row(part.name, f"{part.parameters:,}", f"{part.macs:,}", f"{part.macs / max(sheet.cost.macs, 1):.1%}")
    view.add_row("total", f"{sheet.cost.parameters:,}", f"{sheet.cost.macs:,}", "", style="bold")
    screen.print(view)
    if sheet.published is not None:
        print_published(screen, sheet)
    heading("State dict")
    for key, shape in state_dict_keys(sheet.spec).items():
        screen.print(Text(f"{key:<48} {shape}"))
    heading("Files")
    screen.print(Text("  ".join(files(sheet.spec))))


def print_published(screen: Console, sheet: Page) -> None:
    printed = sheet.published
    assert printed is not None
    scope = "" if printed.head else ", without the head"
    screen.print(f"\n[bold]Published[/bold] ({printed.source}{scope})")
    screen.print(f"parameters  {printed.parameters:>8} M   here {millions(sheet.parameters)}")
    if printed.macs:
        screen.print(f"MACs        {printed.macs:>8} G   here {billions(sheet.cost.macs)}")
    if printed.note:
        screen.print(f"note: {printed.note}", style="italic")
