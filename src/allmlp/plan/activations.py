"""The grammar walked without numbers: what each part of a sentence keeps for the backward pass.

One function per kind mirrors its module's forward pass, operation by operation, on a `Tape`.
"""

from __future__ import annotations

from functools import cache, singledispatch
from typing import NamedTuple

from allmlp.errors import UserError
from allmlp.layers import (
    Affine,
    Attention,
    Block,
    ChannelMlp,
    Classes,
    ClassMlp,
    CrossAttention,
    LayerNorm,
    Mean,
    NoMixing,
    Pair,
    Patches,
    SpatialGate,
    TinyAttention,
    TokenConv,
    TokenLinear,
    TokenMlp,
    Tokens,
    Vocabulary,
)
from allmlp.layers.mixers.projection import Dense, Projection
from allmlp.layers.norm import Norm
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import ModelSpec
from allmlp.plan.tape import FLOAT32, INDEX, Arithmetic, Tape, Value
from allmlp.spec import Spec

ASKED = 0.15
"""The share of the tokens that a masked language model is asked for: its head runs for these alone."""


class Place(NamedTuple):
    """Sizes that the parent hands down."""

    batch: int
    tokens: int
    channels: int
    drop_path: float = 0.0
    memory: Value | None = None
    """What cross-attention reads."""

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


class Stack(NamedTuple):
    """Bytes that one encoder or decoder keeps for one batch."""

    stem: int
    blocks: int
    """All of them together."""
    largest: int
    """The largest of them."""
    widest: int
    """The largest single tensor of it."""
    inputs: int
    """All of them, if each keeps its input alone and is computed again (gradient checkpointing)."""
    head: int
    """Last norm, pool, head and loss."""
    copies: int
    """Weights in the width of the products."""


class Activations(NamedTuple):
    stacks: tuple[Stack, ...]

    def kept(self, checkpointing: bool = False) -> int:
        """What is there at the end of the forward pass; with checkpointing of each block its input alone."""
        return sum(s.stem + s.head + (s.inputs if checkpointing else s.blocks) for s in self.stacks)

    @property
    def copies(self) -> int:
        return sum(stack.copies for stack in self.stacks)


@cache
def activations(spec: ModelSpec, batch: int, arithmetic: Arithmetic) -> Activations:
    """What a training step with `batch` examples of full size keeps for its backward pass."""
    if isinstance(spec, EncoderDecoder):
        source, memory = walk(spec.encoder, batch, arithmetic)
        target, _ = walk(spec.decoder, batch, arithmetic, memory)
        return Activations((source, target))
    if isinstance(spec, Encoder):
        return Activations((walk(spec, batch, arithmetic)[0],))
    raise UserError(f"the plan counts models of the grammar, and {type(spec).__name__} is none: see allmlp list")


def asked(spec: Encoder) -> int:
    """For how many tokens of an example the head runs: one that is pooled, all, or those that were hidden."""
    if spec.pool is not None:
        return 1
    masked = isinstance(spec.head, Vocabulary) and not spec.block.causal
    return max(round(ASKED * spec.stem.tokens), 1) if masked else spec.stem.tokens


def outputs(spec: Encoder) -> int:
    """Scores of a token, or of the example where the head reads one vector."""
    if isinstance(spec.head, (Classes, Pair)):
        return spec.head.classes
    if isinstance(spec.head, Vocabulary):
        assert isinstance(spec.stem, Tokens), "a Vocabulary head comes with a Tokens stem"
        return spec.stem.vocabulary
    return 2  # Span: start and end


def walk(spec: Encoder, batch: int, arithmetic: Arithmetic, memory: Value | None = None) -> tuple[Stack, Value]:
    """One stack from its input to its loss; also its features, for a decoder to read."""
    tape = Tape(arithmetic)
    place = Place(batch, spec.stem.tokens, spec.width, memory=memory)
    x = stem(spec.stem, place, tape)
    token = spec.block.token
    if isinstance(token, Attention) and token.bias is not None:
        tape.keep(Value(place.tokens**2, INDEX))  # which score each pair of tokens has
    start, sizes, inputs = tape.bytes, [], 0
    before = start
    for number in range(spec.depth):
        inputs += x.bytes
        x = block(spec.block, x, place._replace(drop_path=spec.drop_path.at(number, spec.depth)), tape)
        sizes.append(tape.bytes - before)
        before += sizes[-1]
    widest = max(value.bytes for value in tape.kept.values())
    if isinstance(spec.pool, ClassMlp):
        x = class_mlp(spec.pool, spec.block, x, place, tape)
    x = norm(spec.norm, x, place.channels, tape) if spec.norm else x
    if spec.head is not None:
        head(spec, x, place, tape)
    return Stack(start, sum(sizes), max(sizes), widest, inputs, tape.bytes - before, tape.copies), x


