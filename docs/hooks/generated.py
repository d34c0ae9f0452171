"""Pages of the site that are made when it is built, so that they cannot go stale: recipes, adding things, the API."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import allmlp
from allmlp import recipes as room
from allmlp.recipes import Recipe, recipes
from allmlp.spec import Spec

ROOT = Path(__file__).parent.parent.parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out of the navigation what is not there."""
    there = {path.name for path in Path(config.docs_dir).glob("*.md")} | set(PAGES)
    config.nav = [entry for entry in config.nav or [] if set(entry.values()) <= there]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


# --- recipes ----------------------------------------------------------------------------------------------


def recipes_page() -> str:
    parts = ["# Recipes", "`allmlp list recipes` names them, `allmlp train NAME` runs one."]
    by_module: dict[str, list[Recipe]] = {}
    for recipe in recipes().values():
        by_module.setdefault(recipe.module, []).append(recipe)
    for module, found in by_module.items():
        source = (Path(room.__file__).parent / f"{module}.py").read_text(encoding="utf8")
        about = ast.get_docstring(ast.parse(source)) or ""
        parts += [f"## {module.replace('_', ' ').capitalize()}", about]
        for recipe in found:
            parts += [f"### {recipe.name}", *commands_and_text(recipe.text)]
    return "\n\n".join(parts) + "\n"


def commands_and_text(docstring: str) -> list[str]:
    """The paragraphs of a recipe's docstring; lines that are commands become blocks of code."""
    parts: list[str] = []
    before = ""
    for line in docstring.splitlines():
        kind = "code" if line.startswith(("allmlp ", "torchrun ")) else "text" if line.strip() else ""
        shown = f"    {line}" if kind == "code" else line
        if kind and kind == before:
            parts[-1] += f"\n{shown}"
        elif kind:
            parts.append(shown)
        before = kind
    return parts


# --- adding things ----------------------------------------------------------------------------------------


def adding_page() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8")
    return text.replace("# Contributing", "# Adding things", 1)


# --- the API ----------------------------------------------------------------------------------------------


def api_page() -> str:
    parts = [
        "# API",
        "The names of `import allmlp`. What a part of the grammar means stands in [the grammar](grammar.md).",
    ]
    for name in allmlp.__all__:
        thing = getattr(allmlp, name)
        if inspect.isclass(thing):
            parts += [f"## {name}", *class_parts(name, thing)]
        elif callable(thing):
            parts += [f"## {name}", *function_parts(f"allmlp.{name}", tree_of(thing))]
    return "\n\n".join(parts) + "\n"


def tree_of(thing: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def function_parts(name: str, tree: ast.FunctionDef) -> list[str]:
    return [code(signature(name, tree)), *filter(None, [ast.get_docstring(tree)])]


def signature(name: str, tree: ast.FunctionDef) -> str:
    """As it is written, without self; what is given by name on a line of its own where it is long."""
    given = ast.unparse(tree.args).removeprefix("self").removeprefix(", ")
    back = f" -> {ast.unparse(tree.returns)}" if tree.returns else ""
    if any(ast.unparse(decorator) == "property" for decorator in tree.decorator_list):
        return f"{name}{back.replace(' ->', ':')}"
    line = f"{name}({given}){back}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + textwrap.indent(given.replace(", *, ", ",\n*,\n"), "    ") + f",\n){back}"


def class_parts(name: str, kind: type) -> list[str]:
    tree = tree_of(kind)
    parts = [about] if (about := ast.get_docstring(tree)) else []
    if issubclass(kind, Spec):
        fields = [ast.unparse(node) for node in tree.body if isinstance(node, ast.AnnAssign)]
        parts.append(code("\n".join([f"allmlp.{name}(", *(f"    {field}," for field in fields), ")"])))
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    for method in methods:
        if about := ast.get_docstring(method):
            parts += [f"### {name}.{method.name}", code(signature(f".{method.name}", method)), about]
    return parts


def code(text: str) -> str:
    return f"```python\n{text}\n```"


PAGES = {"recipes.md": recipes_page, "adding.md": adding_page, "api.md": api_page}
