"""ResMLP's ablation table on CIFAR-10."""

from __future__ import annotations

from allmlp.data.augment import Augment, HorizontalFlip, Translate
from allmlp.layers import ClassMlp, LayerNorm, NoMixing, TokenConv, TokenMlp
from allmlp.models.encoder import Encoder
from allmlp.models.resmlp import resmlp
from allmlp.recipes.cifar_classification import cifar10_resmlp
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.tasks.classify import Classify


def cifar10_ablations() -> dict[str, Run]:
    """ResMLP's ablations on CIFAR-10: norm, pooling, patch communication, patch size.

    allmlp train cifar10_ablations
    allmlp train cifar10_ablations/conv --set seed=1

    Twelve epochs each, with shifts and flips only; 12 blocks, width 192 and 8 x 8 patches of 4 pixels instead of the
    paper's width 384 and 14 x 14 patches of 16. Half a minute each on one H200. Results beside the published ones:
    docs/further_results.md.
    """
    variants = {
        "linear": _variant(),
        "layernorm": _variant(norm=LayerNorm()),
        "class": _variant(pool=ClassMlp(layers=2)),
        "none": _variant(token=NoMixing()),
        "mlp": _variant(token=TokenMlp(expansion=4.0)),
        "conv": _variant(token=TokenConv("full")),
        "depthwise": _variant(token=TokenConv("depthwise")),
        "separable": _variant(token=TokenConv("separable")),
        "patch2": _variant(patch_size=2),
        "patch8": _variant(patch_size=8),
    }
    short = cifar10_resmlp().replace(
        task=Classify(label_smoothing=0.1, augment=Augment((HorizontalFlip(), Translate(4)))),
        budget=Budget(epochs=12),
        schedule=CosineSchedule(warmup_fraction=0.1),
        ema_decay=None,
        log_every=100,
        eval_every=2000,
        save_every=2000,
    )
    return {name: short.replace(model=model) for name, model in variants.items()}


def _variant(patch_size: int = 4, **changes: object) -> Encoder:
    return resmlp(12, 192, 0.1, patch_size=patch_size, img_size=32, num_classes=10, **changes)  # type: ignore[arg-type]
