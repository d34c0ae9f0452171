"""Specs: strict JSON, dotted overrides, one-line errors with suggestions."""

from __future__ import annotations

import json
import math
from inspect import signature

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import allmlp
from allmlp.data.series_table import SeriesTable
from allmlp.errors import SYNONYMS, UnknownArgument, suggest_keywords
from allmlp.layers import (
    Affine,
    Attention,
    Block,
    ChannelMlp,
    LearnedPositions,
    PatchEmbed,
    RotaryPositions,
    TokenConv,
    TokenLinear,
    TokenMlp,
)
from allmlp.models.encoder import Encoder
from allmlp.models.zoo import presets
from allmlp.optim import AdamW
from allmlp.recipes import runs
from allmlp.run import Run
from allmlp.spec import Spec, format_spec, from_dict, from_json, hints, override, override_all, to_dict, to_json
from allmlp.tasks.forecast import Forecast

MIXER = presets()["mixer_nano"].spec


def test_specs_are_values() -> None:
    assert TokenMlp(3) == TokenMlp(3) and hash(TokenMlp(3)) == hash(TokenMlp(3)) and TokenMlp(3) != TokenMlp(4)
    with pytest.raises(AttributeError):
        TokenMlp(3).hidden = 4  # type: ignore[misc]
    assert (
        repr(Block(TokenLinear(causal=True), norm=Affine())) == "Block(token=TokenLinear(causal=True), norm=Affine())"
    )


def test_two_specs_cannot_share_a_name() -> None:
    with pytest.raises(TypeError, match=r"two specs are called TokenMlp: allmlp\.layers\.mixers\.mlp and test_spec"):
        type("TokenMlp", (Spec,), {"__annotations__": {}, "__module__": "test_spec"})
    assert Spec.kinds["TokenMlp"] is TokenMlp
    with pytest.raises(TypeError, match="kind"):
        type("Odd", (Spec,), {"__annotations__": {"kind": int}, "kind": 3})


CELL = """
class NotebookMixer(TokenMixer):
    shift: int = {default}
"""


def test_running_a_notebook_cell_again_replaces_its_specs() -> None:
    from allmlp.layers.mixers.mixer import TokenMixer

    namespace = {"TokenMixer": TokenMixer, "__name__": "__main__"}
    try:
        for default in (1, 2):
            exec(CELL.format(default=default), namespace)
            mixer = override(MIXER, "block.token", "NotebookMixer").block.token
            assert type(mixer) is namespace["NotebookMixer"] and mixer.shift == default
        with pytest.raises(TypeError, match="two specs are called NotebookMixer"):
            exec(CELL.format(default=3), namespace | {"__name__": "json"})
    finally:
        del Spec.kinds["NotebookMixer"]


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
        ("stem.img_size", "16x32", lambda spec: spec.stem.img_size == (16, 32)),
        ("stem.img_size", "64", lambda spec: spec.stem.img_size == (64, 64)),
        ("stem.positions", "LearnedPositions", lambda spec: spec.stem.positions == LearnedPositions()),
        ("drop_path.rate", "1e-1", lambda spec: spec.drop_path.rate == 0.1),
        ("stem.class_token", "true", lambda spec: spec.stem.class_token is True),
    ],
)
def test_override(path: str, text: str, read: object) -> None:
    assert read(override(MIXER, path, text))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "columns"),
    [("tax", ("tax",)), ("tax, price", ("tax", "price")), ('["tax", "a, b"]', ("tax", "a, b")), ("[]", ())],
)
def test_a_list_of_words(text: str, columns: tuple[str, ...]) -> None:
    """An x separates sizes, not words."""
    assert override(SeriesTable("sales.csv"), "columns", text).columns == columns
    for wrong in ("[1]", '["tax"', "[{}]"):
        with pytest.raises(allmlp.UserError, match=r"^columns"):
            override(SeriesTable("sales.csv"), "columns", wrong)


