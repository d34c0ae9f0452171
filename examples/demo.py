"""A tour of the zoo: one small model of each family, what it costs, and one forward pass.

python examples/demo.py
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table

import allmlp
from allmlp.cli import main

FAMILIES = [
    ("mixer_nano", "MLP-Mixer: an MLP over tokens, an MLP over channels"),
    ("resmlp_nano", "ResMLP: one linear map over tokens"),
    ("gmlp_nano", "gMLP: a channel MLP with a spatial gate inside"),
    ("amlp_nano", "aMLP: gMLP with a tiny attention beside the gate"),
    ("vit_nano", "ViT: attention, the baseline"),
    ("gmlp_mlm_tiny", "gMLP for masked language"),
    ("bert_tiny", "BERT, the baseline for language"),
    ("gmlp_causal_tiny", "gMLP that writes text"),
    ("resmlp_seq2seq_tiny", "ResMLP that translates"),
]


def tour() -> Table:
    view = Table(title="One small model of each family, one forward pass of 8 examples", title_justify="left")
    for title in ("model", "what it is", "parameters", "MACs", "output", "ms"):
        view.add_column(
            title, no_wrap=title != "what it is", justify="left" if title in ("model", "what it is") else "right"
        )
    for name, about in FAMILIES:
        model = allmlp.create(name, seed=0).eval()
        cost, inputs = model.describe(), model.example(batch=8)
        with torch.inference_mode():
            model(*inputs)
            start = time.perf_counter()
            output = model(*inputs)
        milliseconds = 1e3 * (time.perf_counter() - start)
        shape = "x".join(map(str, output.shape))
        view.add_row(name, about, f"{cost.parameters:,}", f"{cost.macs / 1e6:.1f} M", shape, f"{milliseconds:.1f}")
    return view


if __name__ == "__main__":
    Console(width=100).print(tour())
    print("\nThe zoo (allmlp list); one page about a model: allmlp show mixer_b16\n")
    main(["list"])
