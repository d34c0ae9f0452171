"""Your own loop with Hugging Face accelerate, on one device or several.

accelerate launch examples/accelerate_loop.py digits
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import allmlp


def main(folder: str, epochs: int = 3) -> float:
    accelerator = Accelerator()
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    train, test = random_split(data, [1500, 297], torch.Generator().manual_seed(0))

    model = allmlp.create("gmlp_nano", num_classes=10, in_chans=1, img_size=8, patch_size=2, overrides={"depth": 2})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, batches, test_batches = accelerator.prepare(
        model, optimizer, DataLoader(train, 64, shuffle=True), DataLoader(test, 64)
    )
    for _ in range(epochs):
        for images, targets in batches:
            accelerator.backward(cross_entropy(model(images), targets))
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    right = []
    with torch.inference_mode():
        for images, targets in test_batches:
            right.append(accelerator.gather_for_metrics(model(images).argmax(1) == targets))
    accuracy = torch.cat(right).float().mean().item()
    accelerator.print(f"accuracy {accuracy:.3f} on {accelerator.num_processes} processes")
    if accelerator.is_main_process:
        allmlp.save(accelerator.unwrap_model(model), folder)
    accelerator.end_training()
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1])
