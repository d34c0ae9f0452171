"""Self-supervised training, and evaluation of the features."""

from __future__ import annotations

from allmlp.data.augment import Augment, HorizontalFlip, MultiCrop, Translate
from allmlp.data.cifar import Cifar10
from allmlp.models.zoo import preset
from allmlp.optim import Muon, Sgd
from allmlp.recipes.cifar_classification import cifar10_gmlp
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.tasks.dino import Dino
from allmlp.tasks.probe import Probe


def cifar10_dino() -> Run:
    """DINO on CIFAR-10 without labels: two crops of 32 pixels, four of 16 through resized token weights.

    allmlp train cifar10_dino --set budget.epochs=none --set budget.minutes=11
    allmlp eval runs/cifar10_dino --knn 20
    Published for ResNet-18 with DINO: k-NN 81.3 % after 200 epochs, 84.8 % after 800 (Lightly's benchmarks).
    """
    crops = MultiCrop(
        num_local=4,
        global_scale=(0.3, 1.0),
        local_scale=(0.08, 0.3),
        global_size=(32, 32),
        local_size=(16, 16),
        blur_sigma=(0.1, 0.3),
    )
    return Run(
        model=preset("gmlp_micro").spec.configure(drop_path=0.1),
        task=Dino(crops, out_dim=8192, momentum=0.996, warmup_teacher_temperature=0.04, teacher_temperature=0.06),
        data=Cifar10(),
        batch_size=512,
        budget=Budget(epochs=200),
        optim=Muon(lr=1e-3, weight_decay=0.04, weight_decay_end=0.2),
        schedule=CosineSchedule(warmup_fraction=0.05, min_lr_ratio=0.01),
        max_grad_norm=3.0,
        compile=True,
        log_every=50,
        eval_every=1000,
        save_every=2000,
    )


def cifar10_probe() -> Run:
    """Linear probe on the frozen features of cifar10_dino.

    allmlp train cifar10_probe --set init_from=runs/cifar10_dino
    Under a minute on one H200. Published (ResMLP, ImageNet): S12 67.5, S24 72.8 %.
    """
    return Run(
        model=preset("gmlp_micro").spec,
        task=Probe(augment=Augment((HorizontalFlip(), Translate(4)))),
        data=Cifar10(),
        batch_size=512,
        budget=Budget(epochs=20),
        optim=Sgd(lr=0.3, weight_decay=0.0),
        schedule=CosineSchedule(warmup_fraction=0.0),
        compile=True,
        log_every=100,
        eval_every=1000,
        save_every=2000,
        init_from="runs/cifar10_dino",
    )


def cifar10_finetune() -> Run:
    """cifar10_dino fine-tuned with all labels and layer-wise learning rate decay.

    allmlp train cifar10_finetune --set init_from=runs/cifar10_dino
    Published (ResMLP, ImageNet): S12 76.6 to 76.5, S24 79.4 to 79.9 %.
    """
    run = cifar10_gmlp()
    return run.replace(
        budget=Budget(epochs=100), optim=run.optim.replace(lr=1e-3, layer_decay=0.8), init_from="runs/cifar10_dino"
    )
