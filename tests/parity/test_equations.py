"""Every layer against its paper's equation, written token by token; and the models that no other library has."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from agree import Weights, assert_same, assert_same_gradients, randomize
from torch import Tensor, nn

from allmlp.layers import (
    Affine,
    Attention,
    BatchNorm,
    Block,
    ChannelLinear,
    ChannelMlp,
    ClassAttention,
    ClassMlp,
    Context,
    CrossAttention,
    Dense,
    GatedChannels,
    GatedTokens,
    Init,
    LayerNorm,
    LayerScale,
    MeanPool,
    NoMixing,
    PatchEmbed,
    PatchMerge,
    RelativePositionBias,
    RMSNorm,
    RotaryPositions,
    RotaryScaling,
    SinusoidalPositions,
    SpatialGatingUnit,
    TinyAttention,
    Toeplitz,
    TokenConv,
    TokenCycle,
    TokenLinear,
    TokenLstm,
    TokenMlp,
)
from allmlp.layers.channel import ChannelMixer
from allmlp.layers.context import BuildContext
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.models.bert import bert
from allmlp.models.gmlp import gmlp_text
from allmlp.models.mixer import mixer_text
from allmlp.models.resmlp import resmlp
from allmlp.models.seq2seq import resmlp_seq2seq
from allmlp.spec import Spec

TOKENS, WIDTH, GRID, HEADS, VOCABULARY = 6, 8, (2, 3), 2, 11
CTX = BuildContext(TOKENS, WIDTH, Init(), GRID)

Act = Callable[[Tensor], Tensor]
Equation = Callable[[Weights, Tensor, Tensor], Tensor]
"""From the layer's weights, its input (b s c) and which tokens are real (b s, ones and zeros) to its output."""


# --- the equations ------------------------------------------------------------------------------------


def within(p: Weights, prefix: str) -> Weights:
    return {name.removeprefix(f"{prefix}."): weight for name, weight in p.items() if name.startswith(f"{prefix}.")}


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def tanh(x: Tensor) -> Tensor:
    return 2 * sigmoid(2 * x) - 1


def linear(p: Weights, x: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, p["weight"]) + p.get("bias", 0)


def norm(p: Weights, x: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm; RMSNorm if it has no bias, ResMLP's Aff (eq. 1) if it has an alpha, nothing without weights."""
    if not p:
        return x
    if "alpha" in p:
        return p["alpha"] * x + p["beta"]
    if "bias" not in p:
        return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * p["weight"]
    centered = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centered**2).sum(-1, keepdim=True) / x.shape[-1]
    return centered / (variance + eps) ** 0.5 * p["weight"] + p["bias"]


def batch_norm(p: Weights, x: Tensor, eps: float = 1e-5) -> Tensor:
    """BatchNorm in training: every channel over the tokens of all examples."""
    rows = [x[b, i] for b in range(x.shape[0]) for i in range(x.shape[1])]
    mean = sum(rows) / len(rows)
    variance = sum((row - mean) ** 2 for row in rows) / len(rows)
    return (x - mean) / (variance + eps) ** 0.5 * p["weight"] + p["bias"]


def identity(p: Weights, x: Tensor, real: Tensor) -> Tensor:
    return x


def token_mlp(act: Act) -> Equation:
    """Mixer, eq. 1: every column of X by the same MLP."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        tokens, columns = x.shape[1], []
        for channel in range(x.shape[2]):
            column = x[:, :, channel] * real
            hidden = act(torch.einsum("bs,ds->bd", column, p["up.weight"][:, :tokens]) + p["up.bias"])
            columns.append(torch.einsum("bd,sd->bs", hidden, p["down.weight"][:tokens]) + p["down.bias"][:tokens])
        return torch.stack(columns, dim=2)

    return equation


def token_linear(toeplitz: bool = False, causal: bool = False) -> Equation:
    """ResMLP, eq. 2: Y[i] = sum_j A[i, j] X[j] + b[i]; gMLP, eq. 4: f. Toeplitz: A[i, j] = w[j - i + S - 1]."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        w, b, rows = p["weight"], p["bias"], []
        for i in range(x.shape[1]):
            row = b[i] + torch.zeros_like(x[:, 0])
            for j in range(i + 1 if causal else x.shape[1]):
                row = row + (w[j - i + len(b) - 1] if toeplitz else w[i, j]) * x[:, j] * real[:, j, None]
            rows.append(row)
        return torch.stack(rows, dim=1)

    return equation


