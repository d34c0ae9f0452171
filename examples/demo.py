"""Train one small model of each family on the embedded digits and compare them; three and a half minutes of CPU time.

python examples/demo.py
"""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import allmlp
from allmlp.data.digits import Digits
from allmlp.head_init import Features, HeadInit, fit_holding_out
from allmlp.models.model import Model
from allmlp.recipes import recipe
from allmlp.report.page import write
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
    for name, accuracy in floors().items():
        view.add_row("", name, f"{accuracy:.1%}")
    screen.print("", view)
    screen.print(f"images/s: prediction in batches of 100, the models in turn, the fastest of {ROUNDS} rounds.")
    page = OUT / "report.html"
    write([OUT / name for name in FAMILIES], page)
    screen.print(f"Curves, filters and mistakes of all four: {page}", soft_wrap=True)
    screen.print("All models: allmlp list. One model in detail: allmlp show mixer_b16.")
    if sys.stdout.isatty() and has_display():
        webbrowser.open(page.resolve().as_uri())


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


def floors() -> dict[str, float]:
    """What is reached without a network, from the pixels."""
    dataset = Digits().load()
    train, test = (
        Features(split.examples.images.flatten(1).float(), split.examples.labels)
        for split in (dataset.train, dataset.test)
    )
    nearest = train.labels[torch.cdist(test.values, train.values).argmin(1)]
    linear = fit_holding_out(train, HeadInit().l2, torch.ones(10, dtype=torch.float64), seed=0)
    likeliest = (test.values.double() @ linear.weight.T + linear.bias).argmax(1)
    answers = {"nearest neighbor": nearest, "logistic regression": likeliest}
    return {name: (answer == test.labels).double().mean().item() for name, answer in answers.items()}


def has_display() -> bool:
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


if __name__ == "__main__":
    main()
