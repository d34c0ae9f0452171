"""Recipes on CIFAR-10 and CIFAR-100, from scratch at 32 pixels: the same for every family.

Muon was chosen over AdamW on 5,000 held-out training pictures (docs/results.md), never on the test split.
"""

from __future__ import annotations

from allmlp.data.augment import standard
from allmlp.data.cifar import Cifar10, Cifar100
from allmlp.data.images import Mix
from allmlp.data.source import Data
from allmlp.models.zoo import preset
from allmlp.optim import Muon
from allmlp.run import Budget, Cadence, Run
from allmlp.schedule import Cosine
from allmlp.tasks.classify import Classify


def _cifar(model: str, data: Data, classes: int) -> Run:
    return Run(
        model=preset(model).spec.configure(drop_path=0.1, classes=classes),
        task=Classify(smoothing=0.1, augment=standard.cifar(), mix=Mix(mixup=0.8, cutmix=1.0)),
        data=data,
        batch=512,
        budget=Budget(epochs=300),
        optim=Muon(lr=2e-3, decay=0.1),
        schedule=Cosine(warmup=0.03),
        clip=1.0,
        ema=0.999,
        compile=True,
        cadence=Cadence(log=100, evaluate=2000, save=5000),
    )


def _cifar10(model: str) -> Run:
    return _cifar(model, Cifar10(), 10)


def _cifar100(model: str) -> Run:
    return _cifar(model, Cifar100(), 100)


def cifar10_mixer() -> Run:
    """MLP-Mixer on CIFAR-10 from scratch: 6.53 M parameters.

    allmlp train cifar10_mixer --set budget.epochs=none --set budget.minutes=8.75
    One H200 shared by three runs, 8.75 minutes, 176 epochs: 93.81 % (one seed). Best published: 90.8 %.
    """
    return _cifar10("mixer_micro")


def cifar10_resmlp() -> Run:
    """ResMLP on CIFAR-10 from scratch: 6.39 M parameters.

    allmlp train cifar10_resmlp --set budget.epochs=none --set budget.minutes=8.75
    One H200 shared by three runs, 8.75 minutes, 195 epochs: 94.25 % (one seed). None published.
    """
    return _cifar10("resmlp_micro")


def cifar10_gmlp() -> Run:
    """gMLP on CIFAR-10 from scratch: 7.19 M parameters.

    allmlp train cifar10_gmlp --set budget.epochs=none --set budget.minutes=6.5
    One H200, 6.5 minutes, 223 epochs: 95.69 % (one seed). Best published for a pure MLP from scratch: 90.9 %.
    """
    return _cifar10("gmlp_micro")


def cifar10_amlp() -> Run:
    """aMLP on CIFAR-10 from scratch: gMLP with a tiny attention.

    allmlp train cifar10_amlp
    Not yet run. None published.
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
    Not yet run. Published figures for pure MLPs from scratch: none with a recipe.
    """
    return _cifar100("mixer_micro")


def cifar100_resmlp() -> Run:
    """ResMLP on CIFAR-100 from scratch.

    allmlp train cifar100_resmlp
    Not yet run. Published: 87.0 % for S12 pre-trained on ImageNet; none from scratch.
    """
    return _cifar100("resmlp_micro")


def cifar100_gmlp() -> Run:
    """gMLP on CIFAR-100 from scratch.

    allmlp train cifar100_gmlp
    Not yet run. None published.
    """
    return _cifar100("gmlp_micro")


def cifar100_amlp() -> Run:
    """aMLP on CIFAR-100 from scratch.

    allmlp train cifar100_amlp
    Not yet run. None published.
    """
    return _cifar100("amlp_micro")


def cifar100_vit() -> Run:
    """ViT, the baseline, on CIFAR-100 from scratch.

    allmlp train cifar100_vit
    Not yet run.
    """
    return _cifar100("vit_micro")
