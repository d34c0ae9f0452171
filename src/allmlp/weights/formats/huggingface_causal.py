"""Hugging Face's format of GPT-2 and Llama: the part of `huggingface` about causal language models.

transformers stores the matrices of GPT-2 transposed. For Llama it has three linear layers for queries, keys and values
and two for the gated MLP, where this library has one each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from allmlp.data.tokenizer import CLS_TOKEN, END_TOKENS, PAD_TOKEN, SEP_TOKEN, START_TOKENS, TURN_ENDS
from allmlp.errors import UserError
from allmlp.layers.act import Act
from allmlp.layers.block import Block
from allmlp.layers.channel import ChannelMlp
from allmlp.layers.head import LMHead
from allmlp.layers.init import Init
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.mixers.rotary import RotaryPositions, RotaryScaling
from allmlp.layers.norm import LayerNorm, RMSNorm
from allmlp.layers.stem import LearnedPositions, TokenEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.gpt2 import SPREAD
from allmlp.weights.formats.format import NativeName, Shapes, Signatures, check_sizes, check_supported, count_blocks

SIGNATURES: Signatures = {
    "GPT-2": {"wte.weight": 2, "wpe.weight": 2, "h.0.attn.c_attn.weight": 2, "h.0.mlp.c_fc.weight": 2},
    "Llama": {
        "embed_tokens.weight": 2,
        "layers.0.self_attn.q_proj.weight": 2,
        "layers.0.self_attn.k_proj.weight": 2,
        "layers.0.mlp.gate_proj.weight": 2,
    },
}
ARCHITECTURES = {"GPT-2": ("GPT2Model", "GPT2LMHeadModel"), "Llama": ("LlamaModel", "LlamaForCausalLM")}
"""Architectures without and with a head."""
PREFIXES = {"GPT2LMHeadModel": "transformer.", "LlamaForCausalLM": "model."}
"""Prefix of the body's keys in a model with a head."""
HEAD = "lm_head.weight"

OUTER: dict[str, dict[str, str]] = {
    "GPT-2": {"stem.embedding": "wte", "stem.positions": "wpe", "norm": "ln_f", "head.proj": "lm_head"},
    "Llama": {"stem.embedding": "embed_tokens", "norm": "norm", "head.proj": "lm_head"},
}
"""Native module -> its name in transformers."""
BLOCK: dict[str, dict[str, tuple[str, ...]]] = {
    "GPT-2": {
        "token.norm": ("ln_1",),
        "token.mix.qkv": ("attn.c_attn",),
        "token.mix.out": ("attn.c_proj",),
        "channel.norm": ("ln_2",),
        "channel.mix.up": ("mlp.c_fc",),
        "channel.mix.down": ("mlp.c_proj",),
    },
    "Llama": {
        "token.norm": ("input_layernorm",),
        "token.mix.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "token.mix.out": ("self_attn.o_proj",),
        "channel.norm": ("post_attention_layernorm",),
        "channel.mix.up": ("mlp.gate_proj", "mlp.up_proj"),
        "channel.mix.down": ("mlp.down_proj",),
    },
}
"""Native module, relative to its block -> the modules of transformers that are stacked in it."""
BUFFERS = re.compile(r"(h\.\d+\.attn\.(masked_)?bias|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq)")
"""Masks and frequencies that older versions stored."""
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The fields of `RotaryScaling` in transformers."""
REQUIRED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "partial_rotary_factor": 1.0,
}
"""Required values of settings, which are the defaults."""


def normalize_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the prefix of a model with a head, buffers, and the copy of a tied embedding."""
    renamed = {re.sub(r"^(transformer|model)\.", "", name): tensor for name, tensor in tensors.items()}
    embedding = renamed.get("wte.weight", renamed.get("embed_tokens.weight"))
    if embedding is None or len(renamed) < len(tensors):
        return dict(tensors)
    renamed = {name: tensor for name, tensor in renamed.items() if not BUFFERS.fullmatch(name)}
    head = renamed.get(HEAD)
    if head is not None and head.dtype == embedding.dtype and torch.equal(head, embedding):
        del renamed[HEAD]
    return renamed


def keys(family: str, name: str) -> tuple[str, ...]:
    block, module, parameter = NativeName.of(name)
    if not block:
        return (f"{OUTER[family][module]}.{parameter}",)
    stack = "h" if family == "GPT-2" else "layers"
    return tuple(f"{stack}.{block}.{part}.{parameter}" for part in BLOCK[family][module])


def is_transposed(family: str, name: str) -> bool:
    return family == "GPT-2" and ".mix." in name and name.endswith(".weight")


# --- the spec ----------------------------------------------------------------------------------------------


def infer_spec(family: str, shapes: Shapes, config: Mapping[str, Any], act: Act) -> Encoder:
    check_supported(config, REQUIRED)
    depth = count_blocks(shapes, r"(?:h|layers)\.(\d+)\.")
    check_sizes(config, {"n_layer" if family == "GPT-2" else "num_hidden_layers": depth})
    block, stem = (infer_gpt2 if family == "GPT-2" else infer_llama)(shapes, config, act)
    return Encoder(
        width=shapes["wte.weight" if family == "GPT-2" else "embed_tokens.weight"][1],
        depth=depth,
        stem=stem,
        block=block,
        norm=block.norm,
        head=infer_head(family, shapes, config),
        init=Init(SPREAD),
    )


