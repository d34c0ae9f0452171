"""Sphinx configuration. `make docs` builds the site into build/site; it loads nothing from other hosts.

Sphinx with the Furo theme and MyST (Markdown): maintained since 2008, used by Python, PyTorch and attrs themselves,
with a reference from docstrings and a search that also works from the disk.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser

import allmlp

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from notebooks import to_markdown

project = "allmlp"
author = "the allmlp authors"
project_copyright = "the allmlp authors, MIT license"
release = version = allmlp.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["tools/**"]
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 3
nitpicky = False

html_theme = "furo"
html_title = f"allmlp {version}"
html_static_path: list[str] = []
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
python_maximum_signature_line_length = 88


def literal_blocks(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Show equations (indented lines) and commands of a docstring as they are written."""
    command = re.compile(r"(allmlp|torchrun|python) ")
    shown: list[str] = []
    literal = False
    for line in lines:
        wants = line.startswith("    ") or bool(command.match(line))
        if wants and not literal:
            shown += ["", "::", ""]
        if literal and not wants and line.strip():
            shown.append("")
        shown.append(f"    {line}" if wants else line)
        literal = wants or (literal and not line.strip())
    lines[:] = shown


def include_contributing(app: object, name: str, source: list[str]) -> None:
    """In the repository the page is a link to CONTRIBUTING.md, on the site it is that file."""
    if name == "contributing":
        source[0] = "```{include} ../CONTRIBUTING.md\n```\n"


class NotebookParser(MystParser):
    """A notebook as it was executed, as a page."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse(to_markdown(json.loads(inputstring)), document)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", literal_blocks)
    app.connect("source-read", include_contributing)
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
