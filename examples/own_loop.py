"""Your own loop: plain PyTorch with an average of the weights (EMA), a folder for `allmlp predict`, and an export.

python examples/own_loop.py digits
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, random_split

import allmlp
from allmlp.data.preprocessing import ImagePreprocessing

MEAN, STD = 0.305, 0.376


def main(folder: Path, epochs: int = 3) -> float:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset((images - MEAN) / STD, torch.tensor(labels))
    train, test = random_split(data, [1500, 297], torch.Generator().manual_seed(0))

    model = allmlp.create("mixer_nano", num_classes=10, in_chans=1, img_size=8, patch_size=2, overrides={"depth": 2})
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0}], lr=3e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    for _ in range(epochs):
        for inputs, targets in DataLoader(train, 64, shuffle=True):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)

    model = average.module.eval()
    inputs, targets = next(iter(DataLoader(test, len(test))))
    with torch.inference_mode():
        accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    model.preprocessing = ImagePreprocessing((MEAN,), (STD,), class_names=tuple("0123456789"))
    allmlp.save(model, folder)  # for allmlp.load, `allmlp predict`, `allmlp serve`, `allmlp export` ...
    torch.export.save(torch.export.export(model, (inputs[:1],)), folder / "digits.pt2")
    return accuracy


if __name__ == "__main__":
    print(f"accuracy {main(Path(sys.argv[1])):.3f}")
