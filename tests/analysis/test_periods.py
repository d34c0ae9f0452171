"""Periods of the filters of forecasting models, and the map of variates that they mix."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.analysis.analysis import analyze
from allmlp.analysis.output_folder import OutputFolder
from allmlp.analysis.series import TimeFilters, series_sections, strongest, time_filters, variate_maps
from allmlp.analysis.target import AnalysisTarget
from tiny import tiny_model


def test_the_period_of_a_wave_is_found() -> None:
    steps = torch.arange(48.0)
    rows = 5 + torch.stack([torch.sin(2 * math.pi * steps / 12), 0.2 * torch.cos(2 * math.pi * steps / 4)])
    found = strongest(TimeFilters("x", rows, 2))
    assert found is not None and found.steps == pytest.approx(24) and found.share == pytest.approx(1 / 1.04)
    assert strongest(TimeFilters("x", torch.ones(3, 8), 1)) is None
    assert strongest(TimeFilters("x", torch.randn(3, 1), 1)) is None


def test_filters_of_every_layer() -> None:
    names = [filters.name for filters in time_filters(tiny_model("patchtsmixer"))]
    assert names[0] == "stem" and names[-1] == "head" and "blocks.0.token.mix.gate" in names and len(names) == 6
    model = allmlp.create("nlinear", seq_len=48, in_chans=2, horizon=5)
    wave = torch.sin(2 * math.pi * torch.arange(48.0) / 16)
    model.head.proj.weight.data = wave.repeat(5, 1)
    (head,) = time_filters(model)
    assert head.rows.shape == (5, 48) and strongest(head).steps == pytest.approx(16)
    dlinear = allmlp.create("dlinear", seq_len=48, in_chans=2, horizon=5)
    dlinear.head.proj.weight.data = torch.stack([wave, torch.zeros(48)], 1).flatten().repeat(5, 1)
    (head,) = time_filters(dlinear)
    assert head.rows.shape == (10, 48) and strongest(head).steps == pytest.approx(16)


def test_variates_that_are_read() -> None:
    model = tiny_model("patchtsmixer_mix")
    layer = model.blocks[1].variate.mix
    torch.nn.init.zeros_(layer.up.weight)
    layer.up.weight.data[0, 2] = -2.0
    found = variate_maps(model)["blocks.1.variate.mix"]
    assert found.shape == (3, 3) and bool((found[:, :2] == 0).all())
    torch.testing.assert_close(found[:, 2], 2 * layer.down.weight[:, 0].abs().detach())


def test_variates_that_are_channels() -> None:
    model = tiny_model("tsmixer")
    layer = model.blocks[0].channel.mix
    torch.nn.init.zeros_(layer.up.weight)
    layer.up.weight.data[0, 2] = -2.0
    found = variate_maps(model)["blocks.0.channel.mix"]
    torch.testing.assert_close(found[:, 2], 2 * layer.down.weight[:, 0].abs().detach())
    assert bool((found[:, :2] == 0).all())


def test_names_of_columns_are_not_formulas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = tiny_model("tsmixer", torch.float32).requires_grad_(False)
    target = AnalysisTarget("tsmixer", model, True, columns=("a$_", "_$b", "price ($/$t)"))
    series_sections(target, OutputFolder(tmp_path))
    assert "a$_, 1 _$b" in (tmp_path / "variates.svg").read_text(encoding="utf8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["patchtsmixer_mix", "tsmixer", "dlinear"])
def test_sections(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = tiny_model(name, torch.float32).requires_grad_(False)
    target = AnalysisTarget(name, model, True, columns=("heat", "load", "price"))
    found = {section.name: section for section in analyze(target, tmp_path).sections}
    assert "strongest: " in found["periods"].text and found["periods"].files == ("periods.csv", "periods.json")
    assert ("variates" in found) == (name != "dlinear")
    if "variates" in found:
        assert "heat,price," in (tmp_path / "variates.csv").read_text(), "with the names of the columns"