def test_a_list_of_numbers() -> None:
    for text in ("0.1,0.9", "[0.1, 0.9]"):
        assert override(Forecast(), "quantiles", text).quantiles == (0.1, 0.9)


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("block.tokn", "3", "unknown Block field 'tokn'; did you mean 'token'?"),
        ("block.token", "TokenConvv", "unknown kind of block.token 'TokenConvv'; did you mean 'TokenConv'"),
        ("block.token", "Affine", "block.token must be TokenMixer or none, not 'Affine'"),
        (
            "block.norm",
            "Zebra",
            "unknown kind of block.norm 'Zebra': choose one of LayerNorm, RMSNorm, ",
        ),
        ("block.token", "Nonsense", "unknown kind of block.token 'Nonsense': choose one of "),
        ("block.token.hidden", "nan", "block.token.hidden must be a whole number between 1 and 16,777,216 or none"),
        ("block.token.hidden", "-3", "must be a whole number between 1"),
        ("block.token.hidden", "max", "or none, not 'max'"),
        ("width", "1e99", "width must be a whole number"),
        ("width", "none", "width must be a whole number"),
        ("depth", "0", "depth must be"),
        ("depth.more", "0", "depth is 6: it has no field 'more'"),
        ("drop_path.rate", "inf", "drop_path.rate must be a number between 0.0 and 1.0"),
        ("drop_path.rate", "high", "drop_path.rate must be a number between 0.0 and 1.0, not 'high'"),
        ("block.channel.hidden", "abc", "block.channel.hidden must be a whole number"),
        ("drop_path.rate", "2", "between 0.0 and 1.0"),
        ("block.channel.act", "gelo", "must be 'gelu' or 'gelu_tanh' or 'relu' or 'silu' or 'sigmoid', not 'gelo'"),
        ("stem.img_size", "3x4x5", "must be 2 numbers"),
        ("stem.img_size", "33", "a 4x4 patch does not divide a 33x33 image; the nearest size that works is 32x32"),
        ("head", "LMHead", "LMHead needs pool=None"),
        ("head", "Vocabulary", "unknown kind of head 'Vocabulary'; did you mean 'LMHead'?"),
        ("pool", "none", "ClassifierHead needs a pool such as MeanPool()"),
        ("block.token", "{", "not valid JSON"),
        ("block.channel", "ChannelMlp", "ChannelMlp needs hidden"),
        ("stem.class_token", "maybe", "class_token"),
    ],
)
def test_wrong_overrides_are_one_line_errors(path: str, text: str, message: str) -> None:
    with pytest.raises(allmlp.UserError) as caught:
        override(MIXER, path, text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_field_of_what_is_not_set_names_what_to_set_first() -> None:
    run = runs("digits_mixer")["digits_mixer"]
    with pytest.raises(allmlp.UserError, match=r"lora is None: it has no field 'rank'; first set lora=Lora$"):
        override(run, "lora.rank", "4")
    with pytest.raises(allmlp.UserError, match=r"model is None: it has no field 'depth'$"):
        override(run.replace(model=None, init_from="allmlp:image"), "model.depth", "4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(color="red"), "unknown Encoder field 'color'"),
        (lambda data: data.pop("width"), "Encoder needs width"),
        (lambda data: data.pop("kind"), "config has no 'kind'"),
        (lambda data: data.update(kind="Encodr"), "unknown kind of config 'Encodr'; did you mean 'Encoder'"),
        (lambda data: data.update(kind=["Encoder"]), "unknown kind"),
        (lambda data: data["block"].pop("kind"), "config.block has no 'kind'"),
        (lambda data: data.update(width=16.5), "Encoder.width must be a whole number"),
        (lambda data: data.update(width=True), "Encoder.width must be a whole number"),
        (lambda data: data.update(stem=3), "Encoder.stem must be Stem, not 3"),
        (lambda data: data["stem"].update(img_size=[8]), "PatchEmbed.img_size must be 2 numbers"),
        (lambda data: data["drop_path"].update(rate=math.nan), "DropPath.rate must be a number"),
    ],
)
def test_wrong_json_is_a_one_line_error(change: object, message: str) -> None:
    data = to_dict(MIXER)
    change(data)  # type: ignore[operator]
    with pytest.raises(allmlp.UserError) as caught:
        from_json(json.dumps(data))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_fields_take_their_defaults() -> None:
    data = to_dict(MIXER)
    del data["drop_path"]
    assert from_dict(data) == MIXER


def test_a_name_stands_for_a_spec() -> None:
    """In Python, in JSON and on the command line; fields of models also take the names of presets."""
    assert MIXER.replace(norm="Affine").norm == Affine()
    assert from_dict(to_dict(MIXER) | {"norm": "Affine"}).norm == Affine()
    (run,) = runs("digits_mixer").values()
    assert isinstance(run, Run)
    for changed in (
        override(run, "model", "mixer_nano"),
        run.replace(model="mixer_nano"),
        from_json(json.dumps(to_dict(run) | {"model": "mixer_nano"})),
    ):
        assert changed.model == MIXER and changed.replace(model=run.model) == run
    assert override(run, "model", "hf:resnet50").model == presets()["hf:resnet50"].spec
    with pytest.raises(allmlp.UserError, match="unknown model 'mixer_nanno'; did you mean 'mixer_nano'"):
        override(run, "model", "mixer_nanno")
    with pytest.raises(allmlp.UserError, match="unknown model 'Encodr'; did you mean 'Encoder'"):
        override(run, "model", "Encodr")
    with pytest.raises(allmlp.UserError, match="Encoder needs width, depth, block, stem"):
        override(run, "model", "Encoder")
    assert override(run, "task.augment.transforms", "HorizontalFlip").task.augment.transforms == (
        Spec.kinds["HorizontalFlip"](),
    )


