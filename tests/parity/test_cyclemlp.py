"""CycleMLP against a plain copy of its definition: convolutions, and linear maps of channels read elsewhere."""

from __future__ import annotations

import pytest
import torch
from agree import Weights, assert_parity, relabel
from torch import Tensor, nn

import allmlp
from allmlp.models.cyclemlp import cyclemlp

DEPTHS, WIDTHS = (2, 1, 1), (8, 12, 20)


class CycleFC(nn.Conv2d):
    """A 1x1 convolution whose input channel i is sampled (i + k // 2) mod k - k // 2 pixels away; zeros outside."""

    def __init__(self, width: int, kernel: tuple[int, int]) -> None:
        super().__init__(width, width, 1)
        steps = [(i + max(kernel) // 2) % max(kernel) - max(kernel) // 2 for i in range(width)]
        self.offsets = [(0, step) if kernel[0] == 1 else (step, 0) for step in steps]

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[2:]
        sampled = []
        for channel, (down, right) in enumerate(self.offsets):
            rows, columns = torch.arange(height) + down, torch.arange(width) + right
            inside = ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))[None]
            values = image[:, channel][:, rows.clamp(0, height - 1)][:, :, columns.clamp(0, width - 1)]
            sampled.append(values * inside)
        return super().forward(torch.stack(sampled, dim=1))


class Mlp(nn.Sequential):
    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


class Mixing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp_c = nn.Linear(width, width, bias=False)
        self.sfc_h, self.sfc_w = CycleFC(width, (1, 3)), CycleFC(width, (3, 1))
        self.reweight = Mlp(width, width // 4, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # b h w c
        image = x.permute(0, 3, 1, 2)
        h, w = (fc(image).permute(0, 2, 3, 1) for fc in (self.sfc_h, self.sfc_w))
        c = self.mlp_c(x)
        a = self.reweight((h + w + c).mean((1, 2))).view(len(x), -1, 3).softmax(2)[:, None, None]
        return self.proj(h * a[..., 0] + w * a[..., 1] + c * a[..., 2])


class CycleBlock(nn.Module):
    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Mixing(width), Mlp(width, ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CycleNet(nn.Module):
    """Stages of blocks with a convolution of stride 2 between them, all in one list."""

    def __init__(self, depths: tuple[int, ...], widths: tuple[int, ...], ratios: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, widths[0], 7, stride=4, padding=2)
        parts: list[nn.Module] = []
        for i, (depth, width, ratio) in enumerate(zip(depths, widths, ratios, strict=True)):
            if i:
                parts.append(nn.Conv2d(widths[i - 1], width, 3, stride=2, padding=1))
            parts += [CycleBlock(width, ratio) for _ in range(depth)]
        self.network = nn.ModuleList(parts)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).permute(0, 2, 3, 1)
        for part in self.network:
            is_block = isinstance(part, CycleBlock)
            x = part(x) if is_block else part(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.head(self.norm(x).mean((1, 2)))


def rename(tensors: Weights) -> Weights:
    """Blocks are numbered without the convolutions between them, and these by the block that follows."""
    positions = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("network.")})
    merges = [i for i in positions if f"network.{i}.weight" in tensors]
    rules = {rf"^network\.{i}\.(weight|bias)$": rf"merges.{i - merges.index(i)}.proj.\1" for i in merges}
    for i in positions:
        rules[rf"^network\.{i}\."] = f"blocks.{i - sum(merge < i for merge in merges)}."
    renamed = relabel(
        tensors,
        rules
        | {
            r"^patch_embed\.": "stem.proj.",
            r"^head\.": "head.proj.",
            r"\.norm1\.": ".token.norm.",
            r"\.norm2\.": ".channel.norm.",
            r"\.attn\.sfc_h\.": ".token.mix.horizontal.",
            r"\.attn\.sfc_w\.": ".token.mix.vertical.",
            r"\.attn\.mlp_c\.": ".token.mix.unmoved.",
            r"\.attn\.reweight\.0\.": ".token.mix.reweight_up.",
            r"\.attn\.reweight\.2\.": ".token.mix.reweight_down.",
            r"\.attn\.proj\.": ".token.mix.out.",
            r"\.mlp\.0\.": ".channel.mix.up.",
            r"\.mlp\.2\.": ".channel.mix.down.",
        },
    )
    return {name: tensor.flatten(1) if tensor.dim() > 2 else tensor for name, tensor in renamed.items()}


@pytest.mark.parametrize("image", [(32, 32), (36, 52)], ids=["even", "odd"])
def test_tiny(image):
    """Grids of 9 x 13 tokens are merged to 5 x 7 and 3 x 4."""
    ours = allmlp.create(cyclemlp(DEPTHS, WIDTHS, (2, 4, 3), num_classes=5), img_size=image)
    assert_parity(ours, CycleNet(DEPTHS, WIDTHS, (2, 4, 3), 5), rename, torch.randn(2, 3, *image))


SIZES = {
    "cyclemlp_b1": ((2, 2, 4, 2), (64, 128, 320, 512), (4, 4, 4, 4)),
    "cyclemlp_b2": ((2, 3, 10, 3), (64, 128, 320, 512), (4, 4, 4, 4)),
    "cyclemlp_b3": ((3, 4, 18, 3), (64, 128, 320, 512), (8, 8, 4, 4)),
    "cyclemlp_b4": ((3, 8, 27, 3), (64, 128, 320, 512), (8, 8, 4, 4)),
    "cyclemlp_b5": ((3, 4, 24, 3), (96, 192, 384, 768), (4, 4, 4, 4)),
}


@pytest.mark.parametrize("name", SIZES)
def test_same_tensors(name):
    with torch.device("meta"):
        ours, peer = allmlp.create(name), CycleNet(*SIZES[name], 1000)
    shapes = {key: tensor.shape for key, tensor in rename(dict(peer.named_parameters())).items()}
    assert shapes == {key: weight.shape for key, weight in ours.named_parameters()}
