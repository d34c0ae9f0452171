"""Analyses without their figures."""

from __future__ import annotations

import pytest

from allmlp.analysis import figures, output_folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are built but not rendered, which takes most of the time; test_figures.py renders them."""
    monkeypatch.setattr(output_folder, "save", lambda figure, file, kind: file.write_text(f"{kind} of {figure}"))


@pytest.fixture
def without_figures(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are not even built, for tests of the numbers and the text."""
    for name in ("mosaics", "heatmaps", "filter_lines", "by_depth", "cost_bars", "saliency_maps", "image_rows"):
        monkeypatch.setattr(figures, name, lambda *args, **options: None)
