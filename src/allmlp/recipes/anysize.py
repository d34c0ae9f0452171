"""One model for images of any size."""

from __future__ import annotations

from allmlp.recipes.cifar_classification import cifar10_gmlp, cifar10_mixer, cifar10_resmlp
from allmlp.run import Run
from allmlp.tasks.classify import Classify
from allmlp.tasks.classify_any_size import ClassifyAnySize

SIZES = (24, 32, 40, 48, 64)


def cifar10_anysize() -> dict[str, Run]:
    """CIFAR-10 models trained at 32 pixels, or at a random size from 24 to 64 in every step; evaluated at all of them.

    allmlp train cifar10_anysize/gmlp_any
    Images of other sizes are the 32-pixel ones, resized. Results of gMLP: `allmlp study anysize`.
    """
    table = {}
    for name, run in {"gmlp": cifar10_gmlp(), "resmlp": cifar10_resmlp(), "mixer": cifar10_mixer()}.items():
        assert isinstance(run.task, Classify)
        for kind, sizes in {"fixed": (), "any": SIZES}.items():
            task = run.task
            any_size = ClassifyAnySize(
                task.loss,
                task.label_smoothing,
                task.augment,
                task.mix,
                task.mix_until,
                train_sizes=sizes,
                eval_sizes=SIZES,
            )
            table[f"{name}_{kind}"] = run.replace(task=any_size)
    return table
