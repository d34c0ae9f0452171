"""CIFAR-10 from scratch in 300 seconds."""

from __future__ import annotations

from dataclasses import replace

from allmlp.study.definition import Overrides, Row, Study, Tuning

SECONDS_300 = {"budget.epochs": "none", "budget.minutes": "5"}
TUNING_60 = Tuning(val_size=5000, overrides={"budget.minutes": "1"})
TUNING_50_EPOCHS = Tuning(5000, overrides={"budget.epochs": "50", "budget.minutes": "none"}, compared="epochs")

UNMIXED_END: Overrides = {"task.mix_until": "0.85"}
WHITENED_STEM: Overrides = {"stem_init": "Whitening"}
FAST_VECTORS: Overrides = {"optim.vector_lr_scale": "4"}
ALL_THREE: Overrides = {**UNMIXED_END, **WHITENED_STEM, **FAST_VECTORS}


def cifar10() -> Study:
    """gMLP, ResMLP, Mixer, ViT and ResNet-18 on CIFAR-10 with today's recipes: 300 seconds of training alone each.

    allmlp study cifar10 --minutes 9
    15 runs of about 6 minutes on one H200.
    """
    return Study(
        "cifar10",
        rows={
            "gmlp": Row("cifar10_gmlp", anchor=95.54, source="Caterpillar-Mi, 5.9 M, arXiv 2305.17644"),
            "resmlp": Row("cifar10_resmlp", anchor=88.12, source="1.09 M, mskimS2/image-models"),
            "mixer": Row("cifar10_mixer", anchor=90.83, source="0.67 M, omihub777/MLP-Mixer-CIFAR"),
            "vit": Row("cifar10_vit"),
            "resnet18": Row("cifar10_resnet18", anchor=95.28, source="arXiv 1708.04552, 200 epochs"),
        },
        compared="seconds",
        metric="accuracy",
        overrides=SECONDS_300,
        reference="vit",
    )


def cifar10_staged() -> Study:
    """Pyramids, and the plain MLP, on CIFAR-10: three stages of gMLP or ResMLP, CycleMLP, an MLP of the pixels.

    allmlp study cifar10_staged --minutes 9
    9 runs of about 6 minutes on one H200, under the conditions of `cifar10`. Before, gMLP and ResMLP in three stages
    train for 60 seconds each; the better of the two on 5,000 held-out images is the first row.
    """
    pyramid = {"anchor": 95.54, "source": "Caterpillar-Mi, 5.9 M, arXiv 2305.17644"}
    families = {"gMLP": {}, "ResMLP": {"model": "resmlp_staged_micro"}}
    return Study(
        "cifar10_staged",
        rows={
            "staged": Row("cifar10_gmlp_staged", candidates=families, **pyramid),
            "cyclemlp": Row("cifar10_cyclemlp", **pyramid),
            "mlp": Row("cifar10_mlp"),
        },
        compared="seconds",
        metric="accuracy",
        overrides=SECONDS_300,
        tuning=TUNING_60,
    )


def cifar10_tuned() -> Study:
    """gMLP, ResMLP and Mixer tuned on 5,000 held-out images toward higher accuracy on CIFAR-10 in 300 seconds.

    allmlp study cifar10_tuned --minutes 9 --jobs 9

    18 tuning runs of 50 epochs, about 60 seconds of training alone on one H200; the settings do not change the
    seconds of an epoch, so that these runs can share the GPU. 9 final runs of about 6 minutes. The settings: images
    are not mixed in the last 15 % of the run; the stem starts with whitened patches; norms, Affine, LayerScale and
    biases have four times the learning rate; all three; all three with 1.5 times the learning rate of the recipe.
    """
    settings: dict[str, Overrides] = {
        "recipe": {},
        "unmixed end": UNMIXED_END,
        "unmixed end, whitened stem": {**UNMIXED_END, **WHITENED_STEM},
        "unmixed end, fast vectors": {**UNMIXED_END, **FAST_VECTORS},
        "all three": ALL_THREE,
        "all three, lr 3e-3": {**ALL_THREE, "optim.lr": "3e-3"},
    }
    families = ("gmlp", "resmlp", "mixer")
    return Study(
        "cifar10_tuned",
        rows={family: replace(cifar10().rows[family], candidates=settings) for family in families},
        compared="seconds",
        metric="accuracy",
        overrides=SECONDS_300,
        tuning=TUNING_50_EPOCHS,
    )
