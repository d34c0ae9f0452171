"""Segmentation with an all-MLP encoder: DPT of segmentation_models_pytorch.

python examples/timm_segmentation.py
"""

from __future__ import annotations

import segmentation_models_pytorch as smp
import torch
from torch.nn.functional import cross_entropy

import allmlp.timm  # noqa: F401, registers the encoders


def main(steps: int = 5) -> list[float]:
    model = smp.DPT("tu-allmlp_mixer_nano", encoder_weights=None, decoder_readout="ignore", classes=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    images, masks = torch.rand(4, 3, 32, 32) / 2, torch.zeros(4, 32, 32, dtype=torch.long)
    images[:, :, 8:24, 8:24] += 0.5  # a bright square on noise
    masks[:, 8:24, 8:24] = 1
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
