"""Configurations: strict JSON, dotted overrides, one clear line for whatever is wrong."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import allmlp
from allmlp.layers import Affine, Block, ChannelMlp, Learned, Patches, TokenConv, TokenLinear, TokenMlp
from allmlp.models.encoder import Encoder
from allmlp.models.zoo import presets
from allmlp.spec import Spec, from_dict, from_json, override, override_all, to_dict, to_json

MIXER = presets()["mixer_nano"].spec


def test_specs_are_values() -> None:
    assert TokenMlp(3) == TokenMlp(3) and hash(TokenMlp(3)) == hash(TokenMlp(3)) and TokenMlp(3) != TokenMlp(4)
    with pytest.raises(AttributeError):
        TokenMlp(3).hidden = 4  # type: ignore[misc]
    assert (
        repr(Block(TokenLinear(causal=True), norm=Affine())) == "Block(token=TokenLinear(causal=True), norm=Affine())"
    )


def test_two_specs_cannot_share_a_name() -> None:
    with pytest.raises(TypeError, match="TokenMlp"):
        type("TokenMlp", (Spec,), {"__annotations__": {}})
    with pytest.raises(TypeError, match="kind"):
        type("Odd", (Spec,), {"__annotations__": {"kind": int}, "kind": 3})


@pytest.mark.parametrize(
    ("path", "text", "read"),
    [
        ("depth", "3", lambda spec: spec.depth == 3),
        ("block.channel.hidden", " 512 ", lambda spec: spec.block.channel.hidden == 512),
        ("block.channel.act", "relu", lambda spec: spec.block.channel.act == "relu"),
        ("block.token", "TokenLinear", lambda spec: spec.block.token == TokenLinear()),
        ("block.token", "none", lambda spec: spec.block.token is None),
        (
            "block.token",
            '{"kind": "TokenConv", "variant": "depthwise"}',
            lambda s: s.block.token == TokenConv("depthwise"),
        ),
        ("block.norm", "Affine", lambda spec: spec.block.norm == Affine()),
        ("stem.image", "16x32", lambda spec: spec.stem.image == (16, 32)),
        ("stem.image", "64", lambda spec: spec.stem.image == (64, 64)),
        ("stem.positions", "Learned", lambda spec: spec.stem.positions == Learned()),
        ("drop_path.rate", "1e-1", lambda spec: spec.drop_path.rate == 0.1),
        ("stem.class_token", "true", lambda spec: spec.stem.class_token is True),
    ],
)
def test_override(path: str, text: str, read: object) -> None:
    assert read(override(MIXER, path, text))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("block.tokn", "3", "unknown Block field 'tokn'; did you mean 'token'?"),
        ("block.token", "TokenConvv", "unknown kind of block.token 'TokenConvv'; did you mean 'TokenConv'"),
        ("block.token", "Affine", "Block.token must be TokenMixer or none, not Affine()"),
        ("block.token.hidden", "nan", "block.token.hidden must be a whole number between 1 and 16,777,216 or none"),
        ("block.token.hidden", "-3", "must be a whole number between 1"),
        ("width", "1e99", "width must be a whole number"),
        ("width", "none", "width must be a whole number"),
        ("depth", "0", "depth must be"),
        ("depth.more", "0", "depth is 6: it has no field 'more'"),
        ("drop_path.rate", "inf", "drop_path.rate must be a number between 0.0 and 1.0"),
        ("drop_path.rate", "high", "drop_path.rate must be a number between 0.0 and 1.0, not 'high'"),
        ("block.channel.hidden", "abc", "block.channel.hidden must be a whole number"),
        ("drop_path.rate", "2", "between 0.0 and 1.0"),
        ("block.channel.act", "gelo", "must be 'gelu' or 'gelu_tanh' or 'relu', not 'gelo'"),
        ("stem.image", "3x4x5", "must be 2 numbers"),
        ("stem.image", "33", "a 4x4 patch does not divide a 33x33 image; the nearest size that works is 32x32"),
        ("head", "Vocabulary", "a Vocabulary head needs pool=None"),
        ("pool", "none", "a Classes head needs a pool such as Mean()"),
        ("block.token", "{", "not valid JSON"),
        ("block.channel", "ChannelMlp", "ChannelMlp needs hidden"),
        ("stem.class_token", "maybe", "class_token"),
    ],
)
def test_wrong_overrides_are_told_in_one_line(path: str, text: str, message: str) -> None:
    with pytest.raises(allmlp.UserError) as caught:
        override(MIXER, path, text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(colour="red"), "unknown Encoder field 'colour'"),
        (lambda data: data.pop("width"), "Encoder needs width"),
        (lambda data: data.pop("kind"), "config has no 'kind'"),
        (lambda data: data.update(kind="Encodr"), "unknown kind of config 'Encodr'; did you mean 'Encoder'"),
        (lambda data: data.update(kind=["Encoder"]), "unknown kind"),
        (lambda data: data["block"].pop("kind"), "config.block has no 'kind'"),
        (lambda data: data.update(width=16.5), "Encoder.width must be a whole number"),
        (lambda data: data.update(width=True), "Encoder.width must be a whole number"),
        (lambda data: data.update(stem=3), "Encoder.stem must be Stem, not 3"),
        (lambda data: data["stem"].update(image=[8]), "Patches.image must be 2 numbers"),
        (lambda data: data["drop_path"].update(rate=math.nan), "DropPath.rate must be a number"),
    ],
)
def test_wrong_json_is_told_in_one_line(change: object, message: str) -> None:
    data = to_dict(MIXER)
    change(data)  # type: ignore[operator]
    with pytest.raises(allmlp.UserError) as caught:
        from_json(json.dumps(data))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_fields_take_their_defaults() -> None:
    data = to_dict(MIXER)
    del data["drop_path"]
    assert from_dict(data) == MIXER


# --- anything at all ----------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(sorted(Spec.kinds)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["kind", "width", "block", "x"]), inner)
    ),
    max_leaves=12,
)
LEAVES = [
    "width", "depth", "block", "block.token", "block.token.hidden", "block.channel.hidden", "block.channel.inner",
    "stem", "stem.image", "stem.patch", "stem.in_channels", "head", "head.classes", "pool", "norm", "drop_path.rate",
    "init.weight", "block.scale", "block.norm.eps", "block.order", "stem.positions",
]  # fmt: skip


@given(json_values)
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_spec_or_one_line(value: object) -> None:
    try:
        spec = from_json(json.dumps(value))
    except allmlp.UserError as reason:
        assert "\n" not in str(reason)
    else:
        assert isinstance(spec, Spec)


@given(st.dictionaries(st.sampled_from(LEAVES), json_values, max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_damage_to_a_configuration_builds_or_is_one_line(changes: dict[str, object]) -> None:
    data = to_dict(MIXER)
    for path, value in changes.items():
        *above, leaf = path.split(".")
        target = data
        for name in above:
            target = target.get(name) if isinstance(target, dict) else None
        if isinstance(target, dict):
            target[leaf] = value
    try:
        spec = from_json(json.dumps(data))
        assert isinstance(spec, Encoder)
        allmlp.measure(spec)
    except allmlp.UserError as reason:
        assert "\n" not in str(reason)
    else:
        assert from_json(to_json(spec)) == spec


@given(
    st.sampled_from(sorted(presets())),
    st.fixed_dictionaries(
        {},
        optional={
            "classes": st.integers(-2, 50),
            "image": st.one_of(st.integers(-8, 96), st.tuples(st.integers(0, 64), st.integers(0, 64))),
            "patch": st.integers(0, 20),
            "in_channels": st.integers(-1, 5),
            "vocabulary": st.integers(-1, 100),
            "length": st.integers(-1, 100),
            "drop_path": st.floats(),
        },
    ),
)
@settings(max_examples=150, deadline=None)
def test_any_option_builds_or_is_one_line(name: str, options: dict[str, object]) -> None:
    try:
        spec = allmlp.configure(presets()[name].spec, **options)  # type: ignore[arg-type]
    except allmlp.UserError as reason:
        assert "\n" not in str(reason)
    else:
        assert spec.reads and from_json(to_json(spec)) == spec


def test_unknown_names_and_options() -> None:
    with pytest.raises(allmlp.UserError, match="unknown model 'mixer_b61'; did you mean 'mixer_b16'"):
        allmlp.create("mixer_b61")
    with pytest.raises(allmlp.UserError, match="unknown option of create 'clases'; did you mean 'classes'"):
        allmlp.create("mixer_b16", clases=3)
    with pytest.raises(allmlp.UserError, match="reads 128 tokens: it takes no 'image'"):
        allmlp.create("gmlp_l18", image=32)
    with pytest.raises(allmlp.UserError, match="takes no 'classes'"):
        allmlp.create("resmlp_seq2seq_6", classes=3)


def test_impossible_blocks_are_refused() -> None:
    image = Patches((8, 8), (4, 4), class_token=True)
    with pytest.raises(allmlp.UserError, match="plain grid"):
        allmlp.create(Encoder(8, 1, Block(TokenConv()), image))
    with pytest.raises(allmlp.UserError, match="16 channels cannot be split into 3 heads"):
        allmlp.create("vit_nano", overrides={"width": 16})
    with pytest.raises(allmlp.UserError, match="even number of hidden channels, not 7"):
        allmlp.create(Encoder(8, 1, Block(channel=ChannelMlp(7, inner=allmlp.layers.SpatialGate())), image))


def test_changes_that_only_fit_together_may_come_in_any_order() -> None:
    class Bookcase(Spec):
        width: int = 10
        book: int = 5

        def check(self) -> None:
            if self.book > self.width:
                raise allmlp.UserError("the book is too wide")

    assert override_all(Bookcase(), {"book": "20", "width": "30"}) == Bookcase(30, 20)
    with pytest.raises(allmlp.UserError, match="too wide"):
        override_all(Bookcase(), {"book": "20", "width": "15"})
    assert override_all(Bookcase(), {}) == Bookcase()
