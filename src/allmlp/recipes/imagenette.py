"""Recipes on Imagenette: ten classes of ImageNet, 9,469 photographs to train on, read from a folder."""

from __future__ import annotations

from allmlp.data.augment import standard
from allmlp.data.folder import ImageFolder
from allmlp.data.images import Mix
from allmlp.layers import TinyAttention
from allmlp.models.gmlp import gmlp
from allmlp.models.mixer import mixer
from allmlp.models.model import ModelSpec
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit
from allmlp.optim import Muon
from allmlp.run import Budget, Cadence, Run
from allmlp.schedule import Cosine
from allmlp.tasks.classify import Classify

SIZE, PATCH = 128, 8


def _imagenette(model: ModelSpec) -> Run:
    return Run(
        model=model.configure(drop_path=0.1),
        task=Classify(smoothing=0.1, augment=standard.deit(), mix=Mix(mixup=0.8, cutmix=1.0)),
        data=ImageFolder("imagenette2-160", image=(SIZE, SIZE)),
        batch=256,
        budget=Budget(epochs=200),
        optim=Muon(lr=2e-3, decay=0.1),
        schedule=Cosine(warmup=0.03),
        clip=1.0,
        ema=0.999,
        compile=True,
        cadence=Cadence(log=50, evaluate=370, save=740),
    )


def imagenette_mixer() -> Run:
    """MLP-Mixer on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_mixer --set data.path=imagenette2-160
    Not yet run. None published.
    """
    return _imagenette(mixer(8, 256, PATCH, image=SIZE, classes=10))


def imagenette_resmlp() -> Run:
    """ResMLP on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_resmlp --set data.path=imagenette2-160
    Not yet run. None published.
    """
    return _imagenette(resmlp(12, 256, 0.1, PATCH, image=SIZE, classes=10))


def imagenette_gmlp() -> Run:
    """gMLP on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_gmlp --set data.path=imagenette2-160
    Not yet run. None published.
    """
    return _imagenette(gmlp(12, 192, PATCH, image=SIZE, classes=10))


def imagenette_amlp() -> Run:
    """aMLP on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_amlp --set data.path=imagenette2-160
    Not yet run. None published.
    """
    return _imagenette(gmlp(12, 192, PATCH, image=SIZE, classes=10, side=TinyAttention(64, bias=False)))


def imagenette_vit() -> Run:
    """ViT, the baseline, on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_vit --set data.path=imagenette2-160
    Not yet run.
    """
    return _imagenette(vit(10, 256, 4, PATCH, image=SIZE, classes=10))
