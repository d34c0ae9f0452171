"""Configuration as frozen, typed values, with strict JSON and dotted overrides.

Subclassing `Spec` makes a frozen dataclass and registers it under its class name (its kind):

    class TokenLinear(TokenMixer):
        causal: bool = False

Every value is checked against its annotation when a spec is constructed.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pkgutil
import types
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from allmlp.errors import UserError, did_you_mean, lookup


@dataclasses.dataclass(frozen=True)
class Range:
    """Inclusive bounds of a number."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        return f"at least {self.low:,}" if self.high == math.inf else f"between {self.low:,} and {self.high:,}"


MAX_COUNT = 2**24
Count = Annotated[int, Range(1, MAX_COUNT)]
Depth = Annotated[int, Range(1, 10_000)]
Rate = Annotated[float, Range(0.0, 1.0)]
NonNegative = Annotated[float, Range(0.0, 1e9)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Size = tuple[Count, Count]
"""Height and width; one number sets both."""


@dataclass_transform(frozen_default=True)
class Spec:
    """Base of all configuration classes; the class name is its kind."""

    kinds: ClassVar[dict[str, type[Spec]]] = {}
    aliases: ClassVar[dict[str, str]] = {}
    """Other paths of fields in overrides -> their own."""

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, repr=False)(cls)
        if not abstract:
            if "kind" in cls.__dataclass_fields__:  # type: ignore[attr-defined]
                raise TypeError(f"{cls.__name__}: 'kind' is the name of the class in JSON, not a field")
            registered = Spec.kinds.get(cls.__name__, cls)
            # Defining a class again (a notebook cell run twice) replaces the first one.
            if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
                raise TypeError(f"two specs are called {cls.__name__}: {registered.__module__} and {cls.__module__}")
            Spec.kinds[cls.__name__] = cls

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            value = conform(getattr(self, name), hint, f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise UserError if fields contradict each other."""

    @classmethod
    def from_name(cls, name: str, path: str) -> Spec:
        """The spec given by a bare name: the kind of that name with its defaults."""
        if name not in Spec.kinds:
            lookup(
                name, {known: kind for known, kind in Spec.kinds.items() if issubclass(kind, cls)}, f"kind of {path}"
            )
        return from_dict({"kind": name}, path)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        for name in changes:
            lookup(name, hints(type(self)), f"{type(self).__name__} field")
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and all fields that have none."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if default(field) is dataclasses.MISSING or getattr(self, field.name) != default(field)
        }

    def children(self) -> Iterator[Spec]:
        """This spec and every spec below it."""
        yield self
        for name in hints(type(self)):
            value = getattr(self, name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Spec):
                    yield from part.children()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.changed().items())})"


def format_spec(value: Any, label: str = "", indent: str = "", width: int = 96) -> str:
    """A spec as Python code without its default values, in lines of at most `width` characters."""
    line = f"{indent}{label}{value!r}"
    if len(line) < width:
        return line
    if isinstance(value, tuple) and any(isinstance(part, Spec) for part in value):
        parts = [format_spec(part, "", indent + "    ", width) + "," for part in value]
        return "\n".join([f"{indent}{label}(", *parts, f"{indent})"])
    if not isinstance(value, Spec):
        return line
    fields = [format_spec(field, f"{name}=", indent + "    ", width) + "," for name, field in value.changed().items()]
    return "\n".join([f"{indent}{label}{type(value).__name__}(", *fields, f"{indent})"])


S = TypeVar("S", bound=Spec)


def discover(package: str) -> list[types.ModuleType]:
    """Import every module of a package, which registers their specs."""
    path = importlib.import_module(package).__path__
    return [importlib.import_module(module.name) for module in pkgutil.walk_packages(path, f"{package}.")]


def default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


_hints: dict[type, dict[str, Any]] = {}


def hints(kind: type) -> dict[str, Any]:
    """Field name -> annotation, without class variables."""
    if kind not in _hints:
        resolved = get_type_hints(kind, include_extras=True)
        _hints[kind] = {field.name: resolved[field.name] for field in dataclasses.fields(kind)}
    return _hints[kind]


def options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if isinstance(hint, type):
        return (hint,)
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe_hint(hint: Any) -> str:
    if len(options(hint)) > 1:
        return " or ".join(dict.fromkeys(describe_hint(option) for option in options(hint)))
    if get_origin(hint) is Annotated:
        base, *bounds = get_args(hint)
        return " ".join([describe_hint(base), *map(str, bounds)])
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return f"a list, each {describe_hint(parts[0])}" if parts[-1] is Ellipsis else f"{len(parts)} numbers"
    if hint is type(None):
        return "none"
    return {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}.get(hint, hint.__name__)


def conform(value: Any, hint: Any, path: str) -> Any:
    """Convert `value` to its annotation (int to float, list to tuple, a name to its spec), or raise UserError."""
    for option in options(hint):
        accepted, result = fits(value, option, path)
        if accepted:
            return result
    raise UserError(f"{path} must be {describe_hint(hint)}, not {shorten(value)}")


def fits(value: Any, hint: Any, path: str) -> tuple[bool, Any]:
    origin = None if isinstance(hint, type) else get_origin(hint)
    if origin is Annotated:
        base, *bounds = get_args(hint)
        accepted, value = fits(value, base, path)
        return accepted and all(bound.low <= value <= bound.high for bound in bounds), value
    if origin is Literal:
        return value in get_args(hint) and isinstance(value, str), value
    if origin is tuple:
        parts = get_args(hint)
        if parts[-1] is Ellipsis:  # tuple[X, ...]: a single value makes a list of one
            value = (value,) if isinstance(value, (Real, Spec)) or is_named(value, parts[0]) else value
            parts = parts[:1] * len(value) if isinstance(value, (tuple, list)) else ()
        elif isinstance(value, Integral) and not isinstance(value, bool):
            value = (value,) * len(parts)
        if not isinstance(value, (tuple, list)) or len(value) != len(parts):
            return False, value
        return True, tuple(conform(v, part, f"{path}[{i}]") for i, (v, part) in enumerate(zip(value, parts)))
    if hint is float:
        try:
            number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        except OverflowError:  # an integer of more than 308 digits
            number = False
        return number, float(value) if number else value
    if hint is int:  # or an integer of numpy
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole, int(value) if whole else value
    if hint is type(None):
        return value is None, value
    if is_named(value, hint):
        value = hint.from_name(value, path)
    return isinstance(value, hint), value


def is_named(value: Any, hint: Any) -> bool:
    """Whether `value` is the name of a spec that `hint` asks for."""
    return isinstance(value, str) and isinstance(hint, type) and issubclass(hint, Spec)


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- JSON -------------------------------------------------------------------------------------------


def to_dict(value: Any) -> Any:
    if isinstance(value, Spec):
        return {"kind": type(value).__name__} | {name: to_dict(getattr(value, name)) for name in hints(type(value))}
    return [to_dict(part) for part in value] if isinstance(value, tuple) else value


def from_dict(data: Any, path: str = "config") -> Any:
    """Build the spec that a dictionary describes. Unknown kinds and fields and missing fields are errors."""
    if isinstance(data, list):
        return tuple(from_dict(part, f"{path}[{i}]") for i, part in enumerate(data))
    if not isinstance(data, dict):
        return data
    if "kind" not in data:
        raise UserError(f"{path} has no 'kind'")
    kind = lookup(data["kind"], Spec.kinds, f"kind of {path}")
    fields = hints(kind)
    values = {}
    for name, value in data.items():
        if name != "kind":
            lookup(name, fields, f"{kind.__name__} field")
            values[name] = from_dict(value, f"{path}.{name}")
    missing = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if default(field) is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise UserError(f"{path}: {kind.__name__} needs {', '.join(missing)}")
    return kind(**values)


def plugin_hint(reason: ValueError) -> str:
    """The end of an error message about a file with an unknown kind."""
    return (
        "; if it comes from a plug-in, import that first: allmlp --import MODULE ..."
        if str(reason).startswith("unknown kind of ")
        else ""
    )


def to_json(spec: Spec) -> str:
    return json.dumps(to_dict(spec), indent=2) + "\n"


def from_json(text: str | bytes) -> Any:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise UserError(f"not valid JSON: {reason}") from None
    if not isinstance(data, dict):
        raise UserError("a configuration must be a JSON object with a 'kind'")
    try:
        return from_dict(data)
    except RecursionError:
        raise UserError("the configuration is nested too deeply") from None


# --- dotted overrides --------------------------------------------------------------------------------


def override(spec: Spec, path: str, value: Any, above: str = "") -> Any:
    """A copy with one field changed: override(model, "block.channel.hidden", "512").

    A string is parsed as on the command line; other values are used as they are.
    """
    path = spec.aliases.get(path, path)
    head, _, rest = path.partition(".")
    fields = hints(type(spec))
    if head not in fields:
        parts = {name: part for name in fields if isinstance(part := getattr(spec, name), Spec)}
        within = [repr(f"{name}.{path}") for name, part in parts.items() if head in hints(type(part))]
        deeper = f"; did you mean {' or '.join(within)}?" if within else ""
        hint = did_you_mean(path, fields) or deeper or did_you_mean(head, fields)
        raise UserError(f"unknown {type(spec).__name__} field {head!r}{hint}")
    hint = fields[head]
    if not rest:
        return spec.replace(**{head: parse(value, hint, above + head) if isinstance(value, str) else value})
    child = getattr(spec, head)
    if isinstance(child, tuple) and any(isinstance(part, Spec) for part in child):
        number, _, rest = rest.partition(".")
        if not rest or not number.isdecimal() or int(number) >= len(child):
            raise UserError(f"{above}{head} has {len(child)} entries: set a field of one, as {above}{head}.0.NAME")
        part = override(child[int(number)], rest, value, f"{above}{head}.{number}.")
        return spec.replace(**{head: (*child[: int(number)], part, *child[int(number) + 1 :])})
    if not isinstance(child, Spec):
        kinds = [kind.__name__ for kind in options(hint) if kind in Spec.kinds.values()]
        first = f"; first set {above}{head}={' or '.join(kinds)}" if child is None and kinds else ""
        raise UserError(f"{above}{head} is {child!r}: it has no field {rest!r}{first}")
    return spec.replace(**{head: override(child, rest, value, f"{above}{head}.")})


def override_all(spec: S, changes: Mapping[str, Any]) -> S:
    """A copy with several fields changed; the order does not matter, as only the result has to be valid.

    Fields of a spec are set after the spec itself, so that "optim.lr" is effective even if "optim" comes later. A kind
    is created with the fields that are given for it, which it may need: "block.token" and "block.token.num_heads".
    """
    ordered = sorted(changes.items(), key=lambda change: change[0].count("."))
    waiting = {path: with_fields(path, value, changes) for path, value in ordered}
    while waiting:
        refused: dict[str, UserError] = {}
        for path, value in waiting.items():
            try:
                if above := next((other for other in refused if path.startswith(f"{other}.")), ""):
                    raise refused[above]
                spec = override(spec, path, value)
            except UserError as reason:
                refused[path] = reason
        if len(refused) == len(waiting):
            raise next(iter(refused.values()))
        waiting = {path: waiting[path] for path in refused}
    return spec


def with_fields(path: str, value: Any, changes: Mapping[str, Any]) -> Any:
    """A kind given by its name, with those of its fields that `changes` sets; any other value as it is."""
    if not isinstance(value, str) or value not in Spec.kinds:
        return value
    given = {}
    for name, hint in hints(Spec.kinds[value]).items():
        if (inner := f"{path}.{name}") in changes:
            field = with_fields(inner, changes[inner], changes)
            given[name] = parse(field, hint, inner) if isinstance(field, str) else field
    return from_dict({"kind": value, **given}, path) if given else value


def parse(text: str, hint: Any, path: str) -> Any:
    """Parse a command-line value: a number, a word, 160x256, none, words with commas, the name of a spec, or JSON."""
    text = text.strip()
    if text.lower() in ("none", "null"):
        return conform(None, hint, path)
    if text.startswith("{"):
        return from_json(text)
    if text.startswith("["):
        return conform(read_list(text, path), hint, path)
    if any(get_origin(option) is tuple and get_args(option)[0] is str for option in options(hint)):
        return conform(tuple(word.strip() for word in text.split(",")), hint, path)
    parts = [part for option in options(hint) for part in (option, *get_args(option))]
    wants_text = any(option is str or get_origin(option) is Literal for option in options(hint))
    if not wants_text and not any(is_named(text, part) for part in parts):
        pieces = text.replace("x", ",").split(",")
        numbers = tuple(read_scalar(piece.strip()) for piece in pieces)
        if any(isinstance(number, str) for number in numbers) and not any(
            get_origin(option) is tuple for option in options(hint)
        ):
            return conform(text, hint, path)  # a word such as "max", to be named as it was written
        return conform(numbers[0] if len(numbers) == 1 else numbers, hint, path)
    return conform(text, hint, path)


def read_list(text: str, path: str) -> Any:
    try:
        return from_dict(json.loads(text), path)
    except (ValueError, RecursionError):
        raise UserError(f'{path} is not a list in JSON, such as [1, 2] or ["a", "b"]: {shorten(text)}') from None


def read_scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def check_seed(seed: Any) -> None:
    """Raise UserError unless torch's generators take this seed."""
    if not hasattr(seed, "__index__") or not -(2**63) <= seed.__index__() < 2**64:
        raise UserError(f"seed must be a whole number from 0 to 2**63 - 1, not {seed!r}")
