"""The tables of the ResMLP paper, for ResMLP on CIFAR-10."""

from __future__ import annotations

from allmlp.recipes.ablations import cifar10_ablations
from allmlp.study.definition import Overrides, Row, Study

FINETUNING: dict[str, Overrides] = {
    "resmlp": {},
    "vit": {},
    "resnet18": {"optim": '{"kind": "Sgd", "lr": 0.05, "weight_decay": 5e-4}', "max_grad_norm": "none"},
}
"""Changes to `cifar10_finetune`; convnets have SGD, at a quarter of the learning rate of `cifar10_resnet18`."""


def resmlp_distillation() -> Study:
    """A small ResMLP from labels alone, and distilled from a ResNet-18 trained here: hard and soft.

    allmlp study resmlp_distillation --minutes 9

    150 epochs for every student (0.8 M parameters), with the views and mixed images that the teacher sees too; one
    teacher, of seed 0, for 100 epochs. 10 runs. Published gain of hard distillation on ImageNet, from RegNetY-16GF: 1.2
    points (ResMLP-S12, 76.6 to 77.8).
    """
    student: Overrides = {"model": "resmlp_nano", "budget.epochs": "150"}
    taught: Overrides = {**student, "task.teacher": "study:teacher@0"}
    return Study(
        "resmlp_distillation",
        rows={
            "teacher": Row("cifar10_resnet18", {"budget.epochs": "100"}, seeds=1),
            "labels": Row("cifar10_distill/labels", student),
            "hard": Row("cifar10_distill/hard", taught),
            "soft": Row("cifar10_distill/soft", {**taught, "task.temperature": "1"}),
        },
        compared="epochs",
        metric="accuracy",
        reference="labels",
    )


def resmlp_distillation_imagenette() -> Study:
    """ResMLP on Imagenette from labels alone, and distilled from convnets: a ResNet-18 trained here, one of ImageNet.

    allmlp study resmlp_distillation_imagenette --minutes 9 --jobs 2

    100 epochs at 128 pixels for all. The second teacher is an EfficientNet-Lite0 trained on ImageNet, in the model
    folder ./efficientnet_lite0: of ImageNet's training images, a hundred times as many, those of Imagenette are a part,
    but it teaches on the training images of Imagenette only. 16 runs.
    """
    rows = {"labels": Row("imagenette_resmlp")}
    overrides: Overrides = {"task.teacher": "study:resnet18@0"}
    for kind in ("hard", "soft"):
        rows[f"{kind}_efficientnet"] = Row(f"imagenette_resmlp_distilled/{kind}")
    rows["resnet18"] = Row("imagenette_resnet18", seeds=1)
    for kind in ("hard", "soft"):
        rows[f"{kind}_resnet18"] = Row(f"imagenette_resmlp_distilled/{kind}", overrides)
    return Study(
        "resmlp_distillation_imagenette",
        rows,
        compared="epochs",
        metric="accuracy",
        overrides={"budget.epochs": "100"},
        reference="labels",
    )


def resmlp_dino() -> Study:
    """DINO on CIFAR-10 without labels for ResMLP, ViT and ResNet-18 at equal epochs: k-NN, linear, fine-tuned.

    allmlp study resmlp_dino --minutes 9

    100 epochs with two crops, 2,048 outputs and a teacher temperature of 0.04, then fine-tuned for 50, beside 50 epochs
    from labels alone. 36 runs. Anchor: ResNet-18 with DINO, k-NN 81.3 at 200 epochs (Lightly's benchmark). Published
    linear probe of ResMLP on ImageNet: S12 67.5, S24 72.8 %.
    """
    pretraining: Overrides = {
        "budget.epochs": "100",
        "task.crops.num_local": "0",
        "task.out_dim": "2048",
        "task.momentum": "0.99",
        "task.teacher_temperature": "0.04",
    }
    # The usual optimizer of convnets, with Lightly's learning rate of 0.06 per 256 images.
    sgd: Overrides = {"optim": '{"kind": "Sgd", "lr": 0.12, "weight_decay": 5e-4}'}
    drop_path: Overrides = {"model.drop_path.rate": "0.1", "optim.lr": "2e-3"}
    rows: dict[str, Row] = {}
    for family, name, changes in (
        ("resmlp", "resmlp_micro", drop_path),
        ("vit", "vit_micro", drop_path),
        ("resnet18", "resnet18_cifar", sgd),
    ):
        model: Overrides = {"model": name}
        start: Overrides = {**model, "init_from": f"study:{family}_dino"}
        rows[f"{family}_dino"] = Row(
            "cifar10_dino",
            {**model, **pretraining, **changes},
            metric="knn_accuracy",
            anchor=81.3,
            source="ResNet-18, Lightly",
        )
        rows[f"{family}_linear"] = Row("cifar10_probe", start)
        rows[f"{family}_finetuned"] = Row("cifar10_finetune", {**start, **FINETUNING[family], "budget.epochs": "50"})
        rows[f"{family}_labels"] = Row(f"cifar10_{family}", {"budget.epochs": "50"})
    return Study("resmlp_dino", rows, compared="epochs", metric="accuracy")


def resmlp_ablations() -> Study:
    """ResMLP's ablations on CIFAR-10 at 100 epochs: norm, pooling, communication between patches, patch size.

    allmlp study resmlp_ablations --minutes 9 --jobs 3
    30 runs. Published on ImageNet: see `allmlp show cifar10_ablations`.
    """
    return Study(
        "resmlp_ablations",
        rows={name: Row(f"cifar10_ablations/{name}") for name in cifar10_ablations()},
        compared="epochs",
        metric="accuracy",
        overrides={"budget.epochs": "100"},
        reference="linear",
    )


def resmlp_warmup() -> Study:
    """Does ResMLP train without warm-up and without LayerNorm, where ViT needs them?

    allmlp study resmlp_warmup --minutes 9 --jobs 3
    CIFAR-10, 50 epochs with AdamW, 18 runs: ResMLP with Affine and with LayerNorm, and ViT, each with 3 % warm-up and
    without (ViT has LayerNorm in either).
    """
    adamw: Overrides = {"optim": '{"kind": "AdamW", "lr": 1e-3, "weight_decay": 0.05}', "budget.epochs": "50"}
    rows: dict[str, Row] = {}
    for name, recipe, changes in (
        ("resmlp", "cifar10_resmlp", {}),
        ("resmlp, LayerNorm", "cifar10_resmlp", {"model.block.norm": "LayerNorm", "model.norm": "LayerNorm"}),
        ("vit", "cifar10_vit", {}),
    ):
        rows[name] = Row(recipe, {**adamw, **changes})
        rows[f"{name}, no warm-up"] = Row(recipe, {**adamw, **changes, "schedule.warmup_fraction": "0"})
    return Study("resmlp_warmup", rows, compared="epochs", metric="accuracy", reference="resmlp")
