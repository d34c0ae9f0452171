"""Token weights at another image size: resample, mix, resample back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import allmlp
from allmlp.cli import main
from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing, read_preprocessing, write_preprocessing
from allmlp.errors import UserError
from allmlp.layers import ClassifierHead, ClassMlp, Context, Dense, GatedTokens, SpatialGatingUnit, Toeplitz, TokenMlp
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.models.grid import ForwardAtSize, GridResize, Rule, interpolation_matrix, with_img_size
from allmlp.models.resmlp import resmlp
from allmlp.spec import override
from allmlp.weights.resize import extend_bias, resize_model
from allmlp.weights.start import open_start, transfer
from tiny import randomize

FAMILIES = ["mixer_nano", "resmlp_nano", "gmlp_nano", "amlp_nano", "vit_nano", "class"]


def spec(name: str, image: int | tuple[int, int] = 32) -> Encoder:
    found = resmlp(2, 24, 0.1, 4, 32, 10, pool=ClassMlp()) if name == "class" else allmlp.preset(name).spec
    return found.configure(img_size=image).replace(depth=2)


def bring(x: Tensor, source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """b s c on one grid -> on another."""
    maps = x.transpose(1, 2).unflatten(2, source)
    return F.interpolate(maps, target, mode="bilinear", antialias=True).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("rule", ["interpolate", "tile"])
@pytest.mark.parametrize("name", FAMILIES)
def test_to_the_same_size_nothing_changes(name: str, rule: Rule) -> None:
    state = allmlp.create(spec(name), seed=0).state_dict()
    assert with_img_size(spec(name), 32, rule) == spec(name)
    new = GridResize(spec(name), spec(name), rule=rule)(state)
    assert all(torch.equal(state[key], new[key]) for key in state)


@pytest.mark.parametrize("image", [16, 48, 64, (24, 40)])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_resized_weights_fit(name: str, image: int | tuple[int, int]) -> None:
    model = allmlp.create(spec(name), seed=0)
    other = allmlp.create(spec(name, image))
    other.load_state_dict(GridResize(model.spec, other.spec)(model.state_dict()))
    assert torch.isfinite(other(*other.dummy_inputs(2))).all()


@pytest.mark.parametrize("target", [(4, 4), (8, 8), (12, 6), (16, 16)])
def test_mixing_is_resample_mix_resample(target: tuple[int, int]) -> None:
    source = (8, 8)
    generator = torch.Generator().manual_seed(0)
    model = allmlp.create(spec("resmlp_nano"), seed=0, dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(generator=generator)
    resize = GridResize(model.spec, model.spec.configure(img_size=(4 * target[0], 4 * target[1])))
    state = model.state_dict()
    new = resize(state)
    x = torch.randn(2, target[0] * target[1], 3, dtype=torch.float64, generator=generator)
    name = "blocks.0.token.mix"
    mixed = state[f"{name}.weight"] @ bring(x, target, source) + state[f"{name}.bias"][:, None]
    ours = new[f"{name}.weight"] @ x + new[f"{name}.bias"][:, None]
    torch.testing.assert_close(ours, bring(mixed, source, target), atol=1e-5, rtol=1e-5)


def test_mixer_s_two_matrices() -> None:
    model = allmlp.create(spec("mixer_nano"), seed=0)
    new = GridResize(model.spec, spec("mixer_nano", 16))(model.state_dict())
    x, mix = torch.randn(2, 16, 5), model.blocks[0].token.mix
    hidden = new["blocks.0.token.mix.up.weight"] @ x
    torch.testing.assert_close(hidden, mix.up.weight.detach() @ bring(x, (4, 4), (8, 8)), atol=1e-5, rtol=1e-4)
    down = new["blocks.0.token.mix.down.weight"] @ hidden
    torch.testing.assert_close(down, bring(mix.down.weight.detach() @ hidden, (8, 8), (4, 4)), atol=1e-5, rtol=1e-4)


def test_rows_sum_to_one_and_class_tokens_stay() -> None:
    assert torch.allclose(interpolation_matrix((7, 5), (4, 9)).sum(1), torch.ones(36, dtype=torch.float64))
    model = allmlp.create(spec("vit_nano"), seed=0)
    new = GridResize(model.spec, spec("vit_nano", 48))(model.state_dict())
    positions = model.state_dict()["stem.positions.weight"]
    assert new["stem.positions.weight"].shape[0] == 1 + 144
    assert torch.equal(new["stem.positions.weight"][0], positions[0])
    pooled = allmlp.create(spec("class"), seed=0)
    row = pooled.state_dict()["pool.gathers.0.mix.weight"]
    wide = GridResize(pooled.spec, spec("class", 48))(pooled.state_dict())["pool.gathers.0.mix.weight"]
    assert torch.equal(wide[:, 0], row[:, 0])
    torch.testing.assert_close(wide.sum(), row.sum(), atol=1e-4, rtol=1e-4)


def test_half_precision_stays_half() -> None:
    model = allmlp.create(spec("gmlp_nano"), seed=0).half()
    new = GridResize(model.spec, spec("gmlp_nano", 48))(model.state_dict())
    assert {weight.dtype for weight in new.values()} == {torch.float16}


def test_gradients_reach_the_weights_through_a_smaller_picture() -> None:
    model = allmlp.create(spec("gmlp_nano").replace(head=None), seed=0)
    small = ForwardAtSize(model, (16, 16))
    images = torch.randn(2, 3, 16, 16)
    small(images).square().sum().backward()
    gradient = model.blocks[0].channel.mix.inner.proj.weight.grad
    assert gradient is not None and gradient.shape == (64, 64) and gradient.abs().sum() > 0
    other = allmlp.create(model.spec.configure(img_size=16))
    other.load_state_dict(GridResize(model.spec, other.spec)(model.state_dict()))
    torch.testing.assert_close(small(images), other(images))


def test_start_from_a_model_of_another_size(tmp_path: Path) -> None:
    model = allmlp.create(spec("resmlp_nano"), seed=0)
    allmlp.save(model, tmp_path)
    larger = allmlp.create(spec("resmlp_nano", 48).configure(num_classes=7), seed=1)
    assert transfer(larger, open_start(tmp_path)) == ["head.proj.weight", "head.proj.bias"]
    expected = GridResize(model.spec, larger.spec)(model.state_dict())
    own = larger.state_dict()
    assert all(torch.equal(own[key], expected[key]) for key in own if not key.startswith("head."))
    coarser = allmlp.create(spec("resmlp_nano").configure(patch_size=8))
    message = "is another model than that of the run: 5 weights differ, such as blocks.*use --model"
    with pytest.raises(allmlp.UserError, match=message):
        transfer(coarser, open_start(tmp_path))


def test_what_cannot_be_resized() -> None:
    striped = spec("gmlp_nano")
    gate = striped.block.channel.inner
    assert isinstance(gate, SpatialGatingUnit)
    striped = striped.replace(
        block=striped.block.replace(channel=striped.block.channel.replace(inner=gate.replace(projection=Toeplitz())))
    )
    with pytest.raises(allmlp.UserError, match="only dense token weights"):
        GridResize(striped, striped.configure(img_size=64))
    text = allmlp.create("gmlp_mlm_tiny")
    with pytest.raises(allmlp.UserError, match="only this library's image models"):
        GridResize(text.spec, text.spec)
    with pytest.raises(allmlp.UserError, match="only this library's image models"):
        ForwardAtSize(allmlp.create("resmlp_seq2seq_tiny"), (16, 16))


def test_the_resized_model_is_frozen_alike_and_independent() -> None:
    model = allmlp.create(spec("mixer_nano")).set_grad_checkpointing()
    model.stem.requires_grad_(False).eval()
    larger = resize_model(model, 48)
    assert not larger.stem.proj.weight.requires_grad and larger.head.proj.weight.requires_grad
    assert not larger.stem.training and larger.blocks.training and larger.checkpointing
    before = model.stem.proj.weight.clone()
    with torch.no_grad():
        larger.stem.proj.weight.zero_()
    assert torch.equal(model.stem.proj.weight, before)
    shared = resize_model(model, 48, copy=False)
    assert shared.stem.proj.weight.data_ptr() == model.stem.proj.weight.data_ptr()


@pytest.mark.parametrize(("token", "rule"), [(TokenMlp(expansion=2.0), "interpolate"), (TokenMlp(8), "tile")])
def test_a_token_mlp_inside_a_gate_is_resized(token: TokenMlp, rule: Rule) -> None:
    model = allmlp.create(spec("mixer_nano"), overrides={"block.token": GatedTokens(token)})
    larger = resize_model(model, 64, rule=rule)
    hidden = model.blocks[0].token.mix.mix.up.out_features
    assert larger.blocks[0].token.mix.mix.up.out_features == hidden * (4 if rule == "tile" else 1)
    assert larger(torch.randn(1, 3, 64, 64)).shape == (1, 10)


def test_a_misspelled_rule_is_not_taken_for_another() -> None:
    with pytest.raises(UserError, match="unknown rule 'tiles'; did you mean 'tile'"):
        resize_model(allmlp.create(spec("mixer_nano")), 64, rule="tiles")  # type: ignore[arg-type]


# --- Mixer's rule ------------------------------------------------------------------------------------------

QUADRANTS = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
"""The tokens of a 4 x 4 grid in each of its four 2 x 2 parts, row by row."""


def test_tiles_are_mixed_alone_by_mixer_s_own_mlp() -> None:
    """The paper: W1' is block-diagonal with K^2 copies of W1 once tokens are ordered part by part, D_S' = K^2 D_S."""
    model = allmlp.create(spec("mixer_nano", 8), seed=0)
    randomize(model)
    large = resize_model(model, img_size=16, rule="tile")
    old, new = (each.blocks[0].token.mix for each in (model, large))
    width = old.up.weight.shape[0]
    assert new.up.weight.shape == (4 * width, 16)
    order = [token for part in QUADRANTS for token in part]
    assert torch.equal(new.up.weight[:, order], torch.block_diag(*[old.up.weight] * 4))
    assert torch.equal(new.down.weight[order], torch.block_diag(*[old.down.weight] * 4))
    assert torch.equal(new.up.bias, torch.cat([old.up.bias] * 4)) and torch.equal(
        new.down.bias[order], torch.cat([old.down.bias] * 4)
    )
    x = torch.randn(2, 16, 5)
    mixed = new(x, Context())
    for part in QUADRANTS:
        torch.testing.assert_close(mixed[:, part], old(x[:, part], Context()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["resmlp_nano", "gmlp_nano", "amlp_nano"])
def test_square_matrices_become_block_diagonal(name: str) -> None:
    model = allmlp.create(spec(name, 8), seed=0)
    randomize(model)
    large = resize_model(model, img_size=16, rule="tile")
    key = "blocks.0.token.mix" if name == "resmlp_nano" else "blocks.0.channel.mix.inner.proj"
    old, new = model.state_dict(), large.state_dict()
    order = [token for part in QUADRANTS for token in part]
    assert torch.equal(new[f"{key}.weight"][order][:, order], torch.block_diag(*[old[f"{key}.weight"]] * 4))
    assert torch.equal(new[f"{key}.bias"][order], old[f"{key}.bias"].repeat(4))


def test_a_picture_of_equal_tiles_is_answered_as_one_tile() -> None:
    """With mean pooling and no attention, an image tiled four times gives the features of the image."""
    for name in ("mixer_nano", "resmlp_nano", "gmlp_nano", "class"):
        model = allmlp.create(spec(name, 16), seed=0).eval()
        randomize(model, spread=0.1)
        image = torch.randn(1, 3, 16, 16)
        large = resize_model(model, img_size=(32, 48), rule="tile")
        with torch.no_grad():
            torch.testing.assert_close(large(image.repeat(1, 1, 2, 3)), model(image), atol=1e-4, rtol=1e-4)


def test_positions_are_repeated_and_the_class_token_keeps_its_own() -> None:
    model = allmlp.create(spec("vit_nano", 8), seed=0)
    table = model.state_dict()["stem.positions.weight"]
    tiled = resize_model(model, img_size=16, rule="tile").state_dict()["stem.positions.weight"]
    assert torch.equal(tiled[0], table[0])
    for part in QUADRANTS:
        assert torch.equal(tiled[1:][part], table[1:])


def test_tiles_must_fit() -> None:
    with pytest.raises(allmlp.UserError, match="12x12 patches cannot be tiled by 8x8"):
        resize_model(allmlp.create(spec("gmlp_nano")), img_size=48, rule="tile")


@pytest.mark.parametrize("rule", ["interpolate", "tile"])
def test_a_token_mlp_as_wide_as_the_tokens_keeps_its_width(rule: Rule) -> None:
    model = allmlp.create("resmlp_s12_mlp", img_size=32, overrides={"depth": 1})
    assert model.spec.block.token.expansion == 4
    larger = resize_model(model, img_size=64, rule=rule)
    assert larger.spec.block.token.hidden == 16 * (1 if rule == "interpolate" else 4)
    assert larger(torch.randn(1, 3, 64, 64)).shape == (1, 1000)


# --- folders -----------------------------------------------------------------------------------------------


def test_another_size_gives_an_error_that_names_resize() -> None:
    with pytest.raises(
        allmlp.UserError, match=r"32x32 images, got 48x40; .* allmlp resize FOLDER TARGET --img-size 48x40"
    ):
        allmlp.create(spec("mixer_nano"))(torch.randn(1, 3, 48, 40))
    with pytest.raises(allmlp.UserError, match=r"130 tokens .* allmlp resize FOLDER TARGET --seq-len 130"):
        allmlp.create("bert_tiny", overrides={"depth": 1})(torch.zeros(1, 130, dtype=torch.long))


@pytest.mark.parametrize(("rule", "image", "text"), [("interpolate", (24, 40), "24x40"), ("tile", (64, 64), "64")])
def test_the_command_writes_what_load_gives(
    rule: Rule, image: tuple[int, int], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = allmlp.create(spec("mixer_nano"), seed=0)
    allmlp.save(model, tmp_path / "a")
    inputs = ImagePreprocessing((0.5,) * 3, (0.25,) * 3, tuple("abcdefghij"), 0.9)
    write_preprocessing(tmp_path / "a", inputs)
    with pytest.raises(SystemExit) as end:
        main(["resize", str(tmp_path / "a"), str(tmp_path / "b"), "--img-size", text, "--rule", rule])
    assert end.value.code == 0 and f"32x32 image -> {image[0]}x{image[1]} image" in capsys.readouterr().out
    assert read_preprocessing(tmp_path / "b") == inputs
    written, given = allmlp.load(tmp_path / "b"), allmlp.load(tmp_path / "a", img_size=image, rule=rule)
    assert written.spec == given.spec == resize_model(model, image, rule=rule).spec
    assert all(torch.equal(weight, given.state_dict()[key]) for key, weight in written.state_dict().items())


def test_text_keeps_its_tokenizer_and_learns_its_length(tmp_path: Path) -> None:
    model = allmlp.create("resmlp_seq2seq_tiny", seq_len=16, seed=0).eval()
    allmlp.save(model, tmp_path / "a")
    write_preprocessing(tmp_path / "a", TextPreprocessing("translation", 16))
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit) as end:
        main(["resize", str(tmp_path / "a"), str(tmp_path / "b"), "--seq-len", "24"])
    assert end.value.code == 0
    longer = allmlp.load(tmp_path / "b")
    assert read_preprocessing(tmp_path / "b") == TextPreprocessing("translation", 24)
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    source, target = torch.randint(0, 8192, (2, 16)), torch.randint(0, 8192, (2, 12))
    mask = torch.ones(2, 16, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(longer(source, target, mask), model(source, target, mask), atol=1e-4, rtol=1e-4)
        assert longer(torch.randint(0, 8192, (1, 24)), torch.randint(0, 8192, (1, 24))).shape == (1, 24, 8192)


def test_the_class_token_of_a_text_model_reads_the_first_tokens_as_before() -> None:
    small = gmlp_text(1, 16, 32, 8, 31).replace(pool=ClassMlp(1), head=ClassifierHead(3))
    model = allmlp.create(small, seed=0).eval()
    randomize(model, spread=0.3)
    ids = torch.randint(31, (2, 5))  # shorter than all
    for seq_len in (6, 12):
        torch.testing.assert_close(resize_model(model, seq_len=seq_len)(ids), model(ids))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--img-size", "50"], "nearest size that works is 48x48"),
        (["--img-size", "48", "--rule", "tile"], "cannot be tiled"),
        (["--img-size", "48", "--rule", "cubic"], "--rule must be interpolate or tile, not 'cubic'"),
        (["--seq-len", "48"], "only this library's models of texts and series have a sequence length"),
        (["--seq-len", "48", "--rule", "tile"], "apply to images, not to a sequence length"),
        ([], "give one new size: --img-size 448 or --seq-len 512"),
    ],
)
def test_mistakes_leave_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allmlp.save(allmlp.create(spec("gmlp_nano")), tmp_path / "a")
    with pytest.raises(SystemExit) as end:
        main(["resize", str(tmp_path / "a"), str(tmp_path / "b"), *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "b").exists()


# --- text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 48])
@pytest.mark.parametrize(
    "name",
    ["gmlp_mlm_tiny", "gmlp_causal_tiny", "mixer_mlm_tiny", "bert_tiny", "amlp_mlm_tiny", "gpt2_tiny", "llama_tiny"],
)
def test_another_length_of_text_mixes_the_first_tokens_as_before(name: str, length: int, tmp_path: Path) -> None:
    old = allmlp.create(name, seq_len=32, seed=0, overrides={"depth": 2}).eval()
    with torch.no_grad():
        for weight in old.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    allmlp.save(old, tmp_path)
    new = allmlp.create(name, seq_len=length, overrides={"depth": 2}).eval()
    transfer(new, open_start(tmp_path))
    ids = torch.randint(0, 8192, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(new(ids), old(ids), atol=1e-4, rtol=1e-4)
    assert torch.isfinite(new(torch.randint(0, 8192, (1, length)))).all()


def test_distances_never_seen_start_at_zero() -> None:
    weight = torch.arange(1.0, 8.0)  # four tokens: 4 on the diagonal
    assert Toeplitz().crop(weight, 5, False).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert Toeplitz().crop(weight, 2, False).tolist() == [3, 4, 5]
    assert Toeplitz().crop(weight[:4], 6, True).tolist() == [0, 0, 1, 2, 3, 4]
    long, short = (Toeplitz().matrix(Toeplitz().crop(weight, n, False), 0, n, False) for n in (6, 3))
    assert torch.equal(long[:3, :3], short)


def test_new_tokens_get_the_bias_of_the_last_token() -> None:
    """Not zero, which would close a gate trained around a bias of one for the new tokens."""
    bias = torch.tensor([3.0, 1.0, 2.0])
    assert extend_bias(bias, 5).tolist() == [3, 1, 2, 2, 2]
    assert extend_bias(bias, 3).tolist() == [3, 1, 2]
    assert extend_bias(bias, 2).tolist() == [3, 1]
    for name, key in (("gmlp_mlm_tiny", "inner.proj.bias"), ("mixer_mlm_tiny", "token.mix.down.bias")):
        model = allmlp.create(name, seq_len=32, seed=0, overrides={"depth": 2})
        randomize(model)
        longer = resize_model(model, seq_len=48).state_dict()
        found = {path: old for path, old in model.state_dict().items() if path.endswith(key)}
        assert len(found) == 2
        for path, old in found.items():
            assert longer[path].shape == (48,) and old[-1] != 0
            assert torch.equal(longer[path][:32], old) and torch.equal(longer[path][32:], old[-1].expand(16))


def test_a_run_and_the_source_itself_are_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, run = tmp_path / "a", tmp_path / "b"
    for folder in (source, run):
        allmlp.save(allmlp.create("mixer_nano", overrides={"depth": 1}), folder)
    (run / "run.json").write_text("{}")
    for target, reason in ((source, "would overwrite itself"), (run, "holds a run")):
        before = (target / "model.safetensors").read_bytes()
        with pytest.raises(SystemExit) as caught:
            main(["resize", str(source), str(target), "--img-size", "64"])
        assert caught.value.code == 2 and reason in capsys.readouterr().err
        assert (target / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("causal", [False, True])
def test_dense_matrices_start_from_toeplitz_ones(causal: bool, tmp_path: Path) -> None:
    """A gMLP with dense spatial weights computes what the one with Toeplitz weights does that it starts from."""
    spec = gmlp_text(2, 16, 32, seq_len=10, vocab_size=20, causal=causal)
    old = allmlp.create(spec, seed=0).eval()
    randomize(old)
    allmlp.save(old, tmp_path)
    new = allmlp.create(override(spec, "block.channel.inner.projection", Dense()), seed=1).eval()
    assert transfer(new, open_start(tmp_path)) == []
    ids = torch.randint(0, 20, (3, 10))
    with torch.no_grad():
        torch.testing.assert_close(new(ids), old(ids))
    allmlp.save(new, tmp_path / "dense")
    with pytest.raises(UserError, match="is another model"):
        transfer(old, open_start(tmp_path / "dense"))


@pytest.mark.parametrize("seq_len", [6, 14])
def test_dense_matrices_start_from_toeplitz_ones_of_another_length(seq_len: int, tmp_path: Path) -> None:
    old = allmlp.create(gmlp_text(2, 16, 32, seq_len=10, vocab_size=20), seed=0).eval()
    randomize(old)
    allmlp.save(old, tmp_path)
    longer = override(gmlp_text(2, 16, 32, seq_len=seq_len, vocab_size=20), "block.channel.inner.projection", Dense())
    new = allmlp.create(longer, seed=1).eval()
    assert transfer(new, open_start(tmp_path)) == []
    ids = torch.randint(0, 20, (3, seq_len))
    with torch.no_grad():
        torch.testing.assert_close(new(ids), resize_model(old, seq_len=seq_len)(ids))


def pyramid(img_size: int, stages: int) -> Encoder:
    spec = allmlp.preset("cyclemlp_b1").spec
    return spec.configure(img_size=img_size).replace(width=8, depth=1, stages=spec.stages[:stages])


OTHER_MODELS = {
    "attention": ("bert_tiny", "gmlp_mlm_tiny", {"seq_len": 24}),
    "token MLP": ("mixer_mlm_tiny", "bert_tiny", {"seq_len": 24}),
    "translation": ("transformer_seq2seq_tiny", "resmlp_seq2seq_tiny", {"seq_len": 24}),
    "series": ("gmlp_series", "patchtsmixer", {"seq_len": 96}),
    "stages": (pyramid(64, 2), pyramid(128, 1), {}),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_of_another_size_is_no_start(name: str, tmp_path: Path) -> None:
    old, new, size = OTHER_MODELS[name]
    allmlp.save(allmlp.create(old, seed=0), tmp_path)
    with pytest.raises(UserError, match="is another model"):
        transfer(allmlp.create(new, **size, seed=1), open_start(tmp_path))


# --- series ------------------------------------------------------------------------------------------------


SERIES = ("patchtsmixer", "patchtsmixer_mix", "gmlp_series", "resmlp_series", "tsmixer", "dlinear", "nlinear")


@pytest.mark.parametrize("name", SERIES)
def test_a_longer_look_back_reads_the_newest_steps_as_before(name: str) -> None:
    old = allmlp.create(name, seq_len=64, in_chans=2, horizon=8, seed=0).eval()
    randomize(old)
    new = resize_model(old, seq_len=96)
    assert (new.spec.stem.seq_len, new.training) == (96, False)
    z = torch.randn(3, 96, 2)  # normalized: a level would depend on the older steps
    if name == "dlinear":  # its moving average repeats the first step
        z[:, :32] = z[:, 32:33]
    with torch.no_grad():
        before, after = old.forward_head(old.encode(z[:, 32:])), new.forward_head(new.encode(z))
    torch.testing.assert_close(after, before, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", SERIES)
def test_a_shorter_look_back_and_back_again(name: str) -> None:
    old = allmlp.create(name, seq_len=64, in_chans=2, horizon=8, seed=0)
    randomize(old)
    longer = resize_model(old, seq_len=96)
    again = resize_model(longer, seq_len=64).state_dict()
    assert all(torch.equal(weight, again[key]) for key, weight in old.state_dict().items())
    with pytest.raises(allmlp.UserError):
        resize_model(old, seq_len=0)


def test_start_from_a_model_of_another_look_back(tmp_path: Path) -> None:
    old = allmlp.create("resmlp_series", seq_len=64, in_chans=2, horizon=8, seed=0)
    allmlp.save(old, tmp_path)
    new = allmlp.create("resmlp_series", seq_len=96, in_chans=2, horizon=8, seed=1)
    assert transfer(new, open_start(tmp_path)) == []
    assert torch.equal(
        new.state_dict()["head.proj.weight"], resize_model(old, seq_len=96).state_dict()["head.proj.weight"]
    )
    other = allmlp.create("resmlp_series", seq_len=96, in_chans=2, horizon=4, seed=1)
    assert transfer(other, open_start(tmp_path)) == ["head.proj.weight", "head.proj.bias"]
