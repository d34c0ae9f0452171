"""Attention maps against the layers' outputs; entropy, distance and rollout against their equations."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from allmlp.analysis import attention
from allmlp.analysis.analysis import analyze
from allmlp.analysis.attention_maps import (
    AttentionMap,
    alignment,
    attention_layers,
    attention_maps,
    entropy,
    largest_entropy,
    mean_distance,
    read_by_output,
    rollout,
    text_input,
)
from allmlp.analysis.target import AnalysisTarget, load_target
from allmlp.analysis.token_filters import distances
from allmlp.cli import main
from allmlp.layers import (
    Attention,
    Block,
    ChannelMlp,
    ClassAttention,
    ClassifierHead,
    Context,
    CrossAttention,
    Init,
    MeanPool,
    PatchEmbed,
    PatchMerge,
    RelativePositionBias,
    RotaryPositions,
    Stage,
    TinyAttention,
)
from allmlp.layers.context import BuildContext
from allmlp.layers.mixers.attention import TalkingHeadsLayer
from allmlp.layers.pool import ClassAttentionGather
from allmlp.models.encoder import Encoder
from allmlp.models.zoo import preset
from folders import text_folder
from tiny import TINY_SPECS, randomize, tiny_model

CTX = BuildContext(tokens=6, channels=8, init=Init())
MASK = torch.arange(6) < torch.tensor([[6], [4]])
LAYERS = {
    "plain": Attention(2),
    "causal": Attention(2, causal=True),
    "bias": Attention(2, bias=RelativePositionBias(8, 20)),
    "bias alone": Attention(2, bias=RelativePositionBias(8, 20), scores="bias"),
    "grouped, rotary": Attention(4, causal=True, num_kv_heads=2, rotary=RotaryPositions(), linear_bias=False),
    "cross": CrossAttention(2),
    "tiny": TinyAttention(5),
    "tiny, causal": TinyAttention(5),
    "tiny, rotary": TinyAttention(4, rotary=RotaryPositions()),
}


def built(name: str) -> nn.Module:
    spec = LAYERS[name]
    layer = spec.build(CTX, 8, "causal" in name) if isinstance(spec, TinyAttention) else spec.build(CTX)
    randomize(layer.double())
    return layer


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_weights_are_those_that_the_output_is_computed_with(name: str, masked: bool) -> None:
    """With values set to the unit vectors of the tokens, the output before the last map is the weights."""
    layer, mask = built(name), MASK if masked else None
    x, memory = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    bias = torch.randn(2, 6, 6, dtype=torch.float64) if "bias" in name else None
    context = Context(None if name == "cross" else mask, memory, mask, bias)
    weights = layer.attention_weights(x, context)
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:3], dtype=torch.float64))
    projection = next(part for key, part in layer.named_children() if key in ("qkv", "kv", "value"))
    values = projection(memory if name == "cross" else x)
    size = layer.out.weight.shape[1]
    kept = (
        size if name == "bias alone" else values.shape[-1] // 2 if name == "cross" else (values.shape[-1] - size) // 2
    )
    heads = values[..., -kept:].unflatten(-1, (-1, size // weights.shape[1])).transpose(1, 2)  # b g t d
    heads = heads.repeat_interleave(weights.shape[1] // heads.shape[1], dim=1)
    expected = layer.out((weights @ heads).transpose(1, 2).flatten(2))
    assert torch.allclose(layer(x, context), expected)
    if masked:
        assert not weights[1, :, :, 4:].any()


@pytest.mark.parametrize("name", TINY_SPECS)
def test_every_attention_layer_of_a_model_has_one_map(name: str) -> None:
    model = tiny_model(name)
    found = attention_maps(model, *model.dummy_inputs(3))
    assert sorted(one.name for one in found) == sorted(attention_layers(model))
    assert not any(module._forward_pre_hooks for module in model.modules())
    kinds = {(one.stack, one.branch) for one in found}
    if name == "transformer_seq2seq_base":
        assert kinds == {("encoder", "token"), ("decoder", "token"), ("decoder", "cross")}
    elif name.startswith("amlp"):
        assert kinds == {("", "channel")} and found[0].weights.shape[1] == 1
    elif name.startswith(("mixer", "resmlp_s", "gmlp", "convmixer")) and "seq2seq" not in name:
        assert not found


def test_entropy_of_known_weights() -> None:
    sharp, equal = torch.eye(4).expand(3, 4, 4), torch.full((3, 4, 4), 0.25)
    weights = torch.stack([sharp, equal], dim=1)  # b h s t
    assert entropy(weights).tolist() == pytest.approx([0.0, math.log(4)])
    causal = torch.ones(1, 1, 3, 3).tril()
    assert largest_entropy(causal) == pytest.approx((math.log(1) + math.log(2) + math.log(3)) / 3)


def test_distance_on_a_grid_leaves_the_class_token_out() -> None:
    weights = torch.rand(2, 3, 7, 7, dtype=torch.float64).softmax(-1)
    expected = torch.zeros(3, dtype=torch.float64)
    places = [(row, column) for row in range(2) for column in range(3)]
    for head in range(3):
        means = []
        for example in range(2):
            for i, here in enumerate(places, start=1):
                row = weights[example, head, i]
                far = sum(float(row[j]) * math.dist(here, there) for j, there in enumerate(places, start=1))
                means.append(far / float(row[1:].sum()))
        expected[head] = sum(means) / len(means)
    assert torch.allclose(mean_distance(weights, (2, 3)), expected)
    line = torch.eye(5).roll(2, dims=1)[None, None]  # every token two places ahead, the last two three places back
    assert float(mean_distance(line, None)) == pytest.approx((3 * 2 + 2 * 3) / 5)


def test_rollout_adds_all_paths() -> None:
    """Two layers of two tokens: over skip connections and heads, summed path by path."""
    layers = list(torch.rand(2, 1, 2, 2, 2, dtype=torch.float64).softmax(-1))
    found = rollout(layers)
    steps = [(layer[0, 0] + layer[0, 1]) / 4 + torch.eye(2) / 2 for layer in layers]
    paths = [[sum(steps[1][i, k] * steps[0][k, j] for k in range(2)) for j in range(2)] for i in range(2)]
    assert torch.allclose(found, torch.tensor([paths], dtype=torch.float64))
    assert torch.allclose(found.sum(-1), torch.ones(1, 2, dtype=torch.float64))


def test_the_output_reads_the_row_of_its_pool() -> None:
    maps = torch.arange(9.0).view(3, 3)
    rows = {"vit_ti16": [0.0, 1.0, 2.0], "bert_base": [3.0, 4.0, 5.0], "gpt2_small": [6.0, 7.0, 8.0]}
    for name, row in rows.items():
        assert read_by_output(maps, TINY_SPECS[name]).tolist() == row


@pytest.mark.parametrize("task", ["text", "causal", "classes", "translation"])
def test_texts_are_read_with_their_special_tokens_and_cut(task: str, tmp_path: Path) -> None:
    target = load_target(str(text_folder(tmp_path, task)))
    assert target.tokenizer is not None
    for text in ("the cat", "the cat sat on the red mat " * 20):
        found = text_input(target.model, target.tokenizer, text)
        target.model(*found.inputs)
        assert found.read[0] == ("the" if task == "translation" else "[CLS]")
        assert (found.read[-1] == "[SEP]") == (task != "causal")
        if task == "translation":
            assert found.predicted[-1] == "[SEP]" and len(found.predicted) == found.inputs[1].shape[1]


@pytest.mark.slow
def test_alignment_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = load_target(str(text_folder(tmp_path / "model", "translation")))
    texts = ["the cat sat", "a dog"]
    result = analyze(target, tmp_path / "out", texts=texts)
    (section,) = (one for one in result.sections if one.name == "attention")
    assert {"alignment.csv", "alignment.png", "heads.png"} <= set(section.files) and "(2 texts)" in section.text
    with open(tmp_path / "out" / "alignment.csv", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["text"] == "1"]
    read = text_input(target.model, target.tokenizer, texts[1])
    weights: Tensor = alignment(attention_maps(target.model, *read.inputs))[0]
    assert [float(row["weight"]) for row in rows] == pytest.approx(weights.flatten().tolist(), rel=1e-4)
    assert [row["source"] for row in rows[: weights.shape[1]]] == read.read


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_command_reads_texts_and_refuses_images_of_a_text_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = text_folder(tmp_path / "model", "translation")
    outputs = {}
    for text in ((), ("the cat sat", "a dog"), ("cat.png",)):
        with pytest.raises(SystemExit) as ended:
            main(["analyze", str(folder), *text, "--out", str(tmp_path / "out"), "--json"])
        outputs[text] = (ended.value.code or 0, *capsys.readouterr())
    assert "(one random input; give texts as arguments)" in outputs[()][1] and outputs[()][0] == 0
    assert "(2 texts)" in outputs["the cat sat", "a dog"][1] and (tmp_path / "out" / "alignment.csv").is_file()
    assert outputs[("cat.png",)][0] == 2 and "not images" in outputs[("cat.png",)][2]


def test_equal_weights_of_a_causal_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that attend equally to what they may see are on the line of equal weights, by entropy and by distance."""
    seen = torch.ones(6, 6).tril()
    maps = [AttentionMap("blocks.0.token.mix", "", 0, "token", (seen / seen.sum(1, keepdim=True)).expand(1, 2, 6, 6))]
    drawn: list[attention.Chart] = []
    monkeypatch.setattr(attention.figures, "by_depth", lambda charts, *text: drawn.extend(charts))
    output = SimpleNamespace(figure=lambda *given: None)
    attention.draw_depth(output, attention.head_statistics([maps], None), maps, None, "")  # type: ignore[arg-type]
    for chart in drawn:
        heads, equal = chart.series
        assert list(heads.ys) == pytest.approx(list(equal.ys)), chart.title


