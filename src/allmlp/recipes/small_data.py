"""Large models at 224 pixels on small data: from scratch, and from weights of ImageNet.

CIFAR images are enlarged on the device; Pets and Flowers-102 are decoded from their official files
($ALLMLP_DATA/pets, $ALLMLP_DATA/flowers102).
"""

from __future__ import annotations

from typing import NamedTuple

from allmlp.data.augment import Augment, HorizontalFlip, RandomResizedCrop, presets
from allmlp.data.augment.transform import Transform
from allmlp.data.cifar import Cifar10, Cifar100
from allmlp.data.dataset import Data
from allmlp.data.decode import Decode
from allmlp.data.flowers import Flowers102
from allmlp.data.pets import OxfordPets
from allmlp.models.model import ModelSpec
from allmlp.models.zoo import preset
from allmlp.optim import AdamW, Sgd
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.tasks.classify import Classify


class Target(NamedTuple):
    """A dataset, with its number of classes and the steps in which ViT and Mixer are fine-tuned on it."""

    data: Data
    num_classes: int
    finetune_steps: int


TARGETS = {
    "cifar10": Target(Cifar10(), 10, 10_000),
    "cifar100": Target(Cifar100(), 100, 10_000),
    "pets": Target(OxfordPets(), 37, 500),
    "flowers102": Target(Flowers102(), 102, 500),
}
INTERVALS = {"log_every": 100, "eval_every": 2000, "save_every": 2000}


def _crops(target: Target, scale: tuple[float, float]) -> tuple[Data, tuple[Transform, ...]]:
    """The data, and the crops that are taken on the device where the images are not decoded to 224 pixels."""
    if isinstance(target.data, Cifar10 | Cifar100):
        return target.data, (RandomResizedCrop(scale=scale, size=(224, 224), interpolation="bilinear"),)
    return target.data.replace(decode=Decode(scale=scale)), ()


def _from_scratch(model: str, name: str, epochs: int) -> Run:
    """DeiT's settings at batch 512; ResNets have SGD at the usual rate of 0.1 per 256 images."""
    target, is_convnet = TARGETS[name], "resnet" in model
    data, crops = _crops(target, (0.08, 1.0))
    spec: ModelSpec = preset(model).spec
    return Run(
        model=spec.configure(num_classes=target.num_classes, **({} if is_convnet else {"drop_path": 0.1})),
        task=Classify(
            label_smoothing=0.1, augment=Augment((*crops, *presets.deit().transforms)), mix=presets.DEIT_MIXUP
        ),
        data=data,
        batch_size=512,
        grad_accum_steps=4,
        budget=Budget(epochs=epochs),
        optim=Sgd(lr=0.2, weight_decay=5e-4) if is_convnet else AdamW(lr=5e-4, weight_decay=0.05),
        schedule=CosineSchedule(warmup_fraction=5 / epochs),
        compile=True,
        **INTERVALS,
    )


def _table(models: dict[str, str], names: tuple[str, ...], epochs: int) -> dict[str, Run]:
    return {f"{name}_{row}": _from_scratch(model, name, epochs) for name in names for row, model in models.items()}


def scratch_224() -> dict[str, Run]:
    """Mixer-B/16, ViT-B/16 and ResNet-152 from scratch at 224 pixels on CIFAR-10, CIFAR-100 and Pets.

    allmlp train scratch_224/cifar10_mixer_b16
    Not run here. Published as from scratch, without settings: Mixer-B/16 82.3, 68.8, 79.4 %; ViT-B/16 98.6, 89.1,
    93.1 %; ResNet-152 98.2, 87.8, 93.3 %. Here 300 epochs with DeiT's settings.
    """
    models = {"mixer_b16": "mixer_b16", "vit_b16": "vit_b16", "resnet152": "hf:resnet152"}
    return _table(models, ("cifar10", "cifar100", "pets"), 300)


def vit_against_resnet50() -> dict[str, Run]:
    """A small ViT and ResNet-50 from scratch at 224 pixels on CIFAR-10, CIFAR-100 and Flowers-102: 100 epochs.

    allmlp train vit_against_resnet50/cifar10_vit_s16
    Not run here. Published (Liu et al. 2021, 100 epochs) for a variant of ViT: 84.19, 65.16 and 31.73 %; for ResNet-50:
    91.78, 72.80 and 46.92 %. Here a plain ViT-S/16, which has about the size of ResNet-50, with DeiT's settings.
    """
    models = {"vit_s16": "vit_s16", "resnet50": "hf:resnet50"}
    return _table(models, ("cifar10", "cifar100", "flowers102"), 100)


def finetune_mixer_b16() -> dict[str, Run]:
    """Mixer-B/16, pre-trained on ImageNet, fine-tuned at 224 pixels with Google's settings.

    allmlp convert mixer_b16.google_in21k mixer_b16/
    allmlp train finetune_mixer_b16/cifar10 --set init_from=mixer_b16
    Not run here. Published on CIFAR-10: 96.7 % from ImageNet-1k (3 hours on four V100), 96.8 % from 21k; on CIFAR-10,
    CIFAR-100 and Pets from 21k, by others: 97.7, 89.7 and 97.4 %.
    """
    table = {}
    for name, target in TARGETS.items():
        data, crops = _crops(target, (0.05, 1.0))
        table[name] = Run(
            model=preset("mixer_b16").spec.configure(num_classes=target.num_classes),
            task=Classify(augment=Augment((*crops, HorizontalFlip()))),
            data=data,
            batch_size=512,
            grad_accum_steps=8,
            budget=Budget(steps=target.finetune_steps),
            optim=Sgd(lr=0.03, weight_decay=0.0, nesterov=False),
            schedule=CosineSchedule(warmup_fraction=0.05),
            max_grad_norm=1.0,
            compile=True,
            **INTERVALS,
            init_from="runs/imagenet21k_mixer_b16",
        )
    return table
