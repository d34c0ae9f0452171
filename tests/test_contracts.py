"""Contracts of every model of the zoo, parametrized over all distinct configurations, made tiny."""

from __future__ import annotations

import copy
import shutil

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import allmlp
from allmlp.errors import UserError
from allmlp.layers import (
    Cache,
    ClassifierHead,
    FirstTokenPool,
    MeanPool,
    PatchEmbed,
    PooledHead,
    QAHead,
    RelativePositionBias,
    TokenLstm,
    channel,
)
from allmlp.layers.linear import Linear
from allmlp.layers.mixers import mlp, projection
from allmlp.models.encoder_decoder import EncoderDecoderModel
from allmlp.models.zoo import presets
from allmlp.spec import from_json, to_json
from export.folders import REPRESENTATIVES, kind
from tiny import CAUSAL, IMAGES, TEXTS, TINY_SERIES, TINY_SPECS, TRANSLATORS, randomize, text_model, tiny_model

SPECS = TINY_SPECS | TINY_SERIES
EVERY = list(SPECS)
EXPORTED = [name for name in REPRESENTATIVES if kind(name) == "images"]
"""Models that tests/export/test_programs.py exports, of the same size, for any batch."""


def inputs(model: allmlp.Model, batch: int = 3) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return model.dummy_inputs(batch)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# --- all models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_output_is_finite_and_every_parameter_learns(name: str) -> None:
    model = tiny_model(name).train()
    output = model(*inputs(model))
    assert output.shape[0] == 3 and output.isfinite().all()
    output.square().mean().backward()
    idle = [key for key, weight in model.named_parameters() if weight.grad is None or not weight.grad.abs().sum() > 0]
    assert not idle


@pytest.mark.parametrize("name", EVERY)
def test_gradient_is_the_derivative(name: str) -> None:
    """Finite differences along a random direction through all parameters, in float64."""
    model = tiny_model(name)
    x = inputs(model, 1)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    direction = [torch.randn_like(weight) for weight in weights]
    probe = torch.randn_like(model(*x))
    slopes = torch.autograd.grad((model(*x) * probe).sum(), weights)
    expected = sum((slope * step).sum() for slope, step in zip(slopes, direction))

    def shifted(amount: float) -> Tensor:
        moved = {key: weight + amount * step for (key, weight), step in zip(model.named_parameters(), direction)}
        return (torch.func.functional_call(model, moved, x) * probe).sum()

    step = 1e-7  # small enough not to cross the corners of ReLU
    with torch.no_grad():
        measured = (shifted(step) - shifted(-step)) / (2 * step)
    assert measured.item() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_examples_do_not_see_each_other(name: str) -> None:
    model = tiny_model(name)
    x = inputs(model)
    together = model(*x)
    for row in range(3):
        assert close(together[row : row + 1], model(*(part[row : row + 1] for part in x)))


