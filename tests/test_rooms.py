"""Imports run one way: a package or file imports only those listed for it, and there are no import cycles."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import allmlp

ROOT = Path(allmlp.__file__).parent
BELOW = {
    "errors": set(),
    "accuracy": set(),
    "files": set(),
    "spec": {"errors"},
    "plugins": {"declared", "errors"},
    "callbacks": {"errors", "files"},
    "kernels": set(),
    "cuda_graph": set(),
    "layers": {"errors", "spec", "kernels"},
    "models": {"device", "errors", "spec", "layers", "plugins"},
    "nn": {"layers", "models"},
    "timm": {"errors", "layers", "models", "weights"},
    "hf": {"errors", "spec", "layers", "models", "data", "weights"},
    "weights": {"device", "errors", "files", "spec", "layers", "models", "data"},
    # tasks: images are preprocessed and features pooled as by k-NN evaluation, so that neighbors are the same.
    "analysis": {"errors", "files", "spec", "layers", "models", "data", "weights", "tasks"},
    "show": {"errors", "spec", "models"},
    "data": {"device", "errors", "files", "spec", "threads"},
    "tasks": {"device", "errors", "files", "spec", "layers", "models", "data", "weights"},
    "inference": {
        "cuda_graph",
        "device",
        "errors",
        "export",
        "files",
        "kernels",
        "layers",
        "models",
        "provenance",
        "spec",
    },
    "schedule": {"spec"},
    "optim": {"device", "spec", "layers"},
    "ema": {"models"},
    "log": {"callbacks", "errors", "files"},
    "provenance": set(),
    "device": {"errors"},
    "matmul": set(),
    "parallel": {"device", "kernels", "layers", "models"},
    "checkpoint": {"ema", "errors", "files", "parallel", "sharded_checkpoint"},
    "sharded_checkpoint": {"errors", "files"},
    "run": {
        "errors",
        "spec",
        "models",
        "data",
        "tasks",
        "optim",
        "schedule",
        "parallel",
        "plugins",
        "whitening",
        "head_init",
        "lora",
        "quantization",
    },
    "threads": {"errors", "files"},
    "whitening": {"errors", "spec", "layers", "models", "data", "tasks"},
    "meter": {"device", "tasks"},
    "compilation": {"device", "errors", "kernels", "layers", "models", "tasks"},
    "train_step": {"cuda_graph", "ema", "errors", "parallel", "tasks"},
    "pace": {"device", "errors", "files", "parallel"},
    "best": {"ema", "models"},
    "lora": {"errors", "spec", "layers", "models", "data"},
    "quantization": {"spec", "models", "lora", "weights"},
    "averaging": {"checkpoint", "data", "errors", "files", "quantization", "record", "weights"},
    "freezing": {"errors", "tasks"},
    "interrupts": set(),
    "record": {
        "errors",
        "files",
        "spec",
        "data",
        "run",
        "parallel",
        "checkpoint",
        "pace",
        "threads",
        "provenance",
        "weights",
    },
    "messages": {
        "accuracy",
        "device",
        "errors",
        "layers",
        "models",
        "data",
        "run",
        "optim",
        "log",
        "parallel",
        "checkpoint",
        "provenance",
        "record",
        "threads",
    },
    "split_metrics": {"errors", "parallel", "plugins", "tasks"},
    "initial_model": {"data", "errors", "models", "parallel", "plan", "run", "weights"},
    "training": {
        "initial_model",
        "split_metrics",
        "device",
        "spec",
        "callbacks",
        "errors",
        "files",
        "models",
        "weights",
        "data",
        "tasks",
        "run",
        "optim",
        "best",
        "freezing",
        "lora",
        "quantization",
        "interrupts",
        "threads",
        "compilation",
        "ema",
        "log",
        "messages",
        "meter",
        "parallel",
        "checkpoint",
        "pace",
        "record",
        "train_step",
    },
    "head_init": {"errors", "spec", "models", "data", "tasks", "threads"},
    "backtest": {"errors", "data", "device", "models", "record", "tasks", "weights"},
    "auto_series": {"data", "models"},
    "auto_start": {"data", "errors", "head_init", "models", "run", "spec", "weights"},
    "auto": {
        "auto_series",
        "auto_start",
        "errors",
        "spec",
        "data",
        "models",
        "weights",
        "tasks",
        "optim",
        "schedule",
        "device",
        "run",
        "head_init",
        "log",
    },
    "resolve": {
        "plugins",
        "errors",
        "files",
        "spec",
        "data",
        "models",
        "weights",
        "recipes",
        "run",
        "record",
        "auto",
        "tasks",
    },
    "prediction": {"errors", "files", "models", "weights", "data", "tasks", "layers", "inference", "device", "threads"},
    "labeled_inputs": {"data", "errors", "files", "prediction"},
    "evaluation": {
        "backtest",
        "labeled_inputs",
        "split_metrics",
        "accuracy",
        "device",
        "errors",
        "files",
        "models",
        "spec",
        "data",
        "weights",
        "tasks",
        "run",
        "parallel",
        "threads",
        "record",
        "train_step",
        "training",
        "prediction",
        "report",
    },
    "real_labels": {"accuracy", "data", "errors", "evaluation", "files", "labeled_inputs", "parallel", "prediction"},
    "transfer": {"data", "errors", "head_init", "labeled_inputs", "prediction", "threads"},
    "serve": {"errors", "spec", "files", "models", "weights", "data", "tasks", "prediction", "analysis", "threads"},
    "report": {
        "accuracy",
        "best",
        "device",
        "errors",
        "head_init",
        "files",
        "spec",
        "models",
        "weights",
        "data",
        "tasks",
        "run",
        "log",
        "checkpoint",
        "record",
        "training",
        "analysis",
        "layers",
        "plan",
    },
    "plan": {
        "device",
        "errors",
        "kernels",
        "spec",
        "layers",
        "models",
        "tasks",
        "compilation",
        "optim",
        "run",
        "recipes",
        "record",
        "train_step",
        "weights",
    },
    "export": {"device", "errors", "files", "spec", "layers", "models", "weights", "data", "tasks", "prediction"},
    # analysis: the style of its figures. export: the ONNX Runtime backend.
    "bench": {
        "errors",
        "files",
        "spec",
        "layers",
        "models",
        "weights",
        "data",
        "tasks",
        "optim",
        "compilation",
        "parallel",
        "train_step",
        "provenance",
        "inference",
        "kernels",
        "analysis",
        "export",
    },
    "declared": set(),
    "recipes": {
        "head_init",
        "lora",
        "quantization",
        "plugins",
        "declared",
        "errors",
        "spec",
        "layers",
        "models",
        "weights",
        "data",
        "tasks",
        "run",
        "optim",
        "schedule",
    },
    "studies": {"declared", "plugins", "recipes", "study"},
    "study": {"errors", "files", "spec", "run", "recipes", "log", "record", "analysis", "checkpoint", "best"},
    "cli": {
        "split_metrics",
        "backtest",
        "averaging",
        "callbacks",
        "plugins",
        "auto",
        "resolve",
        "run",
        "data",
        "evaluation",
        "accuracy",
        "errors",
        "record",
        "files",
        "studies",
        "study",
        "analysis",
        "spec",
        "models",
        "weights",
        "tasks",
        "show",
        "training",
        "transfer",
        "real_labels",
        "device",
        "prediction",
        "provenance",
        "export",
        "log",
        "recipes",
        "report",
        "plan",
        "serve",
        "bench",
    },
    "api": {
        "callbacks",
        "auto",
        "data",
        "resolve",
        "evaluation",
        "errors",
        "spec",
        "run",
        "recipes",
        "tasks",
        "training",
        "prediction",
    },
    "__main__": {"cli"},
    "__init__": {"errors", "inference", "layers", "matmul", "models", "weights"},
}


FILES = {
    ".".join(("allmlp", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in sorted(ROOT.rglob("*.py"))
}


def room(module: str) -> str:
    return [*module.split("."), "__init__"][1]


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf8"))


@cache
def imports(module: str) -> set[str]:
    """The modules of allmlp that a module imports, also inside functions, but not for type checking only."""
    tree = parse(module)
    typing = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names = set()
    for node in set(ast.walk(tree)) - typing:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: use absolute imports"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in FILES else node.module for name in full}
    return {name for name in names if name in FILES} - {"allmlp", module}


def test_imports_run_one_way() -> None:
    for module in FILES:
        here = room(module)
        assert here in BELOW, f"{here} is a new room: add to this test what it may import"
        assert {room(name) for name in imports(module)} - {here} <= BELOW[here], module


def find_circle(module: str, path: tuple[str, ...], done: set[str]) -> tuple[str, ...]:
    if module in path:
        return (*path[path.index(module) :], module)
    if module in done:
        return ()
    for other in sorted(imports(module)):
        if found := find_circle(other, (*path, module), done):
            return found
    done.add(module)
    return ()


def test_no_file_imports_itself_through_others() -> None:
    done: set[str] = set()
    assert not [circle for module in FILES if (circle := find_circle(module, (), done))]


def test_a_circle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"b"}, "d": set()}
    monkeypatch.setitem(globals(), "imports", graph.__getitem__)
    assert find_circle("a", (), set()) == ("b", "c", "b") and find_circle("d", (), set()) == ()


def test_every_file_says_what_it_is() -> None:
    for module, file in FILES.items():
        assert ast.get_docstring(parse(module)) and file.read_text(encoding="utf8").count("\n") <= 500, module
        assert not {"utils", "helpers", "common", "misc"} & set(module.split("."))
