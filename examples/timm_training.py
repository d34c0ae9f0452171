"""A model of allmlp trained by the parts of timm: dataset, loader, Mixup, optimizer, scheduler, EMA, checkpoints.

python examples/timm_training.py photos out        # photos/train/CLASS/*.jpg, photos/validation/CLASS/*.jpg
"""

from __future__ import annotations

import sys
from pathlib import Path

import timm
import torch
from timm.data import Mixup, create_dataset, create_loader, resolve_model_data_config
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3

import allmlp
import allmlp.timm


def main(photos: Path, out: Path, epochs: int = 2, img_size: int = 32) -> float:
    classes = len(list((photos / "train").iterdir()))
    model = timm.create_model("allmlp_mixer_nano", num_classes=classes, img_size=img_size)
    config = resolve_model_data_config(model)
    train, validation = (
        create_loader(
            create_dataset("", root=photos, split=split, is_training=training),
            input_size=config["input_size"],
            mean=config["mean"],
            std=config["std"],
            crop_pct=config["crop_pct"],
            batch_size=8,
            is_training=training,
            use_prefetcher=False,
            num_workers=0,
            persistent_workers=False,
        )
        for split, training in (("train", True), ("validation", False))
    )
    mixup, criterion = Mixup(mixup_alpha=0.2, num_classes=classes), SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.01, layer_decay=0.8)
    scheduler, epochs = create_scheduler_v2(optimizer, num_epochs=epochs)
    ema = ModelEmaV3(model, decay=0.5)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(out), recovery_dir=str(out))
    for epoch in range(epochs):
        model.train()
        for images, targets in train:
            mixed, soft = mixup(images, targets)
            loss = criterion(model(mixed), soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
        scheduler.step(epoch + 1)
        model.eval()
        with torch.inference_mode():
            right = torch.cat([model(images).argmax(1) == targets for images, targets in validation])
        saver.save_checkpoint(epoch, metric=right.float().mean().item())
    allmlp.save(model, out / "model")
    return saver.best_metric


if __name__ == "__main__":
    print(f"accuracy {main(Path(sys.argv[1]), Path(sys.argv[2])):.3f}")
