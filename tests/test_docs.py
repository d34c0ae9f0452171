"""The documentation site builds without a warning, covers the public API, and its examples run."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import allmlp
from allmlp.recipes import recipes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(file for file in DOCS.rglob("*.md") if "tools" not in file.parts)
EXAMPLES = {
    f"{file.relative_to(DOCS)}-{number}": block
    for file in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", file.read_text(encoding="utf8"), re.DOTALL))
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("furo", reason="the docs theme is not installed")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", str(DOCS), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def text(site: Path, page: str) -> str:
    source = (site / f"{page}.html").read_text(encoding="utf8")
    return html.unescape(re.sub(r"<[^>]+>", "", source))


@pytest.mark.slow
def test_site(site: Path) -> None:
    """All pages are built and reachable, nothing is loaded from other hosts, and the reference is complete."""
    start = (site / "index.html").read_text(encoding="utf8")
    for file in PAGES:
        page = file.relative_to(DOCS).with_suffix("")
        assert (site / f"{page}.html").is_file() and (page.name == "index" or f'href="{page}.html"' in start), page
    for file in site.rglob("*.html"):
        source = file.read_text(encoding="utf8")
        assert not re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="?(?:https?:)?//[^>]+>', source), file
    api = text(site, "reference/api")
    for name in allmlp.__all__:
        assert name == "__version__" or re.search(rf"\ballmlp\.{name}\b", api), f"docs/reference/api.md has no {name}"
    page = text(site, "reference/recipes")
    for recipe in recipes().values():
        assert f"{recipe.module}.{recipe.name}(" in page, f"docs/reference/recipes.md lacks recipes.{recipe.module}"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[name], name, "exec"), {})


def test_images_exist_and_are_small() -> None:
    for file in [*PAGES, ROOT / "README.md"]:
        for image in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", file.read_text(encoding="utf8")):
            assert (file.parent / image).stat().st_size < 150_000, image