# --- stem, pool, head ---------------------------------------------------------------------------------


@singledispatch
def stem(spec: Spec, place: Place, tape: Tape) -> Value:
    raise unknown(spec)


@stem.register
def _(spec: Patches, place: Place, tape: Tape) -> Value:
    pixels = spec.in_channels * spec.patch[0] * spec.patch[1]
    patches = place.tokens - spec.class_token
    x = tape.linear(Value(place.batch * patches * pixels, FLOAT32), pixels, place.channels)
    if spec.class_token or spec.positions:
        x = Value(place.rows * place.channels, FLOAT32)  # joined with float32 weights
    return x


@stem.register
def _(spec: Tokens, place: Place, tape: Tape) -> Value:
    tape.keep(Value(place.rows, INDEX))
    x = Value(place.rows * place.channels, FLOAT32)
    if spec.norm is not None:
        x = norm(spec.norm, x, place.channels, tape)
    return tape.dropout(x, spec.dropout)


def class_mlp(spec: ClassMlp, parent: Block, x: Value, place: Place, tape: Tape) -> Value:
    single = place._replace(tokens=1, drop_path=0.0)
    c = Value(place.batch * place.channels, FLOAT32)
    channel = parent.channel.replace(inner=None) if parent.channel else ChannelMlp(4 * place.channels)
    for _ in range(spec.layers):
        c_normed = norm(parent.norm, c, place.channels, tape)
        x_normed = norm(parent.norm, x, place.channels, tape)
        joined = tape.cast(Value(c_normed.elements + x_normed.elements, x_normed.width), tape.arithmetic.product)
        tape.keep(joined)
        tape.weight(place.tokens + 1)
        gathered = tape.biased(Value(c.elements, joined.width))
        c = tape.add(c, tape.scale(gathered) if parent.scale else gathered)
        c = residual(parent, channel, c, single, tape)
    return Value(c.elements + x.elements, max(c.width, x.width))


def head(spec: Encoder, x: Value, place: Place, tape: Tape) -> None:
    """Scores and the cross-entropy of as many of them as are asked for."""
    rows, channels = place.batch * asked(spec), place.channels
    if spec.pool is None and rows < place.rows:
        tape.keep(x, Value(rows * channels, INDEX))  # features, and which of them are asked for
    # The first token is a view of all, a mean is not.
    x = Value(rows * channels, x.width, None if isinstance(spec.pool, Mean) or spec.pool is None else x)
    if isinstance(spec.head, Pair):
        x = Value(rows * channels, tape.linear(x, channels, channels).width)
        tape.keep(x)
    if isinstance(spec.head, (Classes, Pair)):
        x = tape.dropout(x, spec.head.dropout)
    if isinstance(spec.head, Vocabulary) and spec.head.transform:
        x = norm(spec.head.norm, tape.act(tape.linear(x, channels, channels), spec.head.act), channels, tape)
    scores = tape.linear(x, channels, outputs(spec))
    tape.keep(Value(scores.elements, FLOAT32), Value(rows, INDEX))  # log-probabilities, targets


# --- the block -----------------------------------------------------------------------------------------


def block(spec: Block, x: Value, place: Place, tape: Tape) -> Value:
    for part in (spec.token, spec.cross, spec.channel):
        if part is not None:
            x = residual(spec, part, x, place, tape)
    return x


def residual(spec: Block, part: Spec, x: Value, place: Place, tape: Tape) -> Value:
    y = x if spec.order == "post" else norm(spec.norm, x, place.channels, tape)
    y = tape.dropout(mix(part, y, place, tape), spec.dropout)
    if spec.scale is not None:
        y = tape.scale(y)
    if place.drop_path:
        tape.keep(Value(place.batch, y.width))
    x = tape.add(x, y)
    return norm(spec.norm, x, place.channels, tape) if spec.order == "post" else x


def norm(spec: Norm, x: Value, channels: int, tape: Tape) -> Value:
    if isinstance(spec, LayerNorm):
        return tape.layer_norm(x, channels)
    if isinstance(spec, Affine):
        return tape.scale(x)
    raise unknown(spec)


@singledispatch
def mix(spec: Spec, x: Value, place: Place, tape: Tape) -> Value:
    """What stands in a slot of the block: from S x C to S x C."""
    raise unknown(spec)


@mix.register
def _(spec: NoMixing, x: Value, place: Place, tape: Tape) -> Value:
    return x


