"""Common parts of predict and embed: options, choice of the model, progress, and unusable inputs."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allmlp.cli.app import next_command, say
from allmlp.errors import UserError, did_you_mean, lookup, printable

if TYPE_CHECKING:
    from allmlp.prediction.inputs import Columns, Inputs, Item
    from allmlp.prediction.stream import Answer

FAST_FROM = {"cpu": 100, "cuda": 1000}
"""Images from which on the conversion by allmlp.fast() pays: on a CPU it takes half a second and saves a sixth of the
time, on a GPU the first batch compiles kernels for some seconds.
"""
MAX_REPORTS = 10
"""Inputs that are reported one by one if they cannot be used."""
MAX_LABELS = 5
"""In the summary."""
MODEL_FILES = ("config.json", "run.json", "preprocessing.json")
MODEL_PREFIXES = ("allmlp:", "timm:", "hf:")
DTYPES = ("float32", "bfloat16", "float16")
PART_SIZE = 10_000

ModelAndInputs = Annotated[
    list[str],
    typer.Argument(
        metavar="[MODEL] INPUTS",
        help="A model folder or name, then files, folders, patterns, tables (.csv, .tsv, .jsonl, .parquet), shards "
        "(.tar), URLs such as s3://bucket/folder, texts, or - for standard input. Default: a bundled model.",
    ),
]
ContextOption = Annotated[
    str, typer.Option(help="The second sentence of a pair, or the paragraph that contains the answer.")
]
ColumnOption = Annotated[str, typer.Option(help="Column of a table with the texts or image files.")]
PairOption = Annotated[str, typer.Option(help="Column of a table with the second sentence, or with the context.")]
KeepOption = Annotated[list[str] | None, typer.Option(help="Column of a table to copy to the output; can be repeated.")]
BatchOption = Annotated[int | None, typer.Option(help="Inputs per batch; default 32 on a CPU, 256 on a GPU.", min=1)]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, mps or xpu; default: a GPU if there is one.")
]
DtypeOption = Annotated[
    str | None, typer.Option(help=f"{', '.join(DTYPES)}; default float32, with --fast on a GPU bfloat16.")
]
FastOption = Annotated[
    bool | None,
    typer.Option(
        "--fast/--no-fast",
        help=f"Convert an image model by allmlp.fast(), or not; default: for {FAST_FROM['cpu']} images or more, on a "
        f"GPU for {FAST_FROM['cuda']:,} or more.",
        show_default=False,
    ),
]
PartOption = Annotated[
    int | None, typer.Option(help=f"Inputs per part if --out is a folder; default {PART_SIZE:,}.", min=1)
]


class PredictionJob:
    """A model and its inputs. Progress and errors are printed on stderr, by the first process only."""

    def __init__(
        self,
        arguments: list[str],
        columns: Columns,
        context: str,
        device: str | None,
        dtype: str | None,
        fast: bool | None,
        out: str | None,
        part_size: int | None = None,
    ) -> None:
        from allmlp.device import own_device
        from allmlp.prediction.inputs import Inputs
        from allmlp.prediction.predictor import model_inputs, open_predictor

        precision = torch_dtype(dtype)
        self.arguments, self.out, self.part_size = [*arguments], out, part_size or PART_SIZE
        self.process = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.rank, self.processes = self.process
        self.is_folder = out is not None and (out.endswith("/") or Path(out).is_dir() or not Path(out).suffix)
        self.model, rest = split_model(arguments)
        kind = model_inputs(self.model)
        self.options = kind.reads, columns, context, *kind[1:]
        self.inputs = Inputs(rest, *self.options)
        refuse_unused(self.inputs, fast, part_size if not self.is_folder else None)
        if self.processes > 1 and not (self.is_folder and self.inputs.repeatable):
            raise UserError("several processes need inputs other than - and a folder to write parts to: --out FOLDER/")
        items = iter(self.inputs)
        if fast is None:
            # Only names are listed here; nothing is decoded yet.
            many = FAST_FROM.get(own_device(device).type, 0) if self.inputs.reads == "images" else 0
            first = list(islice(items, many))
            fast, items = 0 < many == len(first), chain(first, items)
        self.items: Iterator[Item] = items
        self.predictor = open_predictor(self.model, device=device, dtype=precision, fast=fast)
        self.done = self.failed = self.earlier = 0
        self.error = ""
        self.progress: Any = None
        self.next: tuple[str, ...] = ()
        """The command to suggest at the end."""

    def watch(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        """Pass answers on, show progress, and report inputs that could not be used."""
        progress, task = self.start_progress()
        with progress:
            for answer in answers:
                if self.failed == 1 and self.done == 1:
                    self.report(self.error)
                self.done += 1
                if answer.error:
                    self.failed += 1
                    self.error = answer.message
                    if self.done > 1 and self.failed <= MAX_REPORTS:
                        self.report(self.error)
                progress.advance(task)
                yield answer

    def report(self, error: str) -> None:
        self.progress.console.print(f"skipped {printable(error)}", markup=False, highlight=False, soft_wrap=True)

    def start_progress(self) -> tuple[Any, Any]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        screen = Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        quiet = not screen.is_terminal or self.rank > 0
        if self.progress is None:
            self.progress = Progress(*columns, console=screen, transient=True, disable=quiet)
            self.bar = self.progress.add_task("", total=None)
            if not quiet and self.inputs.repeatable and self.processes == 1:
                threading.Thread(target=self.count, daemon=True).start()
        return self.progress, self.bar

    def count(self) -> None:
        try:
            self.progress.update(self.bar, total=sum(1 for _ in self.inputs))
        except UserError:  # reported when the input is reached
            return

    def single(self, text: str) -> Item:
        """The one input that `text` names."""
        from allmlp.prediction.inputs import Inputs

        items = list(islice(Inputs([text], *self.options), 2))
        if len(items) > 1:
            raise UserError(f"{text} has several {self.inputs.reads}: name one")
        return items[0]

    def write_parts(
        self,
        columns: dict[str, type],
        answer: Callable[[Iterable[Item]], Iterable[dict[str, Any]]],
        settings: tuple[Any, ...],
    ) -> None:
        """Fill the folder of --out; `settings` are the command and the options that its answers depend on."""
        from allmlp.prediction.output import PartWriter
        from allmlp.prediction.predictor import model_checksum

        def skip(count: int) -> None:
            self.earlier += count

        command, *options = settings
        precision = [str(self.predictor.dtype), self.predictor.fast]
        all_settings = {"command": command, "model": model_checksum(self.model), "precision": precision}
        all_settings = json.loads(json.dumps({**all_settings, "options": [*options, self.part_size]}))
        PartWriter(Path(self.out or ""), self.part_size, all_settings, *self.process).write(
            self.items, columns, answer, skip
        )

    def finish(self, counts: Counter[str] | None = None) -> None:
        """Print a summary with the count of each label; exit with 1 if inputs could not be used."""
        alone = self.processes == 1  # torchrun ends all processes when one exits with an error
        if alone and self.failed and self.failed == self.done:
            several = f"none of the {self.done:,} inputs could be used; the last one: " if self.done > 1 else ""
            raise UserError(several + self.error)
        labels = f": {most_frequent(counts)}" if counts else ""
        noun = self.inputs.reads.removesuffix("s") if self.done == 1 else self.inputs.reads
        parts = [f"{self.done:,} {noun}{labels}"] if self.done > 1 or self.out else []
        parts += [f"{self.earlier:,} done before"] if self.earlier else []
        parts += [f"{self.failed:,} skipped"] if self.failed else []
        parts += [f"written to {self.out}"] if self.out else []
        if parts:
            who = f"process {self.rank}: " if self.processes > 1 else ""
            say(who + "; ".join(parts))
        if self.next:
            next_command(*self.next)
        if alone and self.failed:
            raise typer.Exit(1)


def torch_dtype(name: str | None) -> Any:
    """The value of --dtype; None if it is not given."""
    import torch

    return None if name is None else getattr(torch, lookup(name, {one: one for one in DTYPES}, "dtype"))


def refuse_unused(inputs: Inputs, fast: bool | None, part_size: int | None) -> None:
    """Refuse options that would have no effect; `part_size` is the one given for an output without parts."""
    images, columns = inputs.reads == "images", inputs.columns
    unused = {
        "--part-size is for parts: --out FOLDER/": part_size,
        "--fast is for image models, and this one reads texts": fast and not images,
        "--context is for models that read texts": inputs.context and images,
        "--pair-column is for models that read texts": columns.pair and images,
        "--column, --pair-column and --keep are for tables, and the inputs are none": any(columns)
        and not inputs.may_have_tables,
    }
    if given := [reason for reason, value in unused.items() if value]:
        raise UserError(given[0])


def split_model(arguments: list[str]) -> tuple[str, list[str]]:
    """The model, if the first argument is one, or the bundled one for such inputs; and the inputs."""
    from allmlp.data.preprocessing import refuse_runs
    from allmlp.weights.published import published_weights

    first = arguments[0]
    is_folder = any(os.path.isfile(os.path.join(first, name)) for name in MODEL_FILES)
    if is_folder or first.startswith(MODEL_PREFIXES) or first in published_weights():
        if len(arguments) == 1:
            raise UserError(f"name the input of {first}: an image file, a folder, a table or a text")
        return first, arguments[1:]
    if os.path.isdir(first):
        refuse_runs(Path(first))
    if first.endswith((".onnx", ".pt2")):
        raise UserError(f"{first} is an exported model: name the folder it was exported from")
    if len(arguments) > 1 and not os.path.exists(first) and "/" in first and not any(map(str.isspace, first)):
        beside = Path(first).parent.glob("*") if Path(first).parent.is_dir() else ()
        hint = did_you_mean(os.path.normpath(first), map(str, beside))
        raise UserError(f"{first} is neither a model folder nor an input{hint}")
    from allmlp.prediction.inputs import guess_reads
    from allmlp.weights.bundled import BUNDLED, BUNDLED_TEXT, bundled_models

    if guess_reads(first) != "texts":
        return BUNDLED, arguments
    if BUNDLED_TEXT not in bundled_models():
        raise UserError(f"name a model for {first!r}: allmlp predict MODEL TEXT")
    return BUNDLED_TEXT, arguments


def most_frequent(counts: Counter[str]) -> str:
    """The most frequent labels with their counts, and how many inputs have another one."""
    common = counts.most_common(MAX_LABELS)
    rest = counts.total() - sum(count for _, count in common)
    parts = [f"{count:,} {label}" for label, count in common]
    return ", ".join([*parts, f"{rest:,} with other labels"] if rest else parts)
