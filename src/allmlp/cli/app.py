"""The typer application, and what its commands share."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from allmlp import __version__
from allmlp.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


def examples(*lines: str) -> str:
    """The end of a help text; the first character keeps its lines from being wrapped."""
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])


class Commands(TyperGroup):
    """Lists commands with the whole first paragraph of their help, where click would cut it to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, (one.help or "").partition("\n\n")[0]) for name, one in commands if one is not None]
            )


app = typer.Typer(
    cls=Commands,
    help="All-MLP networks for images and language: MLP-Mixer, ResMLP, gMLP, aMLP and their baselines.",
    epilog=examples(
        "allmlp list gmlp",
        "allmlp show mixer_b16",
        "allmlp train digits_mixer",
        "allmlp predict photo.jpg",
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def print_version(requested: bool) -> None:
    if requested:
        print(f"allmlp {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def console() -> Console:
    """Tables are at most 100 columns wide, also when the output is a file."""
    from rich.console import Console

    screen = Console(highlight=False)
    screen.width = min(screen.width, 100) if screen.is_terminal else 100
    return screen


def millions(count: float) -> str:
    return f"{count / 1e6:,.2f} M"


def billions(count: float) -> str:
    return f"{count / 1e9:,.3f} G"


def assignments(texts: list[str]) -> dict[str, str]:
    """--set a.b=c, as a dictionary."""
    pairs = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UserError(f"--set takes FIELD=VALUE, not {text!r}")
        pairs[path.strip()] = value
    return pairs


def next_command(*parts: object) -> None:
    """Print what to run next, on stderr so that the output stays what was asked for; not for --json.

    next_command("predict", folder, "IMAGE") prints `next: allmlp predict runs/photos IMAGE`.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"next: allmlp {shlex.join(map(str, parts))}", file=sys.stderr)


def print_results(results: dict[str, dict[str, float]]) -> None:
    from allmlp.log import format_value

    if os.environ.get("RANK", "0") == "0":
        for name, values in results.items():
            print(name, "  ".join(f"{key} {format_value(key, value)}" for key, value in values.items()))
