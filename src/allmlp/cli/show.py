"""allmlp show."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allmlp.cli.app import (
    app,
    assignments,
    billions,
    complete_name,
    console,
    examples,
    millions,
    next_command,
    plain_table,
    print_described,
    print_json,
    width,
    wrap_text,
)
from allmlp.errors import UserError, lookup, plural

if TYPE_CHECKING:
    from rich.console import Console

    from allmlp.run import Run
    from allmlp.show import ModelSummary


@app.command(
    epilog=examples(
        "allmlp show gmlp_s16",
        "allmlp show mixer_b16 --num-classes 10 --img-size 160x256",
        "allmlp show gmlp_l36 --set block.channel.inner.variant=additive",
        "allmlp show path/to/model --json",
        "allmlp show cifar10_gmlp",
    )
)
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A model of `allmlp list`, timm:MODEL, a model folder, or a recipe of `allmlp list recipes`.",
            autocompletion=complete_name,
        ),
    ],
    num_classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    img_size: Annotated[str | None, typer.Option(help="Image size: 224 or 160x256 (height x width).")] = None,
    patch_size: Annotated[str | None, typer.Option(help="Patch size: 16 or 8x16.")] = None,
    in_chans: Annotated[int | None, typer.Option(help="Number of image channels.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Maximum sequence length.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Any field: block.channel.hidden=512.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model: config, equations, cost by part, published figures, state-dict keys; or a recipe before it runs:
    model, data, budget, optimizer, expected time.
    """
    from allmlp.models.preset import preset, presets
    from allmlp.models.zoo import configure
    from allmlp.recipes import recipes
    from allmlp.show import summarize
    from allmlp.spec import parse
    from allmlp.weights.bundled import model_path
    from allmlp.weights.folder import read_spec

    size = tuple[int, int]
    options = {
        "num_classes": num_classes,
        "img_size": None if img_size is None else parse(img_size, size, "--img-size"),
        "patch_size": None if patch_size is None else parse(patch_size, size, "--patch-size"),
        "in_chans": in_chans,
        "vocab_size": vocab_size,
        "seq_len": seq_len,
    }
    changes = assignments(overrides or [])
    is_folder = model_path(name).is_dir()
    if not is_folder and name.partition("/")[0] in recipes():
        if given := [option for option, value in options.items() if value is not None]:
            raise UserError(f"--{given[0].replace('_', '-')} is for models; change a recipe with --set FIELD=VALUE")
        show_recipe(name, changes, as_json)
        return
    if not is_folder and ":" not in name:
        known_names = dict.fromkeys([*presets(), *recipes()])
        if name not in known_names and Path(name).is_file():
            read_spec(Path(name))  # says which folder to name
        lookup(name, known_names, "model or recipe")
    spec = read_spec(Path(name)) if is_folder else preset(name).spec
    changed = configure(spec, overrides=changes, **options)
    entry = None if is_folder or changed != spec else preset(name)
    summary = summarize(name, changed, entry.published if entry else None, entry.about if entry else "")
    if as_json:
        print_json(summary.as_json(), indent=2)
    else:
        print_summary(summary)
        if not is_folder:
            next_command("bench", name)


def show_recipe(name: str, changes: dict[str, str], as_json: bool) -> None:
    from allmlp.recipes import recipe, runs
    from allmlp.spec import format_spec, override_all, to_dict

    text = recipe(name.partition("/")[0]).text
    table = {row: override_all(run, changes) for row, run in runs(name).items()}
    summaries = {row: summarize_run(row, run) for row, run in table.items()}
    if as_json:
        configs = {row: to_dict(run) for row, run in table.items()}
        print_json({"name": name, "text": text, "summaries": summaries, "runs": configs})
        return
    print(*wrap_text(text, width()), "", sep="\n")
    if len(table) == 1:
        (run,), (facts,) = table.values(), summaries.values()
        indent = max(map(len, facts)) + 2
        for title, value in facts.items():
            print(textwrap.fill(f"{title:<{indent}}{value}", width(), subsequent_indent=" " * indent))
        print("\nConfig", format_spec(run), sep="\n")
    else:
        print("Runs (allmlp show NAME/RUN prints everything about one)")
        print_described(
            {row: "; ".join(facts[key] for key in ("model", "budget")) for row, facts in summaries.items()}, width()
        )
    no_model = all(run.model is None and run.init_from is None for run in table.values())
    settings = [f"{field}={value}" for field, value in changes.items()] + ["init_from=FOLDER"] * no_model
    next_command("train", name, *(word for setting in settings for word in ("--set", setting)))


