"""Errors that a user sees: one line that says what is wrong and what to do."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


MAX_LINE = 300
"""Characters of an error message."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All control characters but tab and line feed, including those that change the text direction."""


IMPORTED: list[str] = []
"""Plug-ins of `allmlp --import`, which a suggested command needs as well."""


def command(*parts: object) -> str:
    """`allmlp PARTS` as it is typed: quoted for the shell, with the plug-ins of this one."""
    imports = [word for module in IMPORTED for word in ("--import", module)]
    return shlex.join(["allmlp", *imports, *map(str, parts)])


class UserError(ValueError):
    """Raised for arguments that cannot be used. The command line prints the message and exits with status 2."""


class UnknownArgument(UserError, TypeError):
    """A function of the public API was called with a keyword it does not have."""


class MissingExtra(UserError, ImportError):
    """An optional package is needed for this and is not installed."""


OTHER_WORDS: dict[str, str] = {
    # models
    "num_classes": "classes num_labels n_classes nb_classes",
    "img_size": "image image_size input_size resolution",
    "data.img_size": "image image_size resolution",
    "patch_size": "patch",
    "in_chans": "in_channels num_channels channels",
    "width": "channels dim embed_dim hidden_size d_model",
    "model.width": "dim embed_dim hidden_size d_model",
    "vocab_size": "vocabulary",
    "seq_len": "length max_length max_len max_seq_len max_position_embeddings",
    "drop_path": "drop_path_rate stochastic_depth",
    "rate": "drop_path_rate",
    "depth": "num_layers num_blocks num_hidden_layers",
    "model.depth": "num_layers num_blocks num_hidden_layers",
    "expansion": "mlp_ratio",
    "hidden": "d_ffn mlp_dim hidden_dim intermediate_size mlp_ratio",
    "num_heads": "heads n_heads num_attention_heads",
    "variant": "combine",
    "attention": "side",
    "projection": "project",
    "tie_embeddings": "share",
    "alpha": "share",
    "init_value": "value",
    "act": "act_layer activation",
    "norm": "norm_layer",
    "seed": "random_state",
    "init_from": "pretrained weights checkpoint_path resume_from",
    "allmlp.from_pretrained": "pretrained weights",
    "allmlp.load": "checkpoint_path",
    # runs
    "batch_size": "batch train_batch_size per_device_train_batch_size",
    "grad_accum_steps": "accumulate gradient_accumulation_steps accumulation_steps",
    "max_grad_norm": "clip clip_grad grad_clip gradient_clip_val",
    "ema_decay": "ema model_ema_decay",
    "aug_repeats": "repeats",
    "val_size": "hold_out val_split validation_split",
    "train_per_class": "per_class shots",
    "train_fraction": "fraction",
    "grad_checkpointing": "checkpointing gradient_checkpointing",
    "log_every": "cadence.log cadence log_interval logging_steps",
    "eval_every": "cadence.evaluate cadence eval_steps eval_interval",
    "save_every": "cadence.save cadence save_steps",
    "keep_checkpoints": "cadence.keep cadence save_total_limit",
    "epochs": "num_epochs num_train_epochs",
    "budget.epochs": "epochs num_epochs num_train_epochs",
    "steps": "max_steps",
    "budget.steps": "steps max_steps",
    "budget.minutes": "minutes",
    "precision": "amp mixed_precision",
    "compile": "torch_compile",
    "optim": "opt optimizer",
    "lr": "learning_rate",
    "optim.lr": "lr learning_rate",
    "weight_decay": "decay wd",
    "optim.weight_decay": "decay wd weight_decay",
    "weight_decay_end": "last_decay",
    "optim.weight_decay_end": "last_decay",
    "betas": "beta1 beta2",
    "schedule": "lr_scheduler scheduler",
    "warmup_fraction": "warmup warmup_ratio",
    "schedule.warmup_fraction": "warmup warmup_ratio",
    "min_lr_ratio": "floor",
    "schedule.min_lr_ratio": "floor",
    "label_smoothing": "smoothing",
    "task.label_smoothing": "smoothing",
    "distillation_type": "form",
    "data": "dataset",
    "path": "data_dir root",
    "data.path": "data_dir root",
    # kinds
    "ClassifierHead": "Classes",
    "PooledHead": "Pair",
    "QAHead": "Span",
    "LMHead": "Vocabulary",
    "MeanPool": "Mean",
    "FirstTokenPool": "First",
    "PatchEmbed": "Patches",
    "TokenEmbed": "Tokens",
    "LearnedPositions": "Learned",
    "SinusoidalPositions": "Sinusoidal",
    "RelativePositionBias": "RelativePositions",
    "SpatialGatingUnit": "SpatialGate SGU",
    "Attention": "MultiheadAttention",
    "AdamW": "Adam",
    "Lamb": "LAMB",
}
"""Fields, dotted paths, kinds or functions of this library -> other libraries' words for them, and former names."""
MAX_CHOICES = 32
"""Tables of at most so many entries are printed whole where nothing in them is close to a name."""
SYNONYMS: dict[str, tuple[str, ...]] = {}
"""Word of another library -> ours."""
for ours, words in OTHER_WORDS.items():
    for word in words.split():
        SYNONYMS[word] = (*SYNONYMS.get(word, ()), ours)


