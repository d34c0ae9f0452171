"""Segmentation with an all-MLP encoder: DPT of segmentation_models_pytorch.

    python examples/timm_segmentation.py
"""

from __future__ import annotations

import segmentation_models_pytorch as smp
import torch
from torch.nn.functional import cross_entropy

import allmlp.timm  # registers the encoders


def main(steps: int = 5) -> list[float]:
    model = smp.DPT(
        "tu-allmlp_mixer_nano", encoder_weights=None, encoder_depth=4, decoder_intermediate_channels=(32,) * 4, classes=2
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.rand(4, 3, 32, 32)
    masks = (images.mean(1) > 0.5).long()  # [B, H, W]
    losses = []
    for _ in range(steps):
        loss = cross_entropy(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.3f}" for loss in main()))
