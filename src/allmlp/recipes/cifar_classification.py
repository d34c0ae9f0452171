"""CIFAR-10 and CIFAR-100 from scratch at 32 pixels, with the same settings for every family.

ResNet-18, the convolutional baseline, has the optimizer that is usual for it. The test split is evaluated during a run
too, but nothing depends on it; to choose settings, hold out training images: --set val_size=5000.
"""

from __future__ import annotations

from allmlp.data.augment import Mixup, presets
from allmlp.data.cifar import Cifar10, Cifar100
from allmlp.data.dataset import Data
from allmlp.models.model import ModelSpec
from allmlp.models.zoo import preset
from allmlp.optim import Muon, Sgd
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.tasks.classify import Classify


def _cifar(model: ModelSpec, data: Data) -> Run:
    return Run(
        model=model,
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
    return _cifar(preset(model).spec.configure(drop_path=0.1), Cifar10())


def _cifar100(model: str) -> Run:
    return _cifar(preset(model).spec.configure(drop_path=0.1, num_classes=100), Cifar100())


def _convnet(run: Run) -> Run:
    """The usual optimizer of convnets, at the usual learning rate of 0.1 per 256 images; Muon is for matrices."""
    return run.replace(optim=Sgd(lr=0.2, weight_decay=5e-4), max_grad_norm=None)


def cifar10_mixer() -> Run:
    """MLP-Mixer on CIFAR-10 from scratch: 6.53 M parameters.

    allmlp train cifar10_mixer --set budget.epochs=none --set budget.minutes=5
    Measured: 94.74 ± 0.40 % (3 seeds, 300 s alone on one NVIDIA H200).
    Published: 90.8 % (omihub777/MLP-Mixer-CIFAR).
    """
    return _cifar10("mixer_micro")


def cifar10_resmlp() -> Run:
    """ResMLP on CIFAR-10 from scratch: 6.39 M parameters.

    allmlp train cifar10_resmlp --set budget.epochs=none --set budget.minutes=5
    Measured: 95.61 ± 0.09 % (3 seeds, 300 s alone on one NVIDIA H200).
    Published: 88.12 % for 1.09 M parameters (mskimS2/image-models).
    """
    return _cifar10("resmlp_micro")


def cifar10_gmlp() -> Run:
    """gMLP on CIFAR-10 from scratch: 7.19 M parameters.

    allmlp train cifar10_gmlp --set budget.epochs=none --set budget.minutes=5
    Measured: 95.87 ± 0.58 % (3 seeds, 300 s alone on one NVIDIA H200).
    Published for MLPs from scratch: 90.9 % for isotropic ones (0.3-0.7 M parameters); with shifts and stages 95.54 to
    97.35 % (Caterpillar, arXiv 2305.17644, 5.9 to 78.8 M).
    """
    return _cifar10("gmlp_micro")


def cifar10_gmlp_staged() -> Run:
    """gMLP in three stages on CIFAR-10 from scratch: 7.34 M parameters.

    allmlp train cifar10_gmlp_staged --set budget.epochs=none --set budget.minutes=5
    Published for a pyramid of 5.9 M: 95.54 % (Caterpillar-Mi, arXiv 2305.17644).
    """
    return _cifar10("gmlp_staged_micro")


def cifar10_resmlp_staged() -> Run:
    """ResMLP in three stages on CIFAR-10 from scratch: 7.20 M parameters.

    allmlp train cifar10_resmlp_staged --set budget.epochs=none --set budget.minutes=5
    Measured: 96.44 ± 0.25 % (3 seeds, 300 s alone on one NVIDIA H200).
    Published for a pyramid of 5.9 M: 95.54 % (Caterpillar-Mi, arXiv 2305.17644).
    """
    return _cifar10("resmlp_staged_micro")


def cifar10_cyclemlp() -> Run:
    """CycleMLP in three stages on CIFAR-10 from scratch: 6.90 M parameters.

    allmlp train cifar10_cyclemlp --set budget.epochs=none --set budget.minutes=5
    """
    return _cifar10("cyclemlp_micro")


def cifar10_mlp() -> Run:
    """The plain MLP on flattened pixels, without any structure, on CIFAR-10 from scratch: 7.10 M parameters.

    allmlp train cifar10_mlp --set budget.epochs=none --set budget.minutes=5
    Measured: 79.21 ± 0.07 % (3 seeds, 300 s alone on one NVIDIA H200).
    Published after pretraining on ImageNet-21k at 64 pixels: 94.2 % with 124 M parameters (arXiv 2306.13575).
    """
    return _cifar10("mlp_micro")


def cifar10_amlp() -> Run:
    """aMLP on CIFAR-10 from scratch: gMLP with tiny attention.

    allmlp train cifar10_amlp --set budget.epochs=none --set budget.minutes=5
    """
    return _cifar10("amlp_micro")


def cifar10_vit() -> Run:
    """ViT, the baseline, on CIFAR-10 from scratch: 7.93 M parameters.

    allmlp train cifar10_vit --set budget.epochs=none --set budget.minutes=5
    Measured: 95.84 ± 0.65 % (3 seeds, 300 s alone on one NVIDIA H200).
    """
    return _cifar10("vit_micro")


def cifar10_resnet18() -> Run:
    """ResNet-18, the convolutional baseline, on CIFAR-10 from scratch: 11.17 M parameters.

    allmlp train cifar10_resnet18 --set budget.epochs=none --set budget.minutes=5
    Measured: 96.88 ± 0.19 % (3 seeds, 300 s alone on one NVIDIA H200).
    Published: 95.28 %, with Cutout 96.01 % (arXiv 1708.04552, 200 epochs, mean of five).
    """
    return _convnet(_cifar(preset("resnet18_cifar").spec, Cifar10()))


def cifar100_mixer() -> Run:
    """MLP-Mixer on CIFAR-100 from scratch.

    allmlp train cifar100_mixer
    Published: 67.51 % (omihub777).
    """
    return _cifar100("mixer_micro")


def cifar100_resmlp() -> Run:
    """ResMLP on CIFAR-100 from scratch.

    allmlp train cifar100_resmlp
    Published: 64.72 % for 1.09 M parameters from scratch (mskimS2/image-models), 87.0 % for S12
    pre-trained on ImageNet.
    """
    return _cifar100("resmlp_micro")


def cifar100_gmlp() -> Run:
    """gMLP on CIFAR-100 from scratch.

    allmlp train cifar100_gmlp
    Published for MLPs with shifts and stages: 79.41 to 84.77 % (Caterpillar, arXiv 2305.17644).
    """
    return _cifar100("gmlp_micro")


def cifar100_gmlp_staged() -> Run:
    """gMLP in three stages on CIFAR-100 from scratch.

    allmlp train cifar100_gmlp_staged
    Published for a pyramid of 5.9 M: 79.41 % (Caterpillar-Mi, arXiv 2305.17644).
    """
    return _cifar100("gmlp_staged_micro")


def cifar100_resmlp_staged() -> Run:
    """ResMLP in three stages on CIFAR-100 from scratch.

    allmlp train cifar100_resmlp_staged
    Published for a pyramid of 5.9 M: 79.41 % (Caterpillar-Mi, arXiv 2305.17644).
    """
    return _cifar100("resmlp_staged_micro")


def cifar100_amlp() -> Run:
    """aMLP on CIFAR-100 from scratch.

    allmlp train cifar100_amlp
    """
    return _cifar100("amlp_micro")


def cifar100_vit() -> Run:
    """ViT, the baseline, on CIFAR-100 from scratch.

    allmlp train cifar100_vit
    """
    return _cifar100("vit_micro")


def cifar100_resnet18() -> Run:
    """ResNet-18, the convolutional baseline, on CIFAR-100 from scratch.

    allmlp train cifar100_resnet18
    Published: 77.54 %, with Cutout 78.04 % (arXiv 1708.04552, 200 epochs, mean of five).
    """
    return _convnet(_cifar(preset("resnet18_cifar").spec.configure(num_classes=100), Cifar100()))