def summarize_run(name: str, run: Run) -> dict[str, str]:
    """Summary of a run and its cost, before it runs."""
    from allmlp.models.cost import measure
    from allmlp.models.zoo import short_name
    from allmlp.spec import format_spec
    from allmlp.weights.folder import CONFIG, read_spec

    start = Path(run.init_from or "")
    spec = run.model or (read_spec(start) if run.init_from and (start / CONFIG).is_file() else None)
    facts = {
        "model": f"that of {run.init_from}"
        if run.init_from
        else "none: --set init_from=FOLDER names the one to start from"
    }
    if spec is not None:
        cost = measure(spec)
        sizes = f"{millions(cost.parameters)} parameters, {billions(cost.macs)} multiply-adds per example"
        facts["model"] = f"{short_name(spec)}, input {spec.input_spec}, about {sizes}"
    if run.init_from:
        facts["start"] = run.init_from
    limits = {"epochs": run.budget.epochs, "steps": run.budget.steps, "minutes": run.budget.minutes}
    budget = " or ".join(f"{limit:,g} {unit}" for unit, limit in limits.items() if limit is not None)
    facts |= {
        "data": one_line_spec(format_spec(run.data)),
        "task": one_line_spec(format_spec(run.task)),
        "budget": f"{budget or 'none'}, batches of {run.batch_size:,}",
        "optimizer": one_line_spec(f"{format_spec(run.optim)}, {format_spec(run.schedule)}"),
        "precision": f"{run.precision}{', compiled' if run.compile else ''}",
        "time": expected_time(name, run),
    }
    return facts


def one_line_spec(text: str) -> str:
    return re.sub(r", ([)\]])", r"\1", " ".join(text.split())).replace("( ", "(").replace("[ ", "[")


def expected_time(name: str, run: Run) -> str:
    """Expected time on one H200, if the size of the data and the speed of such models are known."""
    from allmlp.log import format_duration
    from allmlp.plan.estimate import expected_seconds
    from allmlp.plan.jobs import from_run

    try:
        seconds, source = expected_seconds(from_run(name, run, None, None, {"gpus": 1}))
    except UserError:
        most = f"at most {run.budget.minutes:g} minutes" if run.budget.minutes else "not known yet"
        return f"{most}; `allmlp train` prints it when it starts"
    if run.budget.minutes is not None and 60 * run.budget.minutes < seconds:
        return f"{plural(run.budget.minutes, 'minute', form='g')}, less than all of its steps take on one H200"
    return f"about {format_duration(seconds)} on one H200, from the speed of {source}; see also `allmlp plan`"


def print_summary(summary: ModelSummary) -> None:
    from rich.table import Table
    from rich.text import Text

    from allmlp.show import equations, source_files, state_dict_keys
    from allmlp.spec import format_spec

    screen = console()

    def heading(text: str) -> None:
        screen.print(Text(f"\n{text}", style="bold"))

    about = f", {summary.about}" if summary.about else ""
    screen.print(Text(summary.name, style="bold"), f"input: {summary.spec.input_spec}{about}")
    heading("Config")
    screen.print(Text(format_spec(summary.spec)))
    heading("Equations")
    formulas = Table.grid(padding=(0, 2))
    for kind, lines in equations(summary.spec).items():
        for number, line in enumerate(lines):
            formulas.add_row(Text(kind if number == 0 else ""), Text(line))
    screen.print(formulas)
    heading("Cost of one example")
    view = plain_table(("part",), ("parameters", "MACs", "% of MACs"))
    for part in summary.cost.parts:
        fraction = part.macs / max(summary.cost.macs, 1)
        view.add_row(part.name, f"{part.parameters:,}", f"{part.macs:,}", f"{fraction:.1%}")
    view.add_row("total", f"{summary.cost.parameters:,}", f"{summary.cost.macs:,}", "", style="bold")
    screen.print(view)
    if summary.published is not None:
        print_published(screen, summary)
    heading("State dict")
    for key, shape in state_dict_keys(summary.spec).items():
        screen.print(Text(f"{key:<48} {shape}"))
    heading("Files")
    screen.print(Text("  ".join(source_files(summary.spec))))


def print_published(screen: Console, summary: ModelSummary) -> None:
    printed = summary.published
    assert printed is not None
    scope = "" if printed.head else ", without the head"
    screen.print(f"\n[bold]Published[/bold] ({printed.source}{scope})")
    screen.print(f"parameters  {printed.parameters:>8} M   here {millions(summary.parameters)}")
    if printed.macs:
        screen.print(f"MACs        {printed.macs:>8} G   here {billions(summary.cost.macs)}")
    if printed.note:
        screen.print(f"note: {printed.note}", style="italic")
