"""`make demo`: its table has every family and what is reached without a network, and it ends with a page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from allmlp.recipes import recipe
from allmlp.run import Budget

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
demo = pytest.importorskip("demo")
pytest.importorskip("jinja2")
ROW = re.compile(r"│ (\w*) +│ ([\w() -]+?) +│ +([\d.]+)% │")


def accuracies(text: str) -> dict[str, float]:
    return {name or title: float(accuracy) for name, title, accuracy in ROW.findall(text)}


@pytest.mark.slow
def test_it_compares_and_ends_with_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def short(name: str) -> SimpleNamespace:
        return SimpleNamespace(make=lambda: recipe(name).make().replace(budget=Budget(steps=1)))  # type: ignore[union-attr]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "recipe", short)
    demo.main()
    printed = capsys.readouterr().out
    rows = accuracies(printed)
    assert list(rows) == [*demo.FAMILIES, "nearest neighbor", "logistic regression"]
    assert rows["nearest neighbor"] > rows["logistic regression"] > 95
    page = (tmp_path / "runs" / "demo" / "report.html").read_text(encoding="utf8")
    assert "runs/demo/report.html" in printed.replace("\\", "/") and all(name in page for name in demo.FAMILIES)


def test_the_readme_shows_what_it_prints() -> None:
    """Every family at 98 % or more."""
    rows = accuracies((ROOT / "README.md").read_text(encoding="utf8"))
    assert list(rows) == [*demo.FAMILIES, "nearest neighbor", "logistic regression"]
    assert all(rows[name] >= 98 for name in demo.FAMILIES)