def test_the_preset_of_an_override_gets_the_classes_of_the_data() -> None:
    (run,) = runs("digits_mixer").values()
    changed = override(run, "model", "mixer_b16")
    spec = changed.task.configure_model(changed.model, changed.data.load())
    assert changed.model.head.num_classes == 1000 and spec.head.num_classes == 10


def test_format_spec_is_code_in_short_lines() -> None:
    for preset in presets().values():
        assert eval(format_spec(preset.spec, width=60), dict(Spec.kinds)) == preset.spec
        assert max(len(line) for line in format_spec(preset.spec).splitlines()) <= 96


# --- suggestions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("optim.decay", "weight_decay"),
        ("optim.wd", "weight_decay"),
        ("optim.learning_rate", "lr"),
        ("learning_rate", "optim.lr"),
        ("lr", "optim.lr"),
        ("weight_decay", "optim.weight_decay"),
        ("epochs", "budget.epochs"),
        ("clip", "max_grad_norm"),
        ("accumulate", "grad_accum_steps"),
        ("gradient_accumulation_steps", "grad_accum_steps"),
        ("gradient_checkpointing", "grad_checkpointing"),
        ("checkpointing", "grad_checkpointing"),
        ("hold_out", "val_size"),
        ("ema", "ema_decay"),
        ("cadence.log", "log_every"),
        ("cadence.evaluate", "eval_every"),
        ("cadence", "log_every"),
        ("batch", "batch_size"),
        ("pretrained", "init_from"),
        ("schedule.warmup", "warmup_fraction"),
        ("task.smoothing", "label_smoothing"),
        ("model.dim", "width"),
        ("model.embed_dim", "width"),
        ("model.num_layers", "depth"),
        ("model.stem.image", "img_size"),
        ("model.stem.patch", "patch_size"),
        ("model.stem.in_channels", "in_chans"),
        ("model.head.classes", "num_classes"),
        ("model.block.channel.mlp_dim", "hidden"),
        ("model.blok", "block"),
        ("block.token", "model.block.token"),
    ],
)
def test_former_names_and_other_libraries_words_are_understood(path: str, meant: str) -> None:
    (run,) = runs("digits_mixer").values()
    with pytest.raises(allmlp.UserError) as caught:
        override(run, path, "1")
    assert f"did you mean {meant!r}" in str(caught.value)


def test_every_suggestion_exists() -> None:
    fields = {name for kind in Spec.kinds.values() for name in hints(kind)}
    keywords = {name for function in (allmlp.create, allmlp.configure) for name in signature(function).parameters}
    for name, suggestions in SYNONYMS.items():
        assert suggestions and name not in suggestions
        for word in suggestions:
            if word.startswith("allmlp."):
                assert word.removeprefix("allmlp.") in allmlp.__all__
            else:
                assert set(word.split(".")) <= fields | keywords | set(Spec.kinds), f"{name} -> {word}"


def test_unknown_keywords_are_type_errors_with_a_suggestion() -> None:
    for options, message in [
        ({"pretrained": True}, "create() has no argument 'pretrained'; did you mean 'allmlp.from_pretrained'?"),
        ({"classes": 10}, "create() has no argument 'classes'; did you mean 'num_classes'?"),
        ({"num_clases": 10}, "create() has no argument 'num_clases'; did you mean 'num_classes'?"),
        ({"image_size": 10}, "create() has no argument 'image_size'; did you mean 'img_size'?"),
    ]:
        with pytest.raises(UnknownArgument) as caught:
            allmlp.create("mixer_nano", **options)  # type: ignore[arg-type]
        assert str(caught.value) == message
        assert isinstance(caught.value, TypeError) and isinstance(caught.value, allmlp.UserError)

    @suggest_keywords
    def flexible(**options: int) -> dict[str, int]:
        return options

    assert flexible(anything=1) == {"anything": 1}


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
    "stem", "stem.img_size", "stem.patch_size", "stem.in_chans", "head", "head.num_classes", "pool", "norm",
    "drop_path.rate", "init.weight", "block.scale", "block.norm.eps", "block.order", "stem.positions",
]  # fmt: skip


@pytest.mark.slow
@given(json_values)
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_spec_or_one_line(value: object) -> None:
    try:
        spec = from_json(json.dumps(value))
    except allmlp.UserError as reason:
        assert "\n" not in str(reason)
    else:
        assert isinstance(spec, Spec)


