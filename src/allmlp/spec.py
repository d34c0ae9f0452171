"""Configuration as frozen, typed values: one class per thing, strict JSON, dotted overrides.

Subclassing `Spec` makes a frozen dataclass and registers it under its class name (its kind):

    class TokenLinear(TokenMixer):
        causal: bool = False

Every value is checked against its annotation when it is made, so a spec that exists is well formed.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pkgutil
import types
from collections.abc import Iterator, Mapping
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

from allmlp.errors import UserError, lookup


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number, both included."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        return f"at least {self.low:,}" if self.high == math.inf else f"between {self.low:,} and {self.high:,}"


LARGEST = 2**24
Count = Annotated[int, Range(1, LARGEST)]
Depth = Annotated[int, Range(1, 10_000)]
Rate = Annotated[float, Range(0.0, 1.0)]
NonNegative = Annotated[float, Range(0.0)]
Size = tuple[Count, Count]
"""Height and width; a single number stands for both."""


@dataclass_transform(frozen_default=True)
class Spec:
    """Base of every configuration value; the class name is its kind."""

    kinds: ClassVar[dict[str, type[Spec]]] = {}

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, repr=False)(cls)
        if not abstract:
            if "kind" in cls.__dataclass_fields__:  # type: ignore[attr-defined]
                raise TypeError(f"{cls.__name__}: 'kind' is the name of the class in JSON, not a field")
            if cls.__name__ in Spec.kinds:
                raise TypeError(f"two specs are called {cls.__name__}")
            Spec.kinds[cls.__name__] = cls

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            value = conform(getattr(self, name), hint, f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise UserError where fields contradict each other."""

    def replace(self, **changes: Any) -> Self:
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


S = TypeVar("S", bound=Spec)


def discover(package: str) -> list[types.ModuleType]:
    """Import every module of a package, so that their specs are known by name: adding a file is enough."""
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
    """The alternatives of a union, or the annotation alone."""
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
    """`value` as its annotation wants it (ints become floats, lists tuples), or a UserError."""
    for option in options(hint):
        accepted, result = fits(value, option, path)
        if accepted:
            return result
    raise UserError(f"{path} must be {describe_hint(hint)}, not {shorten(value)}")


def fits(value: Any, hint: Any, path: str) -> tuple[bool, Any]:
    if get_origin(hint) is Annotated:
        base, *bounds = get_args(hint)
        accepted, value = fits(value, base, path)
        return accepted and all(bound.low <= value <= bound.high for bound in bounds), value
    if get_origin(hint) is Literal:
        return value in get_args(hint) and isinstance(value, str), value
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if parts[-1] is Ellipsis:  # tuple[X, ...]: as many as given; a lone one stands for a list of one
            value = (value,) if isinstance(value, (int, float, Spec)) else value
            parts = parts[:1] * len(value) if isinstance(value, (tuple, list)) else ()
        elif isinstance(value, int) and not isinstance(value, bool):
            value = (value,) * len(parts)
        if not isinstance(value, (tuple, list)) or len(value) != len(parts):
            return False, value
        return True, tuple(conform(v, part, f"{path}[{i}]") for i, (v, part) in enumerate(zip(value, parts)))
    if hint is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return number, float(value) if number else value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if hint is type(None):
        return value is None, value
    return isinstance(value, hint), value


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- JSON -------------------------------------------------------------------------------------------


def to_dict(value: Any) -> Any:
    if isinstance(value, Spec):
        return {"kind": type(value).__name__} | {name: to_dict(getattr(value, name)) for name in hints(type(value))}
    return [to_dict(part) for part in value] if isinstance(value, tuple) else value


def from_dict(data: Any, path: str = "config") -> Any:
    """The spec a dictionary describes. Unknown kinds and fields and missing ones are errors."""
    if isinstance(data, list):
        return tuple(from_dict(part, f"{path}[{i}]") for i, part in enumerate(data))
    if not isinstance(data, dict):
        return data
    if "kind" not in data:
        raise UserError(f"{path} has no 'kind'")
    kind = lookup(data["kind"], Spec.kinds, f"kind of {path}")
    known = hints(kind)
    values = {}
    for name, value in data.items():
        if name != "kind":
            lookup(name, known, f"{kind.__name__} field")
            values[name] = from_dict(value, f"{path}.{name}")
    missing = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if default(field) is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise UserError(f"{path}: {kind.__name__} needs {', '.join(missing)}")
    return kind(**values)


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
    """A new spec with one leaf changed: override(model, "block.channel.hidden", "512").

    A text is read as on the command line, anything else is taken as it is.
    """
    head, _, rest = path.partition(".")
    hint = lookup(head, hints(type(spec)), f"{type(spec).__name__} field")
    if not rest:
        return spec.replace(**{head: parse(value, hint, above + head) if isinstance(value, str) else value})
    child = getattr(spec, head)
    if not isinstance(child, Spec):
        raise UserError(f"{above}{head} is {child!r}: it has no field {rest!r}")
    return spec.replace(**{head: override(child, rest, value, f"{above}{head}.")})


def override_all(spec: S, changes: Mapping[str, Any]) -> S:
    """Several leaves changed, in any order: one that only fits together with another waits for it."""
    waiting = dict(changes)
    while waiting:
        refused: dict[str, UserError] = {}
        for path, value in waiting.items():
            try:
                spec = override(spec, path, value)
            except UserError as reason:
                refused[path] = reason
        if len(refused) == len(waiting):
            raise next(iter(refused.values()))
        waiting = {path: waiting[path] for path in refused}
    return spec


def parse(text: str, hint: Any, path: str) -> Any:
    """Read a command-line value: a number, a word, 160x256, none, a kind's name or its JSON."""
    text = text.strip()
    if text.lower() in ("none", "null"):
        return conform(None, hint, path)
    if text.startswith("{"):
        return from_json(text)
    wants_text = any(option is str or get_origin(option) is Literal for option in options(hint))
    parts = [part for option in options(hint) for part in (option, *get_args(option))]
    wants_kind = any(isinstance(part, type) and issubclass(part, Spec) for part in parts)
    if wants_kind and not wants_text and text.isidentifier():
        return from_dict({"kind": text}, path)
    if not wants_text:
        pieces = text.replace("x", ",").split(",")
        numbers = tuple(read_scalar(piece.strip()) for piece in pieces)
        return conform(numbers[0] if len(numbers) == 1 else numbers, hint, path)
    return conform(text, hint, path)


def read_scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