@pytest.mark.usefixtures("undrawn")
def test_every_stage_has_a_grid_of_its_own(tmp_path: Path) -> None:
    """Attention of equal weights over 4 x 4 patches, then over 2 x 2."""
    stem = PatchEmbed((8, 8), (2, 2))
    stages = (Stage(8, 2, Block(Attention(2), channel=ChannelMlp(8)), PatchMerge()),)
    spec = Encoder(8, 1, stages[0].block, stem, pool=MeanPool(), head=ClassifierHead(3), stages=stages)
    model = spec.build().eval()
    for block in model.blocks:
        torch.nn.init.zeros_(block.token.mix.qkv.weight)
    result = analyze(AnalysisTarget("staged", model, True), tmp_path)
    with open(tmp_path / "attention.csv", encoding="utf8") as file:
        rows = [row for row in csv.DictReader(file) if row["head"] == "0"]
    distance = [float(row["distance"]) for row in rows]
    expected = [float(distances(side * side, (side, side)).mean()) for side in (4, 2, 2)]
    assert distance == pytest.approx(expected, rel=1e-5)
    assert [float(row["entropy"]) for row in rows] == pytest.approx([math.log(16), math.log(4), math.log(4)], rel=1e-5)
    (section,) = (section for section in result.sections if section.name == "attention")
    assert "entropy 2.77 to 1.39 nats" in section.text and "equal weights 2.77 to 1.39" in section.text


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_talking_heads_show_what_is_mixed_again(masked: bool) -> None:
    """Mixed by the second map of the heads, the weights are those that the output is computed with."""
    layer = Attention(2, talking_heads=True).build(CTX)
    randomize(layer.double())
    x, context = torch.randn(2, 6, 8, dtype=torch.float64), Context(MASK if masked else None)
    weights = layer.attention_weights(x, context)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 2, 6, dtype=torch.float64))
    mixed = torch.einsum("gh,bhst->bgst", layer.after.weight, weights) + layer.after.bias[:, None, None]
    if masked:
        assert not weights[1, :, :, 4:].any()
        mixed = mixed * MASK[:, None, None, :]
    values = layer.qkv(x)[..., 16:].unflatten(-1, (2, 4)).transpose(1, 2)
    assert torch.allclose(layer(x, context), layer.out((mixed @ values).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_class_attention_is_over_the_class_token_and_the_patches(masked: bool) -> None:
    layer = ClassAttentionGather(Block(Attention(2)), CTX, 2)
    randomize(layer.double())
    c, x = torch.randn(2, 1, 8, dtype=torch.float64), torch.randn(2, 6, 8, dtype=torch.float64)
    context = Context(MASK if masked else None)
    weights = layer.attention_weights(c, x, context)
    assert weights.shape == (2, 2, 1, 7)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 2, 1, dtype=torch.float64))
    assert bool(weights[1, :, :, 5:].any()) != masked
    values = layer.kv(layer.norm(torch.cat([c, x], dim=1)))[..., 8:].unflatten(-1, (2, 4)).transpose(1, 2)
    assert torch.allclose(layer(c, x, context), c + layer.out((weights @ values).transpose(1, 2).flatten(2)))


