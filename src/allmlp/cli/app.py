"""The command itself, and what its parts share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from allmlp import __version__
from allmlp.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


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


def assignments(texts: list[str]) -> dict[str, str]:
    """--set a.b=c, as a dictionary."""
    pairs = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UserError(f"--set takes FIELD=VALUE, not {text!r}")
        pairs[path.strip()] = value
    return pairs


def print_results(results: dict[str, dict[str, float]]) -> None:
    from allmlp.log import show

    if os.environ.get("RANK", "0") == "0":
        for name, values in results.items():
            print(name, "  ".join(f"{key} {show(key, value)}" for key, value in values.items()))
