"""Train one small model of each family on the embedded digits and compare them; a few minutes on two cores.

python examples/demo.py
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import allmlp
from allmlp.data.digits import Digits
from allmlp.models.model import Model
from allmlp.recipes import recipe
from allmlp.run import Run
from allmlp.threads import choose
from allmlp.training import train

OUT = Path("runs/demo")
FAMILIES = {
    "digits_mixer": "MLP-Mixer",
    "digits_resmlp": "ResMLP",
    "digits_gmlp": "gMLP",
    "digits_vit": "ViT (baseline)",
}
ROUNDS = 15


def main() -> None:
    screen = Console(width=100)
    results = {}
    for name, family in FAMILIES.items():
        screen.print(f"\n[bold]{family}[/bold]: allmlp train {name} --out {OUT / name}")
        run = recipe(name).make()
        assert isinstance(run, Run)
        results[name] = train(run, OUT / name)
    models = {name: allmlp.load(OUT / name) for name in FAMILIES}
    speeds = images_per_second(models)

    view = Table(title="scikit-learn's digits: 1,500 for training, 297 for testing", title_justify="left")
    for title in ("recipe", "model"):
        view.add_column(title)
    for title in ("accuracy", "parameters", "MACs", "images/s"):
        view.add_column(title, justify="right")
    for name, family in FAMILIES.items():
        cost = models[name].describe()
        numbers = f"{results[name]['accuracy']:.1%}", f"{cost.parameters:,}", f"{cost.macs / 1e6:.2f} M"
        view.add_row(name, family, *numbers, f"{speeds[name]:,.0f}")
    view.add_section()
    view.add_row("", "nearest neighbor, pixels", f"{nearest_neighbor_accuracy():.1%}")
    screen.print("", view)
    screen.print(f"images/s: prediction in batches of 100, the models in turn, the fastest of {ROUNDS} rounds.")
    screen.print(f"Curves: {OUT}/*/curves.png. All models: allmlp list. One model in detail: allmlp show mixer_b16.")


@torch.inference_mode()
def images_per_second(models: dict[str, Model]) -> dict[str, float]:
    """The fastest of several rounds, in turn: whatever else runs on this machine disturbs all models alike."""
    inputs = {name: model.dummy_inputs(100) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    choose(lambda: [model(*inputs[name]) for name, model in models.items()])
    for _ in range(ROUNDS):
        for name, model in models.items():
            start = time.perf_counter()
            model(*inputs[name])
            seconds[name].append(time.perf_counter() - start)
    return {name: 100 / min(times) for name, times in seconds.items()}


def nearest_neighbor_accuracy() -> float:
    """What is reached without a model, by the label of the most similar training image."""
    dataset = Digits().load()
    (train_images, train_labels), (images, labels) = (
        (split.examples.images.flatten(1).float(), split.examples.labels) for split in (dataset.train, dataset.test)
    )
    return (train_labels[torch.cdist(images, train_images).argmin(1)] == labels).double().mean().item()


if __name__ == "__main__":
    main()
