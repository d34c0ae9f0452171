"""Imagenette: ten classes of ImageNet, 9,469 training images, read from a folder."""

from __future__ import annotations

from allmlp.data.augment import Mixup, presets
from allmlp.data.image_folder import ImageFolder
from allmlp.layers import TinyAttention
from allmlp.models.gmlp import gmlp
from allmlp.models.mixer import mixer
from allmlp.models.model import ModelSpec
from allmlp.models.resmlp import resmlp
from allmlp.models.resnet import ResNet
from allmlp.models.vit import vit
from allmlp.optim import Muon, Sgd
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.tasks.classify import Classify
from allmlp.tasks.distill import Distill

SIZE, PATCH = 128, 8


def _imagenette(model: ModelSpec) -> Run:
    model = model if isinstance(model, ResNet) else model.configure(drop_path=0.1)
    return Run(
        model=model,
        task=Classify(label_smoothing=0.1, augment=presets.deit(), mix=Mixup(mixup_alpha=0.8, cutmix_alpha=1.0)),
        data=ImageFolder("data/imagenette2-160", img_size=(SIZE, SIZE)),
        batch_size=256,
        budget=Budget(epochs=200),
        optim=Muon(lr=2e-3, weight_decay=0.1),
        schedule=CosineSchedule(warmup_fraction=0.03),
        max_grad_norm=1.0,
        ema_decay=0.999,
        compile=True,
        log_every=50,
        eval_every=370,
        save_every=740,
    )


def imagenette_mixer() -> Run:
    """MLP-Mixer on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_mixer --set data.path=imagenette2-160
    """
    return _imagenette(mixer(8, 256, PATCH, img_size=SIZE, num_classes=10))


def imagenette_resmlp() -> Run:
    """ResMLP on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_resmlp --set data.path=imagenette2-160
    """
    return _imagenette(resmlp(12, 256, 0.1, PATCH, img_size=SIZE, num_classes=10))


def imagenette_resmlp_distilled() -> dict[str, Run]:
    """ResMLP on Imagenette, distilled from a convnet trained on ImageNet: hard and soft.

    allmlp train imagenette_resmlp_distilled --set data.path=imagenette2-160 --set task.teacher=efficientnet_lite0/
    `task.teacher` is a model folder of an ImageNet classifier, or timm:NAME; of its thousand outputs the ten classes
    count. Not yet run.
    """
    labels = imagenette_resmlp()
    assert isinstance(labels.task, Classify)
    return {
        "hard": labels.replace(task=Distill("efficientnet_lite0", labels.task, "hard")),
        "soft": labels.replace(task=Distill("efficientnet_lite0", labels.task, "soft", alpha=0.9)),
    }


def imagenette_gmlp() -> Run:
    """gMLP on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_gmlp --set data.path=imagenette2-160
    """
    return _imagenette(gmlp(12, 192, PATCH, img_size=SIZE, num_classes=10))


def imagenette_amlp() -> Run:
    """aMLP on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_amlp --set data.path=imagenette2-160
    """
    return _imagenette(gmlp(12, 192, PATCH, img_size=SIZE, num_classes=10, attention=TinyAttention(64, bias=False)))


def imagenette_vit() -> Run:
    """ViT, the baseline, on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_vit --set data.path=imagenette2-160
    """
    return _imagenette(vit(10, 256, 4, PATCH, img_size=SIZE, num_classes=10))


def imagenette_resnet18() -> Run:
    """ResNet-18, the convolutional baseline, on Imagenette from scratch at 128 pixels.

    allmlp train imagenette_resnet18 --set data.path=imagenette2-160
    """
    run = _imagenette(ResNet(img_size=(SIZE, SIZE), stem="large"))
    return run.replace(optim=Sgd(lr=0.1, weight_decay=5e-4), max_grad_norm=None)
