"""The command line. Commands import what they need when they run, so that --help is fast.

Each file holds one command, or two related ones; COMMANDS is the order in --help.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import sys
import time
import traceback
import warnings
from importlib import import_module
from typing import Any, NoReturn

import typer

from allmlp.cli.app import DEBUG, app
from allmlp.errors import SYNONYMS, UserError, is_out_of_memory, one_line, printable

# typer contains its own click or uses the installed one: this is the base class of the errors of either.
CommandError = typer.BadParameter.__mro__[2]

COMMANDS = (
    "list",
    "show",
    "train",
    "eval",
    "probe",
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
    "average",
    "shards",
    "export",
    "serve",
    "bench",
    "launch",
)
for name in COMMANDS:
    import_module(f"allmlp.cli.{name}")


def fail(reason: object) -> NoReturn:
    """Print one line, with the traceback before it if --debug was given, and exit with 2."""
    if os.environ.get(DEBUG) and isinstance(reason, BaseException):
        print(printable("".join(traceback.format_exception(reason))), end="", file=sys.stderr)
    line = f"error: {one_line(explain(reason) if isinstance(reason, CommandError) else reason)}"
    if is_first(line):
        print(line, file=sys.stderr)
    sys.exit(2)


def is_first(line: str) -> bool:
    """Whether this is the first process that fails. Under torchrun usually all fail, for the same reason; torchrun
    shows what they write to their error files.
    """
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not report:
        return True
    content = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
    try:
        with open(report, "w", encoding="utf8") as target:
            json.dump({"message": content}, target)
        # The folder of the file is this process's own, the one above it belongs to all.
        with open(os.path.join(os.path.dirname(os.path.dirname(report)), "reported"), "x", encoding="utf8"):
            return True
    except FileExistsError:
        return False
    except OSError:
        return os.environ.get("LOCAL_RANK", "0") == "0"


def listed(names: list[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def is_field(name: str) -> bool:
    """Whether a run has this field, or one that is also called so."""
    from allmlp.run import Run
    from allmlp.spec import hints

    return name in SYNONYMS or name in hints(Run)


def explain(error: Any) -> str:
    """The message; for a missing argument with where examples are; for an unknown option with a correction of a typo,
    the field of --set it may correspond to, or the commands that have it.
    """
    option: str | None = getattr(error, "option_name", None)
    # Only click's NoSuchOption has possibilities; options of other errors lack a value, or have one that does not fit.
    if option is None or not hasattr(error, "possibilities"):
        message = error.format_message()
        missing = hasattr(error, "param_type")  # click's MissingParameter, or that of typer's own click
        return f"{message.rstrip('.')}; for examples: {error.ctx.command_path} --help" if missing else message
    message, options = f"No such option: {option}", [name for param in error.cmd.params for name in param.opts]
    usage = " ".join(error.ctx.get_usage().split()[1:])
    arguments = re.findall("[A-Z]+", usage)
    if option.lstrip("-").upper() in arguments or (option == "--out" and {"TARGET", "FILE"} & {*arguments}):
        return f"{message}; it is an argument: {usage}"
    if option in ("--debug", "--import"):
        return f"{message}; it comes before the command: allmlp {option} ..."
    if close := difflib.get_close_matches(option, options, cutoff=0.75):
        return f"{message}; did you mean {' or '.join(close)}?"
    others = typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    having = [f"allmlp {name}" for name, command in others if any(option in param.opts for param in command.params)]
    name = option.lstrip("-").replace("-", "_")
    if "--set" in options and (not having or is_field(name)):
        return f"{message}; did you mean --set {SYNONYMS.get(name, (name,))[-1]}=VALUE?"
    return f"{message}; {listed(having)} {'has' if len(having) == 1 else 'have'} it" if having else message


def main(arguments: list[str] | None = None) -> Any:
    """Run the command; a user's mistake is printed as one line on stderr, with exit code 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf8"))  # noqa: SIM115
        if hasattr(stream := getattr(sys, name), "reconfigure"):  # names of files need not be text that it can show
            stream.reconfigure(errors="backslashreplace")
    if os.getpid() == 1:  # in a container, where the kernel ignores signals that process 1 does not handle
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # About images that are large, which we refuse ourselves, or have damaged metadata, which we do not read.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        status = app(arguments, prog_name="allmlp", standalone_mode=False)
    except (UserError, CommandError) as reason:
        fail(reason)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as reason:  # a name that is too long, a folder without permission, a full disk
        fail(reason)
    except (MemoryError, RuntimeError) as reason:
        if not is_out_of_memory(reason):
            raise
        fail(MemoryError(f"out of memory, use a smaller model, image or batch: {one_line(reason)}"))
    sys.exit(status if isinstance(status, int) else 0)
