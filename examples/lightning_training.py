"""A model of allmlp in Lightning: training, validation, checkpoints.

python examples/lightning_training.py digits
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import allmlp


class Classifier(lightning.LightningModule):
    def __init__(self, name: str, lr: float, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()  # with which load_from_checkpoint builds the model again
        self.lr = lr
        self.model = allmlp.create(name, **options)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, targets = batch
        loss = cross_entropy(self(images), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, targets = batch
        self.log("accuracy", (self(images).argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.05)


def main(folder: Path, epochs: int = 2) -> float:
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    train, test = random_split(data, [1500, 297], torch.Generator().manual_seed(0))

    sizes = {"num_classes": 10, "in_chans": 1, "img_size": 8, "patch_size": 2, "overrides": {"depth": 2}}
    module = Classifier("mixer_nano", lr=3e-3, **sizes)
    best = ModelCheckpoint(folder / "checkpoints", monitor="accuracy", mode="max")
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[best], default_root_dir=folder, logger=False)
    trainer.fit(module, DataLoader(train, 64, shuffle=True), DataLoader(test, 64))

    module = Classifier.load_from_checkpoint(best.best_model_path)
    allmlp.save(module.model, folder)  # for allmlp.load, `allmlp predict`, `allmlp export` ...
    return float(best.best_model_score)


if __name__ == "__main__":
    print(f"accuracy {main(Path(sys.argv[1])):.3f}")
