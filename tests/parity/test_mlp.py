"""The plain MLP against its definition: a linear map of the flattened image, residual blocks, a linear map."""

from __future__ import annotations

import pytest
import torch
from agree import Weights, assert_parity, relabel
from torch import Tensor, nn

import allmlp
from allmlp.models.mlp import mlp


class BottleneckMLP(nn.Module):
    """x + W2 gelu(W1 norm(x)) with four times as many hidden channels; no norm after the last block."""

    def __init__(self, pixels: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.linear_in, self.linear_out = nn.Linear(pixels, width), nn.Linear(width, classes)
        self.layernorms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.linear_in(images.flatten(1))
        for block, norm in zip(self.blocks, self.layernorms, strict=True):
            x = x + block(norm(x))
        return self.linear_out(x)


def rename(tensors: Weights) -> Weights:
    return relabel(
        tensors,
        {
            r"^linear_in\.": "stem.proj.",
            r"^linear_out\.": "head.proj.",
            r"^layernorms\.(\d+)\.": r"blocks.\1.channel.norm.",
            r"^blocks\.(\d+)\.0\.": r"blocks.\1.channel.mix.up.",
            r"^blocks\.(\d+)\.2\.": r"blocks.\1.channel.mix.down.",
        },
    )


def test_tiny():
    peer = BottleneckMLP(3 * 8 * 8, 12, 3, 5)
    assert_parity(mlp(3, 12, img_size=8, num_classes=5).build(), peer, rename, torch.randn(3, 3, 8, 8))


@pytest.mark.parametrize(("depth", "width"), [(6, 512), (12, 512), (6, 1024), (12, 1024)])
def test_same_tensors(depth, width):
    """ImageNet-21k at 64 pixels, as the weights were released."""
    with torch.device("meta"):
        ours, peer = allmlp.create(f"mlp_b{depth}_{width}"), BottleneckMLP(64 * 64 * 3, width, depth, 11_230)
    shapes = {key: tensor.shape for key, tensor in rename(dict(peer.named_parameters())).items()}
    assert shapes == {key: weight.shape for key, weight in ours.named_parameters()}
