"""GPT-2 and Llama against transformers: outputs, gradients, and decoding token by token."""

from __future__ import annotations

import pytest
import torch
from agree import Weights, assert_parity, assert_same, relabel
from torch import nn

import allmlp
from allmlp.layers import Cache, LMHead, RotaryScaling
from allmlp.models.encoder import Encoder
from allmlp.models.gpt2 import gpt2
from allmlp.models.llama import llama

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, WIDTH = 13, 9, 24
GPT2 = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 3, "n_head": 3}
LLAMA = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rename_gpt2(tensors: Weights) -> Weights:
    """transformers stores the matrices of GPT-2 transposed."""
    turned = {name: t.T if name.split(".")[-2].startswith("c_") and t.dim() == 2 else t for name, t in tensors.items()}
    return relabel(
        turned,
        {
            r"^transformer\.": "",
            r"^wte\.": "stem.embedding.",
            r"^wpe\.": "stem.positions.",
            r"^h\.": "blocks.",
            r"\.ln_1\.": ".token.norm.",
            r"\.ln_2\.": ".channel.norm.",
            r"\.attn\.c_attn\.": ".token.mix.qkv.",
            r"\.attn\.c_proj\.": ".token.mix.out.",
            r"\.mlp\.c_fc\.": ".channel.mix.up.",
            r"\.mlp\.c_proj\.": ".channel.mix.down.",
            r"^ln_f\.": "norm.",
        },
    )


def rename_llama(tensors: Weights) -> Weights:
    return relabel(
        tensors,
        {
            r"^model\.": "",
            r"^embed_tokens\.": "stem.embedding.",
            r"^layers\.": "blocks.",
            r"\.input_layernorm\.": ".token.norm.",
            r"\.post_attention_layernorm\.": ".channel.norm.",
            r"\.self_attn\.q_proj\.(\w+)": r".token.mix.qkv.\1#0",
            r"\.self_attn\.k_proj\.(\w+)": r".token.mix.qkv.\1#1",
            r"\.self_attn\.v_proj\.(\w+)": r".token.mix.qkv.\1#2",
            r"\.self_attn\.o_proj\.": ".token.mix.out.",
            r"\.mlp\.gate_proj\.(\w+)": r".channel.mix.up.\1#0",
            r"\.mlp\.up_proj\.(\w+)": r".channel.mix.up.\1#1",
            r"\.mlp\.down_proj\.": ".channel.mix.down.",
            r"^lm_head\.": "head.proj.",
        },
    )


def tiny_llama(num_kv_heads: int, theta: float, scaled: bool, tied: bool) -> tuple[Encoder, nn.Module]:
    rope = {"rope_type": "default", "rope_theta": theta} | ({**SCALING, "rope_theta": theta} if scaled else {})
    config = transformers.LlamaConfig(
        **LLAMA, num_key_value_heads=num_kv_heads, rope_parameters=rope, tie_word_embeddings=tied
    )
    spec = llama(3, WIDTH, 40, 6, num_kv_heads, LENGTH, VOCABULARY, LMHead(tied=tied))
    token = spec.block.token
    scaling = RotaryScaling(8.0, 1.0, 4.0, 64) if scaled else None
    rotary = token.rotary.replace(theta=theta, scaling=scaling)
    return (
        spec.replace(block=spec.block.replace(token=token.replace(rotary=rotary))),
        transformers.LlamaForCausalLM(config),
    )


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_gpt2(padded: bool) -> None:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **dropout))
    ids = torch.randint(VOCABULARY, (3, 7))
    mask = torch.arange(7) < torch.tensor([7, 5, 2])[:, None] if padded else None
    ours = gpt2(3, WIDTH, 3, LENGTH, VOCABULARY).build()
    assert_parity(
        ours,
        peer,
        rename_gpt2,
        ids,
        ask=lambda model, ids: model(ids, mask),
        ask_peer=lambda model, ids: model(ids, attention_mask=mask).logits,
    )
    assert_same_steps(ours, peer, ids)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("num_kv_heads", "theta", "scaled", "tied"),
    [(6, 1e4, False, False), (2, 5e5, False, True), (1, 1e2, False, False), (3, 5e2, True, False)],
    ids=["all-heads", "grouped", "one-head", "scaled"],
)
def test_llama(num_kv_heads: int, theta: float, scaled: bool, tied: bool, padded: bool) -> None:
    """In float32: transformers computes RMSNorm and the angles in it, whatever the model's dtype."""
    spec, peer = tiny_llama(num_kv_heads, theta, scaled, tied)
    ids = torch.randint(VOCABULARY, (3, 7))
    mask = torch.arange(7) < torch.tensor([7, 5, 2])[:, None] if padded else None
    ours = spec.build()
    assert_parity(
        ours,
        peer,
        rename_llama,
        ids,
        ask=lambda model, ids: model(ids, mask),
        ask_peer=lambda model, ids: model(ids, attention_mask=mask).logits,
        dtype=torch.float32,
    )
    assert_same_steps(ours, peer, ids)


@torch.no_grad()
def assert_same_steps(ours: nn.Module, peer: nn.Module, ids: torch.Tensor) -> None:
    """Each model with its own cache: four tokens at once, then one by one."""
    cache, past = Cache(), None
    for part in ids.split([4, 1, 1, 1], dim=1):
        expected = peer(part, past_key_values=past, use_cache=True)
        past = expected.past_key_values
        assert_same(ours(part, cache=cache), expected.logits, f"the output at {cache.length} tokens")


@pytest.mark.parametrize(
    ("name", "config", "rename"),
    [
        ("gpt2_small", {"model_type": "gpt2"}, rename_gpt2),
        (
            "llama3_8b",
            {
                "model_type": "llama",
                "vocab_size": 128_256,
                "hidden_size": 4096,
                "intermediate_size": 14_336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
            rename_llama,
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_published_models_have_the_same_tensors(name: str, config: dict[str, object], rename: object) -> None:
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        ours = allmlp.create(name)
    renamed = rename(dict(peer.named_parameters()))  # type: ignore[operator]
    assert {name: t.shape for name, t in renamed.items()} == {name: p.shape for name, p in ours.named_parameters()}
