"""The README and the guides: examples run, commands name real recipes and fields, tables are complete."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from allmlp.models.zoo import presets
from allmlp.recipes import runs
from allmlp.spec import override

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")
GUIDES = [file.read_text(encoding="utf8") for file in sorted((ROOT / "docs" / "guides").glob("*.md"))]
MODELS = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf8")
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^    \$ (allmlp .*)\n((?:    (?!\$).*\n)+)", README, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_examples_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_print_what_is_shown(command: str, shown: str) -> None:
    arguments = [sys.executable, "-m", "allmlp", *command.split()[1:]]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})
    printed = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    assert printed == [line[4:].rstrip() for line in shown.splitlines()]


OWN_DATA = re.compile(r".*/|.*\.[\w:]+|[A-Z]+")
"""A folder, a file, or a word in capitals: the reader's own."""
OWN_MODEL = "model=roll_nano"
"""Defined on the page about plug-ins."""
TRAINING = [
    line.partition("#")[0].split("allmlp train ")[1]
    for page in (README, *GUIDES)
    for line in page.splitlines()
    if line.startswith("    ") and " allmlp train " in line
]


@pytest.mark.parametrize(
    "arguments", [text.strip() for text in dict.fromkeys(TRAINING) if not text.startswith("--resume")]
)
def test_training_commands_name_recipes_and_fields(arguments: str) -> None:
    name, *options = shlex.split(arguments)
    if OWN_DATA.fullmatch(name):
        return
    changes = [value for option, value in itertools.pairwise(options) if option == "--set" and value != OWN_MODEL]
    for run in runs(name).values():
        functools.reduce(lambda changed, value: override(changed, *value.split("=", 1)), changes, run)


def expand(pattern: str) -> list[str]:
    """a_{b,c} -> a_b, a_c"""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def test_the_table_of_models_is_complete() -> None:
    cells = [line.split("|")[1] for line in MODELS.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for pattern in re.findall(r"`([^`]+)`", cell) for name in expand(pattern)]
    known = [*presets(), "timm:NAME"]
    missing, unknown = [name for name in known if name not in named], [name for name in named if name not in known]
    assert not missing, f"the table of docs/reference/models.md has no row with {', '.join(missing)}"
    assert not unknown, f"the table of docs/reference/models.md names {', '.join(unknown)}, which no preset has"
    assert len(named) == len(set(named)), "the table of docs/reference/models.md names a model twice"


def test_the_map_of_the_code_is_complete() -> None:
    paths = re.findall(r"^\| `(src/[^`]+)` \|", DESIGN, re.MULTILINE)
    assert paths and all((ROOT / path).exists() for path in paths)
    package = ROOT / "src" / "allmlp"
    rooms = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    missing = rooms - {Path(path).name for path in paths}
    assert not missing, f"the map of docs/design.md has no row for {', '.join(missing)}"


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
