"""One page about one model: its sentence in the grammar, its equations, cost, published figures and keys."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch

import allmlp
from allmlp.models.cost import Cost, measure, one_block
from allmlp.models.model import ModelSpec
from allmlp.models.preset import Published
from allmlp.spec import Spec, to_dict

WIDTH = 96


class Page(NamedTuple):
    name: str
    spec: ModelSpec
    cost: Cost
    published: Published | None
    about: str

    @property
    def parameters(self) -> int:
        """Our count, with or without the head as the published one is."""
        without = self.published is not None and not self.published.head
        return self.cost.parameters - (self.cost.head_parameters if without else 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "reads": self.spec.reads,
            "sentence": sentence(self.spec),
            "equations": equations(self.spec),
            "parameters": self.cost.parameters,
            "macs": self.cost.macs,
            "parts": [part._asdict() for part in self.cost.parts],
            "published": self.published and self.published._asdict(),
            "state_dict": state_dict_keys(self.spec),
            "files": files(self.spec),
            "config": to_dict(self.spec),
        }


def page(name: str, spec: ModelSpec, published: Published | None = None, about: str = "") -> Page:
    return Page(name, spec, measure(spec), published, about)


def sentence(value: Any, label: str = "", indent: str = "") -> str:
    """A spec as one would write it, defaults left out, broken where a line grows too long."""
    line = f"{indent}{label}{value!r}"
    if not isinstance(value, Spec) or len(line) <= WIDTH:
        return line
    fields = [sentence(field, f"{name}=", indent + "    ") + "," for name, field in value.changed().items()]
    return "\n".join([f"{indent}{label}{type(value).__name__}(", *fields, f"{indent})"])


def equations(spec: Spec) -> dict[str, list[str]]:
    """Kind -> the indented lines of its docstring, for every spec the model contains."""
    found: dict[str, list[str]] = {}
    for child in spec.children():
        lines = inspect.cleandoc(type(child).__doc__ or "").splitlines()
        formulas = [line.strip() for line in lines if line.startswith("    ")]
        if formulas:
            found.setdefault(type(child).__name__, formulas)
    return found


def state_dict_keys(spec: ModelSpec) -> dict[str, list[int]]:
    """Key -> shape; the equal blocks of a stack share one line, as blocks.{0..11}."""
    shallow, depths = one_block(spec)
    with torch.device("meta"):
        state = shallow.build().state_dict()
    keys = {}
    for name, tensor in state.items():
        for stack, depth in depths.items():
            if name.startswith(f"{stack}.0.") and depth > 1:
                name = name.replace(f"{stack}.0.", f"{stack}.{{0..{depth - 1}}}.", 1)  # noqa: PLW2901
        keys[name] = list(tensor.shape)
    return keys


def files(spec: Spec) -> list[str]:
    """The source files that together are this model."""
    root = Path(allmlp.__file__).parent
    sources = {Path(inspect.getfile(type(child))).relative_to(root).as_posix() for child in spec.children()}
    return sorted(sources)