def lookup(name: str, table: Mapping[str, T], noun: str) -> T:
    """`table[name]`, or an error that suggests the closest entries; if none is close, all of a short table."""
    try:
        return table[name]
    except (KeyError, TypeError):
        every = f": choose one of {', '.join(map(str, table))}" if 0 < len(table) <= MAX_CHOICES else ""
        raise UserError(f"unknown {noun} {name!r}{did_you_mean(name, table) or every}") from None


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """The end of an error message that suggests names close to `name`; empty if there are none."""
    names = list(names)
    meant = SYNONYMS.get(str(name), ())
    close = (
        [word for word in meant if word.partition(".")[0] in names]
        or difflib.get_close_matches(str(name), names, n=3, cutoff=0.6)
        or [one for one in names if len(str(name)) > 2 and str(one).startswith(str(name))][:3]
        or [word for word in meant if word.startswith("allmlp.")]
    )
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def suggest_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of the public API: an unknown keyword raises UnknownArgument with a suggestion."""
    parameters = inspect.signature(function).parameters
    variadic = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in parameters and not variadic:
                raise UnknownArgument(f"{function.__name__}() has no argument {name!r}{did_you_mean(name, parameters)}")
        return function(*args, **kwargs)

    return checked


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or name the extra that installs it."""
    try:
        return importlib.import_module(module)
    except Exception as reason:  # a package whose compiled part does not load may raise anything
        package = module.partition(".")[0]
        if isinstance(reason, ModuleNotFoundError) and (reason.name or "").partition(".")[0] == package:
            raise MissingExtra(f"this needs {package}: pip install 'allmlp[{extra}]'") from reason
        raise MissingExtra(f"{package} is installed but cannot be imported here: {one_line(reason)}") from reason


@contextmanager
def writing(place: object) -> Iterator[None]:
    """Report an OSError inside of the `with` block: `place` cannot be written."""
    try:
        yield
    except OSError as reason:
        raise UserError(f"cannot write {place}: {one_line(reason)}") from reason


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, including the RuntimeErrors of torch's allocators on CPU and GPU."""
    words = "out of memory", "can't allocate memory", "not enough memory"
    return isinstance(error, MemoryError) or any(one in str(error) for one in words)


def one_line(error: object) -> str:
    """An error as one line for a terminal."""
    return printable(" ".join(str(error).split()))[:MAX_LINE]


def printable(text: object) -> str:
    """Escape control characters, which a terminal would execute, and lone surrogates, which it cannot show."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def plural(count: float, one: str, many: str = "", form: str = ",") -> str:
    """Count and noun: 1 run, 2,000 runs; 0.5 minutes with form="g"."""
    number = f"{count:{form}}"
    return f"{number} {one if number == '1' else many or f'{one}s'}"
