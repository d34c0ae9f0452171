"""The typer application, and functions shared by the commands."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from allmlp.errors import IMPORTED, UserError, command, printable
from allmlp.files import finite

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def examples(*lines: str) -> str:
    """The end of a help text; the first character keeps its lines from being wrapped."""
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])


DEBUG = "ALLMLP_DEBUG"
"""Set to show the traceback of an error; a variable, so that the processes of a study see it as well."""
VERBS = {
    "classify": "predict",
    "compare": "report",
    "evaluate": "eval",
    "benchmark": "bench",
    "download": "convert",
    "features": "embed",
    "fine-tune": "train",
    "finetune": "train",
    "fit": "train",
    "help": "--help",
    "infer": "predict",
    "info": "show",
    "models": "list",
    "quantize": "export",
    "recipes": "list recipes",
    "test": "eval",
    "val": "eval",
    "validate": "eval",
    "visualize": "analyze",
}
"""Other tools' words -> our commands."""


class Commands(TyperGroup):
    """Lists commands with the whole first paragraph of their help, where click would cut it to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, (one.help or "").partition("\n\n")[0]) for name, one in commands if one is not None]
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if ctx.resilient_parsing or name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        meant = nearest_command(name, self.commands)
        hint = f"did you mean allmlp {meant}?" if meant else "see allmlp --help"
        raise UserError(f"No such command {name!r}; {hint}")

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reading process (head, less) has exited: Python must not report this at exit, and click's status of 1
            # would mean that inputs could not be used.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)


def nearest_command(name: str, commands: Iterable[str]) -> str:
    """Suggestion for a first word that is not a command: another tool's word, a file, a model, a typo."""
    close = difflib.get_close_matches(name, [*commands, *VERBS], n=1)
    if close:
        return VERBS.get(close[0], close[0])
    path = Path(name)
    if os.path.exists(name):
        data = path.is_dir() or path.suffix in (".csv", ".tsv", ".jsonl", ".parquet")
        verb = "report" if (path / "run.json").is_file() else "train" if data else "predict"
        return f"{verb} {shlex.quote(name)}"
    names = difflib.get_close_matches(name, complete_name(""), n=1)
    return f"show {names[0]}" if names else ""


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes whose name starts like this, for the shell."""
    from allmlp.recipes import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    from allmlp.models.catalog import read_catalog

    return [entry.name for entry in read_catalog() if entry.name.startswith(incomplete)]


def complete_name(incomplete: str) -> list[str]:
    return complete_model(incomplete) + complete_recipe(incomplete)


class Command(TyperCommand):
    """Names values in the help like other programs: --gpus INT, not --gpus <int range>."""

    def invoke(self, ctx: Any) -> Any:
        out = str(ctx.params.get("out") or "")
        if re.match(r"\w{2,}:/", out):
            out = re.sub(":/+", "://", out)  # Path has made one slash of two
            raise UserError(f"--out {out}: only files and folders of this machine can be written")
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = ["[OPTIONS]"]
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                name = argument_name(param).removesuffix("...") + ("..." if param.nargs != 1 else "")
                pieces.append(name if param.required else f"[{name}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                names, text = record
                if param.param_type_name == "argument":
                    names = argument_name(param)
                elif param.metavar:
                    names = f"{', '.join(param.opts)} {param.metavar}"
                sections[param.param_type_name].append((re.sub(r"<(?:list\[)?(\w+).*>", value_name, names), text))
        for title, records in sections.items():
            if records:
                with formatter.section(f"{title.capitalize()}s"):
                    formatter.write_dl(records, col_max=32)


def argument_name(param: Any) -> str:
    return param.metavar or param.name.upper()


def value_name(match: re.Match[str]) -> str:
    return {"str": "TEXT", "directory": "FOLDER"}.get(match[1], match[1].upper())


class Application(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, cls=Command, **options)


app = Application(
    cls=Commands,
    help="All-MLP networks for images, language and time series: MLP-Mixer, ResMLP, gMLP, aMLP and their baselines.",
    epilog=examples(
        "allmlp train photos/                      # a folder of images per class",
        "allmlp predict runs/photos new_photos/",
        "allmlp predict photo.jpg                  # with the bundled model",
        "allmlp list recipes cifar10",
        "allmlp show mixer_b16",
    ),
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def print_version(requested: bool) -> None:
    if requested:
        from allmlp.provenance import version_line

        print(version_line())
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=print_version,
            is_eager=True,
            help="Print version, commit and torch version, and exit.",
        ),
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE", help="Import a module that adds mixers, models, recipes or studies."
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"
    IMPORTED[:] = modules or []
    if modules:
        from allmlp.plugins import VARIABLE

        # A variable, so that the processes of a study import them as well.
        os.environ[VARIABLE] = ",".join([*filter(None, [os.environ.get(VARIABLE)]), *modules])
    if context.invoked_subcommand is None:
        print(context.get_help())


MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metric", metavar="FILE.py:NAME", help="A function of logits and labels, or MODULE:NAME; repeatable."
    ),
]


def width() -> int:
    """Width of the output: that of the terminal, at most 100, also for files."""
    return min(shutil.get_terminal_size((100, 0)).columns, 100)


def wrap_text(text: str, columns: int) -> list[str]:
    """Wrap a docstring to this width; commands and indented lines are unchanged."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        lines += [""] if lines else []
        for kept, group in itertools.groupby(paragraph.splitlines(), is_command):
            texts = list(group)
            lines += texts if kept else textwrap.wrap(" ".join(texts), columns)
    return lines


