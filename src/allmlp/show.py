"""Contents of `allmlp show`: config of a model, equations, cost, published figures and state-dict keys."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch

import allmlp
from allmlp.models.cost import Cost, measure
from allmlp.models.model import ModelSpec
from allmlp.models.preset import Published
from allmlp.spec import Spec, format_spec, to_dict


class ModelSummary(NamedTuple):
    name: str
    spec: ModelSpec
    cost: Cost
    published: Published | None
    about: str

    @property
    def parameters(self) -> int:
        """Our parameter count, with or without the head like the published one."""
        headless = self.published is not None and not self.published.head
        return self.cost.parameters - (self.cost.head_parameters if headless else 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "input_spec": self.spec.input_spec,
            "python": format_spec(self.spec),
            "equations": equations(self.spec),
            "parameters": self.cost.parameters,
            "macs": self.cost.macs,
            "parts": [part._asdict() for part in self.cost.parts],
            "published": self.published and self.published._asdict(),
            "state_dict": state_dict_keys(self.spec),
            "files": source_files(self.spec),
            "config": to_dict(self.spec),
        }


def summarize(name: str, spec: ModelSpec, published: Published | None = None, about: str = "") -> ModelSummary:
    return ModelSummary(name, spec, measure(spec), published, about)


def equations(spec: Spec) -> dict[str, list[str]]:
    """Kind -> the indented lines of its docstring, for every spec in the model."""
    by_kind: dict[str, list[str]] = {}
    for child in spec.children():
        lines = inspect.cleandoc(type(child).__doc__ or "").splitlines()
        formulas = [line.strip() for line in lines if line.startswith("    ")]
        if formulas:
            by_kind.setdefault(type(child).__name__, formulas)
    return by_kind


def state_dict_keys(spec: ModelSpec) -> dict[str, list[int]]:
    """Key -> shape; the identical blocks of a stack share one line, as blocks.{0..11}."""
    shallow, depths = spec.shallow()
    with torch.device("meta"):
        state = shallow.build().state_dict()
    keys = {}
    for name, tensor in state.items():
        block = next((block for block in depths if name.startswith(f"{block}.")), "")
        if block:
            first, *others = depths[block]
            numbers = f"{{{first}..{others[-1]}}}" if others else str(first)
            name = f"{block.rpartition('.')[0]}.{numbers}{name.removeprefix(block)}"  # noqa: PLW2901
        keys[name] = list(tensor.shape)
    return keys


def source_files(spec: Spec) -> list[str]:
    """Source files of the model's specs, relative to the package; full paths for those of other packages."""
    root = Path(allmlp.__file__).parent
    files = {Path(inspect.getfile(type(child))) for child in spec.children()}
    return sorted((file.relative_to(root) if file.is_relative_to(root) else file).as_posix() for file in files)