def infer_gpt2(shapes: Shapes, config: Mapping[str, Any], act: Act) -> tuple[Block, TokenEmbed]:
    (vocab_size, width), (seq_len, _) = shapes["wte.weight"], shapes["wpe.weight"]
    attention = Attention(config.get("n_head") or config.get("num_attention_heads") or max(width // 64, 1), causal=True)
    hidden = shapes["h.0.mlp.c_fc.weight"][1]
    check_sizes(config, {"n_embd": width, "n_positions": seq_len, "vocab_size": vocab_size})
    block = Block(attention, channel=ChannelMlp(hidden, act), norm=LayerNorm(config.get("layer_norm_epsilon", 1e-5)))
    return block, TokenEmbed(vocab_size, seq_len, LearnedPositions(SPREAD), init=SPREAD)


def infer_llama(shapes: Shapes, config: Mapping[str, Any], act: Act) -> tuple[Block, TokenEmbed]:
    vocab_size, width = shapes["embed_tokens.weight"]
    check_sizes(config, {"hidden_size": width, "vocab_size": vocab_size})
    num_heads = config.get("num_attention_heads")
    if not isinstance(num_heads, int) or num_heads < 1 or "max_position_embeddings" not in config:
        raise UserError("a Llama needs its config.json next to the weights, which do not show heads and length")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if config.get("head_dim") not in (None, width / num_heads):
        size = f"{width} / {num_heads}"
        raise UserError(f"its configuration has head_dim {config['head_dim']!r}; only {size} is supported")
    attention = Attention(
        num_heads,
        causal=True,
        num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
        rotary=infer_rotary(config),
        linear_bias="layers.0.self_attn.q_proj.bias" in shapes,
    )
    hidden, linear_bias = shapes["layers.0.mlp.gate_proj.weight"][0], "layers.0.mlp.gate_proj.bias" in shapes
    channel = ChannelMlp(hidden, act, glu=True, linear_bias=linear_bias)
    block = Block(attention, channel=channel, norm=RMSNorm(config.get("rms_norm_eps", 1e-6)))
    return block, TokenEmbed(vocab_size, config["max_position_embeddings"], init=SPREAD)


def infer_rotary(config: Mapping[str, Any]) -> RotaryPositions:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` of transformers before version 5."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"its configuration has rope_parameters {rope!r}, which are no settings")
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RotaryPositions(theta)
    if kind != "llama3":
        raise UserError(f"the rope_type {kind!r} is not supported; use 'default' or 'llama3'")
    try:
        return RotaryPositions(theta, RotaryScaling(*(rope[name] for name in SCALING)))
    except KeyError as missing:
        raise UserError(f"its rope_parameters lack {missing.args[0]}") from None


def infer_head(family: str, shapes: Shapes, config: Mapping[str, Any]) -> LMHead | None:
    if HEAD in shapes:
        return LMHead(tied=False)
    is_tied, (body, whole) = config.get("tie_word_embeddings", family == "GPT-2"), ARCHITECTURES[family]
    if not is_tied and config.get("architectures") == [whole]:
        raise UserError(f"it has no {HEAD}, which {whole} has unless its configuration has tie_word_embeddings true")
    return LMHead() if is_tied and config.get("architectures") != [body] else None


# --- the configuration -------------------------------------------------------------------------------------


def configuration(family: str, spec: Encoder, act: str) -> dict[str, Any]:
    """The config.json of a causal Transformer."""
    attention, channel, norm, stem = spec.block.token, spec.block.channel, spec.block.norm, spec.stem
    if not (
        isinstance(attention, Attention)
        and isinstance(channel, ChannelMlp)
        and isinstance(norm, LayerNorm if family == "GPT-2" else RMSNorm)
        and isinstance(stem, TokenEmbed)
    ):
        kind = "LayerNorm" if family == "GPT-2" else "RMSNorm"
        raise UserError(f"its blocks are not attention and a channel MLP with {kind}")
    common = {
        "architectures": [ARCHITECTURES[family][spec.head is not None]],
        "vocab_size": stem.vocab_size,
        "tie_word_embeddings": isinstance(spec.head, LMHead) and spec.head.tied,
    }
    if family == "GPT-2":
        return common | {
            "model_type": "gpt2",
            "n_embd": spec.width,
            "n_layer": spec.depth,
            "n_head": attention.num_heads,
            "n_inner": channel.hidden,
            "n_positions": stem.seq_len,
            "activation_function": act,
            "layer_norm_epsilon": norm.eps,
            "resid_pdrop": spec.block.dropout,
            "attn_pdrop": attention.dropout,
            "embd_pdrop": stem.dropout,
        }
    rotary = attention.rotary or RotaryPositions()
    return common | {
        "model_type": "llama",
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "intermediate_size": channel.hidden,
        "max_position_embeddings": stem.seq_len,
        "hidden_act": act,
        "rms_norm_eps": norm.eps,
        "rope_theta": rotary.theta,
        "rope_scaling": rotary.scaling and {"rope_type": "llama3", **dict(zip(SCALING, astuple(rotary.scaling)))},
        "attention_bias": attention.linear_bias,
        "mlp_bias": channel.linear_bias,
        "attention_dropout": attention.dropout,
    }


def token_ids(tokenizer: str) -> dict[str, Any]:
    """The fields of config.json with the ids of a tokenizer.json that start, end and pad a text. Those that are not
    known are null: transformers would use the ids of the published models, which are other tokens here.
    """
    try:
        ids = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    except (ValueError, TypeError, KeyError):  # `write` copies the file as it is
        ids = {}
    start = next((ids[token] for token in (CLS_TOKEN, *START_TOKENS) if token in ids), None)
    ends = [ids[token] for token in (SEP_TOKEN, *END_TOKENS) if token in ids][:1]
    ends += [ids[token] for token in TURN_ENDS if token in ids]
    end = ends if len(ends) > 1 else next(iter(ends), None)
    return {"bos_token_id": start, "eos_token_id": end, "pad_token_id": ids.get(PAD_TOKEN)}
