"""What models of CIFAR-10 rely on: the order of pixels, clean images, a color that matches the class."""

from __future__ import annotations

from allmlp.data.corruptions import CORRUPTIONS
from allmlp.data.planted_colors import PlantedColors
from allmlp.head_init import HeadInit
from allmlp.optim import AdamW
from allmlp.recipes.cifar_classification import (
    cifar10_gmlp,
    cifar10_mixer,
    cifar10_resmlp,
    cifar10_resnet18,
    cifar10_vit,
)
from allmlp.run import Budget, Run
from allmlp.tasks.classify import Classify
from allmlp.tasks.classify_corrupted import ClassifyCorrupted
from allmlp.tasks.classify_permuted import ClassifyPermuted

KINDS = tuple(CORRUPTIONS)
"""Of corruptions."""


def _families() -> dict[str, tuple[Run, Classify]]:
    table = {
        "gmlp": cifar10_gmlp(),
        "resmlp": cifar10_resmlp(),
        "mixer": cifar10_mixer(),
        "vit": cifar10_vit(),
        "resnet18": cifar10_resnet18(),
    }
    families = {}
    for family, run in table.items():
        assert isinstance(run.task, Classify)
        families[family] = run, run.task
    return families


def cifar10_permuted() -> dict[str, Run]:
    """CIFAR-10 with pixels permuted: not at all, patches of 4 x 4 and the pixels within them, or all pixels.

    allmlp train cifar10_permuted/mixer_global --set budget.epochs=40
    Not yet run. Published (Mixer, section 3.4, on JFT-300M): accuracy does not depend on the order of patches and of
    the pixels within them, and falls by 45 % where all pixels are permuted; that of ResNet50 falls by 75 %.
    """
    table = {}
    for family, (run, task) in _families().items():
        same = (task.loss, task.label_smoothing, task.augment, task.mix, task.mix_until)
        table[f"{family}_none"] = run
        table[f"{family}_patches"] = run.replace(task=ClassifyPermuted(*same, permutation="patches"))
        table[f"{family}_global"] = run.replace(task=ClassifyPermuted(*same, permutation="global"))
    return table


def cifar10_corrupted() -> dict[str, Run]:
    """CIFAR-10, evaluated also with noise, blur, fog and other corruptions of five severities.

    allmlp train cifar10_corrupted/gmlp
    Not yet run. The kinds are those of CIFAR-10-C; the images are made here, so that published figures do not compare.
    """
    return {
        family: run.replace(
            task=ClassifyCorrupted(task.loss, task.label_smoothing, task.augment, task.mix, task.mix_until)
        )
        for family, (run, task) in _families().items()
    }


def cifar10_colors() -> dict[str, Run]:
    """CIFAR-10 with planted colors that match the class in training only; last layer or all weights retrained.

    allmlp train cifar10_colors/gmlp
    allmlp train cifar10_colors/gmlp_last_layer --set init_from=runs/cifar10_colors/gmlp

    Not yet run. FAMILY trains where 19 of 20 images have the color of their class. FAMILY_last_layer fits the
    classifier anew on a tenth of the images with colors at random (Kirichenko et al., 2023), FAMILY_full trains all
    weights on them.
    """
    table = {}
    for family, (run, task) in _families().items():
        # The color is the cue: it is neither jittered nor mixed with that of another class.
        start = run.replace(data=PlantedColors(), task=Classify(label_smoothing=task.label_smoothing), ema_decay=None)
        balanced = start.replace(
            data=PlantedColors(correlation=0.1), train_fraction=0.1, init_from=f"runs/cifar10_colors/{family}"
        )
        table[family] = start
        table[f"{family}_last_layer"] = balanced.replace(
            head_init=HeadInit(), freeze_fraction=1.0, budget=Budget(steps=1), optim=AdamW(lr=0.0), compile=False
        )
        table[f"{family}_full"] = balanced.replace(
            optim=run.optim.replace(lr=run.optim.lr / 4), budget=Budget(epochs=20)
        )
    return table
