"""Square matrices over tokens: free or Toeplitz, bidirectional or causal, cropped to the input's length."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.kernels import training_dtype
from allmlp.kernels.token_matmul.op import token_matmul
from allmlp.layers.context import Context, check_tokens
from allmlp.layers.init import Init
from allmlp.layers.norm import AffineLayer
from allmlp.layers.token_roles import TokenRole
from allmlp.spec import Spec


class Projection(Spec, abstract=True):
    """How the S x S matrix over tokens is parametrized."""

    def shape(self, tokens: int, causal: bool) -> tuple[int, ...]:
        raise NotImplementedError

    def matrix(self, weight: Tensor, start: int, stop: int, causal: bool) -> Tensor:
        """Rows start..stop-1 and columns 0..stop-1 of the matrix."""
        raise NotImplementedError

    def crop(self, weight: Tensor, tokens: int, causal: bool) -> Tensor:
        """The weight for another number of tokens: the same entries where both matrices have them, 0 elsewhere."""
        raise NotImplementedError


class Dense(Projection):
    """Every entry is a parameter: S^2 of them. A causal matrix is masked in the forward pass, so that no optimizer step
    can fill its upper triangle.

        W[i, j] = w[i, j]
    """

    def shape(self, tokens: int, causal: bool) -> tuple[int, ...]:
        return tokens, tokens

    def matrix(self, weight: Tensor, start: int, stop: int, causal: bool) -> Tensor:
        block = weight[start:stop, :stop]
        return block.tril(start) if causal else block

    def crop(self, weight: Tensor, tokens: int, causal: bool) -> Tensor:
        more = tokens - len(weight)
        return F.pad(weight, (0, more, 0, more))


class Toeplitz(Projection):
    """One parameter per distance: 2S - 1 of them (S if causal). The leading submatrix is the Toeplitz matrix of the
    cropped vector.

        W[i, j] = w[j - i + S - 1]

    Source: gMLP, appendix C; used in its language models.
    """

    def shape(self, tokens: int, causal: bool) -> tuple[int, ...]:
        return (tokens if causal else 2 * tokens - 1,)

    def matrix(self, weight: Tensor, start: int, stop: int, causal: bool) -> Tensor:
        if causal:
            weight = F.pad(weight, (0, weight.shape[0] - 1))
        tokens = (weight.shape[0] + 1) // 2
        if stop - start == 1:
            return weight[tokens - stop : tokens].unsqueeze(0)
        # Row i starts at w[S-1-i]: the rows are the windows of w in reverse order.
        return weight[tokens - stop : tokens - 1 - start + stop].unfold(0, stop, 1).flip(0)

    def crop(self, weight: Tensor, tokens: int, causal: bool) -> Tensor:
        # The diagonal is in the middle of the vector, or last if causal.
        more = tokens - (len(weight) if causal else (len(weight) + 1) // 2)
        return F.pad(weight, (more, 0 if causal else more))


class TokenProjection(nn.Module):
    """Y[i] = sum_j W[i, j] X[j] + b[i], the same for every channel."""

    def __init__(self, spec: Projection, tokens: int, causal: bool, init: Init) -> None:
        super().__init__()
        self.spec, self.tokens, self.causal, self.init = spec, tokens, causal, init
        self.weight = nn.Parameter(torch.empty(spec.shape(tokens, causal)))
        self.bias = nn.Parameter(torch.empty(tokens))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.init.weight.fill(self.weight, self.tokens)
        self.init.bias.fill(self.bias, self.tokens)

    @property
    def token_roles(self) -> dict[str, TokenRole]:
        return {"weight": "square" if isinstance(self.spec, Dense) else "square parameters", "bias": "out"}

    def matrix(self, start: int = 0, stop: int | None = None) -> Tensor:
        check_tokens(stop or self.tokens, self.tokens)
        return self.spec.matrix(self.weight, start, stop or self.tokens, self.causal)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        start = context.start()
        if context.cache is not None:
            x = context.cache.extend(self, x)
        x, stop = context.zero_padding(x), x.shape[1]
        matrix, dtype = self.matrix(start, stop), training_dtype(x)
        if (same_document := context.same_document()) is not None:  # a matrix per row, with zeros between documents
            return (matrix * same_document) @ x + self.bias[start:stop, None]
        y = matrix @ x if dtype is None else token_matmul(matrix, x.to(dtype))
        return y + self.bias[start:stop, None]

    def folded(self, x: Tensor, context: Context, norm: AffineLayer, gamma: Tensor) -> Tensor | None:
        """gamma * f(norm(x)) in training on a GPU; a factor per channel commutes with a matrix over tokens:

            gamma (A (alpha x + beta) + b) = (gamma alpha) (A x) + gamma (beta A 1 + b)

        None where the product is not fused, and in float16, as in channel MLPs.
        """
        dtype = training_dtype(x)
        if dtype in (None, torch.float16) or context.is_special() or context.mask is not None:
            return None
        tokens = x.shape[1]
        matrix = self.matrix(0, tokens)
        shift = gamma * (matrix.sum(1, keepdim=True) * norm.beta + self.bias[:tokens, None])  # s c
        return torch.addcmul(shift, gamma * norm.alpha, token_matmul(matrix, x.to(dtype)))

    def extra_repr(self) -> str:
        return f"{self.spec!r}, tokens={self.tokens}, causal={self.causal}"
