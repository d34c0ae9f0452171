"""The papers' ImageNet recipes, reading tar shards; as published, not run here.

`torchrun --nproc-per-node 8 -m allmlp train NAME --set data.path=shards/`; if a batch does not fit into memory,
`--set grad_accum_steps=4` computes the same steps. `allmlp.data.shards` describes class names and remote paths.
"""

from __future__ import annotations

from typing import Any

from allmlp.data.augment import Augment, HorizontalFlip, presets
from allmlp.data.decode import Decode
from allmlp.data.shards import Shards
from allmlp.layers import ClassifierHead, Constant, Init, Zeros
from allmlp.models.encoder import Encoder
from allmlp.models.zoo import preset
from allmlp.optim import AdamW, Lamb, Sgd
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule, LinearSchedule, StepSchedule
from allmlp.tasks.classify import Classify
from allmlp.tasks.dino import Dino
from allmlp.tasks.distill import Distill

TRAIN_IMAGES = {"imagenet": 1_281_167, "imagenet21k": 14_197_122}
INTERVALS: dict[str, Any] = {"log_every": 100, "eval_every": 5000, "save_every": 2500}
MINUS_ONE_TO_ONE = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def _spec(name: str, drop_path: float) -> Encoder:
    spec = preset(name).spec.configure(drop_path=drop_path)
    assert isinstance(spec, Encoder)
    return spec


def _mixer(name: str, magnitude: float, mixup: float, data: str = "imagenet") -> Run:
    epochs, batch = 300, 4096
    steps = epochs * TRAIN_IMAGES[data] / batch
    mean, std = MINUS_ONE_TO_ONE
    model = _spec(name, 0.1)
    return Run(
        # For the sigmoid loss the bias starts at log(1 / 1000), the prior of a class.
        model=model.replace(head=ClassifierHead(1000, init=Init(Zeros(), Constant(-6.9)))),
        task=Classify("sigmoid", augment=presets.mixer(magnitude), mix=presets.mixer_mixup(mixup)),
        data=Shards(data, decode=Decode(scale=(0.05, 1.0), mean=mean, std=std)),
        batch_size=batch,
        budget=Budget(epochs=epochs),
        optim=AdamW(lr=1e-3, weight_decay=0.1),
        schedule=LinearSchedule(warmup_fraction=10_000 / steps, min_lr_ratio=0.01),
        max_grad_norm=1.0,
        compile=True,
        **INTERVALS,
    )


def imagenet_mixer_b16() -> Run:
    """Mixer-B/16 on ImageNet-1k, with the settings of big_vision.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_mixer_b16 --set data.path=shards/
    Not run here. Published: 76.4 % (paper), 76.3 % in 2 h 11 min on a TPU v3-128 (big_vision).
    """
    return _mixer("mixer_b16", 15, 0.5)


def imagenet_mixer_l16() -> Run:
    """Mixer-L/16 on ImageNet-1k.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_mixer_l16 --set data.path=shards/
    Not run here. Published: 71.8 %.
    """
    return _mixer("mixer_l16", 15, 0.5)


def imagenet21k_mixer_b16() -> Run:
    """Mixer-B/16 on ImageNet-21k, for fine-tuning.

    torchrun --nproc-per-node 8 -m allmlp train imagenet21k_mixer_b16 --set data.path=shards21k/
    Not run here. Published: 80.6 % on ImageNet-1k after fine-tuning.
    """
    return _mixer("mixer_b16", 10, 0.2, "imagenet21k")


def imagenet21k_mixer_l16() -> Run:
    """Mixer-L/16 on ImageNet-21k, for fine-tuning.

    torchrun --nproc-per-node 8 -m allmlp train imagenet21k_mixer_l16 --set data.path=shards21k/
    Not run here. Published: 82.9 % on ImageNet-1k after fine-tuning.
    """
    return _mixer("mixer_l16", 20, 0.5, "imagenet21k")


