"""Every layer against its paper's equation, written out token by token; and the models that have no peer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from agree import Weights, assert_same, assert_same_gradients, randomise
from torch import Tensor, nn

from allmlp.layers import (
    Affine,
    Attention,
    Block,
    ChannelMlp,
    ClassMlp,
    Context,
    CrossAttention,
    Dense,
    Init,
    LayerNorm,
    LayerScale,
    Mean,
    NoMixing,
    RelativePositions,
    Sinusoidal,
    SpatialGate,
    TinyAttention,
    Toeplitz,
    TokenConv,
    TokenLinear,
    TokenMlp,
)
from allmlp.layers.context import Site
from allmlp.models.bert import bert
from allmlp.models.gmlp import gmlp_text
from allmlp.models.mixer import mixer_text
from allmlp.models.resmlp import resmlp
from allmlp.models.seq2seq import resmlp_seq2seq

TOKENS, WIDTH, GRID, HEADS, VOCABULARY = 6, 8, (2, 3), 2, 11
SITE = Site(TOKENS, WIDTH, Init(), GRID)

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


def linear(p: Weights, x: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, p["weight"]) + p["bias"]


def norm(p: Weights, x: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm, or ResMLP's Aff (eq. 1) where there is an alpha."""
    if "alpha" in p:
        return p["alpha"] * x + p["beta"]
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centred**2).sum(-1, keepdim=True) / x.shape[-1]
    return centred / (variance + eps) ** 0.5 * p["weight"] + p["bias"]


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


def tiny_attention(causal: bool) -> Equation:
    """aMLP's tiny_attn: one head, its width a third of qkv's."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        qkv = torch.einsum("bsc,oc->bso", x, p["qkv.weight"]) + p.get("qkv.bias", 0)
        q, k, v = qkv.chunk(3, dim=2)
        return join_heads(p, q, k, v, visible(real, x.shape[1], causal), heads=1)

    return equation


def gate(combine: str, toeplitz: bool, causal: bool, eps: float = 1e-6) -> Callable[..., Tensor]:
    """gMLP, eq. 2-4 and the versions of table 3; with a tiny attention aMLP's."""

    def equation(p: Weights, z: Tensor, x: Tensor, real: Tensor) -> Tensor:
        half = z.shape[2] // 2
        u, v = (z[..., :half], z[..., half:]) if combine == "split" else (z, z)
        f = token_linear(toeplitz, causal)(within(p, "proj"), norm(within(p, "norm"), v, eps), real)
        if side := within(p, "side"):
            f = f + tiny_attention(causal)(side, x, real)
        return {"split": u * f, "multiply": u * f, "add": u + f, "linear": f}[combine]

    return equation


def channel_mlp(act: Act = gelu, inner: Callable[..., Tensor] | None = None) -> Equation:
    """Mixer, eq. 1; ResMLP, eq. 3; gMLP, eq. 1 with a gate as `inner`."""

    def equation(p: Weights, x: Tensor, real: Tensor) -> Tensor:
        z = act(linear(within(p, "up"), x))
        return linear(within(p, "down"), z if inner is None else inner(within(p, "inner"), z, x, real))

    return equation


def token_conv(p: Weights, x: Tensor, real: Tensor) -> Tensor:
    """The sum over the neighbours that exist; a weight of one input channel per output is depthwise."""
    kernel, (height, width) = p["space.weight"], GRID
    reach = kernel.shape[2] // 2
    x, pixels = x * real[..., None], []
    for row, column in product(range(height), range(width)):
        pixel = p["space.bias"] + torch.zeros_like(x[:, 0])
        for down, right in product(range(-reach, reach + 1), repeat=2):
            if 0 <= row + down < height and 0 <= column + right < width:
                neighbour = x[:, (row + down) * width + column + right]
                w = kernel[:, :, reach + down, reach + right]
                pixel = pixel + (neighbour * w[:, 0] if w.shape[1] == 1 else torch.einsum("bi,oi->bo", neighbour, w))
        if "point.weight" in p:
            pixel = torch.einsum("bi,oi->bo", pixel, p["point.weight"][:, :, 0, 0]) + p["point.bias"]
        pixels.append(pixel)
    return torch.stack(pixels, dim=1)


