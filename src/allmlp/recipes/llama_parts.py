"""Llama's parts, RMSNorm, SwiGLU and rotary positions, in MLP models; and the way from GPT-2 to Llama."""

from __future__ import annotations

from allmlp.layers import ChannelMlp, RMSNorm, RotaryPositions, TinyAttention
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.models.gpt2 import gpt2
from allmlp.models.llama import llama
from allmlp.recipes.digits_classification import digits_gmlp, digits_mixer
from allmlp.recipes.stdlib import stdlib_causal
from allmlp.run import Run


def digits_llama_parts() -> dict[str, Run]:
    """Mixer and gMLP on the embedded digits, with RMSNorm, with SwiGLU, and with both.

    allmlp train digits_llama_parts
    allmlp train digits_llama_parts/mixer_swiglu --set seed=1

    No download, two CPU cores. SwiGLU has fewer hidden channels, so that all have about as many parameters.
    """
    table = {}
    for family, run in (("mixer", digits_mixer()), ("gmlp", digits_gmlp())):
        assert isinstance(run.model, Encoder)
        table |= {name: run.replace(model=model) for name, model in _variants(family, run.model).items()}
    return table


def stdlib_llama_parts() -> dict[str, Run]:
    """Causal models of docstrings: gMLP and aMLP with Llama's parts, and GPT-2 changed step by step into Llama.

    allmlp train stdlib_llama_parts
    allmlp train stdlib_llama_parts/llama
    allmlp generate runs/stdlib_llama_parts/llama --prompt "Return the"

    No download, two CPU cores. SwiGLU has fewer hidden channels, so that a model has about as many parameters with it.
    """
    run = stdlib_causal()
    transformer = gpt2(3, 96, 4, seq_len=64, vocab_size=32_000)
    rotary = transformer.block.token.replace(rotary=RotaryPositions())  # type: ignore[union-attr]
    models = {
        **_variants("gmlp", gmlp_text(4, 96, 384, seq_len=64, causal=True)),
        "amlp": _amlp(TinyAttention(32)),
        "amlp_rotary": _amlp(TinyAttention(32, rotary=RotaryPositions())),
        **_variants("gpt2", transformer),
        "gpt2_rotary": transformer.replace(
            stem=transformer.stem.replace(positions=None), block=transformer.block.replace(token=rotary)
        ),
        "llama": llama(3, 96, 256, 4, 2, seq_len=64, vocab_size=32_000, head=transformer.head),  # type: ignore[arg-type]
    }
    return {name: run.replace(model=model) for name, model in models.items()}


def _amlp(attention: TinyAttention) -> Encoder:
    return gmlp_text(4, 96, 384, seq_len=64, attention=attention, causal=True)


def _variants(name: str, model: Encoder) -> dict[str, Encoder]:
    return {
        name: model,
        f"{name}_rmsnorm": _rmsnorm(model),
        f"{name}_swiglu": _swiglu(model),
        f"{name}_rmsnorm_swiglu": _rmsnorm(_swiglu(model)),
    }


def _rmsnorm(model: Encoder) -> Encoder:
    """RMSNorm for every norm, that of a spatial gating unit included."""
    channel = model.block.channel
    assert isinstance(channel, ChannelMlp)
    inner = channel.inner and channel.inner.replace(norm=RMSNorm())
    block = model.block.replace(channel=channel.replace(inner=inner), norm=RMSNorm())
    return model.replace(block=block, norm=RMSNorm())


def _swiglu(model: Encoder) -> Encoder:
    """With the hidden channels that keep the number of parameters: two thirds of them in a plain MLP."""
    channel = model.block.channel
    assert isinstance(channel, ChannelMlp)
    down = channel.inner.width(channel.hidden) / channel.hidden if channel.inner else 1
    hidden = int(channel.hidden * (1 + down) / (2 + down)) // 2 * 2
    return model.replace(block=model.block.replace(channel=channel.replace(hidden=hidden, act="silu", glu=True)))
