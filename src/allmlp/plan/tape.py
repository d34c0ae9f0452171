"""What autograd keeps between the forward and the backward pass, operation by operation.

A value is known by the number of its elements and their width alone; each operation says what it keeps and how wide
its answer is. Widths follow autocast: products run in `product` bytes, a sum or product of two values is as wide as
the wider one, weights have 4 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FLOAT32 = 4
INDEX = 8
"""Bytes of a whole number: token ids, positions."""


@dataclass(frozen=True)
class Arithmetic:
    """Bytes of a number, by where it is used."""

    product: int
    """In and out of matrix products and convolutions."""
    norm: int | None = None
    """What LayerNorm and softmax read; None where they take what comes."""
    spelled_out: bool = False
    """Whether attention with learned relative scores runs product by product, for want of a kernel that knows them."""
    fused: bool = False
    """Whether MLPs learn by the operators of `kernels`, which keep no activations, norms and gates."""
    compiled: bool = False
    """Whether what a wider copy or an activation function gives is computed again instead of being kept."""


CUDA_BFLOAT16 = Arithmetic(product=2, norm=4, fused=True)
"""Autocast on a GPU: products in bfloat16, statistics in float32."""
CUDA_FLOAT32 = Arithmetic(product=4, norm=4)
CPU_BFLOAT16 = Arithmetic(product=2, spelled_out=True)
"""Autocast on a CPU leaves LayerNorm alone."""
CPU_FLOAT32 = Arithmetic(product=4, norm=4, spelled_out=True)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor: so many elements of so many bytes. Two values are the same only if they are the same object."""

    elements: int
    width: int
    whole: Value | None = None
    """What it is a view of: keeping a part keeps it all."""

    @property
    def bytes(self) -> int:
        return self.elements * self.width

    def part(self, share: int) -> Value:
        """The `share`-th part of it, without a copy."""
        return Value(self.elements // share, self.width, self.whole or self)


@dataclass
class Tape:
    arithmetic: Arithmetic
    kept: dict[int, Value] = field(default_factory=dict)
    copies: int = 0
    """Bytes of weights that were copied: into the width of the products, or into a matrix from fewer numbers."""

    @property
    def bytes(self) -> int:
        return sum(value.bytes for value in self.kept.values())

    def keep(self, *values: Value) -> None:
        for value in values:
            owner = value.whole or value
            self.kept[id(owner)] = owner

    def cast(self, x: Value, width: int | None) -> Value:
        if width is None or width == x.width:
            return x
        return self.again(x, width) if width > x.width else Value(x.elements, width)

    def again(self, x: Value, width: int) -> Value:
        """What can be computed from `x` element by element: compiled, keeping it is keeping x."""
        return Value(x.elements, width, (x.whole or x) if self.arithmetic.compiled else None)

    def weight(self, elements: int, made: bool = False) -> None:
        """A weight of a product; `made` of other numbers it is a copy in any width."""
        if made or self.arithmetic.product != FLOAT32:
            self.copies += elements * self.arithmetic.product

    def linear(self, x: Value, inputs: int, outputs: int) -> Value:
        """X W^T + b over the last axis."""
        x = self.cast(x, self.arithmetic.product)
        self.keep(x)
        self.weight(inputs * outputs)
        return Value(x.elements // inputs * outputs, x.width)

    def mix(self, x: Value, rows: int, columns: int, made: bool = False) -> Value:
        """W X over tokens. Where no operator does it, its input is kept as another copy, laid out for the product."""
        arithmetic, width = self.arithmetic, self.arithmetic.product
        x = self.cast(x, width) if arithmetic.compiled or arithmetic.fused else Value(x.elements, width)
        self.keep(x)
        self.weight(rows * columns, made)
        return Value(x.elements // columns * rows, x.width)

    def biased(self, x: Value) -> Value:
        """With a vector of weights added by hand: as wide as the weights."""
        return self.cast(x, max(x.width, FLOAT32))

    def add(self, x: Value, y: Value) -> Value:
        return Value(max(x.elements, y.elements), max(x.width, y.width))

    def multiply(self, x: Value, y: Value) -> Value:
        self.keep(x, y)
        return self.add(x, y)

    def scale(self, x: Value) -> Value:
        """Times a vector of weights."""
        self.keep(x)
        return Value(x.elements, max(x.width, FLOAT32))

    def layer_norm(self, x: Value, channels: int) -> Value:
        """Keeps its input and two statistics of each row."""
        x = self.cast(x, self.arithmetic.norm)
        self.keep(x, Value(2 * x.elements // channels, FLOAT32))
        return Value(x.elements, x.width)

    def act(self, x: Value, name: str) -> Value:
        """GELU needs its input, ReLU its output."""
        y = self.again(x, x.width)
        self.keep(y if name == "relu" else x)
        return y

    def again_in_operator(self, x: Value) -> Value:
        """What an operator computes of `x` and again from it."""
        self.keep(x)
        return Value(x.elements, x.width, x.whole or x)

    def dropout(self, x: Value, rate: float) -> Value:
        if rate == 0:
            return x
        self.keep(Value(x.elements, 1))
        return Value(x.elements, x.width)

    def softmax(self, x: Value) -> Value:
        y = Value(x.elements, self.arithmetic.norm or x.width)
        self.keep(y)
        return y

    def attend(self, q: Value, kv: Value, channels: int, heads: int, bias: int = 0, batch: int = 1) -> Value:
        """softmax(Q K^T + bias) V in one kernel: queries, keys, values, the answer, one number of each row, not the
        scores. `bias` is the number of relative scores, the same for the whole batch.
        """
        y = Value(q.elements, q.width)
        if bias and self.arithmetic.spelled_out:
            self.keep(*(Value(q.elements, FLOAT32) for _ in "qkv"), Value(batch * bias, FLOAT32))
            return y
        self.keep(q, kv, y, Value(q.elements // channels * heads, FLOAT32))
        if bias:
            self.keep(Value(bias, q.width))
        return y
