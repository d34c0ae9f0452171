"""Recipes on CIFAR-10, from scratch at 32 pixels.

Muon was chosen over AdamW on 5,000 held-out training pictures (docs/results.md), never on the test split.
"""

from __future__ import annotations

from allmlp.data.cifar import Cifar10
from allmlp.data.images import Augment, Erasing, Flip, Mix, RandAugment, Translate
from allmlp.models.gmlp import gmlp
from allmlp.models.mixer import mixer
from allmlp.models.model import ModelSpec
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit
from allmlp.optim import Muon
from allmlp.run import Budget, Cadence, Run
from allmlp.schedule import Cosine
from allmlp.tasks.classify import Classify


def _cifar10(model: ModelSpec, drop_path: float = 0.1) -> Run:
    augment = Augment((Flip(), Translate(4), RandAugment(2, 9), Erasing(0.25, mode="mean")))
    return Run(
        model=model.configure(drop_path=drop_path),
        task=Classify(smoothing=0.1, augment=augment, mix=Mix(mixup=0.8, cutmix=1.0)),
        data=Cifar10(),
        batch=512,
        budget=Budget(epochs=300),
        optim=Muon(lr=2e-3, decay=0.1),
        schedule=Cosine(warmup=0.03),
        clip=1.0,
        ema=0.999,
        compile=True,
        cadence=Cadence(log=100, evaluate=2000, save=5000),
    )


def cifar10_mixer() -> Run:
    """MLP-Mixer on CIFAR-10 from scratch.

    allmlp train cifar10_mixer
    Not yet run at full length; 40 epochs give 83.0 % on held-out training pictures. Best published: 90.8 %.
    """
    return _cifar10(mixer(12, 256, 4, image=32, classes=10))


def cifar10_resmlp() -> Run:
    """ResMLP on CIFAR-10 from scratch.

    allmlp train cifar10_resmlp
    Not yet run at full length; 40 epochs give 80.1 % on held-out training pictures. None published.
    """
    return _cifar10(resmlp(12, 256, 0.1, patch=4, image=32, classes=10))


def cifar10_gmlp() -> Run:
    """gMLP on CIFAR-10 from scratch: 7.19 M parameters.

    allmlp train cifar10_gmlp --set budget.epochs=none --set budget.minutes=6.5
    One H200, 6.5 minutes, 223 epochs: 95.69 % (one seed). Best published for a pure MLP from scratch: 90.9 %.
    """
    return _cifar10(gmlp(12, 256, patch=4, image=32, classes=10))


def cifar10_vit() -> Run:
    """ViT, the baseline, on CIFAR-10 from scratch.

    allmlp train cifar10_vit
    Not yet run at full length.
    """
    return _cifar10(vit(10, 256, 4, 4, image=32, classes=10))
