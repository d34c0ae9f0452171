"""Run the notebooks of docs/notebooks from top to bottom and keep what they print and draw: python -m notebooks.

A cell is executed as by Jupyter: its output is what it prints, the pictures it draws, and the value of its last line.
`to_markdown` makes a page of the site from a notebook (docs/conf.py).
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

FOLDER = Path(__file__).parents[1] / "notebooks"
IMAGE = '<img alt="the picture that the code above draws" src="data:image/png;base64,%s">'
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def run(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """The notebook with new outputs, run in an empty folder; what a cell raises is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count, home = [], 0, Path.cwd()
    plt.switch_backend("agg")  # a figure is kept, not shown in a window
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    count += 1
                    outputs = run_cell("".join(cell["source"]), f"{name}, cell {count}", names)
                    cells.append({**cell, "execution_count": count, "outputs": outputs})
                else:
                    cells.append(cell)
        finally:
            os.chdir(home)
    return {**notebook, "cells": cells}


def run_cell(source: str, name: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := ESCAPES.sub("", printed.getvalue()):
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(text)})
    shown = [{"text/plain": lines(repr(value))}] if value is not None else []
    shown += [{"image/png": image} for image in drawn()]
    return outputs + [{"output_type": "display_data", "data": data, "metadata": {}} for data in shown]


def drawn() -> list[str]:
    """The open figures of pyplot as PNG in base64; they are closed, as at the end of a cell in Jupyter."""
    images = []
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, format="png", dpi=72, bbox_inches="tight", metadata={"Software": None})
        images.append(base64.b64encode(image.getvalue()).decode())
    plt.close("all")
    return images


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def to_markdown(notebook: dict[str, Any]) -> str:
    """Text as it is, code and what it printed as blocks, pictures inside the page."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            if "image/png" in data:
                parts.append(f"```{{raw}} html\n{IMAGE % data['image/png']}\n```")
            else:
                parts.append("```text\n" + "".join(data["text/plain"]).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    for file in sorted(FOLDER.glob(f"{'*' if len(sys.argv) == 1 else sys.argv[1]}.ipynb")):
        done = run(json.loads(file.read_text(encoding="utf8")), file.name)
        file.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