@pytest.mark.parametrize("name", EVERY)
def test_seed_decides_the_weights(name: str) -> None:
    first, again, other = (allmlp.create(SPECS[name], seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_seed_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    allmlp.create("mixer_nano", seed=5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_is_initialized(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter is left uninitialized."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: empty(*size, **kwargs).fill_(float("nan")))
    uninitialized = [key for key, tensor in SPECS[name].build().state_dict().items() if not tensor.isfinite().all()]
    assert not uninitialized


class Adapted(nn.Module):
    """What PEFT puts in place of a linear layer: `weight` is that of the layer without the adapter."""

    def __init__(self, base_layer: nn.Linear, change: Tensor) -> None:
        super().__init__()
        self.base_layer, self.change = base_layer, change
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.change.T


def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with the fused operators, as on a GPU."""
    for module in (channel, mlp, projection):
        monkeypatch.setattr(module, "training_dtype", lambda x, act="none": x.dtype)


@pytest.mark.parametrize("name", EVERY)
def test_replaced_linear_layers_are_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of PEFT take part wherever a model could compute with the weights alone."""
    fuse(monkeypatch)
    changed = copy.deepcopy(model := tiny_model(name))
    for path, layer in [pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear)]:
        change = torch.randn_like(layer.weight) / layer.in_features**0.5
        changed.get_submodule(path).weight.data += change
        model.set_submodule(path, Adapted(layer, change))
    x = inputs(model)
    shorter = [(x[0][:, :-2], *x[1:])] if name in TEXTS else []
    for batch in (x, *shorter):
        assert close(model(*batch), changed(*batch), 1e-4)  # norms of the fused operators are in float32
    if any(isinstance(layer, Adapted) for layer in model.modules()):
        with pytest.raises(UserError, match="merge_and_unload"):
            allmlp.save(model, "unused")


@pytest.mark.parametrize("name", EVERY)
def test_hooks_are_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of every kind of layer, with and without fused operators."""
    model = tiny_model(name).train()
    x = inputs(model)

    def called(layers: type[nn.Module]) -> set[str]:
        found = set[str]()
        for path, layer in model.named_modules():
            if type(layer) is layers:
                layer.register_forward_hook(lambda *_, path=path: found.add(path))
        model(*x)
        for layer in model.modules():
            layer._forward_hooks.clear()
        return found

    classes = {type(layer) for layer in model.modules()}
    expected = {cls: called(cls) for cls in classes}
    assert expected.get(Linear, set()) == {path for path, layer in model.named_modules() if type(layer) is Linear}
    fuse(monkeypatch)
    for cls in classes:
        assert called(cls) == expected[cls], cls


@pytest.mark.parametrize("name", presets())
def test_configuration_survives_json(name: str) -> None:
    spec = presets()[name].spec
    assert from_json(to_json(spec)) == spec


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    exact = tiny_model(name)
    model = copy.deepcopy(exact).to(dtype)
    x = inputs(exact)
    expected = exact(*x)
    output = model(*(part.to(dtype) if part.is_floating_point() else part for part in x))
    assert output.dtype == dtype
    error = (output.double() - expected).norm() / expected.norm()
    assert error < (0.1 if dtype == torch.bfloat16 else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_compiles_as_one_graph(name: str) -> None:
    torch.compiler.reset()
    model = tiny_model(name, torch.float32, shallow=True)
    x = inputs(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert close(compiled(*x), model(*x), 1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["mixer_nano", "gmlp_mlm_tiny"])
def test_inductor_agrees(name: str) -> None:
    torch.compiler.reset()
    model = allmlp.create(name, seed=0, overrides={"depth": 2}).eval()
    randomize(model, spread=0.05)
    x = model.dummy_inputs(2)
    assert close(torch.compile(model, fullgraph=True)(*x), model(*x), 1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("uncached_operators")
@pytest.mark.parametrize("name", [name for name in EVERY if name not in EXPORTED])
def test_exports_with_any_batch(name: str) -> None:
    model = tiny_model(name, torch.float32, shallow=True)
    batch = torch.export.Dim("batch", min=1, max=64)
    x = inputs(model, 2)
    program = torch.export.export(model, x, dynamic_shapes=tuple({0: batch} for _ in x))
    larger = inputs(model, 5)
    assert close(program.module()(*larger), model(*larger), 1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_checkpointing_changes_memory_not_gradients(name: str) -> None:
    model = tiny_model(name).train()
    x = inputs(model)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable).zero_grad()
        torch.manual_seed(2)  # of the dropout
        model(*x).square().mean().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    assert all(close(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize("name", [*IMAGES, *TEXTS])
def test_intermediates_are_those_of_the_forward_pass(name: str) -> None:
    model = text_model(name)
    (x,) = inputs(model)
    kept = model.forward_activations(x)
    assert close(kept["head"], model(x)) and close(kept["norm"], model.forward_features(x))
    assert next(iter(kept)) == "stem" and torch.equal(kept["blocks.1"], kept[f"blocks.1.{model.blocks[1].slots[-1]}"])
    assert list(model.forward_activations(x, ["blocks.0", "stem"])) == ["blocks.0", "stem"]
    with pytest.raises(allmlp.UserError, match=r"did you mean .blocks\.0"):
        model.forward_activations(x, ["block.0"])


# --- images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize(("image", "patch"), [((4, 4), (2, 2)), ((6, 15), (3, 5)), ((8, 4), (8, 4))])
def test_any_image_size_and_patch(name: str, image: tuple[int, int], patch: tuple[int, int]) -> None:
    model = allmlp.create(TINY_SPECS[name], img_size=image, patch_size=patch, num_classes=7, in_chans=1)
    assert model(torch.rand(2, 1, *image)).shape == (2, 7)


def test_the_image_size_in_the_readme() -> None:
    model = allmlp.create("resmlp_s24", num_classes=10, img_size=(160, 256), overrides={"depth": 2})
    assert model(torch.rand(1, 3, 160, 256)).shape == (1, 10)


@pytest.mark.parametrize("training", [True, False])
def test_a_new_classifier_is_in_the_mode_of_the_model(training: bool) -> None:
    """Otherwise its dropout would be active in evaluation mode."""
    model = allmlp.create("vit_nano", overrides={"depth": 1, "head.dropout": 0.5}).train(training)
    assert model.reset_classifier(4).head.training is training  # type: ignore[union-attr]
    torch.nn.init.normal_(model.head.proj.weight)  # type: ignore[union-attr]
    (images,) = model.dummy_inputs(2)
    assert torch.equal(model(images), model(images)) is not training


@pytest.mark.parametrize("name", IMAGES)
def test_reset_classifier(name: str) -> None:
    model = text_model(name)
    assert model.reset_classifier(np.int64(4)) is model  # type: ignore[arg-type]
    (x,) = inputs(model)
    assert model(x).shape == (3, 4) and model.spec.head.num_classes == 4 and model.dtype == torch.float64
    assert from_json(to_json(model.spec)).build()(x.float()).shape == (3, 4)


def test_patches_run_row_by_row() -> None:
    """Token i is the linear map of patch i, so a change in one patch moves one token."""
    model = text_model("mixer_s32")
    assert isinstance(model.spec.stem, PatchEmbed)
    (x,) = inputs(model, 1)
    changed = x.clone()
    changed[:, :, 2:4, 6:8] += 1
    moved = (model.stem(changed) - model.stem(x)).abs().sum(dim=-1)[0]
    assert moved.nonzero().flatten().tolist() == [1 * 4 + 3]


# --- text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_padding_does_not_leak(name: str) -> None:
    """The output of real tokens does not depend on the length and content of the padding."""
    model = text_model(name)
    (ids,) = inputs(model, 2)
    alone = model(ids[:, :5])
    for length in (6, 9, 12):
        mask = torch.arange(length).expand(2, -1) < 5
        assert close(model(ids[:, :length], mask)[:, :5], alone, 1e-9)
    ragged = torch.tensor([[True] * 5 + [False] * 4, [True] * 9])
    assert close(model(ids[:, :9], ragged)[0, :5], alone[0])


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("pool", [MeanPool(), FirstTokenPool()])
def test_padding_does_not_leak_into_the_pool(name: str, pool: object) -> None:
    model = TINY_SPECS[name].replace(pool=pool, head=PooledHead(3)).build().double().eval()
    randomize(model)
    (ids,) = inputs(model, 2)
    mask = torch.arange(12).expand(2, -1) < 5
    assert close(model(ids, mask), model(ids[:, :5]))


def test_padding_does_not_leak_into_class_mlp() -> None:
    spec = TINY_SPECS["gmlp_l18"].replace(pool=allmlp.layers.ClassMlp(), head=ClassifierHead(3))
    model = spec.build().double().eval()
    randomize(model)
    (ids,) = inputs(model, 2)
    mask = torch.arange(12).expand(2, -1) < 5
    assert close(model(ids, mask), model(ids[:, :5]))


@pytest.mark.parametrize("name", TEXTS)
def test_shorter_sequences(name: str) -> None:
    model = text_model(name)
    (ids,) = inputs(model)
    for length in (1, 7, 12):
        assert model(ids[:, :length]).shape == (3, length, 31)


@pytest.mark.parametrize("name", TEXTS)
def test_qa_and_pooled_heads(name: str) -> None:
    model = text_model(name).reset_classifier(QAHead())
    (ids,) = inputs(model)
    assert model(ids).shape == (3, 12, 2)
    classifier = TINY_SPECS[name].replace(pool=FirstTokenPool(), head=PooledHead(3)).build()
    assert classifier(ids).shape == (3, 3)


def future_changes_nothing(model: allmlp.Model, run: object) -> None:
    torch.manual_seed(2)
    for t in range(12):
        ids = torch.randint(31, (1, 12))
        other = ids.clone()
        other[:, t:] = (ids[:, t:] + torch.randint(1, 31, (1, 12 - t))) % 31
        before, after = run(ids), run(other)  # type: ignore[operator]
        assert torch.equal(before[:, :t], after[:, :t]) or close(before[:, :t], after[:, :t], 1e-12)
        assert not close(before[:, t:], after[:, t:], 1e-6)


def train_with_decay(model: allmlp.Model, *x: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    for _ in range(3):
        model(*x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", CAUSAL)
def test_no_token_sees_the_future(name: str) -> None:
    model = text_model(name)
    future_changes_nothing(model, model)
    train_with_decay(model, *inputs(model))
    future_changes_nothing(model, model)


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in CAUSAL])
def test_bidirectional_models_see_the_future(name: str) -> None:
    model = text_model(name)
    (ids,) = inputs(model, 1)
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 31
    assert not close(model(ids)[:, 0], model(other)[:, 0], 1e-6)
    with pytest.raises(allmlp.UserError, match="causal"):
        model(ids, cache=Cache())


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 1, 5], [12]])
def test_step_by_step_is_the_parallel_pass(name: str, chunks: list[int]) -> None:
    model = text_model(name)
    (ids,) = inputs(model)
    cache = Cache()
    steps = [model(part, cache=cache) for part in ids.split(chunks, dim=1)]
    assert close(torch.cat(steps, dim=1), model(ids))
    with pytest.raises(allmlp.UserError, match="13 tokens are longer than the 12"):
        model(ids[:, :1], cache=cache)


@pytest.mark.parametrize("name", CAUSAL)
def test_step_by_step_with_padding(name: str) -> None:
    model = text_model(name)
    (ids,) = inputs(model)
    mask = torch.rand(3, 12) > 0.3
    mask[:, 0] = mask[:, 9:] = True  # tokens without a mask are real
    masks = [mask[:, t : t + 1] if 0 < t < 9 else None for t in range(12)]
    cache = Cache()
    steps = [model(ids[:, t : t + 1], masks[t], cache=cache) for t in range(12)]
    assert close(torch.cat(steps, dim=1), model(ids, mask))


def causal_attention() -> allmlp.Model:
    """No preset decodes with relative positions, but the grammar can express it."""
    spec = TINY_SPECS["bert_base_rel"]
    return spec.replace(block=spec.block.replace(token=spec.block.token.replace(causal=True))).build().double().eval()


def test_causal_attention_with_relative_positions() -> None:
    model = causal_attention()
    randomize(model)
    (ids,) = inputs(model)
    future_changes_nothing(model, model)
    cache = Cache()
    steps = [model(ids[:, t : t + 1], cache=cache) for t in range(12)]
    assert close(torch.cat(steps, dim=1), model(ids))


@pytest.mark.parametrize("in_chans", [1, 3])
def test_relative_positions_are_those_of_the_patches(in_chans: int) -> None:
    """An image has its channels where a text has its tokens."""
    spec = TINY_SPECS["vit_ti16"].configure(in_chans=in_chans)
    token = spec.block.token.replace(bias=RelativePositionBias(8, 8))
    model = spec.replace(block=spec.block.replace(token=token)).build()
    randomize(model)
    model(*model.dummy_inputs()).sum().backward()
    assert (model.relative.weight.grad != 0).sum() > 8  # with distance 0 alone, one row of the table


def test_recurrence_decodes_step_by_step_and_does_not_see_what_follows() -> None:
    spec = TINY_SPECS["gmlp_causal_tiny"]
    model = spec.replace(block=spec.block.replace(token=TokenLstm(), channel=None)).build().double().eval()
    randomize(model)
    (ids,) = inputs(model)
    future_changes_nothing(model, model)
    cache, rows = Cache(), torch.tensor([2, 0, 0])
    steps = [model(part, cache=cache) for part in ids[:, :9].split([1, 5, 3], dim=1)]
    assert close(torch.cat(steps, dim=1), model(ids[:, :9]))
    cache.reorder(rows)
    assert close(model(ids[rows, 9:], cache=cache), model(ids[rows])[:, 9:])


# --- translation ------------------------------------------------------------------------------------


def translator(name: str) -> EncoderDecoderModel:
    model = tiny_model(name)
    assert isinstance(model, EncoderDecoderModel)
    return model


@pytest.mark.parametrize("name", TRANSLATORS)
def test_decoder_is_causal(name: str) -> None:
    model = translator(name)
    source, target = inputs(model, 1)
    future_changes_nothing(model, lambda ids: model(source, ids))
    train_with_decay(model, source, target)
    future_changes_nothing(model, lambda ids: model(source, ids))


@pytest.mark.parametrize("name", TRANSLATORS)
def test_incremental_decoding(name: str) -> None:
    model = translator(name)
    source, target = inputs(model)
    mask = torch.arange(12).expand(3, -1) < torch.tensor([[12], [7], [3]])
    memory = model.encode(source, mask)
    cache = Cache()
    steps = [model.decode(target[:, t : t + 1], memory, mask, cache=cache) for t in range(12)]
    assert close(torch.cat(steps, dim=1), model(source, target, mask))


@pytest.mark.parametrize("name", TRANSLATORS)
def test_reordered_cache_continues_other_rows(name: str) -> None:
    """As in beam search: row 0 continues twice, row 1 is dropped."""
    model = translator(name)
    source, target = inputs(model, 2)
    rows = torch.tensor([0, 0])
    cache = Cache()
    memory = model.encode(source)
    model.decode(target[:, :4], memory, cache=cache)
    cache.reorder(rows)
    continued = model.decode(target[rows, 4:5], memory[rows], cache=cache)
    assert close(continued, model(source[rows], target[rows, :5])[:, 4:])


@pytest.mark.parametrize("name", TRANSLATORS)
def test_translation_padding_does_not_leak(name: str) -> None:
    model = translator(name)
    source, target = inputs(model, 2)
    alone = model(source[:, :5], target[:, :4])
    source_mask = torch.arange(12).expand(2, -1) < 5
    target_mask = torch.arange(9).expand(2, -1) < 4
    assert close(model(source, target[:, :9], source_mask, target_mask)[:, :4], alone)
    assert close(model(source, target[:, :9], source_mask)[:, :4], alone)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_one_table_serves_source_target_and_output(name: str) -> None:
    model = translator(name)
    tables = [key for key, weight in model.state_dict().items() if weight.shape == (31, 16)]
    assert tables == ["encoder.stem.embedding.weight"]
    separate = model.spec.replace(tie_embeddings=False).build()
    assert sum(weight.shape == (31, 16) for weight in separate.state_dict().values()) == 2
