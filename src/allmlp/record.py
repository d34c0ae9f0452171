"""The record of a run, run.json in its folder.

It holds `run` (the configuration), `processes`, `environment` (command, commit, versions, device, time), `data`
(checksum and number of examples), and, once the run has ended, `result`: the evaluation of the saved model by split,
with trivial baselines (`Task.floors`), `parameters`, `trained_parameters`, `steps`, `epochs` and `seconds` of training,
`best_step` where the best weights are kept, `macs` (multiply-adds of one example), on a GPU `peak_memory` in bytes, and
`evaluations` (step, seconds of training and first metric of each).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from allmlp import checkpoint, pace, threads
from allmlp.data.dataset import Data, Dataset
from allmlp.data.preprocessing import refuse_runs
from allmlp.data.tokenizer import TOKENIZER_FILE, TextData, Tokenizer, load_tokenizer
from allmlp.errors import UserError, writing
from allmlp.files import RUN, lock_folder, write_text_atomically
from allmlp.parallel import World
from allmlp.provenance import environment
from allmlp.run import Run
from allmlp.spec import from_dict, plugin_hint, to_dict
from allmlp.weights.folder import WEIGHTS

log = logging.getLogger(__name__)


@contextmanager
def run_folder(out: Path, run: Run, world: World) -> Iterator[Path]:
    """The folder of a run, while no other process trains into it."""
    check_folder(out, run)
    with ExitStack() as stack:
        if world.is_main:
            try:
                stack.enter_context(lock_folder(out))
            except BlockingIOError:
                raise UserError(
                    f"another process trains into {out}: wait until it has ended, or choose another --out"
                ) from None
        yield out


def check_folder(out: Path, run: Run) -> None:
    """Raise UserError if the folder holds another run or a model, or is not writable. A run is replaced if it is
    unfinished and has no checkpoint.
    """
    before = read_run(out) if (out / RUN).exists() else None
    if before is None and (out / WEIGHTS).exists():
        raise UserError(f"{out} holds a model, which the run would replace: choose another --out")
    if before not in (None, run) and (checkpoint.complete(out) or "result" in read_record(out)):
        changes = ", ".join(differences(to_dict(before), to_dict(run)))
        raise UserError(f"{out} holds another run, these fields differ: {changes}; resume it, or choose another --out")
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not place.is_dir():
        raise UserError(f"cannot write to {out}: {place} is not a folder")
    if not os.access(place, os.W_OK):
        raise UserError(f"cannot write to {out}: no permission for {place}")


def load_data(data: Data, out: Path, world: World) -> Dataset:
    """Load the data of a run. If it continues from a checkpoint, their tokenizer is the one that it began with: the
    cache of another machine does not have it, and training it again gives another one.
    """
    dataset = data.load()
    if not isinstance(data, TextData):
        return dataset
    if (out / TOKENIZER_FILE).is_file() and checkpoint.complete(out) and tokenizer_of(dataset) != load_tokenizer(out):
        if place := data.tokenizer.path:  # type: ignore[attr-defined]
            raise UserError(f"the tokenizer in {place} is no longer the one in {out} that the run began with")
        dataset = data.for_model(str(out)).load()
    tokenizer = tokenizer_of(dataset).to_json()
    if world.any(world.broadcast(tokenizer) != tokenizer):
        raise UserError(
            "the tokenizers of the processes differ, because each node has trained its own: set data.cache to a folder "
            "that all nodes share, or data.tokenizer.path"
        )
    return dataset


def tokenizer_of(dataset: Dataset) -> Tokenizer:
    return dataset.tokenizer  # type: ignore[attr-defined]


def claim(out: Path, run: Run, world: World, dataset: Dataset) -> None:
    """Write run.json and the tokenizer of text, unless they exist and the run continues from a checkpoint; without one
    the run starts again.
    """
    before = read_run(out) if (out / RUN).exists() else None
    starts = before != run or not checkpoint.complete(out)
    world.barrier()
    if starts and world.is_main:
        with writing(f"to {out}"):
            out.mkdir(parents=True, exist_ok=True)
            for name in (pace.FILE, threads.FILE) if before != run else ():
                (out / name).unlink(missing_ok=True)
            if isinstance(run.data, TextData):
                write_text_atomically(out / TOKENIZER_FILE, tokenizer_of(dataset).to_json())
            write_record(out, {"run": to_dict(run), "processes": world.size, "environment": environment(world.device)})
    world.barrier()


def record_data(out: Path, world: World, dataset: Dataset) -> None:
    """Add checksum and number of examples to run.json; a warning if the run began with other data."""
    record = describe_data(dataset) if world.is_main else {}
    add_to_record(out, world, {"data": record})
    if world.is_main:
        warn_of_other_data(out, record)


def warn_of_other_data(out: Path, record: dict[str, Any], consequence: str = "") -> None:
    """A warning if the run in `out` began with other data than those of `record`; it may have recorded none."""
    recorded = read_record(out).get("data")
    if recorded and recorded != record:
        began, now = (
            ", ".join(f"{data[name]:,} {name}" for name in data if name != "sha256") for data in (recorded, record)
        )
        log.warning(
            "the data have changed since the run began: examples were %s, and are %s%s", began, now, consequence
        )


def describe_data(dataset: Dataset) -> dict[str, Any]:
    return {"sha256": dataset.checksum()} | split_sizes(dataset)


def split_sizes(dataset: Dataset) -> dict[str, int]:
    splits = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    return {name: len(split) for name, split in splits.items() if split}


def add_to_record(out: Path, world: World, entries: dict[str, Any]) -> None:
    """Add entries to run.json; existing ones are kept."""
    if world.is_main:
        write_record(out, entries | read_record(out))


def write_record(out: Path, record: dict[str, Any]) -> None:
    order = [name for name in ("run", "processes", "environment", "data", "result") if name in record]
    text = json.dumps({name: record[name] for name in order}, indent=1)
    write_text_atomically(out / RUN, text)


def read_record(out: Path) -> dict[str, Any]:
    file = out / RUN
    if not file.is_file():
        refuse_runs(out)
        raise UserError(f"{out} is not a run: it has no {RUN}")
    try:
        record = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as reason:
        raise UserError(f"{file}: {reason}") from None
    return record if isinstance(record, dict) else {}


def read_run(out: Path) -> Run:
    file, record = out / RUN, read_record(out)
    try:
        run = from_dict(record.get("run"), "run")
    except ValueError as reason:
        raise UserError(f"{file}: {reason}{plugin_hint(reason)}") from None
    if not isinstance(run, Run):
        raise UserError(f"{file} does not describe a run")
    return run


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict) and a.get("kind") == b.get("kind"):
        return [line for name in a for line in differences(a[name], b[name], f"{path}.{name}" if path else name)]
    return [] if a == b else [path]
