"""torchrun in forks of one process that has imported what runs need, which takes longer than most runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent.parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
}
# Processes of a run are forks of torchrun, also after a restart.
CODE = """
import functorch.compile, torch._inductor.compile_fx
import gc, json, multiprocessing, os, sys
from torch.distributed.run import main
from allmlp import training
import torch._dynamo, torch.distributed.fsdp, torch.utils.tensorboard, train.runs

def torchrun(arguments, log, environment):
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    main(["--run-path", "--start-method", "fork", *arguments])

training.draw_curves = lambda out: []
gc.freeze()  # each run ends with a collection, which would visit all modules
forks = multiprocessing.get_context("fork")
for line in sys.stdin:
    started = [forks.Process(target=torchrun, args=launch) for launch in json.loads(line)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    print(json.dumps([process.exitcode for process in started]), flush=True)
"""


class Launcher:
    """Starts with the first launch; what still runs at the end is killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Launcher:
        return self

    def run(self, launches: Sequence[tuple[Sequence[str], Path]]) -> list[int]:
        """Exit codes of torchruns that run at the same time, each given as its arguments and a file for its output."""
        if self.process is None:
            pipe, environment = subprocess.PIPE, {**os.environ, **ENVIRONMENT}
            command = [sys.executable, "-c", CODE]
            self.process = subprocess.Popen(
                command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        environment = {**os.environ, **ENVIRONMENT}
        lines = [(list(arguments), str(log), environment) for arguments, log in launches]
        print(json.dumps(lines), file=self.process.stdin, flush=True)
        try:
            answer = self.process.stdout.readline()
        except BaseException:  # the time limit of a test: the next launch does not wait for what hangs
            self.kill()
            raise
        assert answer, f"the launcher has ended with {self.process.wait()}"
        return json.loads(answer)

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None
