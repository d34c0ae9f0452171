"""docs/guides/predicting.md shows what the commands print."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import allmlp
from prediction.conftest import Command

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "predicting.md"
SAMPLES = Path(allmlp.__file__).parent / "serve" / "page" / "samples"
NUMBER = re.compile(r"\d+\.\d+")


def shown() -> list[tuple[str, list[str]]]:
    """Commands and the lines that follow them."""
    found = re.findall(r"^    \$ allmlp (.+)\n((?:    (?!\$).+\n)*)", GUIDE.read_text(encoding="utf8"), re.MULTILINE)
    return [(command, lines.splitlines()) for command, lines in found]


def words(line: str) -> list[str]:
    return NUMBER.sub("0.0", line).split()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf8"), re.DOTALL))
def test_code_prints_what_its_comments_say(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "guide", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# (.*)$", block, re.MULTILINE)


@pytest.mark.slow
def test_commands_print_what_is_shown(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    for file in SAMPLES.glob("cifar10-*.png"):
        shutil.copy(file, tmp_path / "photos" / file.name.removeprefix("cifar10-"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: self is sys.stdout, raising=False)
    assert len(shown()) == 5
    for number, (line, expected) in enumerate(shown()):
        if number == 1:
            (tmp_path / "photos" / "broken.jpg").write_text("not an image")
        code, out, err = command(*shlex.split(line), "--device", "cpu")
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out + err).splitlines()
        assert code == (number in (1, 2)) and [words(one) for one in plain] == [words(one) for one in expected], line
        for one, other in zip(plain, expected):
            values = [[float(value) for value in NUMBER.findall(text)] for text in (one, other)]
            assert values[0] == pytest.approx(values[1], abs=0.2 if "%" in one else 0.002), one
