"""The command line. Commands import what they need when they run, so that --help is fast.

Each file holds one command, or two related ones; COMMANDS is the order in --help.
"""

from __future__ import annotations

import difflib
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


def explain(error: Any) -> str:
    """The message; of an unknown option with a typo's correction, the field of --set it may stand for, or the commands
    that have it.
    """
    option: str | None = getattr(error, "option_name", None)
    if option is None:
        return error.format_message()
    message, known = f"No such option: {option}", [name for param in error.cmd.params for name in param.opts]
    if close := difflib.get_close_matches(option, known, cutoff=0.75):
        return f"{message}; did you mean {' or '.join(close)}?"
    if "--set" in known:
        name = option.lstrip("-").replace("-", "_")
        return f"{message}; did you mean --set {SYNONYMS.get(name, (name,))[-1]}=VALUE?"
    others = typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    having = [f"allmlp {name}" for name, command in others if any(option in param.opts for param in command.params)]
    return f"{message}; {' and '.join(having)} {'has' if len(having) == 1 else 'have'} it" if having else message


def main(arguments: list[str] | None = None) -> Any:
    """Run the command; a user's mistake is printed as one line on stderr, with exit code 2."""
    try:
        status = app(arguments, prog_name="allmlp", standalone_mode=False)
    except UserError as reason:
        fail(reason)
    except CommandError as reason:
        fail(explain(reason))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # The reading process (head, less) has exited; Python must not report this at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)