@pytest.mark.slow
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


@pytest.mark.slow
@given(
    st.sampled_from(sorted(presets())),
    st.fixed_dictionaries(
        {},
        optional={
            "num_classes": st.integers(-2, 50),
            "img_size": st.one_of(st.integers(-8, 96), st.tuples(st.integers(0, 64), st.integers(0, 64))),
            "patch_size": st.integers(0, 20),
            "in_chans": st.integers(-1, 5),
            "vocab_size": st.integers(-1, 100),
            "seq_len": st.integers(-1, 100),
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
        assert spec.input_spec and from_json(to_json(spec)) == spec


def test_unknown_names_and_options() -> None:
    with pytest.raises(allmlp.UserError, match="unknown model 'mixer_b61'; did you mean 'mixer_b16'"):
        allmlp.create("mixer_b61")
    with pytest.raises(allmlp.UserError, match=r"has no 'img_size' \(input: 128 tokens\); it has vocab_size"):
        allmlp.create("gmlp_l18", img_size=32)
    with pytest.raises(allmlp.UserError, match="has no 'num_classes'"):
        allmlp.create("resmlp_seq2seq_6", num_classes=3)


def test_impossible_blocks_are_refused() -> None:
    image = PatchEmbed((8, 8), (4, 4), class_token=True)
    with pytest.raises(allmlp.UserError, match="plain grid"):
        allmlp.create(Encoder(8, 1, Block(TokenConv()), image))
    with pytest.raises(allmlp.UserError, match="16 channels cannot be split into 3 heads"):
        allmlp.create("vit_nano", overrides={"width": 16})
    with pytest.raises(allmlp.UserError, match="even number of hidden channels, not 7"):
        allmlp.create(Encoder(8, 1, Block(channel=ChannelMlp(7, inner=allmlp.layers.SpatialGatingUnit())), image))


def test_overrides_are_checked_together() -> None:
    class Interval(Spec, abstract=True):
        high: int = 10
        low: int = 5

        def check(self) -> None:
            if self.low > self.high:
                raise allmlp.UserError("low is above high")

    assert override_all(Interval(), {"low": "20", "high": "30"}) == Interval(30, 20)
    with pytest.raises(allmlp.UserError, match="low is above high"):
        override_all(Interval(), {"low": "20", "high": "15"})
    assert override_all(Interval(), {}) == Interval()


def test_a_field_counts_also_where_its_spec_is_set_later() -> None:
    run = next(iter(runs("digits_gmlp").values()))
    for changes in ({"optim.lr": "0.5", "optim": "AdamW"}, {"optim": "AdamW", "optim.lr": "0.5"}):
        assert override_all(run, changes).optim == AdamW(lr=0.5)

    class Limited(Spec, abstract=True):
        token: TokenMlp = TokenMlp(1)
        most: int = 1

        def check(self) -> None:
            if (self.token.hidden or 0) > self.most:
                raise allmlp.UserError("too wide")

    changes: dict[str, object] = {"token.act": "relu", "token": TokenMlp(5), "most": "9"}
    assert override_all(Limited(), changes) == Limited(TokenMlp(5, act="relu"), 9)


def test_numbers_of_numpy_are_numbers() -> None:
    stem = PatchEmbed(img_size=np.int64(32), patch_size=(np.int32(4), 4))  # type: ignore[arg-type]
    assert stem == PatchEmbed((32, 32), (4, 4)) and to_json(stem) == to_json(PatchEmbed((32, 32), (4, 4)))
    assert Block(dropout=np.float32(0.5)) == Block(dropout=0.5)  # type: ignore[arg-type]
    for wrong in (np.float64(3.0), np.bool_(True)):
        with pytest.raises(allmlp.UserError, match="in_chans must be a whole number"):
            PatchEmbed(in_chans=wrong)  # type: ignore[arg-type]


def test_a_kind_is_created_with_the_fields_it_needs() -> None:
    changes = {"token": "Attention", "token.num_heads": "4", "token.rotary": "RotaryPositions"}
    assert override_all(Block(), changes).token == Attention(4, rotary=RotaryPositions())
    scaled = changes | {"token.rotary.theta": "5e5"}
    assert override_all(Block(), scaled).token == Attention(4, rotary=RotaryPositions(5e5))
    with pytest.raises(allmlp.UserError, match="Attention needs num_heads"):
        override_all(Block(), {"token": "Attention", "token.rotary": "RotaryPositions"})
    with pytest.raises(allmlp.UserError, match=r"^token\.num_heads must be"):
        override_all(Block(), {"token": "Attention", "token.num_heads": "many"})
