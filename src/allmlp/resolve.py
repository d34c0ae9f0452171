"""Resolve the argument of `allmlp train X`. X is, in this order:

1. the name of a recipe (`allmlp list recipes`), or NAME/ROW for one run of a table
2. FILE.py:NAME, a `Run` in a Python file, or a function that returns one or a table of them
3. a run.json, or the folder of a run: the same run again
4. data, by name (`digits`) or detected by `allmlp.data.detect`, with settings chosen by `allmlp.auto`

A name that is both a recipe and a file or folder here is refused: `recipe:NAME` is the recipe, `./NAME` the path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from allmlp import recipes
from allmlp.auto import Reason, TrainOptions, choose_run, rank, show
from allmlp.data.augment.multicrop import MultiCrop
from allmlp.data.dataset import Data
from allmlp.data.detect import NAMED, detect_data
from allmlp.data.labeled_text import LabeledText
from allmlp.data.series_table import SeriesTable
from allmlp.data.tables import is_table
from allmlp.errors import UserError, command, did_you_mean, lookup
from allmlp.files import RUN, expand_user
from allmlp.models.zoo import preset, presets
from allmlp.plugins import import_file
from allmlp.record import read_run
from allmlp.run import Budget, Run
from allmlp.spec import hints, override, override_all
from allmlp.tasks.classify import Classify
from allmlp.tasks.dino import Dino
from allmlp.weights.folder import CONFIG
from allmlp.weights.start import open_start

RECIPE_PREFIX = "recipe:"
RUNS = Path("runs")
NO_HEAD_INIT: dict[str, Any] = {"head_init": None, "start_margin": 0.0}
"""For another task than the chosen one, whose head would be fitted."""
CHOSEN = ("model", "task", "data", "schedule", "batch_growth")
"""Fields whose values may be right only with others that depend on the data."""


class Resolved(NamedTuple):
    """A run with its folder, and the reasons for settings that were chosen automatically."""

    run: Run
    folder: Path
    reasons: list[Reason]


def resolve(
    source: str,
    options: TrainOptions = TrainOptions(),
    overrides: Mapping[str, Any] | None = None,
    device: str | None = None,
    out: Path | None = None,
) -> dict[str, Resolved]:
    """The runs given by `source`, by name, with options and overrides applied. The folder of a run is `out`, or a
    subfolder of it for a run of a table; by default it is in runs.
    """
    overrides = overrides or {}
    path = expand_user(source)
    named = source.removeprefix(RECIPE_PREFIX)
    is_recipe = named.partition("/")[0] in recipes.recipes() and not source.startswith((".", "/", "~"))
    if is_recipe and path.exists() and named == source:
        raise UserError(
            f"{source} is a recipe and also a {'folder' if path.is_dir() else 'file'} here: write "
            f"{RECIPE_PREFIX}{source} or ./{source}"
        )
    if is_recipe or source.startswith(RECIPE_PREFIX):
        return changed(recipes.runs(named), options, overrides, out)
    file, colon, name = source.rpartition(":")
    if colon and file.endswith(".py"):
        return changed(read_python(expand_user(file), name), options, overrides, out)
    if path.name == RUN or (path / RUN).is_file():
        folder = path.parent if path.name == RUN else path
        name = folder.resolve().name
        if (out or RUNS / name).resolve() == folder.resolve():
            raise UserError(
                f"{folder} is the run itself: name another folder with --out to repeat it, or continue it with "
                + command("train", "--resume", folder)
            )
        return changed({name: read_run(folder)}, options, overrides, out)
    if (path / CONFIG).is_file():
        raise UserError(
            f"{source} is a model: name the data to train it on, {command('train', 'DATA', '--model', source)}"
        )
    if not path.exists() and source not in NAMED and re.fullmatch(r"[\w./-]+", source):
        hint = did_you_mean(source, [*recipes.recipes(), *NAMED, *(file.name for file in Path().iterdir())])
        raise UserError(f"{source!r} is neither a recipe (`allmlp list recipes`) nor a file or folder{hint}")
    # Overrides of the data come first: without them data may be unreadable, as with two possible label columns.
    names = (name for name in overrides if name.startswith("data.") and name not in Run.aliases)
    fields = {name.removeprefix("data."): overrides[name] for name in names}
    series = is_table(source) and not fields.keys().isdisjoint(("horizon", "time_column", "id_columns"))
    texts = path.is_file() and is_table(source) and "text_column" in fields  # which may be as short as labels
    data = SeriesTable(source) if series else LabeledText(source) if texts else detect_data(source)
    data = override_all(data, fields)
    run, reasons = choose(data, options, overrides, device)
    name = re.sub(r"[^\w.-]+", "_", path.resolve().name.partition(".")[0] or path.resolve().name) or "data"
    return {name: Resolved(run, out or free_folder(name, run), reasons)}


def choose(
    data: Data, options: TrainOptions, overrides: Mapping[str, Any], device: str | None
) -> tuple[Run, list[Reason]]:
    """What is chosen for data, with overrides, and the reasons for what they leave."""
    model = overrides.get("model")
    is_preset = isinstance(model, str) and model in presets() and not Path(model).exists()
    if is_preset and options.model is None and "init_from" not in overrides:
        # As with --model: settings for this model, and not for a trained one, whose weights do not fit it.
        options = options._replace(model=model)
        overrides = {name: value for name, value in overrides.items() if name != "model"}
    start = overrides.get("init_from", "none")
    is_start = isinstance(start, str) and start != "none" and (start not in presets() or Path(start).exists())
    if is_start and options.model is None and "model" not in overrides:
        options = options._replace(model=start)
        overrides = {name: value for name, value in overrides.items() if name != "init_from"}
    # Mistakes in these are found before models are compared, which takes longer.
    override_all(
        Run(model=None, task=Classify(), data=data), {name: overrides[name] for name in filter(is_plain, overrides)}
    )
    choice = choose_run(data, device=device, overrides=overrides, **options._asdict())
    run = change(choice.run, overrides)
    changes = {*overrides, *(field.partition(".")[0] for field in overrides if field.startswith(("task.", "budget.")))}
    if type(run.task) is not type(choice.run.task):
        run = run.replace(**{field: value for field, value in NO_HEAD_INIT.items() if field not in overrides})
        changes |= NO_HEAD_INIT.keys()
    run, crops = with_crops(run, overrides)
    check_sizes(run, overrides)
    kept = (reason for reason in choice.reasons if reason.field.partition(".")[0] not in overrides)
    reasons = sorted([*(reason for reason in kept if reason.field not in changes), *crops], key=rank)
    return run, reasons


def changed(
    runs: dict[str, Run], options: TrainOptions, overrides: Mapping[str, Any], out: Path | None
) -> dict[str, Resolved]:
    resolved = {}
    for name, run in runs.items():
        run = change(with_options(run, options), overrides)  # noqa: PLW2901
        check_sizes(run, overrides)
        resolved[name] = Resolved(run, RUNS / name if out is None else out / name.partition("/")[2], [])
    return resolved


def is_plain(name: str) -> bool:
    """Whether an override is right or wrong for all data."""
    field, dot, _ = name.partition(".")
    return field not in CHOSEN and (not dot or field in ("optim", "budget") or field not in hints(Run))


def change(run: Run, overrides: Mapping[str, Any]) -> Run:
    """The run with overrides; those of a model that it does not have are refused."""
    field = next((name for name in overrides if name.startswith("model.")), "")
    if field and run.model is None and "model" not in overrides:
        start = f"the run starts from {run.init_from}, as it is" if run.init_from else "the run has no model"
        raise UserError(f"{field}: {start}; --model NAME of `allmlp list` trains one from random weights")
    return override_all(run, overrides)


def with_options(run: Run, options: TrainOptions) -> Run:
    """`run` with another model, budget or input size."""
    name = options.model
    if name is not None and name in presets() and not Path(name).exists():
        model, before = preset(name).spec, run.model
        if before is not None and before.input_size and model.input_size:
            model = model.configure(img_size=before.input_size)
        run = run.replace(model=model, init_from=None)
    elif name is not None:
        run = run.replace(model=None, init_from=name)
        run = with_size(run, open_start(name).model.spec.input_size)
    if options.epochs is not None:
        run = run.replace(budget=Budget(epochs=options.epochs, minutes=options.minutes))
    elif options.minutes is not None:
        run = run.replace(budget=run.budget.replace(minutes=options.minutes))
    if options.size is None:
        return run
    if "seq_len" in hints(type(run.data)):
        return override(run, "data.seq_len", options.size)
    if run.model is None and run.init_from is None:
        raise UserError("--size needs a model: name one with --model")
    model = run.model or open_start(str(run.init_from)).model.spec
    return with_size(run.replace(model=model.configure(img_size=options.size)), (options.size, options.size))


def with_size(run: Run, size: tuple[int, int] | None) -> Run:
    """`run` with images of this size, if the size of the data can be set."""
    return override(run, "data.img_size", size) if size and "img_size" in hints(type(run.data)) else run


def check_sizes(run: Run, overrides: Mapping[str, Any]) -> None:
    """Raise UserError if the images are set to another size than the model's: they would be resized twice."""
    data_size = getattr(run.data, "img_size", None)
    if "data.img_size" not in overrides or (run.model is None and run.init_from is None):
        return
    model_size = (run.model or open_start(str(run.init_from)).model.spec).input_size
    if model_size is not None and data_size != model_size:
        raise UserError(f"data.img_size {show(data_size)} is not the model's {show(model_size)}: --size sets both")


