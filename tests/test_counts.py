"""Every published number is a test, before anything is trained."""

from __future__ import annotations

import math
import os
from functools import cache

import pytest

import allmlp
from allmlp.models import cost
from allmlp.models.catalog import read_catalog, write_catalog
from allmlp.models.zoo import build_catalog, presets
from allmlp.show import summarize

measure = cache(cost.measure)

PUBLISHED = {name: preset for name, preset in presets().items() if preset.published is not None}

# Exact counts known from the papers' released code and weights, or derived from their sizes by hand.
EXACT = {
    "mixer_s32": (19_104_624, 18_591_624),
    "mixer_s16": (18_528_264, 18_015_264),
    "mixer_b32": (60_293_428, 59_524_428),
    "mixer_b16": (59_880_472, 59_111_472),
    "mixer_l32": (206_939_264, 205_914_264),
    "mixer_l16": (208_196_168, 207_171_168),
    "mixer_h14": (432_350_952, 431_069_952),
    "resmlp_s12": (15_350_872, 14_965_872),
    "resmlp_s24": (30_020_680, 29_635_680),
    "resmlp_s36": (44_690_488, 44_305_488),
    "resmlp_b24_8": (129_138_280, 128_369_280),
    "cyclemlp_b1": (15_155_400, 14_642_400),
    "mlp_b6_512": (24_657_374, 18_896_384),
    "mlp_b12_512": (37_261_790, 31_500_800),
    "mlp_b6_1024": (74_469_342, 62_958_592),
    "mlp_b12_1024": (124_843_998, 113_333_248),
    "gmlp_ti16": (5_867_328, 5_738_328),
    "gmlp_s16": (19_422_656, 19_165_656),
    "gmlp_b16": (73_075_392, 72_562_392),
}
EXACT_WITH_HEAD = {
    "resmlp_b24": 115_736_776,
    "resmlp_s12_14": 15_607_912,
    "resmlp_s12_8": 22_051_624,
    "resmlp_s12_ln": 15_350_872,
    "resmlp_s12_class": 17_719_396,
    "resmlp_s12_none": 14_887_528,
    "resmlp_s12_mlp": 18_587_224,
    "resmlp_s12_conv": 30_817_384,
    "resmlp_s12_dw": 14_933_608,
    "resmlp_s12_dwsep": 16_707_688,
    "convmixer_768_32": 21_110_248,
    "convmixer_1536_20": 51_625_960,
    "convmixer_1024_20_ks9_p14": 24_383_464,
    "cait_xs24": 26_560_648,
    "cait_xs24_384": 26_670_088,
    "cait_m48_448": 356_460_520,
    "amlp_ti16": 7_353_408,
    "amlp_s16": 22_394_816,
    "amlp_b16": 79_019_712,
    "vit_ti16": 5_717_416,
    "vit_s16": 22_050_664,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
    "gmlp_l18": 58_997_486,
    "gmlp_l36": 101_609_948,
    "gmlp_l72": 186_834_872,
    "gmlp_l144": 357_284_720,
    "gmlp_l36_linear": 92_172_764,
    "gmlp_l36_additive": 92_172_764,
    "gmlp_l36_multiplicative": 92_172_764,
    "gmlp_base": 130_073_552,
    "gmlp_large": 365_274_528,
    "gmlp_xlarge": 940_582_768,
    "amlp_base": 108_791_516,
    "amlp_large": 315_627_960,
    "bert_base_uncased": 109_514_298,
    "gpt2_small": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}
