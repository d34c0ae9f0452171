"""Four ways to adapt a pretrained model with few labels, side by side."""

from __future__ import annotations

from allmlp.data.augment import Augment, HorizontalFlip, RandomResizedCrop
from allmlp.data.decode import Decode
from allmlp.data.image_folder import ImageFolder
from allmlp.data.labeled_text import LabeledText
from allmlp.head_init import HeadInit
from allmlp.lora import Lora
from allmlp.models.gmlp import gmlp
from allmlp.optim import AdamW
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.tasks.classify import Classify
from allmlp.tasks.classify_text import ClassifyText


def few_shot_images() -> dict[str, Run]:
    """The bundled image encoder with four labeled images per class: probe, last layer, LoRA, all weights.

    allmlp train few_shot_images --set data.path=photos/ --set train_per_class=4
    allmlp study few_shot_images --set data.path=photos/ --seeds 5
    Each seed draws other images. `--model FOLDER` starts from another model. Results: docs/guides/adapting.md.
    """
    crop = RandomResizedCrop(scale=(0.5, 1.0), size=(128, 128))
    mean = std = (0.5, 0.5, 0.5)
    return _methods(
        Run(
            model=gmlp(16, 256, 16, img_size=128),
            task=Classify(augment=Augment((crop, HorizontalFlip()))),
            data=ImageFolder("data/photos", img_size=(128, 128), decode=Decode(crop_pct=1.0, mean=mean, std=std)),
            batch_size=16,
            train_per_class=4,
            init_from="allmlp:image",
        )
    )


def few_shot_texts() -> dict[str, Run]:
    """The bundled text encoder with 16 labeled texts per class: probe, last layer, LoRA, all weights.

    allmlp train few_shot_texts --set data.path=reviews.csv --set train_per_class=16
    allmlp study few_shot_texts --set data.path=reviews.csv --seeds 5
    A file with text and label, other than SST-2, which the model was trained on. Each seed draws other texts.
    Results: docs/guides/adapting.md.
    """
    return _methods(
        Run(
            model=None,
            task=ClassifyText(),
            data=LabeledText("data/texts.csv"),
            batch_size=16,
            train_per_class=16,
            init_from="allmlp:text",
        )
    )


def _methods(start: Run) -> dict[str, Run]:
    """The classifier of every row starts as the probe, so that rows differ in what is trained afterwards."""
    run = start.replace(
        head_init=HeadInit(),
        budget=Budget(steps=200),
        schedule=CosineSchedule(warmup_fraction=0.1),
        max_grad_norm=1.0,
        log_every=50,
        eval_every=1000,
        save_every=1000,
    )
    frozen = run.replace(freeze_fraction=1.0)
    return {
        # Logistic regression on the frozen features: its only step has the rate 0.
        "probe": frozen.replace(budget=Budget(steps=1), optim=AdamW(lr=0.0)),
        "last_layer": frozen.replace(optim=AdamW(lr=1e-3)),
        "lora": run.replace(lora=Lora(rank=8), optim=AdamW(lr=1e-3)),
        "full": run.replace(optim=AdamW(lr=1e-4, layer_decay=0.75)),
    }
