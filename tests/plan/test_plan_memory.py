"""What the plan says of memory, against bytes that torch keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from allmlp import UserError
from allmlp.layers import ChannelMlp, Classes, LayerNorm, Mean, Patches, TokenMlp
from allmlp.layers.block import Block
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.zoo import configure, preset
from allmlp.optim import Adagrad, AdamW, Lamb, Muon, Optim, Sgd
from allmlp.plan.activations import activations, asked
from allmlp.plan.check import Bench, check, moments_of
from allmlp.plan.memory import Weight, memory, weights
from allmlp.plan.tape import CPU_BFLOAT16, CPU_FLOAT32, CUDA_BFLOAT16, Arithmetic
from allmlp.recipes import runs
from allmlp.spec import override
from tiny import SENTENCES, tiny

BATCH = 3
FAMILIES = ["mixer_nano", "resmlp_nano", "gmlp_nano", "amlp_nano", "vit_nano", "bert_tiny", "resmlp_seq2seq_tiny"]
CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs"


def really_kept(name: str, bfloat16: bool) -> int:
    """Bytes of everything autograd keeps from the input to the loss, beside the parameters."""
    model = SENTENCES[name].build().train()
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    inputs = model.example(BATCH)
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        if isinstance(model, EncoderModel) and model.pool is None and asked(model.spec) < model.spec.stem.tokens:
            features = model.forward_features(*inputs)
            places = torch.arange(asked(model.spec)).view(1, -1, 1).expand(BATCH, -1, features.shape[2])
            scores = model.forward_head(features.gather(1, places.contiguous()))
        else:
            scores = model(*inputs)
        scores = scores.float().flatten(0, -2)
        F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("name", SENTENCES)
@pytest.mark.parametrize("arithmetic", [CPU_FLOAT32, CPU_BFLOAT16], ids=["float32", "bfloat16"])
def test_every_sentence_keeps_what_is_counted(name: str, arithmetic: Arithmetic) -> None:
    found = activations(SENTENCES[name], BATCH, arithmetic)
    measured = really_kept(name, bfloat16=arithmetic is CPU_BFLOAT16)
    assert found.kept() + found.copies == pytest.approx(measured, rel=0.03)


def test_a_mixer_by_hand() -> None:
    """One block of width 8 over 4 tokens of 12 pixels, hidden 6 and 16, two examples, on a GPU in bfloat16."""
    spec = Encoder(
        width=8,
        depth=1,
        block=Block(token=TokenMlp(6), channel=ChannelMlp(16), norm=LayerNorm()),
        stem=Patches((4, 4), (2, 2)),
        pool=Mean(),
        head=Classes(5),
    )
    (stack,) = activations(spec, 2, CUDA_BFLOAT16).stacks
    rows = 2 * 4
    assert stack.stem == 2 * rows * 12
    token = 4 * rows * 8 + 8 * rows + 2 * rows * 8 + 2 * 2 * 6 * 8
    channel = 4 * rows * 8 + 8 * rows + 2 * rows * 8 + 2 * rows * 16
    assert stack.blocks == stack.largest == token + channel
    assert stack.inputs == 2 * rows * 8, "the stem answers in bfloat16"
    assert stack.head == 4 * rows * 8 + 8 * rows + 2 * 2 * 8 + 4 * 2 * 5 + 8 * 2
    assert stack.copies == 2 * (12 * 8 + 2 * 4 * 6 + 2 * 8 * 16 + 8 * 5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("optim", [AdamW(), Sgd(), Sgd(momentum=0.0), Adagrad(), Lamb(), Muon()], ids=repr)
def test_weights_gradients_and_moments_are_exact(name: str, optim: Optim) -> None:
    spec = tiny(preset(name).spec)
    bench, found = Bench(spec, BATCH, optim, CPU, checkpointing=False), memory(spec, BATCH, optim)
    bench.step()
    bench.loss().backward()
    parameters = list(bench.model.parameters())
    assert found.weights == sum(4 * weight.numel() for weight in parameters)
    assert found.gradients == sum(4 * weight.grad.numel() for weight in parameters if weight.grad is not None)
    assert found.optimiser == sum(4 * moment.numel() for moment in moments_of(bench.optimizer))


@pytest.mark.parametrize(
    ("name", "checkpointing"), [*((name, False) for name in FAMILIES), ("gmlp_nano", True), ("bert_tiny", True)]
)
def test_the_worst_moment_of_a_step(name: str, checkpointing: bool) -> None:
    """All tensors of a real step on a CPU, counted as they come and go: within ten per cent."""
    rows = {row.what: row for row in check(preset(name).spec, 2, AdamW(), CPU, 1, checkpointing, flops=1e9)}
    assert rows["at most"].error == pytest.approx(0, abs=0.10)
    assert rows["weights"].error == rows["gradients"].error == rows["optimiser"].error == 0
    if not checkpointing:
        assert rows["activations"].error == pytest.approx(0, abs=0.001)
    assert rows["step"].measured > 0 and rows["rate"].measured > 0


def test_weights_are_counted_without_allocating_them() -> None:
    assert sum(weight.elements for weight in weights(preset("gmlp_xlarge").spec)) == 940_582_768
    spec = preset("resmlp_seq2seq_tiny").spec
    assert sum(weight.elements for weight in weights(spec)) == sum(w.numel() for w in spec.build().parameters())


def test_fsdp_shares_rows() -> None:
    """Ten rows over four GPUs are three for the first; what has fewer rows than GPUs is one row for the first."""
    weight = Weight((10, 7), times=2, block=True, hidden=True)
    assert weight.elements == 140 and weight.piece(1) == 140 and weight.piece(4) == 2 * 3 * 7
    assert Weight((3,), 1, False, False).piece(8) == 1


def test_ddp_holds_all_and_fsdp_a_part() -> None:
    spec = preset("mixer_h14").spec
    alone, ddp, fsdp = (memory(spec, 4, AdamW(), n, way) for n, way in ((1, "ddp"), (8, "ddp"), (8, "fsdp")))
    assert alone.weights == 4 * 432_350_952 and alone.optimiser == 2 * alone.weights and alone.exchange == 0
    assert ddp.weights == alone.weights and ddp.exchange == alone.weights
    assert fsdp.weights == pytest.approx(alone.weights / 8, rel=0.001)
    assert fsdp.optimiser == pytest.approx(alone.optimiser / 8, rel=0.001)
    assert fsdp.copies == ddp.copies, "autocast's copies are whole in both"
    assert fsdp.activations == ddp.activations
    assert memory(spec, 4, AdamW(), 8, "ddp", ema=True).average == alone.weights


def test_copies_of_weights_are_whole_under_fsdp() -> None:
    """One process that shards its blocks: autograd keeps a bfloat16 copy of every matrix that a product used."""
    spec = tiny(preset("resmlp_nano").spec)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = spec.build().train()
        inputs = model.example(BATCH)
        for block in model.blocks:
            fully_shard(block)
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
            model(*inputs)
        shapes = [tuple(tensor.shape) for tensor in kept.values() if tensor.dtype == torch.bfloat16]
        assert shapes.count((spec.width, 24)) == shapes.count((24, spec.width)) == spec.depth  # up and down, as used
    finally:
        dist.destroy_process_group()


def test_checkpointing_keeps_the_inputs_of_blocks() -> None:
    spec = preset("gmlp_b16").spec
    whole, again = memory(spec, 64, AdamW()), memory(spec, 64, AdamW(), checkpointing=True)
    assert again.activations < whole.activations / 10 and again.most < whole.most / 3


@pytest.mark.parametrize(("recipe", "name"), [("wiki_gmlp", "gMLP"), ("wiki_amlp", "aMLP"), ("wiki_bert", "BERT")])
def test_compiled_steps_on_a_gpu(recipe: str, name: str) -> None:
    """What three models took on a H200, compiled and before there were operators for it, in the log of
    benchmarks/pretraining.py: within 15 %.
    """
    rows = json.loads((DOCS / "logs" / "pretraining_speed.json").read_text())
    measured = next(row for row in rows["rows"] if row["model"] == name)
    model = runs(recipe)[recipe].model
    assert model is not None
    spec = model.configure(vocabulary=30_522, length=rows["options"]["length"])
    plain = replace(CUDA_BFLOAT16, fused=False)
    found = memory(spec, rows["options"]["batch"], Muon(), arithmetic=replace(plain, compiled=True))
    assert found.weights == pytest.approx(4 * measured["parameters"], rel=1e-4)
    assert found.most == pytest.approx(measured["GiB"] * 2**30, rel=0.15)
    eager = memory(spec, rows["options"]["batch"], Muon(), arithmetic=plain)
    assert eager.activations > found.activations, "eager keeps more"


@pytest.mark.parametrize(
    ("log", "name"),
    [
        ("bench_training", "resmlp_s24"),
        ("bench_training", "gmlp_s16"),
        ("bench_training", "mixer_b16"),
        ("bench_pretraining", "gmlp_l36"),
        ("bench_pretraining_512", "gmlp_base"),
    ],
)
def test_steps_by_operators_on_a_gpu(log: str, name: str) -> None:
    """What `allmlp bench --train` has measured on a H200, all of it compiled: within 10 %."""
    measured = json.loads((DOCS / "logs" / f"{log}.json").read_text())
    row = next(row for row in measured["rows"] if row["model"] == name and row["side"] == "ours graphs")
    spec = configure(preset(name).spec, length=measured["options"]["length"])
    found = memory(spec, row["batch"], AdamW(), arithmetic=replace(CUDA_BFLOAT16, compiled=True))
    assert found.most == pytest.approx(row["memory_bytes"], rel=0.10)


def test_more_passes_take_less_memory_and_hold_gradients_longer() -> None:
    spec = preset("vit_b16").spec
    once, twice = memory(spec, 64, AdamW()), memory(spec, 64, AdamW(), passes=2)
    assert twice.activations == pytest.approx(once.activations / 2, rel=0.01) and twice.several
    assert twice.most > memory(spec, 32, AdamW()).most


def test_what_the_grammar_does_not_build_is_refused() -> None:
    with pytest.raises(UserError, match="models of the grammar"):
        memory(preset("hf:resnet50").spec, 4, AdamW())


def test_what_is_not_written_down_is_refused() -> None:
    """A new mixer is no silent zero."""

    class Unheard(TokenMixer, abstract=True):
        pass

    with pytest.raises(UserError, match="what a Unheard keeps"):
        activations(override(preset("mixer_nano").spec, "block.token", Unheard()), 1, CUDA_BFLOAT16)
