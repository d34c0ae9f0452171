"""A trained model resized to another image size and fine-tuned briefly."""

from __future__ import annotations

from allmlp.models.zoo import preset
from allmlp.recipes.cifar_classification import cifar10_gmlp
from allmlp.run import Budget, Run


def cifar10_resized() -> dict[str, Run]:
    """The bundled CIFAR-10 model at 24, 40, 48 and 64 pixels: three epochs of fine-tuning each.

    allmlp train cifar10_resized/48
    allmlp resize weights/cifar10 runs/cifar10_64_tile --img-size 64 --rule tile && allmlp train cifar10_resized/64_tile
    A minute each on one H200. Results, with and without fine-tuning: docs/further_results.md.
    """
    spec = preset("gmlp_micro").spec.configure(drop_path=0.1, num_classes=10)
    start = cifar10_gmlp()
    short = start.replace(budget=Budget(epochs=3), optim=start.optim.replace(lr=2e-4), init_from="weights/cifar10")
    table = {str(size): short.replace(model=spec.configure(img_size=size)) for size in (24, 40, 48, 64)}
    return table | {"64_tile": table["64"].replace(init_from="runs/cifar10_64_tile")}
