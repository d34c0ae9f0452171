"""The site: it builds without a warning, and its pages say what the library has."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import allmlp
from allmlp.recipes import recipes

ROOT = Path(__file__).parent.parent
pytest.importorskip("material", reason="mkdocs-material is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    settings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def text(site: Path, page: str) -> str:
    source = (site / f"{page}.html").read_text(encoding="utf8")
    return html.unescape(re.sub(r"<[^>]+>", "", source))


def test_every_page_is_there(site: Path) -> None:
    wanted = {"index", "grammar", "recipes", "results", "adding", "api", "404"}
    wanted |= {file.stem for file in (ROOT / "docs").glob("*.md")}
    assert {file.stem for file in site.glob("*.html")} == wanted
    navigation = re.findall(r'href="(\w+)\.html" class="md-tabs__link"', (site / "index.html").read_text())
    assert set(navigation) == wanted - {"404"}


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for file in site.glob("*.html"):
        source = file.read_text(encoding="utf8")
        assert not re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="?(?:https?:)?//[^>]+>', source), file


def test_recipes_and_names_are_those_of_the_library(site: Path) -> None:
    page = text(site, "recipes")
    for recipe in recipes().values():
        assert f"{recipe.name}¶" in page and f"allmlp train {recipe.name}" in page
        assert recipe.text.splitlines()[0] in page
    page = text(site, "api")
    assert all(f"{name}¶" in page for name in allmlp.__all__ if name != "__version__")
    assert "allmlp.create(" in page and "Model.describe" in page


def test_the_start_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = (ROOT / "docs" / "index.md").read_text(encoding="utf8")
    blocks = re.findall(r"```python\n(.*?)```", start, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/index.md", "exec"), {})
    for picture in re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", start):
        assert (ROOT / "docs" / picture).stat().st_size < 150_000
