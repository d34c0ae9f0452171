"""The command line. Commands import what they need when they run, so that --help is fast.

Each file holds one command, or two related ones; COMMANDS is the order in --help.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import typer

from allmlp.cli.app import app
from allmlp.errors import SYNONYMS, UserError, one_line

# typer contains its own click or uses the installed one: this is the base class of the errors of either.
CommandError = typer.BadParameter.__mro__[2]

COMMANDS = (
    "list",
    "show",
    "train",
    "eval",
    "study",
    "predict",
    "embed",
    "analyze",
    "report",
    "tables",
    "plan",
    "convert",
    "resize",
    "prune",
    "export",
    "serve",
    "bench",
)
for name in COMMANDS:
    import_module(f"allmlp.cli.{name}")


def fail(message: object) -> NoReturn:
    print(f"error: {one_line(message)}", file=sys.stderr)
    sys.exit(2)


def suggest_set(error: Any) -> str:
    """For an unknown option of a command with --set: the field that it may stand for."""
    option: str | None = getattr(error, "option_name", None)
    if option is None or error.possibilities or not any("--set" in param.opts for param in error.cmd.params):
        return ""
    name = option.lstrip("-").replace("-", "_")
    return f"; did you mean --set {SYNONYMS.get(name, (name,))[-1]}=VALUE?"


def main(arguments: list[str] | None = None) -> Any:
    """Run the command; a user's mistake is printed as one line on stderr, with exit code 2."""
    try:
        status = app(arguments, prog_name="allmlp", standalone_mode=False)
    except UserError as reason:
        fail(reason)
    except CommandError as reason:
        fail(reason.format_message() + suggest_set(reason))  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # The reading process (head, less) has exited; Python must not report this at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)
