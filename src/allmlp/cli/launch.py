"""allmlp launch."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from allmlp.cli.app import app, examples
from allmlp.errors import UserError, one_line

QUIET = 2, 130
"""Exit statuses of a process that has printed its own error: a user's mistake, and Ctrl-C."""


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "allmlp launch --nproc-per-node 8 train imagenet_mixer_b16 --out runs/b --set data.path=shards/",
        "allmlp launch --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 train imagenet_mixer_b16 --out runs/b",
        "allmlp launch --nproc-per-node 8 predict runs/photos 's3://bucket/*.tar' --out answers/",
    ),
)
def launch(
    arguments: Annotated[list[str], typer.Argument(help="Options of torchrun, then a command with its own options.")],
) -> None:
    """Run a command in several processes.

    The same as torchrun OPTIONS -m allmlp COMMAND, except that a failure prints one line, and the exit status is that
    of the process that failed first.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    def refuse(message: str) -> NoReturn:
        raise UserError(
            f"{message}; the options are those of torchrun, before the command: allmlp launch OPTIONS train"
        )

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    given = parser.parse_args(arguments)
    given.module, given.training_script, command = True, "allmlp", given.training_script
    given.training_script_args = [command, *given.training_script_args]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does so too, with a warning
    logging.disable(logging.ERROR)  # torchrun's own report of failures
    try:
        run(given)
    except ValueError as error:  # of torchrun's options, such as --nproc-per-node two
        refuse(one_line(error))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if status not in QUIET:
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
            print(f"error: process {rank} ended {how}", file=sys.stderr)
        sys.exit(status if status > 0 else 128 - status)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
