"""Train one small model of each family on the embedded digits and compare them; about three minutes on two cores.

python examples/demo.py
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import allmlp
from allmlp.log import METRICS, read_metrics
from allmlp.recipes import recipe
from allmlp.run import Run
from allmlp.training import train

OUT = Path("runs/demo")
FAMILIES = {
    "digits_mixer": "MLP-Mixer",
    "digits_resmlp": "ResMLP",
    "digits_gmlp": "gMLP",
    "digits_vit": "ViT (baseline)",
}


def main() -> None:
    screen = Console(width=100)
    view = Table(title="scikit-learn's digits: 1,500 for training, 297 for testing", title_justify="left")
    for title in ("recipe", "model"):
        view.add_column(title)
    for title in ("accuracy", "parameters", "MACs", "images/s", "seconds"):
        view.add_column(title, justify="right")
    for name, family in FAMILIES.items():
        screen.print(f"[bold]{family}[/bold]: allmlp train {name} --out {OUT / name}")
        run = recipe(name).make()
        assert isinstance(run, Run)
        started = time.monotonic()
        result = train(run, OUT / name)
        seconds = time.monotonic() - started
        cost = allmlp.load(OUT / name).describe()
        speeds = sorted(
            record["images/s"] for record in read_metrics(OUT / name / METRICS) if record["kind"] == "train"
        )
        view.add_row(
            name,
            family,
            f"{result['accuracy']:.1%}",
            f"{cost.parameters:,}",
            f"{cost.macs / 1e6:.2f} M",
            f"{speeds[len(speeds) // 2]:,.0f}",
            f"{seconds:.0f}",
        )
    screen.print(view)
    screen.print(f"Curves: {OUT}/*/curves.png. All models: allmlp list. One model in detail: allmlp show mixer_b16.")


if __name__ == "__main__":
    main()
