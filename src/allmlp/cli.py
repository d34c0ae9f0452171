"""The command line: thin, and quick to answer because everything heavy is imported where it is used."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from allmlp import __version__
from allmlp.errors import UserError, did_you_mean, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from allmlp.show import Page

# typer brings its own click or uses the installed one: the base of its errors is taken from what it exports.
CommandError = typer.BadParameter.__mro__[2]


def examples(*lines: str) -> str:
    return "\n\n".join(["Examples:", *lines])


app = typer.Typer(
    help="All-MLP networks for images and language: MLP-Mixer, ResMLP, gMLP, aMLP and their baselines.",
    epilog=examples("allmlp list gmlp", "allmlp show mixer_b16", "allmlp show resmlp_s12 --image 160x256"),
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def console() -> Console:
    """Tables are at most 100 columns wide, and as wide when the output is a file."""
    from rich.console import Console

    screen = Console(highlight=False)
    screen.width = min(screen.width, 100) if screen.is_terminal else 100
    return screen


def millions(count: float) -> str:
    return f"{count / 1e6:,.2f} M"


def billions(count: float) -> str:
    return f"{count / 1e9:,.3f} G"


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"allmlp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command("list", epilog=examples("allmlp list", "allmlp list 'resmlp_s12*'", "allmlp list hf: --json"))
def list_command(
    pattern: Annotated[str, typer.Argument(help="A word in the name, or a shell pattern.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for machines.")] = False,
) -> None:
    """The zoo: every model, what it reads, its size and cost, and the figure its paper prints."""
    if pattern == "recipes":
        list_recipes(as_json)
        return
    from allmlp.models.catalog import matching, rows

    table = {row.name: row for row in rows()}
    names = matching(table, pattern)
    if not names:
        raise UserError(f"no model matches {pattern!r}{did_you_mean(pattern, table)}")
    if as_json:
        print(json.dumps([table[name]._asdict() for name in names], indent=2))
        return
    from rich.table import Table

    view = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "family", "reads"):
        view.add_column(title, no_wrap=True)
    for title in ("parameters", "MACs", "published"):
        view.add_column(title, justify="right", no_wrap=True)
    for row in map(table.__getitem__, names):
        view.add_row(row.name, row.family, row.reads, millions(row.parameters), billions(row.macs), row.published)
    console().print(view)


def list_recipes(as_json: bool) -> None:
    from allmlp.recipes import recipes

    texts = {recipe.name: recipe.text for recipe in recipes().values()}
    if as_json:
        print(json.dumps(texts, indent=2))
        return
    width = max(map(len, texts)) + 2
    for name, text in texts.items():
        print(f"{name:<{width}}{shorten(text.splitlines()[0], 100 - width, placeholder=' ...')}")


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


@app.command(
    epilog=examples(
        "allmlp train digits_mixer",
        "allmlp train cifar10_gmlp --set optim.lr=2e-3 --out runs/a",
        "allmlp train cifar10_ablations/conv --set seed=1",
        "allmlp train --resume runs/a",
        "torchrun --nproc-per-node 8 -m allmlp train cifar10_gmlp --out runs/b",
    )
)
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A name from `allmlp list recipes`; NAME/ROW is one run of a table.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/RECIPE if not given.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Any field: optim.lr=2e-3.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
) -> None:
    """Train a recipe: one loop for every model and task, alone or under torchrun. It can be killed and resumed."""
    from allmlp import recipes
    from allmlp.spec import override_all
    from allmlp.train import read_run, train

    if (recipe is None) == (resume is None):
        raise UserError("name a recipe, or a folder to --resume")
    if resume is not None:
        print_results({resume.name: train(read_run(resume), resume, device)})
        return
    results = {}
    for name, run in recipes.runs(str(recipe)).items():
        changed = override_all(run, assignments(overrides or []))
        place = out / name.partition("/")[2] if out else Path("runs") / name
        results[name] = train(changed, place, device)
    print_results(results)


def print_results(results: dict[str, dict[str, float]]) -> None:
    from allmlp.log import show

    if os.environ.get("RANK", "0") == "0":
        for name, values in results.items():
            print(name, "  ".join(f"{key} {show(key, value)}" for key, value in values.items()))


@app.command("eval", epilog=examples("allmlp eval runs/a", "allmlp eval runs/a --knn 20"))
def eval_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    knn: Annotated[int | None, typer.Option(help="Judge its features by this many nearest neighbours.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Judge a trained model on its test split again."""
    from allmlp.tasks.probe import Neighbours
    from allmlp.train import judge_again

    print_results({str(run): judge_again(run, device, Neighbours(knn) if knn else None)})


