"""Measure the properties that the papers claim, on the bundled models and on small ones trained on digits in seconds.

    PYTHONPATH=docs/tools python -m properties       writes docs/logs/properties.json and docs/images/properties-*.png
    PYTHONPATH=docs/tools python -m properties --add 'ResMLP, cifar10=runs/cifar10_resmlp'

The second adds reach and sparsity of a model of images in 8 x 8 patches that was trained elsewhere to the record.
The same seeds give the same numbers on the same machine. docs/guides/properties.md has the figures;
`python -m results` writes its tables from the record.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy

import allmlp
from allmlp.analysis import figures
from allmlp.analysis.figures import Chart, FigureText, Panel, Series
from allmlp.analysis.sparsity import sparsity
from allmlp.analysis.target import AnalysisTarget, load_target
from allmlp.analysis.toeplitz import Grid, mean_filter
from allmlp.analysis.token_filters import direction, distances, reach, token_weights
from allmlp.data.digits import Digits
from allmlp.errors import require
from allmlp.files import write_atomically, write_json_atomically
from allmlp.layers import Attention, ClassifierHead, Context, Init, MeanPool, Normal, SpatialGatingUnit
from allmlp.layers.block import Residual
from allmlp.layers.context import BuildContext
from allmlp.models.encoder import EncoderModel
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.models.mixer import mixer
from allmlp.models.model import Model, ModelSpec
from allmlp.models.resmlp import resmlp
from allmlp.provenance import environment

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "logs" / "properties.json"
SAMPLES = ROOT / "src" / "allmlp" / "serve" / "page" / "samples"
WIDTH, DEPTH, EPOCHS, BATCH = 32, 4, 12, 50
"""Of the models that are trained on digits: 8 x 8 pixels, 16 patches."""
PAD = 17
"""The token after the 17 gray levels."""


# --- training on digits -----------------------------------------------------------------------------------------


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images in [0, 1] and labels, then those for testing."""
    data = Digits().load()
    (x, y), (test_x, test_y) = (split.fetch(torch.arange(len(split))) for split in (data.train, data.test))
    return x / 255, y, test_x / 255, test_y