def lstm(p: Weights, x: Tensor, real: Tensor) -> Tensor:
    """Gates i, f, g, o from a token and the hidden state before it; the memory forgets by f and learns i g."""
    rows, size = [], x.shape[2]
    h = c = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        gates = linear({"weight": p["lstm.weight_ih_l0"], "bias": p["lstm.bias_ih_l0"]}, x[:, t])
        gates = gates + linear({"weight": p["lstm.weight_hh_l0"], "bias": p["lstm.bias_hh_l0"]}, h)
        i, f, g, o = (gates[:, k * size : (k + 1) * size] for k in range(4))
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        rows.append(h)
    return torch.stack(rows, dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor) -> Tensor:
    """One head: out[i] = sum_j softmax_j(q[i] k[j] / sqrt(d) + bias[i, j]) v[j], j over the tokens that i may see."""
    rows = []
    for i in range(q.shape[1]):
        score = torch.einsum("bd,bjd->bj", q[:, i], k) / math.sqrt(q.shape[2]) + bias[i]
        weight = torch.exp(score) * seen[:, i]
        rows.append(torch.einsum("bj,bjd->bd", weight / weight.sum(1, keepdim=True), v))
    return torch.stack(rows, dim=1)


def visible(real: Tensor, queries: int, causal: bool) -> Tensor:
    """b i j: whether token i may see token j."""
    seen = real[:, None, :].repeat(1, queries, 1)
    return seen.tril() if causal else seen


def attention(heads: int, causal: bool = False, bias: Tensor | None = None, content: bool = True) -> Equation:
    """Multi-head self-attention, with relative scores (h i j) or nothing but these."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        v = linear(within(p, "qkv" if content else "value"), x)
        q, k, v = v.split(x.shape[2], dim=2) if content else (torch.zeros_like(v), torch.zeros_like(v), v)
        return join_heads(p, q, k, v, visible(real, x.shape[1], causal), heads, bias)

    return equation


def talking_heads(heads: int, causal: bool = False) -> Equation:
    """CaiT's attention: every score and every weight is a linear map of those of all heads."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        size, seen = x.shape[2] // heads, visible(real, x.shape[1], causal)
        q, k, v = linear(within(p, "qkv"), x).split(x.shape[2], dim=2)
        parts = [slice(h * size, (h + 1) * size) for h in range(heads)]
        scores = [torch.einsum("bid,bjd->bij", q[..., part], k[..., part]) / math.sqrt(size) for part in parts]
        mixed = [
            sum(p["before.weight"][g, h] * scores[h] for h in range(heads)) + p["before.bias"][g] for g in range(heads)
        ]
        weights = [torch.exp(score) * seen for score in mixed]
        weights = [weight / weight.sum(2, keepdim=True) for weight in weights]
        outputs = []
        for g in range(heads):
            weight = sum(p["after.weight"][g, h] * weights[h] for h in range(heads)) + p["after.bias"][g]
            outputs.append(torch.einsum("bij,bjd->bid", weight * seen, v[..., parts[g]]))
        return linear(within(p, "out"), torch.cat(outputs, dim=2))

    return equation