def is_command(line: str) -> bool:
    return line.startswith((" ", "allmlp ", "torchrun "))


def print_described(texts: Mapping[str, str], columns: int) -> None:
    """Names, each with the first paragraph of its text beside it."""
    indent = max(map(len, texts)) + 2
    for name, text in texts.items():
        first, *rest = textwrap.wrap(" ".join(text.partition("\n\n")[0].split()), max(columns - indent, 20)) or [""]
        print(f"{name:<{indent}}{first}", *(" " * indent + line for line in rest), sep="\n")


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=width())


def plain_table(left: Iterable[str], right: Iterable[str] = (), **column: Any) -> Table:
    """A table without lines; `left` are columns of words, `right` of numbers, `column` are options of all of them."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in left:
        table.add_column(title, **column)
    for title in right:
        table.add_column(title, justify="right", **column)
    return table


def cell(text: object) -> str:
    """A name of the user's for a table: rich would take [old] in it for a style, and leave it out."""
    from rich.markup import escape

    return escape(printable(text))


def is_main_process() -> bool:
    """Whether this is the only process, or the first of torchrun."""
    return os.environ.get("RANK", "0") == "0"


def print_json(value: Any, indent: int | None = None) -> None:
    print(json.dumps(finite(value), indent=indent, allow_nan=False, default=str))


def millions(count: float) -> str:
    return f"{count / 1e6:,.{2 if count < 1e10 else 0}f} M"


def billions(count: float) -> str:
    return f"{count / 1e9:,.{3 if count < 1e13 else 0}f} G"


def assignments(texts: list[str], usage: str = "--set takes FIELD=VALUE") -> dict[str, str]:
    """--set a.b=c, as a dictionary; `usage` is said of another text."""
    pairs = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UserError(f"{usage}, not {text!r}")
        pairs[path.strip()] = value
    return pairs


def say(text: str) -> None:
    """Print on stderr, so that it is not part of the output."""
    print(printable(text), file=sys.stderr)


def next_command(*parts: object) -> None:
    """Print what to run next; not for --json.

    next_command("predict", folder, "IMAGE") prints `next: allmlp predict runs/photos IMAGE`.
    """
    if is_main_process():
        say(f"next: {command(*parts)}")


def next_for_head(folder: Path, *parts: object) -> None:
    """Print what to run next with a model's outputs; for a model without a head, what trains one."""
    from allmlp.weights.folder import read_spec

    next_command(*(parts if read_spec(folder).has_head else ("train", "DATA", "--model", folder)))


def next_prediction(folder: Path) -> None:
    """Print the command that uses a trained model of images or texts, if its folder says how."""
    from allmlp.data.preprocessing import TextPreprocessing, known_preprocessing
    from allmlp.weights.folder import read_spec

    preprocessing, spec = known_preprocessing(folder), read_spec(folder)
    block = getattr(spec, "block", None)
    if preprocessing is None:
        next_command("show", folder)
    elif not spec.has_head:
        next_command("train", "DATA", "--model", folder)
    elif not isinstance(preprocessing, TextPreprocessing):
        next_command("predict", folder, "IMAGE")
    elif preprocessing.task == "span":
        next_command("predict", folder, "QUESTION", "--context", "TEXT")
    elif preprocessing.task == "text" and block is not None and block.causal:
        next_command("generate", folder, "--prompt", "TEXT")
    elif preprocessing.task == "text":
        next_command("predict", folder, "TEXT WITH [MASK]")
    else:
        next_command("predict", folder, "TEXT", *(["--context", "TEXT"] if len(preprocessing.text_columns) > 1 else []))


def print_results(results: dict[str, dict[str, float]]) -> None:
    from allmlp.log import format_values

    if is_main_process():
        for name, values in results.items():
            print(printable(name), format_values(values))
