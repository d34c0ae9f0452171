"""Errors that a user sees: one line that says what is wrong and what to do."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


MAX_LINE = 300
"""Characters of an error message."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but tab and line feed; those that change the direction of text are among them."""


class UserError(ValueError):
    """The arguments cannot be used. The command line prints the message and exits with 2."""


class UnknownArgument(UserError, TypeError):
    """A function of the public API was called with a keyword it does not have."""


class MissingExtra(UserError, ImportError):
    """An optional package is needed for this and is not installed."""


SYNONYMS: dict[str, tuple[str, ...]] = {
    # models
    "classes": ("num_classes",),
    "num_labels": ("num_classes",),
    "n_classes": ("num_classes",),
    "nb_classes": ("num_classes",),
    "image": ("img_size", "data.img_size"),
    "image_size": ("img_size", "data.img_size"),
    "input_size": ("img_size",),
    "resolution": ("img_size", "data.img_size"),
    "patch": ("patch_size",),
    "in_channels": ("in_chans",),
    "num_channels": ("in_chans",),
    "channels": ("in_chans", "width"),
    "vocabulary": ("vocab_size",),
    "length": ("seq_len",),
    "max_length": ("seq_len",),
    "max_len": ("seq_len",),
    "max_seq_len": ("seq_len",),
    "max_position_embeddings": ("seq_len",),
    "drop_path_rate": ("drop_path", "rate"),
    "stochastic_depth": ("drop_path",),
    "dim": ("width", "model.width"),
    "embed_dim": ("width", "model.width"),
    "hidden_size": ("width", "model.width"),
    "d_model": ("width", "model.width"),
    "num_layers": ("depth", "model.depth"),
    "num_blocks": ("depth", "model.depth"),
    "num_hidden_layers": ("depth", "model.depth"),
    "d_ffn": ("hidden",),
    "mlp_dim": ("hidden",),
    "hidden_dim": ("hidden",),
    "intermediate_size": ("hidden",),
    "mlp_ratio": ("expansion", "hidden"),
    "heads": ("num_heads",),
    "n_heads": ("num_heads",),
    "num_attention_heads": ("num_heads",),
    "combine": ("variant",),
    "side": ("attention",),
    "project": ("projection",),
    "share": ("tie_embeddings", "alpha"),
    "value": ("init_value",),
    "act_layer": ("act",),
    "activation": ("act",),
    "norm_layer": ("norm",),
    "random_state": ("seed",),
    "pretrained": ("init_from", "allmlp.from_pretrained"),
    "weights": ("init_from", "allmlp.from_pretrained"),
    "checkpoint_path": ("init_from", "allmlp.load"),
    # runs
    "batch": ("batch_size",),
    "train_batch_size": ("batch_size",),
    "per_device_train_batch_size": ("batch_size",),
    "accumulate": ("grad_accum_steps",),
    "gradient_accumulation_steps": ("grad_accum_steps",),
    "accumulation_steps": ("grad_accum_steps",),
    "clip": ("max_grad_norm",),
    "clip_grad": ("max_grad_norm",),
    "grad_clip": ("max_grad_norm",),
    "gradient_clip_val": ("max_grad_norm",),
    "ema": ("ema_decay",),
    "model_ema_decay": ("ema_decay",),
    "repeats": ("aug_repeats",),
    "hold_out": ("val_size",),
    "per_class": ("train_per_class",),
    "shots": ("train_per_class",),
    "fraction": ("train_fraction",),
    "val_split": ("val_size",),
    "validation_split": ("val_size",),
    "checkpointing": ("grad_checkpointing",),
    "gradient_checkpointing": ("grad_checkpointing",),
    "cadence.log": ("log_every",),
    "cadence.evaluate": ("eval_every",),
    "cadence.save": ("save_every",),
    "cadence.keep": ("keep_checkpoints",),
    "cadence": ("log_every", "eval_every", "save_every", "keep_checkpoints"),
    "log_interval": ("log_every",),
    "logging_steps": ("log_every",),
    "eval_steps": ("eval_every",),
    "eval_interval": ("eval_every",),
    "save_steps": ("save_every",),
    "save_total_limit": ("keep_checkpoints",),
    "epochs": ("budget.epochs",),
    "num_epochs": ("epochs", "budget.epochs"),
    "num_train_epochs": ("epochs", "budget.epochs"),
    "steps": ("budget.steps",),
    "max_steps": ("steps", "budget.steps"),
    "minutes": ("budget.minutes",),
    "amp": ("precision",),
    "mixed_precision": ("precision",),
    "torch_compile": ("compile",),
    "resume_from": ("init_from",),
    "opt": ("optim",),
    "optimizer": ("optim",),
    "lr": ("optim.lr",),
    "learning_rate": ("lr", "optim.lr"),
    "decay": ("weight_decay", "optim.weight_decay"),
    "wd": ("weight_decay", "optim.weight_decay"),
    "weight_decay": ("optim.weight_decay",),
    "last_decay": ("weight_decay_end", "optim.weight_decay_end"),
    "beta1": ("betas",),
    "beta2": ("betas",),
    "lr_scheduler": ("schedule",),
    "scheduler": ("schedule",),
    "warmup": ("warmup_fraction", "schedule.warmup_fraction"),
    "warmup_ratio": ("warmup_fraction", "schedule.warmup_fraction"),
    "floor": ("min_lr_ratio", "schedule.min_lr_ratio"),
    "smoothing": ("label_smoothing", "task.label_smoothing"),
    "form": ("distillation_type",),
    "dataset": ("data",),
    "data_dir": ("path", "data.path"),
    "root": ("path", "data.path"),
    # kinds
    "Classes": ("ClassifierHead",),
    "Pair": ("PooledHead",),
    "Span": ("QAHead",),
    "Vocabulary": ("LMHead",),
    "Mean": ("MeanPool",),
    "First": ("FirstTokenPool",),
    "Patches": ("PatchEmbed",),
    "Tokens": ("TokenEmbed",),
    "Learned": ("LearnedPositions",),
    "Sinusoidal": ("SinusoidalPositions",),
    "RelativePositions": ("RelativePositionBias",),
    "SpatialGate": ("SpatialGatingUnit",),
    "SGU": ("SpatialGatingUnit",),
    "MultiheadAttention": ("Attention",),
    "Adam": ("AdamW",),
    "LAMB": ("Lamb",),
}
"""Former names and other libraries' words -> ours: fields, dotted paths, kinds, or functions to use instead."""


def lookup(name: str, table: Mapping[str, T], noun: str) -> T:
    """`table[name]`, or an error that suggests the closest entries."""
    try:
        return table[name]
    except (KeyError, TypeError):
        raise UserError(f"unknown {noun} {name!r}{did_you_mean(name, table)}") from None


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """The end of an error message that suggests what `name` may stand for; empty where nothing is close."""
    names = list(names)
    meant = SYNONYMS.get(str(name), ())
    close = (
        [word for word in meant if word.partition(".")[0] in names]
        or difflib.get_close_matches(str(name), names, n=3, cutoff=0.6)
        or [word for word in meant if word.startswith("allmlp.")]
    )
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def suggest_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of the public API: an unknown keyword raises UnknownArgument with a suggestion."""
    known = inspect.signature(function).parameters
    variadic = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known and not variadic:
                raise UnknownArgument(f"{function.__name__}() has no argument {name!r}{did_you_mean(name, known)}")
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


def one_line(error: object) -> str:
    """An error as one line for a terminal."""
    return printable(" ".join(str(error).split()))[:MAX_LINE]


def printable(text: object) -> str:
    """Text for a terminal: control characters, which it would obey, and lone surrogates, which it refuses, escaped."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
