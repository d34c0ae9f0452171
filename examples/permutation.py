"""Which layers know the order of their tokens? Permute the tokens before a layer and after it, and compare.

python examples/permutation.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allmlp.nn import Attention, ChannelMlp, SpatialGatingUnit, TokenConv, TokenLinear, TokenMlp

GRID, CHANNELS = (4, 4), 32


def layers() -> dict[str, nn.Module]:
    tokens = GRID[0] * GRID[1]
    return {
        "channel MLP": ChannelMlp(CHANNELS),
        "self-attention": Attention(CHANNELS, num_heads=4),
        "self-attention, causal": Attention(CHANNELS, num_heads=4, causal=True),
        "self-attention with rotary positions": Attention(CHANNELS, num_heads=4, rope_theta=100.0),
        "token MLP (Mixer)": TokenMlp(tokens, hidden=24),
        "token linear (ResMLP)": TokenLinear(tokens),
        "spatial gating unit (gMLP)": SpatialGatingUnit(tokens, CHANNELS),
        "convolution over patches": TokenConv(GRID, CHANNELS),
    }


@torch.no_grad()
def difference(layer: nn.Module, x: Tensor, order: Tensor) -> float:
    """|f(PX) - P f(X)| / |f(X)|: 0 if the layer treats its tokens as a set (it is permutation equivariant)."""
    y = layer(x)
    return float((layer(x[:, order]) - y[:, order]).norm() / y.norm())


def main() -> dict[str, float]:
    torch.manual_seed(0)
    x, order = torch.randn(8, GRID[0] * GRID[1], CHANNELS).double(), torch.randperm(GRID[0] * GRID[1])
    found = {}
    for name, layer in layers().items():
        for weight in layer.double().parameters():  # as after training: no weight is zero
            nn.init.normal_(weight, std=0.3)
        found[name] = difference(layer, x, order)
        verdict = "does not know the order" if found[name] < 1e-9 else "knows the order"
        print(f"{name:38}{found[name]:9.1e}   {verdict}")
    return found


if __name__ == "__main__":
    main()
