"""What the README says is what happens."""

from __future__ import annotations

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
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^    \$ (allmlp .*)\n((?:    (?!\$).*\n)+)", README, re.MULTILINE)


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


TRAINING = [
    line.partition("#")[0].split("allmlp train ")[1] for line in README.splitlines() if " allmlp train " in line
]


@pytest.mark.parametrize("arguments", [text.strip() for text in TRAINING if not text.startswith("--resume")])
def test_training_commands_name_recipes_and_fields(arguments: str) -> None:
    name, *options = shlex.split(arguments)
    for run in runs(name).values():
        for option, value in itertools.pairwise(options):
            if option == "--set":
                override(run, *value.split("=", 1))


def expand(pattern: str) -> list[str]:
    """a_{b,c} -> a_b, a_c"""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def test_the_zoo_table_names_every_model() -> None:
    section = README.partition("## The zoo")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for pattern in re.findall(r"`([^`]+)`", cell) for name in expand(pattern)]
    assert sorted(named) == sorted([*presets(), "timm:NAME"])


def test_the_map_names_what_is_there() -> None:
    section = README.partition("## Where things are")[2]
    paths = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert paths and all((ROOT / path).exists() for path in paths)
    rooms = {path.name for path in (ROOT / "src" / "allmlp").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= {Path(path).name for path in paths}