def cycle(kernel: int) -> Equation:
    """CycleMLP: channel c of token (y, x) is read (c + k // 2) mod k - k // 2 tokens to the side, or below."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        (rows, columns), tokens = GRID, x * real[:, :, None]

        def moved(down: bool) -> Tensor:
            found = []
            for y, column in product(range(rows), range(columns)):
                channels = []
                for c in range(x.shape[2]):
                    step = (c + kernel // 2) % kernel - kernel // 2
                    at_y, at_x = (y + step, column) if down else (y, column + step)
                    inside = 0 <= at_y < rows and 0 <= at_x < columns
                    channels.append(tokens[:, at_y * columns + at_x, c] if inside else 0 * tokens[:, 0, c])
                found.append(torch.stack(channels, dim=1))
            return torch.stack(found, dim=1)

        h = linear(within(p, "horizontal"), moved(down=False))
        v = linear(within(p, "vertical"), moved(down=True))
        u = linear(within(p, "unmoved"), tokens)
        pooled = (h + v + u).sum(1) / x.shape[1]
        scores = linear(within(p, "reweight_down"), gelu(linear(within(p, "reweight_up"), pooled)))
        terms = [torch.exp(scores[:, branch::3])[:, None] for branch in range(3)]
        return linear(within(p, "out"), (terms[0] * h + terms[1] * v + terms[2] * u) / sum(terms))

    return equation


def rotate(x: Tensor, size: int, theta: float, slower: Callable[[float], float] = lambda w: w) -> Tensor:
    """RoPE, each pair of channels a complex number that is turned; `slower` maps the frequency of a pair to another."""
    rows = []
    for i in range(x.shape[1]):
        channels = list(x[:, i].unbind(1))
        for first in range(0, x.shape[2], size):
            for k in range(size // 2):
                a, b = first + k, first + k + size // 2
                turned = torch.complex(channels[a], channels[b]) * cmath.exp(1j * i * slower(theta ** (-2 * k / size)))
                channels[a], channels[b] = turned.real, turned.imag
        rows.append(torch.stack(channels, dim=1))
    return torch.stack(rows, dim=1)


def llama_attention(
    heads: int, kv_heads: int, theta: float | None, slower: Callable[[float], float] = lambda w: w
) -> Equation:
    """Causal, with rotary positions unless theta is None; head h reads keys and values of head h kv_heads / heads."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        size = x.shape[2] // heads
        q, k, v = linear(within(p, "qkv"), x).split([x.shape[2], kv_heads * size, kv_heads * size], dim=2)
        if theta is not None:
            q, k = rotate(q, size, theta, slower), rotate(k, size, theta, slower)
        shared = [h * kv_heads // heads for h in range(heads)]
        k, v = (torch.cat([t[..., g * size : (g + 1) * size] for g in shared], dim=2) for t in (k, v))
        return join_heads(p, q, k, v, visible(real, x.shape[1], True), heads)

    return equation


def longer_waves(factor: float, low: float, high: float, length: int) -> Callable[[float], float]:
    """Llama 3.1's code: by wavelength, frequencies stay, are divided by `factor`, or something between."""

    def slower(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            return frequency
        if wavelength > length / low:
            return frequency / factor
        smooth = (length / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency

    return slower


def cross_attention(heads: int, memory: Tensor, memory_real: Tensor) -> Equation:
    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        k, v = linear(within(p, "kv"), memory).split(x.shape[2], dim=2)
        return join_heads(p, linear(within(p, "q"), x), k, v, visible(memory_real, x.shape[1], False), heads)

    return equation


def join_heads(
    p: Weights, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, heads: int, bias: Tensor | None = None
) -> Tensor:
    size = q.shape[2] // heads
    outputs = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        extra = torch.zeros(q.shape[1], k.shape[1], dtype=q.dtype) if bias is None else bias[h]
        outputs.append(attend(q[..., part], k[..., part], v[..., part], seen, extra))
    return linear(within(p, "out"), torch.cat(outputs, dim=2))


def tiny_attention(causal: bool, theta: float | None) -> Equation:
    """aMLP's tiny_attn: one head, its width a third of qkv's; with rotary positions unless theta is None."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        qkv = torch.einsum("bsc,oc->bso", x, p["qkv.weight"]) + p.get("qkv.bias", 0)
        q, k, v = qkv.chunk(3, dim=2)
        if theta is not None:
            q, k = rotate(q, q.shape[2], theta), rotate(k, k.shape[2], theta)
        return join_heads(p, q, k, v, visible(real, x.shape[1], causal), heads=1)

    return equation


def gate(
    variant: str, toeplitz: bool, causal: bool, eps: float = 1e-6, theta: float | None = None
) -> Callable[..., Tensor]:
    """gMLP, eq. 2-4 and the variants of table 3; with a tiny attention aMLP's."""

    def equation(p: Weights, z: Tensor, x: Tensor, real: Tensor) -> Tensor:
        half = z.shape[2] // 2
        u, v = (z[..., :half], z[..., half:]) if variant == "split" else (z, z)
        f = token_linear(toeplitz, causal)(within(p, "proj"), norm(within(p, "norm"), v, eps), real)
        if attention_weights := within(p, "attention"):
            f = f + tiny_attention(causal, theta)(attention_weights, x, real)
        return {"split": u * f, "multiplicative": u * f, "additive": u + f, "linear": f}[variant]

    return equation


def channel_mlp(act: Act = gelu, inner: Callable[..., Tensor] | None = None) -> Equation:
    """Mixer, eq. 1; ResMLP, eq. 3; gMLP, eq. 1 with a gate as `inner`."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        z = act(linear(within(p, "up"), x))
        return linear(within(p, "down"), z if inner is None else inner(within(p, "inner"), z, x, real))

    return equation


def glu(act: Act, inner: Callable[..., Tensor] | None = None) -> Equation:
    """Shazeer (2020): act(G x) * U x, both in one matrix."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        gate, up = linear(within(p, "up"), x).chunk(2, dim=2)
        z = act(gate) * up
        return linear(within(p, "down"), z if inner is None else inner(within(p, "inner"), z, x, real))

    return equation


def channel_linear(p: Weights, x: Tensor, real: Tensor) -> Tensor:
    return linear(within(p, "proj"), x)


def activated(mix: Equation, act: Act) -> Equation:
    return lambda p, x, real: act(mix(p, x, real))


def token_conv(p: Weights, x: Tensor, real: Tensor) -> Tensor:
    """The sum over the neighbors that exist; a weight of one input channel per output is depthwise."""
    kernel, (height, width) = p["conv.weight"], GRID
    reach = kernel.shape[2] // 2
    x, pixels = x * real[..., None], []
    for row, column in product(range(height), range(width)):
        pixel = p["conv.bias"] + torch.zeros_like(x[:, 0])
        for down, right in product(range(-reach, reach + 1), repeat=2):
            if 0 <= row + down < height and 0 <= column + right < width:
                neighbor = x[:, (row + down) * width + column + right]
                w = kernel[:, :, reach + down, reach + right]
                pixel = pixel + (neighbor * w[:, 0] if w.shape[1] == 1 else torch.einsum("bi,oi->bo", neighbor, w))
        if "pointwise.weight" in p:
            pixel = torch.einsum("bi,oi->bo", pixel, p["pointwise.weight"][:, :, 0, 0]) + p["pointwise.bias"]
        pixels.append(pixel)
    return torch.stack(pixels, dim=1)


def prefixed(name: str, mix: Equation) -> Equation:
    return lambda p, x, real: mix(within(p, name), x, real)


def gated_tokens(mix: Equation) -> Equation:
    """PatchTSMixer: each channel of a token is weighted by a softmax over the tokens; padding has no weight."""

    def f(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        y = mix(within(p, "mix"), x, real)
        e = token_linear()(within(p, "gate"), y, real).exp() * real[..., None]
        weights = e / e.sum(1, keepdim=True)
        return torch.stack([y[:, i] * weights[:, i] for i in range(x.shape[1])], dim=1)

    return f


def gated_channels(mix: Equation) -> Equation:
    def f(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        y = mix(within(p, "mix"), x, real)
        e = linear(within(p, "gate"), y).exp()
        return y * e / e.sum(2, keepdim=True)

    return f


def residual(
    p: Weights,
    x: Tensor,
    real: Tensor,
    mix: Equation,
    order: str = "pre",
    eps: float = 1e-6,
    normed: Callable[[Weights, Tensor, float], Tensor] = norm,
    skip: bool = True,
) -> Tensor:
    normed = partial(normed, within(p, "norm"), eps=eps)

    def scaled(y: Tensor) -> Tensor:
        scale = within(p, "scale")
        return scale["gamma"] * y + scale.get("beta", 0) if scale else y

    def f(x: Tensor) -> Tensor:
        return mix(within(p, "mix"), x, real)

    kept = x if skip else torch.zeros_like(x)
    if order == "post":
        return normed(kept + scaled(f(x)))
    return kept + (scaled(normed(f(x))) if order == "res-post" else scaled(f(normed(x))))


def blocks(p: Weights, x: Tensor, real: Tensor, depth: int, slots: dict[str, Equation], **how: Any) -> Tensor:
    for i in range(depth):
        for slot, mix in slots.items():
            x = residual(within(p, f"blocks.{i}.{slot}"), x, real, mix, **how)
    return x


def class_mlp(p: Weights, x: Tensor, real: Tensor, layers: int) -> Tensor:
    """ResMLP's Class-MLP: the class token after its layers, the patches staying as they are."""
    c = p["token"] + torch.zeros_like(x[:, 0])
    for layer in range(layers):
        gather, gamma = within(p, f"gathers.{layer}"), p[f"gathers.{layer}.scale.gamma"]
        row, normed = gather["mix.weight"][0], partial(norm, within(gather, "norm"))
        mixed = row[0] * normed(c) + gather["mix.bias"]
        for j in range(x.shape[1]):
            mixed = mixed + row[1 + j] * normed(x[:, j]) * real[:, j, None]
        c = c + gamma * mixed
        c = residual(within(p, f"channels.{layer}"), c, real, channel_mlp())
    return c


def class_attention(p: Weights, x: Tensor, real: Tensor, layers: int) -> Tensor:
    """CaiT, eq. 2-6: the class token attends to itself and to the patches, which stay as they are."""
    c, seen = p["token"] + torch.zeros_like(x[:, :1]), torch.cat([torch.ones_like(real[:, :1]), real], dim=1)
    for layer in range(layers):
        gather, gamma = within(p, f"gathers.{layer}"), p[f"gathers.{layer}.scale.gamma"]
        normed = norm(within(gather, "norm"), torch.cat([c, x], dim=1))
        k, v = linear(within(gather, "kv"), normed).split(x.shape[2], dim=2)
        q = linear(within(gather, "q"), normed[:, :1])
        c = c + gamma * join_heads(gather, q, k, v, visible(seen, 1, False), HEADS)
        c = residual(within(p, f"channels.{layer}"), c, real, channel_mlp())
    return c[:, 0]


# --- one layer at a time ------------------------------------------------------------------------------


def ready(module: nn.Module) -> tuple[Any, Weights]:
    """The module with random double weights, and these."""
    randomize(module.double())
    return module, dict(module.named_parameters())


def padding(padded: bool, tokens: int = TOKENS) -> tuple[Tensor | None, Tensor]:
    """A mask for our layers, and the same for the equations."""
    mask = torch.arange(tokens) < torch.tensor([[tokens], [3], [1]]) if padded else None
    return mask, torch.ones(3, tokens, dtype=torch.float64) if mask is None else mask.double()


def activations(tokens: int = TOKENS) -> Tensor:
    return torch.randn(3, tokens, WIDTH, dtype=torch.float64, requires_grad=True)


def assert_equal(actual: Tensor, expected: Tensor, inputs: Weights) -> None:
    """Equal outputs, and equal gradients of all `inputs`."""
    assert_same(actual, expected, "the output")
    probe = torch.randn_like(expected)
    ours = torch.autograd.grad(actual, list(inputs.values()), probe)
    theirs = torch.autograd.grad(expected, list(inputs.values()), probe)
    assert_same_gradients(dict(zip(inputs, ours)), dict(zip(inputs, theirs)))


MIXERS: dict[str, tuple[Any, Equation]] = {
    "mlp": (TokenMlp(5), token_mlp(gelu)),
    "mlp-tanh": (TokenMlp(expansion=2.0, act="gelu_tanh"), token_mlp(gelu_tanh)),
    "linear": (TokenLinear(), token_linear()),
    "linear-causal": (TokenLinear(causal=True), token_linear(causal=True)),
    "linear-toeplitz": (TokenLinear(Toeplitz()), token_linear(toeplitz=True)),
    "linear-toeplitz-causal": (TokenLinear(Toeplitz(), causal=True), token_linear(toeplitz=True, causal=True)),
    "attention": (Attention(HEADS), attention(HEADS)),
    "attention-causal": (Attention(HEADS, causal=True), attention(HEADS, causal=True)),
    "attention-grouped": (Attention(4, causal=True, num_kv_heads=2), llama_attention(4, 2, None)),
    "attention-rotary": (
        Attention(HEADS, causal=True, rotary=RotaryPositions(100.0), linear_bias=False),
        llama_attention(HEADS, HEADS, 100.0),
    ),
    "attention-rotary-scaled": (
        # wavelengths of 6.3, 20, 63 and 199 tokens: the first stays, the next two shrink in part, the last by all
        Attention(1, causal=True, rotary=RotaryPositions(100.0, RotaryScaling(8.0, 0.5, 4.0, 64))),
        llama_attention(1, 1, 100.0, longer_waves(8.0, 0.5, 4.0, 64)),
    ),
    "lstm": (TokenLstm(), lstm),
    "attention-talking": (Attention(HEADS, talking_heads=True), talking_heads(HEADS)),
    "attention-talking-causal": (Attention(HEADS, True, talking_heads=True), talking_heads(HEADS, causal=True)),
    "linear-relu": (TokenLinear(act="relu"), activated(prefixed("proj", token_linear()), relu)),
    "gated-tokens": (GatedTokens(TokenMlp(5)), gated_tokens(token_mlp(gelu))),
    "gated-channels": (GatedChannels(ChannelMlp(12)), gated_channels(channel_mlp())),
    "channel": (ChannelMlp(12), channel_mlp()),
    "channel-glu": (ChannelMlp(12, "sigmoid", glu=True), glu(sigmoid)),
    "channel-geglu": (ChannelMlp(12, glu=True), glu(gelu)),
    "channel-swiglu": (ChannelMlp(12, "silu", glu=True, linear_bias=False), glu(silu)),
    "channel-silu": (ChannelMlp(12, "silu"), channel_mlp(silu)),
    "mlp-silu": (TokenMlp(5, act="silu"), token_mlp(silu)),
    "channel-tanh": (ChannelMlp(12, act="gelu_tanh"), channel_mlp(gelu_tanh)),
    "channel-relu": (ChannelMlp(12, act="relu"), channel_mlp(relu)),
    "channel-linear": (ChannelLinear(), channel_linear),
    "channel-linear-gelu": (ChannelLinear("gelu"), activated(channel_linear, gelu)),
    "none": (NoMixing(), identity),
}
GRID_MIXERS: dict[str, tuple[Any, Equation]] = {
    f"conv-{variant}-{kernel}": (TokenConv(variant, kernel), token_conv)
    for variant in ("full", "depthwise", "separable")
    for kernel in (3, 5)
} | {
    "conv-depthwise-gelu": (TokenConv("depthwise", act="gelu"), activated(token_conv, gelu)),
    **{f"cycle-{kernel}": (TokenCycle(kernel), cycle(kernel)) for kernel in (2, 3, 7)},
}
"""Mixers that read the whole grid of patches, never fewer tokens."""
GATES: dict[str, tuple[Any, Equation]] = {
    f"gate-{variant}-{type(projection).__name__.lower()}{'-causal' * causal}{'-attention' * bool(tiny)}": (
        ChannelMlp(12, inner=SpatialGatingUnit(variant, projection, causal, attention=tiny)),
        channel_mlp(inner=gate(variant, isinstance(projection, Toeplitz), causal)),
    )
    for variant in ("split", "multiplicative", "additive", "linear")
    for projection in (Dense(), Toeplitz())
    for causal in (False, True)
    for tiny in (None, TinyAttention(5))
} | {
    "gate-attention-without-bias": (
        ChannelMlp(12, inner=SpatialGatingUnit(attention=TinyAttention(5, bias=False))),
        channel_mlp(inner=gate("split", False, False)),
    ),
    "gate-attention-rotary": (
        ChannelMlp(12, inner=SpatialGatingUnit(attention=TinyAttention(4, rotary=RotaryPositions(100.0)))),
        channel_mlp(inner=gate("split", False, False, theta=100.0)),
    ),
    "gate-eps": (
        ChannelMlp(12, inner=SpatialGatingUnit(norm=LayerNorm(0.1))),
        channel_mlp(inner=gate("split", False, False, eps=0.1)),
    ),
    "gate-swiglu": (
        ChannelMlp(12, "silu", SpatialGatingUnit(norm=RMSNorm()), glu=True),
        glu(silu, gate("split", False, False)),
    ),
    "gate-without-norm": (
        ChannelMlp(12, inner=SpatialGatingUnit(norm=None)),
        channel_mlp(inner=gate("split", False, False)),
    ),
}
LAYERS = MIXERS | GRID_MIXERS | GATES


@pytest.mark.parametrize("slot", [TokenMixer, ChannelMixer])
def test_every_mixer_has_an_equation(slot):
    known = {type(spec) for spec, _ in LAYERS.values()}
    mixers = {kind for kind in Spec.kinds.values() if issubclass(kind, slot) and kind.__module__.startswith("allmlp.")}
    missing = ", ".join(sorted(kind.__name__ for kind in mixers - known))
    assert not missing, (
        f"no equation of {missing}: write it token by token with float64 tensors, without calling allmlp, and add the "
        f"pair (spec, equation) to MIXERS in tests/parity/test_equations.py, or to GRID_MIXERS if it reads a whole grid"
    )


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("name", "tokens"),
    [(name, TOKENS) for name in LAYERS] + [(name, TOKENS - 2) for name in LAYERS if name not in GRID_MIXERS],
)
def test_layer(name, tokens, padded):
    spec, equation = LAYERS[name]
    layer, p = ready(spec.build(CTX))
    x, (mask, real) = activations(tokens), padding(padded, tokens)
    assert_equal(layer(x, Context(mask=mask)), equation(p, x, real), p | {"x": x})


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_cross_attention(padded):
    layer, p = ready(CrossAttention(HEADS).build(CTX))
    x, memory, (mask, real) = activations(4), activations(7), padding(padded, 7)
    expected = cross_attention(HEADS, memory, real)(p, x, torch.ones(3, 4))
    assert_equal(layer(x, Context(memory=memory, memory_mask=mask)), expected, p | {"x": x, "memory": memory})


@pytest.mark.parametrize("skips", ["all", "token"])
@pytest.mark.parametrize("order", ["pre", "post", "res-post"])
@pytest.mark.parametrize(
    "normed",
    [LayerNorm(), RMSNorm(), Affine(), BatchNorm(1e-6), None],
    ids=["layernorm", "rmsnorm", "affine", "batchnorm", "no-norm"],
)
@pytest.mark.parametrize("scale", [None, LayerScale(), LayerScale(shift=True)], ids=["plain", "scale", "scale-shift"])
def test_block(order, normed, scale, skips):
    """ResMLP eq. 2-3 print the scale with a shift: Z = X + Aff(A Aff(X))."""
    spec = Block(TokenLinear(), channel=ChannelMlp(12), norm=normed, scale=scale, order=order, residual=skips)
    layer, p = ready(spec.build(CTX))
    x, (mask, real) = activations(), padding(True)
    how = {"order": order, "normed": batch_norm if isinstance(normed, BatchNorm) else norm}
    expected = residual(within(p, "token"), x, real, token_linear(), **how)
    expected = residual(within(p, "channel"), expected, real, channel_mlp(), skip=skips == "all", **how)
    assert_equal(layer(x, Context(mask=mask)), expected, p | {"x": x})


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("normed", [LayerNorm(), Affine()], ids=["layernorm", "affine"])
@pytest.mark.parametrize("layers", [1, 2])
def test_class_mlp(layers, normed, padded):
    block = Block(TokenLinear(), channel=ChannelMlp(12), norm=normed, scale=LayerScale())
    pool, p = ready(ClassMlp(layers).build(CTX, block))
    x, (mask, real) = activations(), padding(padded)
    joined = pool.prepare(x, Context(mask=mask))
    assert torch.equal(joined[:, 1:], x)
    assert_equal(pool(joined, mask), class_mlp(p, x, real, layers), p | {"x": x})


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("layers", [1, 2])
def test_class_attention(layers, padded):
    block = Block(Attention(HEADS), channel=ChannelMlp(12), scale=LayerScale())
    pool, p = ready(ClassAttention(HEADS, layers).build(CTX, block))
    x, (mask, real) = activations(), padding(padded)
    joined = pool.prepare(x, Context(mask=mask))
    assert torch.equal(joined[:, 1:], x)
    assert_equal(pool(joined, mask), class_attention(p, x, real, layers), p | {"x": x})


@pytest.mark.parametrize("normed", [LayerNorm(), None], ids=["layernorm", "no-norm"])
@pytest.mark.parametrize("grid", [(2, 4), (3, 5)], ids=["even", "odd"])
@pytest.mark.parametrize("kernel", [None, 3, 4])
def test_patch_merge(kernel, grid, normed):
    """Token (y, x) is a linear map of a window of tokens; channels first, then rows and columns of the window."""
    spec, before = PatchMerge(kernel=kernel, norm=normed), replace(CTX, grid=grid, tokens=grid[0] * grid[1])
    layer, p = ready(spec.build(before, replace(CTX, channels=5)))
    x = activations(before.tokens)
    tokens, size, start = norm(within(p, "norm"), x), kernel or 2, ((kernel or 2) - 1) // 2
    merged = []
    for y, column in product(range(0, grid[0], 2), range(0, grid[1], 2)):
        window = torch.zeros(3, WIDTH, size, size, dtype=torch.float64)
        for i, j in product(range(size), range(size)):
            at_y, at_x = y + i - start, column + j - start
            if 0 <= at_y < grid[0] and 0 <= at_x < grid[1]:
                window[:, :, i, j] = tokens[:, at_y * grid[1] + at_x]
        merged.append(linear(within(p, "proj"), window.flatten(1)))
    assert_equal(layer(x), torch.stack(merged, dim=1), p | {"x": x})


@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize("normed", [LayerNorm(), BatchNorm(1e-6), None], ids=["layernorm", "batchnorm", "no-norm"])
def test_patch_embed(normed, act):
    stem, p = ready(PatchEmbed((4, 6), (2, 2), act=act, norm=normed).build(CTX))
    images = torch.randn(3, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    patches = [images[:, :, y : y + 2, x : x + 2].flatten(1) for y in (0, 2) for x in (0, 2, 4)]
    x = linear(within(p, "proj"), torch.stack(patches, 1))
    equation = batch_norm if isinstance(normed, BatchNorm) else norm
    expected = equation(within(p, "norm"), relu(x) if act else x, 1e-6)
    assert_equal(stem(images), expected, p | {"images": images})


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_mean(padded):
    x, (mask, real) = activations(), padding(padded)
    expected = torch.stack([row[keep > 0].sum(0) / keep.sum() for row, keep in zip(x, real)])
    assert_equal(MeanPool().build(CTX, Block())(x, mask), expected, {"x": x})


@pytest.mark.parametrize("start", [0, 200])
def test_sinusoidal_positions(start):
    x, wave = activations(), torch.empty(TOKENS, WIDTH, dtype=torch.float64)
    for i, k in product(range(TOKENS), range(WIDTH // 2)):
        angle = (start + i) / 10_000 ** (2 * k / WIDTH)
        wave[i, 2 * k], wave[i, 2 * k + 1] = math.sin(angle), math.cos(angle)
    assert_same(SinusoidalPositions().build(start + TOKENS, WIDTH)(x, start), x + wave, "the output")


@pytest.mark.parametrize("n", [1, 2, 7])
def test_toeplitz_matrix(n):
    """gMLP's appendix C makes the matrix by padding, tiling, cutting and reshaping its 2n - 1 numbers."""
    w = torch.randn(2 * n - 1)
    tiled = nn.functional.pad(w, (0, n)).repeat(n)[:-n].reshape(n, 3 * n - 2)
    expected = tiled[:, n - 1 : 2 * n - 1]
    assert torch.equal(Toeplitz().matrix(w, 0, n, causal=False), expected)
    assert torch.equal(Toeplitz().matrix(w[:n], 0, n, causal=True), expected.tril())


# --- whole models -------------------------------------------------------------------------------------


def words(tokens: int = TOKENS) -> Tensor:
    return torch.randint(VOCABULARY, (3, tokens))


TEXT = {
    f"gmlp-{variant}{'-causal' * causal}{'-attention' * bool(tiny)}": (
        gmlp_text(2, WIDTH, 12, TOKENS, VOCABULARY, variant, tiny, causal),
        {"channel": channel_mlp(inner=gate(variant, toeplitz=True, causal=causal))},
    )
    for variant in ("split", "multiplicative", "additive", "linear")
    for causal in (False, True)
    for tiny in (None, TinyAttention(5))
} | {
    "mixer": (
        mixer_text(2, WIDTH, 5, 12, VOCABULARY).configure(seq_len=TOKENS),
        {"token": token_mlp(gelu), "channel": channel_mlp()},
    )
}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", TEXT)
def test_text(name, padded):
    """The embedding, blocks, a norm, and the embedding again."""
    spec, slots = TEXT[name]
    model, p = ready(spec.build())
    ids, embedding, (mask, real) = words(), p["stem.embedding.weight"], padding(padded)
    x = norm(within(p, "norm"), blocks(p, embedding[ids], real, 2, slots))
    assert_equal(model(ids, mask), torch.einsum("bsc,vc->bsv", x, embedding), p)


def relative_scores(table: Tensor, tokens: int, buckets: int, distance: int, causal: bool) -> Tensor:
    """T5: near distances have a bucket each, far ones share buckets that grow with the logarithm."""

    def bucket(offset: int) -> int:
        count = buckets if causal else buckets // 2
        side, gap = (0, max(-offset, 0)) if causal else (count * (offset > 0), abs(offset))
        if gap < count // 2:
            return side + gap
        share = math.log(gap / (count // 2)) / math.log(distance / (count // 2))
        return side + min(count // 2 + int(share * (count - count // 2)), count - 1)

    rows = [torch.stack([table[bucket(j - i)] for j in range(tokens)]) for i in range(tokens)]
    return torch.stack(rows).permute(2, 0, 1)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("scores", ["content", "bias"])
def test_bert_with_relative_positions(scores, causal, padded):
    """gMLP's baselines: relative scores shared by all layers, added to the content's or alone."""
    tokens, eps = 12, 1e-12
    spec = Attention(HEADS, causal, RelativePositionBias(8, 20), scores)
    model, p = ready(bert(2, WIDTH, HEADS, spec, seq_len=tokens, vocab_size=VOCABULARY).build())
    ids, table, (mask, real) = words(tokens), p["stem.embedding.weight"], padding(padded, tokens)
    bias = relative_scores(p["relative.weight"], tokens, 8, 20, causal)
    slots = {"token": attention(HEADS, causal, bias, content=scores == "content"), "channel": channel_mlp()}
    x = table[ids] + p["stem.segments.weight"][0] + p["stem.positions.weight"]
    x = blocks(p, norm(within(p, "stem.norm"), x, eps), real, 2, slots, order="post", eps=eps)
    assert_equal(model(ids, mask), torch.einsum("bsc,vc->bsv", x, table), p)


ABLATIONS: dict[str, tuple[dict[str, Any], Equation]] = {
    "none": ({"token": NoMixing()}, identity),
    "mlp": ({"token": TokenMlp(expansion=4.0)}, token_mlp(gelu)),
    "conv": ({"token": TokenConv("full")}, token_conv),
    "depthwise": ({"token": TokenConv("depthwise")}, token_conv),
    "separable": ({"token": TokenConv("separable")}, token_conv),
    "layernorm": ({"norm": LayerNorm()}, token_linear()),
    "class-mlp": ({"pool": ClassMlp()}, token_linear()),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_resmlp_ablation(name):
    """Patches row by row, blocks, a norm, the mean or the class token, a linear map."""
    variant, mix = ABLATIONS[name]
    spec = resmlp(2, WIDTH, 0.1, patch_size=4, num_classes=5, **variant).configure(img_size=(8, 12))
    model, p = ready(spec.build())
    images = torch.randn(3, 3, 8, 12, dtype=torch.float64, requires_grad=True)
    patches = [images[:, :, y : y + 4, x : x + 4].flatten(1) for y in (0, 4) for x in (0, 4, 8)]
    real = torch.ones(3, TOKENS)
    x = blocks(
        p, linear(within(p, "stem.proj"), torch.stack(patches, 1)), real, 2, {"token": mix, "channel": channel_mlp()}
    )
    if name == "class-mlp":
        x = class_mlp(within(p, "pool"), x, real, layers=2)[:, None]
    pooled = norm(within(p, "norm"), x).sum(1) / x.shape[1]
    assert_equal(model(images), linear(within(p, "head.proj"), pooled), p | {"images": images})


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_resmlp_seq2seq(padded):
    """ResMLP, section 2: linear maps over tokens for self-attention, triangular in the decoder."""
    model, p = ready(resmlp_seq2seq(2, WIDTH, HEADS, seq_len=9, vocab_size=VOCABULARY).build())
    source, target, table = words(8), words(6), p["encoder.stem.embedding.weight"]
    (source_mask, source_real), (target_mask, target_real) = padding(padded, 8), padding(padded, 6)
    encoder, decoder, mlp = within(p, "encoder"), within(p, "decoder"), channel_mlp(relu)

    x = table[source] * math.sqrt(WIDTH)
    x = blocks(encoder, x, source_real, 2, {"token": token_linear(), "channel": mlp})
    memory = norm(within(encoder, "norm"), x)
    cross = cross_attention(HEADS, memory, source_real)
    x = table[target] * math.sqrt(WIDTH)
    x = blocks(decoder, x, target_real, 2, {"token": token_linear(causal=True), "cross": cross, "channel": mlp})
    expected = torch.einsum("bsc,vc->bsv", norm(within(decoder, "norm"), x), table)
    assert_equal(model(source, target, source_mask, target_mask), expected, p)