@mix.register
def _(spec: TokenLinear, x: Value, place: Place, tape: Tape) -> Value:
    return project(spec.project, spec.causal, x, place.tokens, tape)


def project(spec: Projection, causal: bool, x: Value, tokens: int, tape: Tape) -> Value:
    made = causal or not isinstance(spec, Dense)
    return tape.biased(tape.mix(x, tokens, tokens, made))


@mix.register
def _(spec: TokenMlp, x: Value, place: Place, tape: Tape) -> Value:
    hidden = spec.width(place.tokens)
    h = tape.mix(x, hidden, place.tokens)
    if tape.arithmetic.fused:
        return tape.mix(tape.again_in_operator(h), place.tokens, hidden)
    return tape.biased(tape.mix(tape.act(tape.biased(h), spec.act), place.tokens, hidden))


@mix.register
def _(spec: TokenConv, x: Value, place: Place, tape: Tape) -> Value:
    x, channels = Value(x.elements, tape.arithmetic.product), place.channels
    tape.keep(x)
    tape.weight(spec.kernel**2 * channels * (channels if spec.variant == "full" else 1))
    y = Value(x.elements, x.width)
    if spec.variant == "separable":
        tape.keep(y)
        tape.weight(channels**2)
        y = Value(y.elements, y.width)
    return y


@mix.register
def _(spec: Attention, x: Value, place: Place, tape: Tape) -> Value:
    channels, bias = place.channels, spec.heads * place.tokens**2 if spec.bias else 0
    if spec.scores == "bias":
        v = tape.linear(x, channels, channels)
        tape.softmax(Value(bias, FLOAT32))
        tape.keep(v, Value(place.batch * bias, v.width))  # one copy of the weights for each example
        return tape.linear(Value(v.elements, v.width), channels, channels)
    q = kv = tape.linear(x, channels, 3 * channels).part(3)
    return tape.linear(tape.attend(q, kv, channels, spec.heads, bias, place.batch), channels, channels)


@mix.register
def _(spec: CrossAttention, x: Value, place: Place, tape: Tape) -> Value:
    assert place.memory is not None, "a decoder is walked behind its encoder"
    channels = place.channels
    q, kv = tape.linear(x, channels, channels), tape.linear(place.memory, channels, 2 * channels)
    return tape.linear(tape.attend(q, kv, channels, spec.heads), channels, channels)


@mix.register
def _(spec: ChannelMlp, x: Value, place: Place, tape: Tape) -> Value:
    h = tape.linear(x, place.channels, spec.hidden)
    if tape.arithmetic.fused and not spec.dropout and (spec.inner is None or spec.inner.is_plain):
        return fused_mlp(spec, h, place, tape)
    h = tape.act(h, spec.act)
    h, width = tape.dropout(h, spec.dropout), spec.hidden
    if spec.inner is not None:
        h, width = gate(spec.inner, h, x, spec.hidden, place, tape), spec.inner.width(spec.hidden)
    return tape.linear(h, width, place.channels)


def fused_mlp(spec: ChannelMlp, h: Value, place: Place, tape: Tape) -> Value:
    """As one operator: of what comes after `h` it keeps the product over tokens and the norm's statistics alone."""
    h, width = tape.again_in_operator(h), spec.hidden
    if spec.inner is not None:
        width = spec.inner.width(spec.hidden)
        product = Value(place.rows * width, h.width)
        tape.keep(product, Value(2 * place.rows, FLOAT32))
        tape.weight(place.tokens**2, made=spec.inner.causal or not isinstance(spec.inner.project, Dense))
    tape.weight(width * place.channels)
    return Value(place.rows * place.channels, h.width)


def gate(spec: SpatialGate, z: Value, x: Value, hidden: int, place: Place, tape: Tape) -> Value:
    width = spec.width(hidden)
    u, v = (z.part(2), z.part(2)) if spec.combine == "split" else (z, z)
    f = project(spec.project, spec.causal, norm(spec.norm, v, width, tape), place.tokens, tape)
    if spec.side is not None:
        f = tape.add(f, side(spec.side, x, width, place, tape))
    if spec.combine == "linear":
        return f
    return tape.add(u, f) if spec.combine == "add" else tape.multiply(u, f)


def side(spec: TinyAttention, x: Value, width: int, place: Place, tape: Tape) -> Value:
    q = kv = tape.linear(x, place.channels, 3 * spec.channels).part(3)
    return tape.linear(tape.attend(q, kv, spec.channels, 1), spec.channels, width)


def unknown(spec: Spec) -> UserError:
    return UserError(f"what a {type(spec).__name__} keeps for the backward pass is not written in plan/activations.py")