def fit(model: Model, inputs: Callable[[Tensor], tuple[Any, ...]], epochs: int, watch: Callable[[int], None]) -> Model:
    """AdamW with warm-up and linear decay.

    `inputs` maps indices of examples to the model's arguments; `watch` is called before every step and at the end.
    """
    labels, order = digits()[1], torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    steps = epochs * (len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 50) * (1 - n / steps))
    model.train()
    step = 0
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=order).split(BATCH):
            watch(step)
            step += 1
            loss = cross_entropy(model(*inputs(chosen)), labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    watch(step)
    return model.eval()


def normalize(pixels: Tensor) -> Tensor:
    return (pixels - 0.3) / 0.37


def trained(
    spec: ModelSpec, epochs: int = EPOCHS, watch: Callable[[Model, int], None] = lambda model, step: None
) -> Model:
    """An image model of digits."""
    model = allmlp.create(spec.configure(in_chans=1, img_size=8, num_classes=10), seed=0)
    return fit(model, lambda chosen: (normalize(digits()[0][chosen]),), epochs, lambda step: watch(model, step))


SMALL: dict[str, ModelSpec] = {
    "ResMLP": resmlp(DEPTH, WIDTH, 0.3, patch_size=2),
    "Mixer": mixer(DEPTH, WIDTH, patch_size=2),
    "gMLP": gmlp(DEPTH, WIDTH, patch_size=2),
}


# --- what a token of a block's output depends on -----------------------------------------------------------------


def token_influence(residual: Residual, x: Tensor, probes: int = 1) -> Tensor:
    """How strongly token j of the input acts on token i of what a branch adds: s s.

    influence[i, j] = sqrt(mean |d (r . f(norm(X))[i]) / d X[j]|^2),   r a random direction over the channels
    """
    x = x.detach().clone().requires_grad_()
    y = residual.branch(residual.norm(x), Context())
    random = torch.Generator().manual_seed(0)
    total = torch.zeros(y.shape[1], x.shape[1], dtype=x.dtype)
    for r in torch.randn(probes, y.shape[-1], dtype=x.dtype, generator=random):
        for i in range(y.shape[1]):
            (slope,) = torch.autograd.grad((y[:, i] @ r).sum(), x, retain_graph=True)
            total[i] += slope.square().sum((0, 2))
    return (total / (probes * len(x))).sqrt()


def influences(model: Model, images: Tensor) -> list[Tensor]:
    """The influence in the token-mixing branch of every block, the first branch of it."""
    assert isinstance(model, EncoderModel)
    with torch.no_grad():
        kept = model.forward_activations(images)
    inputs = [kept["stem"], *(kept[f"blocks.{i}"] for i in range(len(model.blocks) - 1))]
    return [token_influence(block.residuals()[0][1], x) for block, x in zip(model.blocks, inputs)]


def from_others(influence: Tensor) -> float:
    """The fraction of the squared influence that comes from other tokens: 0 for a plain channel MLP."""
    energy = influence.double().square()
    return float(1 - energy.trace() / energy.sum())


# --- the properties ------------------------------------------------------------------------------------------------


def bundled(name: str) -> AnalysisTarget:
    return load_target(str(ROOT / "weights" / name))


def cifar_images(target: AnalysisTarget, count: int = 1) -> Tensor:
    files = sorted(SAMPLES.glob("cifar10-*.png"))[:count]
    return target.normalize(target.load_images(files).pixels)


def start() -> dict[str, Any]:
    """gMLP starts as a plain channel MLP: before training no token acts on another."""
    target = bundled("cifar10")
    images = cifar_images(target)
    models = {"before": allmlp.create(target.model.spec, seed=0).eval(), "after": target.model}
    shares = {key: [from_others(one) for one in influences(model, images)] for key, model in models.items()}
    steps: list[int] = []
    during: list[float] = []

    def watch(model: Model, step: int) -> None:
        if step % 15 == 0:
            several = [from_others(one) for one in influences(model.eval(), normalize(digits()[2][:4]))]
            steps.append(step)
            during.append(sum(several) / len(several))
            model.train()

    trained(SMALL["gMLP"], 4, watch)
    return shares | {"digits_steps": steps, "digits": during}


def filters() -> dict[str, Any]:
    """The spatial filters of a trained text model look forward, backward, or to both sides."""
    kinds = {one.name: direction(mean_filter(one.weight.double())) for one in token_weights(bundled("text").model)}
    return {
        "count": dict(Counter(kind for kind, _ in kinds.values())),
        "direction": {name: kind for name, (kind, _) in kinds.items()},
        "ahead": {name: ahead for name, (_, ahead) in kinds.items()},
    }


def order_sizes(f: Callable[[Tensor], Tensor], x: Tensor, most: int = 6, nodes: int = 13) -> list[float]:
    """The sizes of the terms of order 0 .. `most` in f(t X) as a polynomial in t, the largest one 1.

    Its coefficients are those of the polynomial through the values at Chebyshev nodes of t in [-1, 1], in float64.
    """
    ts = torch.cos(torch.pi * (torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes)
    values = torch.stack([f(t * x).flatten() for t in ts])
    powers = ts[:, None] ** torch.arange(nodes)
    sizes = torch.linalg.solve(powers, values).norm(dim=1)[: most + 1]
    return (sizes / sizes.max()).tolist()


def orders() -> dict[str, Any]:
    """The gate multiplies two tokens; attention multiplies query, key and value."""
    torch.manual_seed(0)
    tokens, channels = 6, 8
    ctx = BuildContext(tokens, channels, Init(Normal(0.3)))
    x = torch.randn(1, tokens, channels, dtype=torch.float64)
    gate = SpatialGatingUnit("split", norm=None, init=Init(Normal(0.3), Normal(0.3))).build(ctx, channels).double()
    attention: Any = Attention(2, linear_bias=False).build(ctx).double()

    def products(x: Tensor) -> Tensor:
        """Attention without its softmax: Q K^T V."""
        q, k, v = attention.qkv(x).chunk(3, dim=-1)
        return q @ k.transpose(1, 2) @ v

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "spatial gate": lambda x: gate(x, x, Context()),
        "attention": lambda x: attention(x, Context()),
        "attention without softmax": products,
    }
    with torch.no_grad():
        return {name: order_sizes(f, x) for name, f in functions.items()}


def gray_words(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Digits as texts of up to 16 tokens, the gray levels of 2 x 2 pixels row by row; the last 0 to 7 are padding.

    The ids, and which of them are real.
    """
    ids = (avg_pool2d(pixels, 2).flatten(1) * 16).round().long()
    missing = torch.arange(len(ids)) * 5 % 8  # as many of every length, in a fixed order
    real = torch.arange(16) < 16 - missing[:, None]
    return ids.masked_fill(~real, PAD), real


def padding() -> dict[str, Any]:
    """A gMLP that is trained without a mask learns to ignore padding."""
    spec = gmlp_text(2, WIDTH, 4 * WIDTH, seq_len=16, vocab_size=PAD + 1).replace(
        pool=MeanPool(), head=ClassifierHead(10)
    )
    (ids, real), (test_ids, test_real), found = gray_words(digits()[0]), gray_words(digits()[2]), {}
    for training, masked in (("with mask", True), ("without mask", False)):
        model = allmlp.create(spec, seed=0)
        fit(
            model, lambda chosen, masked=masked: (ids[chosen], real[chosen] if masked else None), EPOCHS, lambda n: None
        )
        with torch.no_grad():
            for testing, mask in (("with mask", test_real), ("without mask", None)):
                right = model(test_ids, mask).argmax(1) == digits()[3]
                found[f"trained {training}, tested {testing}"] = float(right.double().mean())
    return {"accuracy": found, "test_examples": len(test_ids), "padding": float((~test_real).double().mean())}


def far() -> dict[str, Any]:
    """Deeper layers read from farther away: the reach of the gates, and of the influence in small models."""
    gates = {name: token_weights(bundled(name).model) for name in ("cifar10", "image")}
    found: dict[str, Any] = {
        f"gMLP, {name}": [reach(one.weight, one.grid) for one in own] for name, own in gates.items()
    }
    for name in SMALL:
        grid = (4, 4)
        found[f"{name}, digits"] = [reach(one, grid) for one in influences(small(name), normalize(digits()[2][:8]))]
    grids: dict[str, Grid] = {"8 x 8 patches": (8, 8), "4 x 4 patches": (4, 4)}
    return {"reach": found, "equal weights": {key: float(distances(g[0] * g[1], g).mean()) for key, g in grids.items()}}


def sparse() -> dict[str, Any]:
    """The fraction of weights below 5 % of the largest one in their matrix, by what the matrix mixes."""
    before = allmlp.create(small("ResMLP").spec, seed=0)
    models = {"ResMLP, digits, before training": before, "ResMLP, digits": small("ResMLP")}
    models |= {"gMLP, cifar10": bundled("cifar10").model, "gMLP, image": bundled("image").model}
    models["aMLP, text"] = bundled("text").model
    return {name: small_fractions(model) for name, model in models.items()}


def small_fractions(model: Model) -> dict[str, float]:
    """By what the matrices mix, the mean over all of them."""
    rows = sparsity(model)
    kinds = {kind: [row.fraction for row in rows if row.kind == kind] for kind in ("token", "channel")}
    return {kind: sum(own) / len(own) for kind, own in kinds.items()}


def add(record: dict[str, Any], name: str, target: AnalysisTarget) -> None:
    """Reach and sparsity of another model of images; the reach of a Mixer is that of its gradient."""
    own = [reach(one.weight, one.grid) for one in token_weights(target.model) if one.kind == "matrix"]
    if not own:
        grid = target.model.spec.build_contexts[0].grid  # type: ignore[attr-defined]
        own = [reach(one, grid) for one in influences(target.model, cifar_images(target))]
    record["reach"]["reach"][name], record["sparsity"][name] = own, small_fractions(target.model)


@cache
def small(name: str) -> Model:
    return trained(SMALL[name]).requires_grad_(False)


PROPERTIES: dict[str, Callable[[], dict[str, Any]]] = {
    "start": start,
    "filters": filters,
    "orders": orders,
    "padding": padding,
    "reach": far,
    "sparsity": sparse,
}


# --- figures -------------------------------------------------------------------------------------------------------


def bars(title: str, ylabel: str, groups: dict[str, dict[str, float]], floor: float = 0.0) -> Any:
    """Grouped bars: groups along the axis, one color per key; a logarithmic axis from `floor` if that is not 0."""

    @figures.styled
    def draw() -> Any:
        figure = require("matplotlib.figure", "analysis").Figure(figsize=(7.2, 3.2), layout="constrained")
        axes = figure.subplots()
        keys = list(next(iter(groups.values())))
        width = 0.8 / len(keys)
        for number, key in enumerate(keys):
            at = [place + (number - (len(keys) - 1) / 2) * width for place in range(len(groups))]
            heights = [max(group[key], floor) for group in groups.values()]
            axes.bar(at, heights, width * 0.95, color=figures.COLORS[number], label=key)
        if floor:
            axes.set_yscale("log")
            axes.set_ylim(bottom=floor)
        axes.set_xticks(range(len(groups)), [name.replace(", ", "\n") for name in groups], size=7)
        axes.set_title(title, size=10)
        axes.set_ylabel(ylabel)
        figure.legend(loc="outside lower center", ncols=len(keys))
        return figure

    return draw()


def drawings(record: dict[str, Any]) -> dict[str, Any]:
    """The figures by name."""
    depth = list(range(len(record["start"]["before"])))
    shares = [Series(f"{when} training", depth, record["start"][when]) for when in ("before", "after")]
    course = Series("", record["start"]["digits_steps"], record["start"]["digits"])
    reaches = [Series(name, list(range(len(ys))), ys) for name, ys in record["reach"]["reach"].items()]
    uniform = record["reach"]["equal weights"]

    def charts(ending: str) -> list[Series]:
        return [one for one in reaches if one.label.endswith("digits") == (ending == "4 x 4 patches")]

    lines = [(one.name, mean_filter(one.weight.double())) for one in token_weights(bundled("text").model)]
    panels = []
    for number, (name, line) in enumerate(lines):
        kind = record["filters"]["direction"][name]
        middle = len(line) // 2
        panels.append(Panel(f"block {number}, {kind}", line[middle - 16 : middle + 17], kind))
    note = "the bundled aMLP; the 16 nearest tokens on each side; positive offsets are later tokens"
    text = FigureText("Spatial filters of a text model", note, "offset of the token read", "relative weight")
    return {
        "start": figures.by_depth(
            [Chart("gMLP of CIFAR-10", "fraction from other tokens", shares)],
            "What a token gets from other tokens",
            "block",
        ),
        "gradual": figures.by_depth(
            [Chart("gMLP on digits, mean over the blocks", "fraction from other tokens", [course])],
            "Spatial information comes in during training",
            "step",
        ),
        "filters": figures.filter_lines(panels, text, directions=True),
        "orders": bars(
            "Terms of f(tX) by their order in t",
            "size, the largest 1",
            {f"order {n}": {name: sizes[n] for name, sizes in record["orders"].items()} for n in range(1, 7)},
            floor=1e-8,
        ),
        "padding": bars(
            "Accuracy on digits as padded texts",
            "accuracy",
            {name: {"accuracy": value} for name, value in record["padding"]["accuracy"].items()},
        ),
        "reach": figures.by_depth(
            [
                Chart(
                    size,
                    "mean distance read (patches)",
                    [*charts(size), Series("equal weights", xs, [value] * len(xs), dashed=True)],
                )
                for size, value in uniform.items()
                for xs in [max((one.xs for one in charts(size)), key=len)]
            ],
            "Reach of token mixing by depth",
            "block",
        ),
        "sparsity": bars("Weights below 5 % of the largest in their matrix", "fraction", record["sparsity"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", action="append", default=[], metavar="NAME=FOLDER")
    added = parser.parse_args().add
    torch.set_num_threads(1)
    if added:
        record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf8"))
        for name, _, folder in (one.partition("=") for one in added):
            add(record, name, load_target(folder))
    else:
        record = {name: measure() for name, measure in PROPERTIES.items()}
        record["environment"] = environment(torch.device("cpu"))
    write_json_atomically(RECORD, record)
    for name, figure in drawings(record).items():
        image = ROOT / "docs" / "images" / f"properties-{name}.png"
        write_atomically(image, lambda file, figure=figure: figures.save(figure, file, "png"))


if __name__ == "__main__":
    main()