# Billions of multiply-adds at 224 pixels, counted by an independent tool on the released code.
GMACS = {
    "mixer_s32": 1.002,
    "mixer_s16": 3.777,
    "mixer_b32": 3.238,
    "mixer_b16": 12.602,
    "mixer_l32": 11.253,
    "mixer_l16": 44.548,
    "mixer_h14": 120.990,
    "resmlp_s12": 3.010,
    "resmlp_s12_14": 3.984,
    "resmlp_s12_8": 13.989,
    "resmlp_s24": 5.961,
    "resmlp_s36": 8.913,
    "resmlp_b24": 23.021,
    "resmlp_b24_8": 100.231,
    "resmlp_s12_none": 2.833,
    "resmlp_s12_mlp": 4.249,
    "resmlp_s12_conv": 5.954,
    "resmlp_s12_dw": 2.841,
    "resmlp_s12_dwsep": 3.188,
    "gmlp_ti16": 1.329,
    "gmlp_s16": 4.392,
    "gmlp_b16": 15.720,
}
# gMLP, table 5: FLOPs (two per multiply-add) of one sequence of 512, the vocabulary scored at the masked tokens only.
TABLE_5 = {
    "bert_base": 100.8,
    "gmlp_base": 158.0,
    "amlp_base": 128.9,
    "bert_large": 341.2,
    "gmlp_large": 430.1,
    "amlp_large": 370.3,
    "gmlp_xlarge": 1091.3,
}
# Printed counts that the paper's own sizes do not give: the preset's note says so in words.
CONTRADICTIONS = {"gmlp_s16", "mlp_b6_512", "mlp_b12_1024"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to every printed digit, with or without the head as the paper counts."""
    monkeypatch.setattr("allmlp.show.measure", measure)
    preset = PUBLISHED[name]
    assert preset.published is not None
    printed = preset.published.parameters
    ours = summarize(name, preset.spec, preset.published).parameters / 1e6
    if name in CONTRADICTIONS or name.startswith("hf:"):
        assert ours == pytest.approx(float(printed), rel=0.05)
        assert preset.published.note or f"{ours:.{decimals(printed)}f}" == printed
    else:
        assert f"{ours:.{decimals(printed)}f}" == printed


@pytest.mark.parametrize("name", [name for name, preset in PUBLISHED.items() if preset.published.macs])  # type: ignore[union-attr]
def test_published_macs(name: str) -> None:
    """Equal to the printed digits; within 6 % where the paper counts more than matrix products and says so."""
    published = PUBLISHED[name].published
    assert published is not None and published.macs is not None
    ours = measure(PUBLISHED[name].spec).macs / 1e9
    if published.note:
        assert ours == pytest.approx(float(published.macs), rel=0.06)
    else:
        assert f"{ours:.{decimals(published.macs)}f}" == published.macs


@pytest.mark.slow
def test_list_is_the_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """zoo.json is up to date; after a change of the models run `make zoo`."""
    monkeypatch.setattr("allmlp.models.zoo.measure", measure)
    built = build_catalog()
    if os.environ.get("ALLMLP_WRITE_ZOO"):
        write_catalog(built)
    stored = read_catalog()
    missing = [row.name for row in built if row not in stored]
    assert not missing, f"src/allmlp/models/zoo.json is not up to date for {', '.join(missing)}: run `make zoo`"
    assert stored == built, "src/allmlp/models/zoo.json lists other models than the presets: run `make zoo`"


def decimals(printed: str) -> int:
    return len(printed.partition(".")[2])


@pytest.mark.parametrize("name", EXACT)
def test_exact_parameters_with_and_without_head(name: str) -> None:
    found = measure(presets()[name].spec)
    assert (found.parameters, found.parameters - found.head_parameters) == EXACT[name]


@pytest.mark.parametrize("name", EXACT_WITH_HEAD)
def test_exact_parameters(name: str) -> None:
    assert measure(presets()[name].spec).parameters == EXACT_WITH_HEAD[name]


@pytest.mark.parametrize("name", GMACS)
def test_exact_macs(name: str) -> None:
    assert measure(presets()[name].spec).macs / 1e9 == pytest.approx(GMACS[name], abs=6e-4)


@pytest.mark.parametrize("name", TABLE_5)
def test_flops_of_the_language_models(name: str) -> None:
    found = measure(presets()[name].spec)
    head = next(part.macs for part in found.parts if part.name == "head")
    masked = math.ceil(0.15 * 512)
    assert 2 * (found.macs - head + head * masked / 512) / 1e9 == pytest.approx(TABLE_5[name], rel=0.006)


def test_captions_that_contradict_their_counts() -> None:
    """The printed widths do not give the printed counts; the widths used here do, and the note says so."""
    wide = {"block.channel.hidden": 3072}
    for name, caption, printed in [("mixer_mlm", 140.4, "112"), ("gmlp_l36_linear", 130.0, "92")]:
        preset = presets()[name]
        assert measure(allmlp.configure(preset.spec, overrides=wide)).parameters / 1e6 == pytest.approx(
            caption, abs=0.05
        )
        assert preset.published is not None and preset.published.parameters == printed
        assert f"{caption}" in preset.published.note and "3072" in preset.published.note


def test_class_mlp_has_one_row_not_a_square() -> None:
    """A full token matrix would be printed as 17.8 M: the published 17.7 M means the class row alone."""
    ours = measure(presets()["resmlp_s12_class"].spec).parameters
    square = ours + 2 * 196 * (196 + 1 + 1)
    assert f"{ours / 1e6:.1f}" == "17.7" and f"{square / 1e6:.1f}" == "17.8"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("mixer_s32", "resmlp_s12_class", "gmlp_causal_tiny", "bert_base_rel", "resmlp_seq2seq_tiny", "llama3_405b"),
        *("cyclemlp_b1", "gmlp_staged_micro", "cait_xs24"),
    ],
)
def test_the_cost_table_counts_the_built_model(name: str) -> None:
    """One block times the depth is the whole model."""
    import torch

    with torch.device("meta"):
        model = allmlp.create(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.describe().parameters


@pytest.mark.parametrize("family", ["mixer", "resmlp", "gmlp", "amlp", "vit", "mlp", "cyclemlp"])
def test_small_presets_are_small(family: str) -> None:
    assert measure(presets()[f"{family}_nano"].spec).parameters < 1e6
    assert measure(presets()[f"{family}_micro"].spec).parameters < 10e6