@app.command(
    epilog=examples(
        "allmlp predict photo.jpg",
        "allmlp predict runs/a photo.jpg",
        "allmlp predict runs/a photos/*.png --top 3 --json",
        "allmlp predict runs/mlm 'the cat [MASK] on the mat'",
        "allmlp predict runs/squad 'Who sat on the mat?' --context 'The cat sat on the mat.'",
    )
)
def predict(
    things: Annotated[
        list[str],
        typer.Argument(
            help="Picture files, or texts; a folder in front is the model, else the CIFAR-10 model that comes along."
        ),
    ],
    context: Annotated[str, typer.Option(help="The second sentence of a pair, or the text that has the answer.")] = "",
    top: Annotated[int, typer.Option(help="How many classes or words to name.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """What a trained model says: classes of pictures and texts, words for [MASK], answers, translations."""
    from allmlp.predict import predict, predict_text, reads_text
    from allmlp.weights.pretrained import shipped

    folder = Path(things.pop(0)) if Path(things[0]).is_dir() else shipped()
    if not things:
        raise UserError(f"name a picture or a text for the model in {folder}")
    if reads_text(folder):
        answers = {thing: predict_text(folder, thing, context, top) for thing in things}
    else:
        answers = dict(zip(things, ([row] for row in predict(folder, [Path(thing) for thing in things], top))))
    if as_json:
        rows = {thing: [[answer._asdict() for answer in row] for row in found] for thing, found in answers.items()}
        print(json.dumps({thing: found[0] if len(found) == 1 else found for thing, found in rows.items()}))
        return
    for thing, found in answers.items():
        for row in found:
            print(f"{thing}:", "  ".join(map(str, row)))


@app.command(
    epilog=examples(
        "allmlp convert Mixer-B_16.npz mixer/",
        "allmlp convert resmlp_12_no_dist.pth resmlp/",
        "allmlp convert timm:gmlp_s16_224.ra3_in1k gmlp/",
        "allmlp convert mixer/ out.npz --to google",
    )
)
def convert(
    source: Annotated[str, typer.Argument(help="A file of Google, timm or FAIR, timm:NAME, or a model folder.")],
    target: Annotated[str, typer.Argument(help="A model folder, or with --to a file.")],
    to: Annotated[str | None, typer.Option(help="The layout to write: google, timm or fair.")] = None,
) -> None:
    """Published image weights into a model folder, with the same output; and back."""
    from allmlp.weights.convert import convert

    print(convert(source, target, to))


@app.command(
    epilog=examples("allmlp generate runs/causal --prompt Once", "allmlp generate runs/causal --temperature 0")
)
def generate(
    model: Annotated[Path, typer.Argument(help="Folder of a causal language model.")],
    prompt: Annotated[str, typer.Option(help="How the text begins.")] = "",
    tokens: Annotated[int, typer.Option(help="How many to write at most.", min=1)] = 50,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 draws.", min=0.0)] = 0.8,
    top: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest only.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="The same text again.")] = None,
) -> None:
    """Write text, token by token."""
    from allmlp.predict import generate

    print(generate(model, prompt, tokens, temperature, top, seed))


def assignments(texts: list[str]) -> dict[str, str]:
    """--set a.b=c, as a dictionary."""
    pairs = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UserError(f"--set takes FIELD=VALUE, not {text!r}")
        pairs[path.strip()] = value
    return pairs


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


def fail(message: object) -> NoReturn:
    print(f"error: {one_line(message)}", file=sys.stderr)
    sys.exit(2)


def main(arguments: list[str] | None = None) -> Any:
    """Run the command; whatever the user got wrong becomes one line on stderr and exit code 2."""
    try:
        status = app(arguments, prog_name="allmlp", standalone_mode=False)
    except UserError as reason:
        fail(reason)
    except CommandError as reason:
        fail(reason.format_message())  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has gone; python must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)