def residual(p: Weights, x: Tensor, real: Tensor, mix: Equation, order: str = "pre", eps: float = 1e-6) -> Tensor:
    def branch(x: Tensor) -> Tensor:
        y, scale = mix(within(p, "mix"), x, real), within(p, "scale")
        return scale["gamma"] * y + scale.get("beta", 0) if scale else y

    if order == "post":
        return norm(within(p, "norm"), x + branch(x), eps)
    return x + branch(norm(within(p, "norm"), x, eps))


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


# --- one layer at a time ------------------------------------------------------------------------------


def ready(module: nn.Module) -> tuple[Any, Weights]:
    """The module with random double weights, and these."""
    randomise(module.double())
    return module, dict(module.named_parameters())


def padding(padded: bool, tokens: int = TOKENS) -> tuple[Tensor | None, Tensor]:
    """A mask for our layers, and the same for the equations."""
    mask = torch.arange(tokens) < torch.tensor([[tokens], [3], [1]]) if padded else None
    return mask, torch.ones(3, tokens, dtype=torch.float64) if mask is None else mask.double()


def activations(tokens: int = TOKENS) -> Tensor:
    return torch.randn(3, tokens, WIDTH, dtype=torch.float64, requires_grad=True)


def assert_equal(actual: Tensor, expected: Tensor, inputs: Weights) -> None:
    """The same numbers and the same gradients of everything that they come from."""
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
    "channel": (ChannelMlp(12), channel_mlp()),
    "channel-tanh": (ChannelMlp(12, act="gelu_tanh"), channel_mlp(gelu_tanh)),
    "channel-relu": (ChannelMlp(12, act="relu"), channel_mlp(relu)),
    "none": (NoMixing(), identity),
}
CONVOLUTIONS: dict[str, tuple[Any, Equation]] = {
    f"conv-{kind}-{kernel}": (TokenConv(kind, kernel), token_conv)
    for kind in ("full", "depthwise", "separable")
    for kernel in (3, 5)
}
GATES: dict[str, tuple[Any, Equation]] = {
    f"gate-{combine}-{type(project).__name__.lower()}{'-causal' * causal}{'-attention' * bool(side)}": (
        ChannelMlp(12, inner=SpatialGate(combine, project, causal, side=side)),
        channel_mlp(inner=gate(combine, isinstance(project, Toeplitz), causal)),
    )
    for combine in ("split", "multiply", "add", "linear")
    for project in (Dense(), Toeplitz())
    for causal in (False, True)
    for side in (None, TinyAttention(5))
} | {
    "gate-attention-without-bias": (
        ChannelMlp(12, inner=SpatialGate(side=TinyAttention(5, bias=False))),
        channel_mlp(inner=gate("split", False, False)),
    ),
    "gate-eps": (
        ChannelMlp(12, inner=SpatialGate(norm=LayerNorm(0.1))),
        channel_mlp(inner=gate("split", False, False, eps=0.1)),
    ),
}
LAYERS = MIXERS | CONVOLUTIONS | GATES


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("name", "tokens"),
    [(name, TOKENS) for name in LAYERS] + [(name, TOKENS - 2) for name in LAYERS if name not in CONVOLUTIONS],
)
def test_layer(name, tokens, padded):
    spec, equation = LAYERS[name]
    layer, p = ready(spec.build(SITE))
    x, (mask, real) = activations(tokens), padding(padded, tokens)
    assert_equal(layer(x, Context(mask=mask)), equation(p, x, real), p | {"x": x})


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_cross_attention(padded):
    layer, p = ready(CrossAttention(HEADS).build(SITE))
    x, memory, (mask, real) = activations(4), activations(7), padding(padded, 7)
    expected = cross_attention(HEADS, memory, real)(p, x, torch.ones(3, 4))
    assert_equal(layer(x, Context(memory=memory, memory_mask=mask)), expected, p | {"x": x, "memory": memory})


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("normed", [LayerNorm(), Affine()], ids=["layernorm", "affine"])
@pytest.mark.parametrize("scale", [None, LayerScale(), LayerScale(shift=True)], ids=["plain", "scale", "scale-shift"])
def test_block(order, normed, scale):
    """ResMLP eq. 2-3 print the scale with a shift: Z = X + Aff(A Aff(X))."""
    spec = Block(TokenLinear(), channel=ChannelMlp(12), norm=normed, scale=scale, order=order)
    layer, p = ready(spec.build(SITE))
    x, (mask, real) = activations(), padding(True)
    expected = residual(within(p, "token"), x, real, token_linear(), order)
    expected = residual(within(p, "channel"), expected, real, channel_mlp(), order)
    assert_equal(layer(x, Context(mask=mask)), expected, p | {"x": x})


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("normed", [LayerNorm(), Affine()], ids=["layernorm", "affine"])
@pytest.mark.parametrize("layers", [1, 2])
def test_class_mlp(layers, normed, padded):
    block = Block(TokenLinear(), channel=ChannelMlp(12), norm=normed, scale=LayerScale())
    pool, p = ready(ClassMlp(layers).build(SITE, block))
    x, (mask, real) = activations(), padding(padded)
    joined = pool.prepare(x, Context(mask=mask))
    assert torch.equal(joined[:, 1:], x)
    assert_equal(pool(joined, mask), class_mlp(p, x, real, layers), p | {"x": x})


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_mean(padded):
    x, (mask, real) = activations(), padding(padded)
    expected = torch.stack([row[keep > 0].sum(0) / keep.sum() for row, keep in zip(x, real)])
    assert_equal(Mean().build(SITE, Block())(x, mask), expected, {"x": x})