def _resmlp(name: str, drop_path: float, epochs: int = 400, data: str = "imagenet") -> Run:
    batch = 2048
    return Run(
        model=_spec(name, drop_path),
        task=Classify(label_smoothing=0.1, augment=presets.deit(), mix=presets.DEIT_MIXUP),
        data=Shards(data, decode=Decode(crop_pct=0.9)),
        batch_size=batch,
        # DeiT counts a repeated image as a new one, so an epoch has as many steps as without repetition.
        budget=Budget(steps=epochs * TRAIN_IMAGES[data] // batch),
        aug_repeats=3,
        optim=Lamb(lr=5e-3, weight_decay=0.2),
        schedule=CosineSchedule(warmup_fraction=5 / epochs),
        precision="float32",
        compile=True,
        **INTERVALS,
    )


def imagenet_resmlp_s12() -> Run:
    """ResMLP-S12 on ImageNet-1k: LAMB, 400 epochs, with its author's settings.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resmlp_s12 --set data.path=shards/
    Not run here. Published: 76.6 %.
    """
    return _resmlp("resmlp_s12", 0.05)


def imagenet_resmlp_s24() -> Run:
    """ResMLP-S24 on ImageNet-1k: LAMB, 400 epochs.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resmlp_s24 --set data.path=shards/
    Not run here. Published: 79.4 %. Stochastic depth is that of the fine-tuning recipe; none is given for training.
    """
    return _resmlp("resmlp_s24", 0.1)


def imagenet_resmlp_s36() -> Run:
    """ResMLP-S36 on ImageNet-1k: LAMB, 400 epochs.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resmlp_s36 --set data.path=shards/
    Not run here. Published: 79.7 % (released weights). Stochastic depth as of S24; none is given.
    """
    return _resmlp("resmlp_s36", 0.1)


def imagenet_resmlp_s12_90epochs() -> Run:
    """ResMLP-S12 on ImageNet-1k, "old-fashioned": 90 epochs with crops and flips only.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resmlp_s12_90epochs --set data.path=shards/
    Not run here. Published: 69.2 %, without further settings; the optimizer is that of the long run.
    """
    return _resmlp("resmlp_s12", 0.0, 90).replace(task=Classify(augment=Augment((HorizontalFlip(),))), aug_repeats=1)


def imagenet21k_resmlp_b24_8() -> Run:
    """ResMLP-B24/8 on ImageNet-21k, 60 epochs, for fine-tuning.

    torchrun --nproc-per-node 8 -m allmlp train imagenet21k_resmlp_b24_8 --set data.path=shards21k/
    Not run here. Published: 84.4 % on ImageNet-1k after fine-tuning. The settings are those of ImageNet-1k.
    """
    return _resmlp("resmlp_b24_8", 0.1, 60, "imagenet21k")


def _distilled(run: Run) -> Run:
    """Hard distillation from the RegNetY-16GF of DeiT (82.9 %), which timm downloads."""
    assert isinstance(run.task, Classify)
    return run.replace(task=Distill("timm:regnety_160.deit_in1k", run.task, "hard"))


def imagenet_resmlp_s12_distilled() -> Run:
    """ResMLP-S12 on ImageNet-1k, hard distillation from RegNetY-16GF.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resmlp_s12_distilled --set data.path=shards/
    Not run here. Published: 77.8 %, 1.2 more than without a teacher. timm downloads the teacher (82.9 %).
    """
    return _distilled(_resmlp("resmlp_s12", 0.05))


def imagenet_resmlp_s24_distilled() -> Run:
    """ResMLP-S24 on ImageNet-1k, hard distillation from RegNetY-16GF.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resmlp_s24_distilled --set data.path=shards/
    Not run here. Published: 80.8 %, 1.4 more than without a teacher.
    """
    return _distilled(_resmlp("resmlp_s24", 0.1))


def imagenet_resmlp_b24_8_distilled() -> Run:
    """ResMLP-B24/8 on ImageNet-1k, hard distillation from RegNetY-16GF.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resmlp_b24_8_distilled --set data.path=shards/
    Not run here. Published: 83.6 %, 2.6 more than without a teacher.
    """
    return _distilled(_resmlp("resmlp_b24_8", 0.1))


def _dino(name: str) -> Run:
    """Images are decoded to their central square at 288 pixels, and crops are taken from it."""
    epochs, batch = 300, 1024
    return Run(
        model=_spec(name, 0.1),
        task=Dino(presets.dino(), freeze_last_layer=1 / epochs),
        data=Shards("imagenet", img_size=(288, 288), decode=Decode(crop_pct=1.0, scale=(1.0, 1.0), ratio=(1.0, 1.0))),
        batch_size=batch,
        budget=Budget(epochs=epochs),
        optim=AdamW(lr=5e-4 * batch / 256, weight_decay=0.04, weight_decay_end=0.4),
        schedule=CosineSchedule(warmup_fraction=10 / epochs, min_lr_ratio=1e-6 / (5e-4 * batch / 256)),
        max_grad_norm=3.0,
        compile=True,
        **INTERVALS,
    )


def imagenet_resmlp_s12_dino() -> Run:
    """ResMLP-S12 on ImageNet-1k without labels: DINO, 300 epochs, defaults of the official code.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resmlp_s12_dino --set data.path=shards/
    Not run here. Published: k-NN 62.6, linear 67.5 %, without saying how small crops pass through the model. Here
    images are decoded to their central square at 288 pixels, and crops are taken from it.
    """
    return _dino("resmlp_s12")


def imagenet_resmlp_s24_dino() -> Run:
    """ResMLP-S24 on ImageNet-1k without labels: DINO, 300 epochs.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resmlp_s24_dino --set data.path=shards/
    Not run here. Published: k-NN 69.4, linear 72.8 %; fine-tuned afterwards 79.9 %.
    """
    return _dino("resmlp_s24")


def imagenet_deit() -> dict[str, Run]:
    """DeiT-Ti, -S and -B on ImageNet-1k, the attention baseline, with the settings of the official code.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_deit/s16 --set data.path=shards/
    Not run here. Published: 72.2, 79.8 and 81.8 %. Without the ten epochs at the smallest rate at the end.
    """
    epochs, batch = 300, 1024
    run = _resmlp("resmlp_s12", 0.0, epochs).replace(
        data=Shards("imagenet"),
        batch_size=batch,
        budget=Budget(steps=epochs * TRAIN_IMAGES["imagenet"] // batch),
        optim=AdamW(lr=5e-4 * batch / 512, weight_decay=0.05),
        schedule=CosineSchedule(warmup_fraction=5 / epochs, min_lr_ratio=0.01),
        ema_decay=0.99996,
        precision="auto",
    )
    return {size: run.replace(model=_spec(f"vit_{size}", 0.1)) for size in ("ti16", "s16", "b16")}


def imagenet_resnet() -> dict[str, Run]:
    """ResNet-50 and ResNet-152 on ImageNet-1k, the convolutional baseline: SGD, 90 epochs, crops and flips.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_resnet/50 --set data.path=shards/
    Not run here. Published: 76.1 and 78.3 % (torchvision). Batch 256 and lr 0.1 of He et al. (2016), scaled to 1024
    with five epochs of warm-up as by Goyal et al. (2017); a tenth at epochs 30, 60 and 80.
    """
    epochs, batch = 90, 1024
    run = Run(
        model=None,
        task=Classify(augment=Augment((HorizontalFlip(),))),
        data=Shards("imagenet"),
        batch_size=batch,
        budget=Budget(epochs=epochs),
        optim=Sgd(lr=0.1 * batch / 256, weight_decay=1e-4, nesterov=False),
        schedule=StepSchedule(warmup_fraction=5 / epochs),
        compile=True,
        **INTERVALS,
    )
    return {str(layers): run.replace(model=preset(f"hf:resnet{layers}").spec) for layers in (50, 152)}


def _gmlp(name: str, drop_path: float) -> Run:
    epochs, batch = 300, 4096
    return Run(
        model=_spec(name, drop_path),
        task=Classify(label_smoothing=0.1, augment=presets.gmlp(), mix=presets.DEIT_MIXUP),
        data=Shards("imagenet"),
        batch_size=batch,
        budget=Budget(epochs=epochs),
        optim=AdamW(lr=1e-3, weight_decay=0.05, eps=1e-6),
        schedule=CosineSchedule(warmup_fraction=10_000 * batch / (epochs * TRAIN_IMAGES["imagenet"])),
        max_grad_norm=1.0,
        compile=True,
        **INTERVALS,
    )


def imagenet_gmlp_ti16() -> Run:
    """gMLP-Ti/16 on ImageNet-1k.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_gmlp_ti16 --set data.path=shards/
    Not run here. Published: 72.3 %.
    """
    return _gmlp("gmlp_ti16", 0.0)


def imagenet_gmlp_s16() -> Run:
    """gMLP-S/16 on ImageNet-1k.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_gmlp_s16 --set data.path=shards/
    Not run here. Published: 79.6 %.
    """
    return _gmlp("gmlp_s16", 0.05)


def imagenet_gmlp_b16() -> Run:
    """gMLP-B/16 on ImageNet-1k.

    torchrun --nproc-per-node 8 -m allmlp train imagenet_gmlp_b16 --set data.path=shards/
    Not run here. Published: 81.6 %.
    """
    return _gmlp("gmlp_b16", 0.2)