def with_crops(run: Run, overrides: Mapping[str, Any]) -> tuple[Run, list[Reason]]:
    """The run with crops of DINO for the size of the model, which would otherwise be trained at that of its crops."""
    task, model = run.task, run.model or (open_start(run.init_from).model.spec if run.init_from else None)
    if not isinstance(task, Dino) or model is None:
        return run, []
    default, before = MultiCrop(), task.crops
    for name, value in task.sized_for(model).items():
        field = f"task.crops.{name}"
        if field not in overrides and getattr(before, name) == getattr(default, name):
            run = override(run, field, value)
    assert isinstance(run.task, Dino)
    crops = run.task.crops
    shown = f"{show(crops.global_size)}, {show(crops.local_size)}"
    return run, [Reason("task.crops", shown, "global and local, for the size of the model")] if crops != before else []


def free_folder(name: str, run: Run) -> Path:
    """runs/NAME, or runs/NAME_2 and so on if another run is there; an equal run is continued."""
    for number in count(1):
        folder = RUNS / (name if number == 1 else f"{name}_{number}")
        try:
            if not (folder / RUN).exists() or read_run(folder) == run:
                return folder
        except UserError:  # written by another version, or damaged
            continue
    raise AssertionError


def read_python(file: Path, name: str) -> dict[str, Run]:
    """The run or table of runs called `name` in a user's file; NAME/ROW is one run of a table."""
    table, _, row = name.partition("/")
    public = {key: value for key, value in vars(import_file(file)).items() if not key.startswith("_")}
    made = lookup(table, public, f"name in {file},")
    made = made() if callable(made) else made
    if isinstance(made, Run):
        return {table: made}
    if not isinstance(made, dict) or not all(isinstance(run, Run) for run in made.values()):
        raise UserError(f"{file}:{table} is {type(made).__name__}, neither a Run nor a function that returns one")
    if row:
        lookup(row, made, f"row of {table}")
    return {f"{table}/{key}": run for key, run in made.items() if row in ("", key)}
