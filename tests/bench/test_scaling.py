"""Cost by hand: how it grows, and what memory the products touch."""

from __future__ import annotations

import pytest

from allmlp.bench.scaling import exponent, scaled_models
from allmlp.bench.traffic import traffic
from allmlp.errors import UserError
from allmlp.models.cost import measure
from allmlp.models.mixer import mixer
from allmlp.models.preset import preset


def test_traffic_of_a_mixer() -> None:
    """One block of 8 channels over 4 tokens of 3 x 2 x 2 pixels, 5 classes, 7 examples."""
    batch, tokens, width, hidden, token_hidden, pixels, classes = 7, 4, 8, 32, 4, 12, 5
    spec = mixer(1, width, 2, img_size=4, num_classes=classes)
    x = batch * tokens * width
    stem = batch * tokens * pixels + pixels * width + x
    token = 2 * (x + tokens * token_hidden + batch * token_hidden * width)
    channel = 2 * (x + width * hidden + batch * tokens * hidden)
    head = batch * width + width * classes + batch * classes
    assert traffic(spec, batch) == stem + token + channel + head


@pytest.mark.parametrize("name", ["mixer_s16", "gmlp_l18", "vit_ti16"])
def test_a_longer_stack_costs_in_proportion(name: str) -> None:
    small, middle, large = (measure(one.spec).macs for one in scaled_models(preset(name).spec, "depth"))
    assert large - middle == 2 * (middle - small)


def test_tokens() -> None:
    """gMLP: the channel MLP grows with S, the gate with S^2; the parts of the cost are known by name."""
    found = scaled_models(preset("gmlp_s16").spec, "tokens")
    assert [one.size for one in found] == [49, 100, 196, 400, 784]
    parts = [{part.name: part.macs for part in measure(one.spec).parts} for one in found]
    assert parts[-1]["blocks.channel.mix.up"] == 4 * parts[2]["blocks.channel.mix.up"]
    assert parts[-1]["blocks.channel.mix.inner"] == 16 * parts[2]["blocks.channel.mix.inner"]
    assert [one.size for one in scaled_models(preset("gmlp_l18").spec, "tokens")] == [32, 64, 128, 256, 512]


def test_width_keeps_the_proportions() -> None:
    half, same, twice = (one.spec for one in scaled_models(preset("vit_s16").spec, "width"))
    assert same == preset("vit_s16").spec
    assert [spec.block.token.num_heads for spec in (half, same, twice)] == [3, 6, 12]  # type: ignore[union-attr]
    assert [spec.block.channel.hidden for spec in (half, same, twice)] == [768, 1536, 3072]  # type: ignore[union-attr]
    middle, large = (one.spec for one in scaled_models(preset("mixer_b16").spec, "width")[1:])
    assert large.block.token.hidden == 2 * middle.block.token.hidden  # type: ignore[union-attr]


def test_only_a_stack_grows() -> None:
    with pytest.raises(UserError, match="single stack"):
        scaled_models(preset("resmlp_seq2seq_tiny").spec, "depth")


def test_exponent() -> None:
    assert exponent([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    assert exponent([1, 10], [5, 5]) == pytest.approx(0)
