"""CIFAR-10 and CIFAR-100 from scratch at 32 pixels, with the same settings for every family.

Muon was chosen over AdamW on 5,000 training images held out for validation (docs/results.md).
"""

from __future__ import annotations

from allmlp.data.augment import Mixup, presets
from allmlp.data.cifar import Cifar10, Cifar100
from allmlp.data.dataset import Data
from allmlp.models.zoo import preset
from allmlp.optim import Muon
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.tasks.classify import Classify


def _cifar(model: str, data: Data, num_classes: int) -> Run:
    return Run(
        model=preset(model).spec.configure(drop_path=0.1, num_classes=num_classes),
        task=Classify(label_smoothing=0.1, augment=presets.cifar(), mix=Mixup(mixup_alpha=0.8, cutmix_alpha=1.0)),
        data=data,
        batch_size=512,
        budget=Budget(epochs=300),
        optim=Muon(lr=2e-3, weight_decay=0.1),
        schedule=CosineSchedule(warmup_fraction=0.03),
        max_grad_norm=1.0,
        ema_decay=0.999,
        compile=True,
        log_every=100,
        eval_every=2000,
        save_every=5000,
    )


def _cifar10(model: str) -> Run:
    return _cifar(model, Cifar10(), 10)


def _cifar100(model: str) -> Run:
    return _cifar(model, Cifar100(), 100)


def cifar10_mixer() -> Run:
    """MLP-Mixer on CIFAR-10 from scratch: 6.53 M parameters.

    allmlp train cifar10_mixer --set budget.epochs=none --set budget.minutes=8.75
    One H200 shared by three runs, 8.75 minutes, 176 epochs: 93.81 % (one seed). Published: 90.8 %.
    """
    return _cifar10("mixer_micro")


def cifar10_resmlp() -> Run:
    """ResMLP on CIFAR-10 from scratch: 6.39 M parameters.

    allmlp train cifar10_resmlp --set budget.epochs=none --set budget.minutes=8.75
    One H200 shared by three runs, 8.75 minutes, 195 epochs: 94.25 % (one seed).
    Published: 88.12 % for 1.09 M parameters (mskimS2/image-models).
    """
    return _cifar10("resmlp_micro")


def cifar10_gmlp() -> Run:
    """gMLP on CIFAR-10 from scratch: 7.19 M parameters.

    allmlp train cifar10_gmlp --set budget.epochs=none --set budget.minutes=6.5
    One H200, 6.5 minutes, 223 epochs: 95.69 % (one seed).
    Published for MLPs from scratch: 90.9 % for isotropic ones (0.3-0.7 M parameters); with shifts and stages 95.54 to
    97.35 % (Caterpillar, arXiv 2305.17644, 5.9 to 78.8 M).
    """
    return _cifar10("gmlp_micro")


def cifar10_amlp() -> Run:
    """aMLP on CIFAR-10 from scratch: gMLP with tiny attention.

    allmlp train cifar10_amlp
    Not yet run.
    """
    return _cifar10("amlp_micro")


def cifar10_vit() -> Run:
    """ViT, the baseline, on CIFAR-10 from scratch: 7.93 M parameters.

    allmlp train cifar10_vit --set budget.epochs=none --set budget.minutes=8.75
    One H200 shared by three runs, 8.75 minutes, 185 epochs: 95.11 % (one seed).
    """
    return _cifar10("vit_micro")


def cifar100_mixer() -> Run:
    """MLP-Mixer on CIFAR-100 from scratch.

    allmlp train cifar100_mixer
    Not yet run. Published: 67.51 % (omihub777).
    """
    return _cifar100("mixer_micro")


def cifar100_resmlp() -> Run:
    """ResMLP on CIFAR-100 from scratch.

    allmlp train cifar100_resmlp
    Not yet run. Published: 64.72 % for 1.09 M parameters from scratch (mskimS2/image-models), 87.0 % for S12
    pre-trained on ImageNet.
    """
    return _cifar100("resmlp_micro")


def cifar100_gmlp() -> Run:
    """gMLP on CIFAR-100 from scratch.

    allmlp train cifar100_gmlp
    Not yet run. Published for MLPs with shifts and stages: 79.41 to 84.77 % (Caterpillar, arXiv 2305.17644).
    """
    return _cifar100("gmlp_micro")


def cifar100_amlp() -> Run:
    """aMLP on CIFAR-100 from scratch.

    allmlp train cifar100_amlp
    Not yet run.
    """
    return _cifar100("amlp_micro")


def cifar100_vit() -> Run:
    """ViT, the baseline, on CIFAR-100 from scratch.

    allmlp train cifar100_vit
    Not yet run.
    """
    return _cifar100("vit_micro")