def test_rollout_to_the_class_token_adds_all_paths() -> None:
    """Two patches, one layer of self-attention, two of class attention: path by path, from the last to the first."""
    (layer,), classes = torch.rand(1, 1, 1, 2, 2).softmax(-1), torch.rand(2, 1, 1, 1, 3).softmax(-1)
    step = layer[0, 0] / 2 + torch.eye(2) / 2
    (first,), (second,) = classes[0, 0, 0] / 2, classes[1, 0, 0] / 2
    expected = [
        sum((second[1 + k] + (second[0] + 0.5) * first[1 + k]) * step[k, j] for k in range(2)) for j in range(2)
    ]
    assert torch.allclose(rollout([layer], list(classes)), torch.tensor([[expected]]))


@pytest.mark.usefixtures("undrawn")
def test_attention_of_cait(tmp_path: Path) -> None:
    result = analyze(load_target("cait_nano"), tmp_path)
    (section,) = (section for section in result.sections if section.name == "attention")
    assert {"attention.csv", "heads.png", "rollout.csv"} <= set(section.files)
    assert "; class attention: entropy " in section.text
    with open(tmp_path / "attention.csv", encoding="utf8") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows[::2]] == [
        *(f"blocks.{block}.token.mix" for block in range(6)),
        *(f"pool.gathers.{layer}" for layer in range(2)),
    ]
    assert {row["distance"] for row in rows if row["branch"] == "pool"} == {""}
    assert [float(row["largest_entropy"]) for row in rows[:: len(rows) - 1]] == pytest.approx(
        [math.log(64), math.log(65)], rel=1e-4
    )


@pytest.mark.usefixtures("without_figures")
def test_class_attention_after_blocks_without_attention(tmp_path: Path) -> None:
    spec = preset("resmlp_nano").spec.replace(pool=ClassAttention(2))
    result = analyze(AnalysisTarget("resmlp", spec.build().eval(), True), tmp_path)
    (section,) = (section for section in result.sections if section.name == "attention")
    assert section.text.startswith("class attention: entropy ") and "attention.png" not in section.files


@pytest.mark.usefixtures("without_figures")
def test_attention_without_weights_to_show_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in (TalkingHeadsLayer, ClassAttentionGather):
        monkeypatch.delattr(layer, "attention_weights")
    result = analyze(load_target("cait_nano"), tmp_path)
    (section,) = (section for section in result.sections if section.name == "attention")
    assert section.text == "not known for TalkingHeadsLayer, ClassAttentionGather, which has no attention_weights"
