"""The documentation site builds without a warning, covers the public API, and its examples run."""

from __future__ import annotations

import html
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import allmlp
import allmlp.layers
from allmlp.recipes import recipes
from notebooks import run, to_markdown

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf8")
PAGES = sorted(file for file in DOCS.rglob("*.md") if "tools" not in file.parts)
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
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
    for file in [*PAGES, *NOTEBOOKS]:
        page = file.relative_to(DOCS).with_suffix("")
        assert (site / f"{page}.html").is_file() and (page.name == "index" or f'href="{page}.html"' in start), page
    for file in site.rglob("*.html"):
        source = file.read_text(encoding="utf8")
        assert not re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="?(?:https?:)?//[^>]+>', source), file
    api = text(site, "reference/api")
    for name in allmlp.__all__:
        assert name == "__version__" or re.search(rf"\ballmlp\.{name}\b", api), f"docs/reference/api.md has no {name}"
    layers = text(site, "reference/layers") + api
    missing = [name for name in allmlp.layers.__all__ if not re.search(rf"\b{name}\b", layers)]
    assert not missing, f"docs/reference/layers.md has no {', '.join(missing)}"
    assert "A token mixer" in text(site, "contributing")
    page = text(site, "reference/recipes")
    for recipe in recipes().values():
        assert f"{recipe.module}.{recipe.name}(" in page, f"docs/reference/recipes.md lacks recipes.{recipe.module}"


IMPORTS = sorted(
    {
        (module, name.strip())
        for text in (*EXAMPLES.values(), *re.findall(r"```python\n(.*?)```", README, re.DOTALL))
        for module, names in re.findall(r"^from (allmlp[\w.]*) import (.*)$", text, re.MULTILINE)
        for name in names.split(",")
    }
)


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_what_examples_import_is_in_the_policy(module: str, name: str) -> None:
    """A public name, or of a module that docs/versioning.md promises less of."""
    policy = (DOCS / "versioning.md").read_text(encoding="utf8")
    assert re.search(rf"`{re.escape(module)}`", policy), f"docs/versioning.md says nothing of {module}"
    public = getattr(importlib.import_module(module), "__all__", None)
    assert public is None or name in public, f"{name} is not in the __all__ of {module}"


def test_what_an_own_token_mixer_needs_is_public() -> None:
    """From allmlp and allmlp.layers alone."""
    page = (DOCS / "guides" / "plugins.md").read_text(encoding="utf8")
    assert {module for module, _ in re.findall(r"^from (allmlp[\w.]*) import (.*)$", page, re.MULTILINE)} == {
        "allmlp",
        "allmlp.layers",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[name], name, "exec"), {})


def outline(notebook: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The code of each cell with the kinds of its outputs: text, or a picture."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), [next(iter(one.get("data", one))) for one in cell["outputs"]]) for cell in cells]


FEWER = {
    "fine_tune": {"== digit][:64]": "== digit][:24]", "epochs=3": "epochs=1"},
    "look_inside": {r"(\"cat\", \"horse\", \"ship\", \"truck\")": r"(\"cat\",)"},
}
"""Notebooks that are tried on fewer examples and for a shorter time: what they say, and what they say here."""


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_run(file: Path) -> None:
    """From top to bottom, with the kinds of output that are stored: python -m notebooks."""
    text = file.read_text(encoding="utf8")
    for said, instead in FEWER.get(file.stem, {}).items():
        assert text.count(said) == 1, said
        text = text.replace(said, instead)
    stored = json.loads(text)
    assert outline(run(stored, file.name)) == outline(stored)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_are_kept_executed(file: Path) -> None:
    """In order, with pictures, which are on the page; small, and without traces of the machine."""
    stored = json.loads(file.read_text(encoding="utf8"))
    cells = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    images = sum(kinds.count("image/png") for _, kinds in outline(stored))
    assert images >= 2 and to_markdown(stored).count("<img ") == images
    text = file.read_text(encoding="utf8")
    assert len(text) < 200_000 and not re.search(r"/home/|/root/|/tmp/|/Users/|Traceback", text)


def anchors(file: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    """Those within the repository: the file exists, and the heading."""
    files = [*PAGES, *NOTEBOOKS, *ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    links = [(file, link) for file in files for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf8"))]
    assert len(links) > 100
    for file, link in links:
        path, _, heading = link.partition("#")
        target = file.parent / path if path else file
        assert "://" in link or target.exists(), f"{file.name}: {link}"
        assert "://" in link or not heading or heading in anchors(target), f"{file.name}: {link}"


def test_images_exist_and_are_small() -> None:
    for file in [*PAGES, ROOT / "README.md"]:
        for image in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", file.read_text(encoding="utf8")):
            assert (file.parent / image).stat().st_size < 150_000, image
