"""Encoders of several stages: what runs in which order, the pyramid of features, and every tool that reads a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import allmlp
from allmlp import compilation
from allmlp.analysis.saliency import class_maps
from allmlp.analysis.token_filters import token_weights
from allmlp.errors import UserError
from allmlp.inference.encoder import FastEncoder
from allmlp.inference.gpu import GpuFastEncoder
from allmlp.inference.model import UnfusedModel
from allmlp.layers import (
    Affine,
    Attention,
    Block,
    ChannelMlp,
    ClassifierHead,
    ClassMlp,
    GatedTokens,
    LayerNorm,
    MeanPool,
    PatchEmbed,
    PatchMerge,
    RelativePositionBias,
    SpatialGatingUnit,
    Stage,
    TokenEmbed,
    TokenLinear,
    TokenMlp,
)
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.zoo import short_name
from allmlp.optim import AdamW, Muon, hidden_matrices, parameter_groups
from allmlp.plan.activations import Execution, TrainingLoss, activations, deepen, trace
from allmlp.plan.memory import weights as planned_weights
from allmlp.show import state_dict_keys
from allmlp.spec import from_json, override, to_json
from allmlp.weights.convert import convert
from allmlp.weights.folder import expected_shapes
from tiny import randomize

LINEAR = Block(TokenLinear(), channel=ChannelMlp(16), norm=Affine())
RELATIVE = Attention(2, bias=RelativePositionBias())
MLP = Block(TokenMlp(6), channel=ChannelMlp(24))
GATED = Block(channel=ChannelMlp(24, inner=SpatialGatingUnit()))
SPEC = Encoder(
    width=8,
    depth=2,
    block=LINEAR,
    stem=PatchEmbed((8, 12), (2, 2), kernel=3),
    pool=MeanPool(),
    head=ClassifierHead(5),
    stages=(Stage(12, 1, MLP, PatchMerge(norm=LayerNorm())), Stage(16, 3, GATED, PatchMerge(kernel=3))),
)
"""Grids of 4 x 6, 2 x 3 and 1 x 2 tokens; blocks 0-1, 2 and 3-5."""


def built(spec: Encoder = SPEC, dtype: torch.dtype = torch.float64) -> EncoderModel:
    model = spec.build().to(dtype).eval()
    randomize(model)
    return model


def images(*size: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, *(size or (8, 12)), dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_merges_run_before_the_first_block_of_a_stage() -> None:
    model, x = built(), images()
    found = model.forward_activations(x)
    order = [name for name in found if name.count(".") < 2]
    blocks = [f"blocks.{number}" for number in range(6)]
    assert order == ["stem", *blocks[:2], "merges.2", blocks[2], "merges.3", *blocks[3:], "norm", "pool", "head"]
    assert torch.equal(found["merges.2"], model.merges["2"](found["blocks.1"])) and found["merges.3"].shape == (
        2,
        2,
        16,
    )
    assert torch.allclose(found["head"], model(x))


def test_drop_path_grows_through_all_stages() -> None:
    model = SPEC.configure(drop_path=0.5).build()
    assert [block.channel.drop_path.rate for block in model.blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_the_features_are_a_pyramid() -> None:
    model, x = built(), images()
    features, maps = model.forward_intermediates(x)
    kept = model.forward_activations(x)
    assert torch.equal(features, kept["norm"]) and model.num_features == 16
    assert [tuple(each.shape[1:]) for each in maps] == [(8, 4, 6), (12, 2, 3), (16, 1, 2)]
    assert torch.equal(maps[1].flatten(2).transpose(1, 2), kept["blocks.2"])
    assert [(each["module"], each["num_chs"], each["reduction"]) for each in model.feature_info] == [
        ("blocks.1", 8, 2),
        ("blocks.2", 12, 4),
        ("blocks.5", 16, 8),
    ]
    (normed,) = model.forward_intermediates(x, 1, norm=True, output_fmt="NLC", intermediates_only=True)
    assert torch.equal(normed, kept["norm"])
    with pytest.raises(UserError, match="the last norm is for the channels of the last stage"):
        model.forward_intermediates(x, norm=True)
    with pytest.raises(UserError, match="there is no stage 3 in a model of 3 stages"):
        model.forward_intermediates(x, [3])


def test_pruning_keeps_the_first_stages() -> None:
    model, x = built(SPEC.configure(drop_path=0.5)), images()
    (expected,) = model.forward_intermediates(x, [1], intermediates_only=True)
    with pytest.raises(UserError, match="prune_norm and prune_head are needed"):
        model.prune_intermediate_layers([1])
    assert model.prune_intermediate_layers([1], prune_norm=True) == [1]
    assert model.spec.num_blocks == len(model.blocks) == 3 and list(model.merges) == ["2"]
    assert torch.equal(model.forward_intermediates(x, [1], intermediates_only=True)[0], expected)
    again = model.spec.build().double().eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x)) and again.blocks[2].token.drop_path.rate == pytest.approx(0.2)


def test_timm_gets_the_pyramid() -> None:
    timm = pytest.importorskip("timm")
    pytest.importorskip("allmlp.timm")
    model = timm.create_model("allmlp_cyclemlp_nano", features_only=True)
    assert model.feature_info.channels() == [32, 64, 128] and model.feature_info.reduction() == [2, 4, 8]
    assert [tuple(each.shape) for each in model(torch.randn(1, 3, 32, 32))] == [
        (1, 32, 16, 16),
        (1, 64, 8, 8),
        (1, 128, 4, 4),
    ]
    first = timm.create_model("allmlp_cyclemlp_nano", features_only=True, out_indices=(0, 1), dynamic_img_size=True)
    assert [tuple(each.shape) for each in first(torch.randn(1, 3, 48, 40))] == [(1, 32, 24, 20), (1, 64, 12, 10)]
    assert (
        sum(weight.numel() for weight in first.parameters()) < sum(weight.numel() for weight in model.parameters()) / 2
    )


def test_a_stage_without_a_merge_keeps_the_tokens() -> None:
    spec = SPEC.replace(stages=(Stage(8, 2, GATED, merge=None), Stage(16, 1, MLP)))
    model, x = built(spec), images()
    found = model.forward_activations(x)
    assert list(model.merges) == ["4"] and found["blocks.3"].shape == found["blocks.0"].shape == (2, 24, 8)
    assert close(allmlp.fast(model, torch.float64)(x), model(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stem": PatchEmbed((8, 12), (2, 2), class_token=True)}, "stages need a plain grid of patches"),
        ({"stem": TokenEmbed(9, 6)}, "stages need a plain grid of patches"),
        ({"stages": (Stage(9, 1, MLP, merge=None),)}, "a stage without a merge keeps 8 channels: it cannot have 9"),
        ({"block": Block(RELATIVE)}, "it needs Attention, and no stages"),
        ({"stages": (), "block": Block(GatedTokens(RELATIVE))}, "it needs Attention, and no stages"),
    ],
)
def test_what_stages_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SPEC.replace(**change)


def test_kernels_cover_their_patches() -> None:
    with pytest.raises(UserError, match="a 1x1 kernel does not cover patches of 2x2"):
        PatchMerge(kernel=1)
    with pytest.raises(UserError, match="a kernel on patches of 1x1 must be odd, not 2"):
        PatchEmbed((4, 4), (1, 1), kernel=2)


# --- configuration ----------------------------------------------------------------------------------


def test_fields_of_a_stage_are_set_by_number() -> None:
    changed = override(SPEC, "stages.1.block.channel.hidden", "32")
    assert changed.stages[1].block.channel.hidden == 32 and changed.stages[0] == SPEC.stages[0]
    assert override(SPEC, "stages.0.block.token", "TokenLinear").stages[0].block.token == TokenLinear()
    for path in ("stages.2.depth", "stages.depth", "stages.-1.depth", "stages.0"):
        with pytest.raises(UserError, match=r"stages has 2 entries: set a field of one, as stages\.0\.NAME"):
            override(SPEC, path, "2")
    with pytest.raises(UserError, match="unknown Stage field 'dept'"):
        override(SPEC, "stages.0.dept", "2")


def test_json_and_folder(tmp_path: Path) -> None:
    assert from_json(to_json(SPEC)) == SPEC
    model, x = built(), images()
    allmlp.save(model, tmp_path / "model")
    assert torch.equal(allmlp.load(tmp_path / "model", dtype=torch.float64)(x), model(x))
    with pytest.raises(UserError, match="is a model with stages, which no other format supports"):
        convert(str(tmp_path / "model"), str(tmp_path / "file"), to="timm")


def test_names_of_the_weights_are_known_without_building_all_blocks() -> None:
    state = {name: tuple(weight.shape) for name, weight in built().state_dict().items()}
    assert expected_shapes(SPEC) == state
    keys = state_dict_keys(SPEC)
    assert "blocks.{0..1}.token.mix.weight" in keys and "blocks.{3..5}.channel.mix.up.weight" in keys
    assert {"merges.3.proj.weight", "blocks.2.token.mix.up.weight"} < keys.keys()


def test_a_report_names_every_stage() -> None:
    assert short_name(allmlp.preset("gmlp_staged_micro").spec) == "gMLP 4+6+2 x 128+256+320"


# --- other image sizes ---------------------------------------------------------------------------------


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["interpolate", "tile"])
def test_every_stage_is_resized_on_its_own_grid(rule: str) -> None:
    """From 4 x 8, 2 x 4 and 1 x 2 patches to four times as many."""
    model = built(SPEC.replace(pool=ClassMlp()).configure(img_size=(8, 16)))
    larger = allmlp.resize_model(model, (16, 32), rule=rule)
    assert larger(images(16, 32)).shape == (2, 5)
    assert torch.equal(larger.merges["2"].proj.weight, model.merges["2"].proj.weight)
    first, gate = larger.blocks[0].token.mix.weight, larger.blocks[3].channel.mix.inner.proj.weight
    assert first.shape == (128, 128) and gate.shape == (8, 8) and larger.pool.gathers[0].mix.weight.shape == (1, 9)
    if rule == "tile":
        tile = torch.arange(128).view(8, 16)[4:, 8:].flatten()
        assert torch.equal(first[tile][:, tile], model.blocks[0].token.mix.weight)
        assert larger.spec.stages[0].block.token.hidden == 24
    same = allmlp.resize_model(model, (8, 16), rule=rule)
    assert torch.equal(same(images(8, 16)), model(images(8, 16)))


def test_an_odd_grid_cannot_be_tiled() -> None:
    """3 columns are merged to 2, and twice as many, 6, to 3."""
    with pytest.raises(UserError, match="a grid of 2x3 patches cannot be tiled by 1x2"):
        allmlp.resize_model(built(), (16, 24), rule="tile")


def test_any_size_with_gradients() -> None:
    model = allmlp.create(SPEC, dynamic=True).double()
    randomize(model)
    x = images(12, 8)
    model(x).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())
    model.eval()
    assert close(allmlp.resize_model(model, (12, 8))(x), model(x))


# --- the tools ----------------------------------------------------------------------------------------


def test_fast_serves_every_stage() -> None:
    model, x = built(), images()
    fast = allmlp.fast(model, torch.float64)
    assert isinstance(fast, FastEncoder) and close(fast(x), model(x)) and fast(x[:0]).shape == (0, 5)
    assert close(GpuFastEncoder(model, torch.float64)(x), model(x)), "with the definitions of the kernels, on a CPU"
    mixed = SPEC.replace(stages=(*SPEC.stages, Stage(16, 1, Block(Attention(2)), merge=None)))
    model = built(mixed)
    assert isinstance(allmlp.fast(model, torch.float64), UnfusedModel)
    assert close(allmlp.fast(model, torch.float64)(x), model(x))


@pytest.mark.parametrize("merge", [PatchMerge(), PatchMerge(norm=LayerNorm())], ids=["no-norm", "layernorm"])
def test_fast_drops_a_token_bias_only_where_layernorm_reads_it(merge: PatchMerge) -> None:
    model = built(SPEC.replace(block=MLP, stages=(Stage(12, 1, MLP, merge),)))
    assert close(allmlp.fast(model, torch.float64)(images()), model(images()))


def test_analysis_knows_the_grid_of_every_stage() -> None:
    grids = {one.name: one.grid for one in token_weights(built())}
    assert grids["blocks.0.token.mix"] == (4, 6) and grids["blocks.2.token.mix"] == (2, 3)
    assert grids["blocks.5.channel.mix.inner.proj"] == (1, 2)


def test_a_class_map_has_the_logit_of_the_merged_token() -> None:
    model, x = built(SPEC.configure(img_size=(16, 16))), images(16, 16, batch=1)
    found = class_maps(model, x, torch.tensor([2]))
    assert found is not None and found.shape == (1, 8, 8) and found[0, :4, :4].unique().numel() == 1
    assert found.mean() == pytest.approx(model(x)[0, 2].item())


def test_optimizers_treat_a_merge_as_part_of_the_next_block() -> None:
    model = built()
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert "merges.2.proj.weight" in {names[key] for key in hidden_matrices(model)}
    groups = parameter_groups(model, AdamW(lr=1.0, layer_decay=0.5))
    rates = {names[id(weight)]: group["lr"] for group in groups for weight in group["params"]}
    assert rates["merges.2.proj.weight"] == rates["blocks.2.token.mix.up.weight"] == 0.5**4
    assert rates["head.proj.weight"] == 1.0 and rates["stem.proj.weight"] == 0.5**7
    assert Muon().build(model)


@pytest.mark.slow
def test_the_plan_counts_every_stage() -> None:
    count = sum(weight.numel() for weight in built().parameters())
    assert sum(weight.elements for weight in planned_weights(SPEC)) == count == allmlp.measure(SPEC).parameters
    eager = Execution(device="cpu", bfloat16=False)
    assert activations(SPEC, eager).saved == pytest.approx(trace(SPEC, eager).saved / 64, rel=1e-6)
    deeper = deepen(SPEC.shallow()[0], "blocks.2")
    assert isinstance(deeper, Encoder) and [stage.depth for stage in deeper.all_stages] == [1, 1, 2]


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=2)  # monkeypatch would leave it undefined
def test_every_stage_is_compiled_at_every_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six graphs of one function, more than torch compiles by itself with this limit."""
    torch.compiler.reset()
    monkeypatch.setattr(compilation, "GRAPHS_PER_STAGE", 2)
    monkeypatch.setattr(compilation, "BACKEND", counter := CompileCounter())
    model = SPEC.build().train()
    compilation.compile_task(TrainingLoss(model))
    for batch in (2, 3):
        before = counter.frame_count
        model.forward_features(torch.randn(batch, 3, 8, 12))
        assert counter.frame_count == before + 3


def test_export() -> None:
    model = built(dtype=torch.float32)
    program = torch.export.export(model, (images().float(),))
    assert close(program.module()(images().float()), model(images().float()))


def test_transformers_gives_all_hidden_states() -> None:
    pytest.importorskip("transformers")
    from allmlp import hf

    model = hf.wrap(built(dtype=torch.float32))
    states = model(images().float(), output_hidden_states=True).hidden_states
    assert [state.shape[2] for state in states] == [8, 8, 8, 12, 16, 16, 16]
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (16, 6)
