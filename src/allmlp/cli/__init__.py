"""The command line: thin, and quick to answer because everything heavy is imported where it is used.

One file is one command, or two that belong together; COMMANDS is the order of --help.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import typer

from allmlp.cli.app import app
from allmlp.errors import UserError, one_line

# typer brings its own click or uses the installed one: the base of its errors is taken from what it exports.
CommandError = typer.BadParameter.__mro__[2]

COMMANDS = (
    "list",
    "show",
    "train",
    "predict",
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
