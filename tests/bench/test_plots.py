"""Benchmark figures: units, and names of models."""

from __future__ import annotations

import pytest

from allmlp.bench.plots import LETTERS, throughput
from allmlp.bench.runner import BenchOptions, BenchReport, Measurement

pytest.importorskip("matplotlib")


def row(model: str, unit: str, rate: float) -> Measurement:
    return Measurement(
        model, model, None, "inference", "ours fast", 8, unit, rate_per_s=rate, flop_per_s=1e14, peak_flop_per_s=7e14
    )


def test_images_and_tokens_have_panels_of_their_own() -> None:
    rows = [row("mixer_b16", "images", 5e3), row("gmlp_base", "tokens", 4e6), row("vit_s16", "images", 9e3)]
    report = BenchReport(BenchOptions(("mixer_b16",), (8,), "cuda", "bfloat16"), {}, 4e12, rows, {})
    figure = throughput(report, rows)
    assert [axis.get_ylabel() for axis in figure.axes] == ["images/s", "tokens/s"]
    assert [axis.get_xlabel().partition(" (")[0] for axis in figure.axes] == [
        "multiply-adds of one image",
        "multiply-adds of one token",
    ]
    ticks = [tick.get_text() for axis in figure.axes for tick in axis.get_yticklabels()]
    assert "2,000,000" in ticks and not any("e+" in tick for tick in ticks)


def test_long_names_are_cut() -> None:
    rows = [row("a_model_folder_with_a_rather_long_name", "images", 5e3), row("mixer_b16", "images", 9e3)]
    report = BenchReport(BenchOptions(("mixer_b16",), (8,), "cuda", "bfloat16"), {}, 4e12, rows, {})
    texts = {text.get_text() for text in throughput(report, rows).axes[0].texts}
    assert {"a_model_folder_wi...", "mixer_b16"} <= texts and max(map(len, texts)) <= LETTERS