@pytest.mark.parametrize("start", [0, 200])
def test_sinusoidal_positions(start):
    x, wave = activations(), torch.empty(TOKENS, WIDTH, dtype=torch.float64)
    for i, k in product(range(TOKENS), range(WIDTH // 2)):
        angle = (start + i) / 10_000 ** (2 * k / WIDTH)
        wave[i, 2 * k], wave[i, 2 * k + 1] = math.sin(angle), math.cos(angle)
    assert_same(Sinusoidal().build(start + TOKENS, WIDTH)(x, start), x + wave, "the output")


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
    f"gmlp-{combine}{'-causal' * causal}{'-attention' * bool(side)}": (
        gmlp_text(2, WIDTH, 12, TOKENS, VOCABULARY, combine, side, causal),
        {"channel": channel_mlp(inner=gate(combine, toeplitz=True, causal=causal))},
    )
    for combine in ("split", "multiply", "add", "linear")
    for causal in (False, True)
    for side in (None, TinyAttention(5))
} | {
    "mixer": (
        mixer_text(2, WIDTH, 5, 12, VOCABULARY).configure(length=TOKENS),
        {"token": token_mlp(gelu), "channel": channel_mlp()},
    )
}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", TEXT)
def test_text(name, padded):
    """A table, blocks, a norm, and the same table again."""
    spec, slots = TEXT[name]
    model, p = ready(spec.build())
    ids, table, (mask, real) = words(), p["stem.embedding.weight"], padding(padded)
    x = norm(within(p, "norm"), blocks(p, table[ids], real, 2, slots))
    assert_equal(model(ids, mask), torch.einsum("bsc,vc->bsv", x, table), p)


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
    """gMLP's baselines: one table of relative scores for all layers, beside the content's or alone."""
    tokens, eps = 12, 1e-12
    spec = Attention(HEADS, causal, RelativePositions(8, 20), scores)
    model, p = ready(bert(2, WIDTH, HEADS, spec, length=tokens, vocabulary=VOCABULARY).build())
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
    spec = resmlp(2, WIDTH, 0.1, patch=4, classes=5, **variant).configure(image=(8, 12))
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
    model, p = ready(resmlp_seq2seq(2, WIDTH, HEADS, length=9, vocabulary=VOCABULARY).build())
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
