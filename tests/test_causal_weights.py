"""Hugging Face's GPT-2 and Llama: equal outputs, and lossless conversion back to a folder for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import allmlp
from allmlp.data.preprocessing import TextPreprocessing, read_preprocessing
from allmlp.layers import LayerNorm, RotaryPositions, RotaryScaling
from allmlp.models.gmlp import gmlp_text
from allmlp.models.gpt2 import gpt2
from allmlp.models.llama import llama
from allmlp.weights.convert import convert

transformers = pytest.importorskip("transformers")

GPT2 = {"vocab_size": 40, "n_positions": 9, "n_embd": 12, "n_layer": 3, "n_head": 3}
LLAMA = {
    "vocab_size": 40,
    "max_position_embeddings": 9,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 30,
}


def publish(folder: Path, kind: str, **options: Any) -> Any:
    """A model saved by transformers, whose weights all affect the output."""
    config = (
        transformers.GPT2Config(**GPT2 | options) if "GPT2" in kind else transformers.LlamaConfig(**LLAMA | options)
    )
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GPT2LMHeadModel", {}),
        ("GPT2LMHeadModel", {"activation_function": "relu", "layer_norm_epsilon": 1e-2, "n_inner": 20}),
        ("GPT2LMHeadModel", {"tie_word_embeddings": False}),
        ("GPT2Model", {}),
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 6, "rms_norm_eps": 1e-2}),
        ("LlamaForCausalLM", {"rope_parameters": SCALED, "attention_bias": True, "num_key_value_heads": 1}),
        ("LlamaForCausalLM", {"mlp_bias": True, "hidden_act": "gelu"}),
        ("LlamaModel", {}),
    ],
    ids=str,
)
def test_there_and_back(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    peer, ids = publish(tmp_path / "theirs", kind, **options), torch.randint(40, (3, 7))
    ours = convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    back = convert(str(ours), str(tmp_path / "back"), to="hf")
    assert_same(load_file(back / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors"))
    again = getattr(transformers, kind).from_pretrained(back).eval()
    with torch.no_grad():
        expected = peer(ids)[0]
        torch.testing.assert_close(allmlp.load(ours)(ids), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again(ids)[0], expected, rtol=1e-6, atol=1e-6)
    if kind.endswith("Model") and "LMHead" not in kind:
        assert allmlp.load(ours).spec.head is None
    else:
        assert read_preprocessing(ours) == TextPreprocessing("text", 9)


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_a_missing_head_is_an_error(kind: str, tmp_path: Path) -> None:
    publish(tmp_path / "theirs", kind, tie_word_embeddings=True)
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(allmlp.UserError, match=f"it has no lm_head.weight, which {kind} has"):
        convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))


def test_settings_are_read(tmp_path: Path) -> None:
    publish(tmp_path / "llama", "LlamaForCausalLM", rope_parameters=SCALED)
    token = allmlp.load(convert(str(tmp_path / "llama"), str(tmp_path / "ours"))).spec.block.token
    assert (token.num_heads, token.num_kv_heads, token.linear_bias) == (6, 2, False)
    assert token.rotary == RotaryPositions(500.0, RotaryScaling(4.0, 1.0, 3.0, 30))


def test_names_of_settings_before_transformers_5(tmp_path: Path) -> None:
    publish(tmp_path / "theirs", "LlamaForCausalLM", rope_parameters=SCALED)
    expected = allmlp.load(convert(str(tmp_path / "theirs"), str(tmp_path / "expected"))).spec
    file = tmp_path / "theirs" / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    file.write_text(json.dumps(config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}))
    assert allmlp.load(convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))).spec == expected


def test_keys_of_the_first_published_files(tmp_path: Path) -> None:
    """No prefix, the masks of attention as buffers, and a copy of the tied embedding."""
    publish(tmp_path / "theirs", "GPT2LMHeadModel")
    file = tmp_path / "theirs" / "model.safetensors"
    expected = load_file(convert(str(tmp_path / "theirs"), str(tmp_path / "expected")) / "model.safetensors")
    state = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    masks = {f"h.{block}.attn.bias": torch.ones(1, 1, 9, 9).tril() for block in range(3)}
    masks |= {f"h.{block}.attn.masked_bias": torch.tensor(-1e4) for block in range(3)}
    save_file(state | masks | {"lm_head.weight": state["wte.weight"].clone()}, file)
    ours = convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert_same(load_file(ours / "model.safetensors"), expected)


def test_weights_in_several_files(tmp_path: Path) -> None:
    peer = publish(tmp_path / "whole", "LlamaForCausalLM")
    peer.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    whole, parts = (convert(str(tmp_path / name), str(tmp_path / f"{name}-ours")) for name in ("whole", "parts"))
    assert_same(load_file(parts / "model.safetensors"), load_file(whole / "model.safetensors"))

    index = tmp_path / "parts" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for files, message in (
        ({"lm_head.weight": "../whole/model.safetensors"}, "which is not a file of its folder"),
        ({"lm_head.weight": 3}, "names no files of weights"),
        (content["weight_map"] | {"other": content["weight_map"]["lm_head.weight"]}, "has no other"),
    ):
        index.write_text(json.dumps({"weight_map": files}))
        with pytest.raises(allmlp.UserError, match=message):
            convert(str(tmp_path / "parts"), str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("GPT2LMHeadModel", {"n_layer": 4}, "its configuration has n_layer 4, its weights have 3"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "only False is supported"),
        ("GPT2LMHeadModel", {"activation_function": "mish"}, "the hidden_act 'mish' is not supported"),
        ("LlamaForCausalLM", {"hidden_size": 25}, "its configuration has hidden_size 25, its weights have 24"),
        ("LlamaForCausalLM", {"head_dim": 8}, "its configuration has head_dim 8; only 24 / 6 is supported"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "of another shape"),
        ("LlamaForCausalLM", {"num_attention_heads": None}, "needs its config.json next to the weights"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "yarn"}}, "the rope_type 'yarn' is not supported"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "llama3"}}, "its rope_parameters lack factor"),
        ("LlamaForCausalLM", {"rope_parameters": [1]}, "which are no settings"),
    ],
)
def test_what_cannot_be_read(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    publish(tmp_path / "theirs", kind)
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(allmlp.UserError) as caught:
        convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (gpt2(1, 8, 2, 9, 9).replace(norm=None), "norm is None"),
        (gpt2(1, 8, 2, 9, 9).replace(norm=LayerNorm(1e-3)), "norm.eps is 0.001, but the format implies 1e-05"),
        (
            llama(1, 8, 12, 2, 1, 9, 9).replace(block=llama(1, 8, 12, 2, 1).block.replace(norm=LayerNorm())),
            "its blocks are not attention and a channel MLP with RMSNorm",
        ),
    ],
)
def test_what_has_no_place_there(spec: Any, message: str, tmp_path: Path) -> None:
    allmlp.save(spec.build(), tmp_path / "ours")
    with pytest.raises(allmlp.UserError) as caught:
        convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), to="hf")
    assert message in str(caught.value) and not (tmp_path / "theirs").exists()


def test_tokens_of_gpt2_have_other_names(tmp_path: Path) -> None:
    """Tokens that the vocabulary lacks were once added to it, with ids that the model does not have."""
    tokenizers, hf = pytest.importorskip("tokenizers"), pytest.importorskip("allmlp.hf")
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE())
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet, "show_progress": False}
    bytes_only.train_from_iterator(["the cat"], tokenizers.trainers.BpeTrainer(vocab_size=257, **options))
    spec = gmlp_text(1, 16, 32, seq_len=24, vocab_size=257, causal=True)
    allmlp.save(allmlp.create(spec, seed=0), tmp_path)
    bytes_only.save(str(tmp_path / "tokenizer.json"))
    model, tokenizer = hf.wrap(tmp_path), hf.processor(tmp_path)
    assert len(tokenizer) == 257 and tokenizer.pad_token_id == tokenizer.bos_token_id == model.config.pad_token_id == 0
    batch = tokenizer(["the cat", "a"], padding=True, return_tensors="pt")
    assert batch.attention_mask[1].tolist() == [0] * 6 + [1] * 3 and model(**batch).logits.shape == (2, 9, 257)
