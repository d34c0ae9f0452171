"""Figures from docs/logs: one per line of `MEASURED` for the papers' tables, and all speeds for `allmlp plan`.

Speeds need no list: every docs/logs/bench*.json, written by `allmlp bench` on a known GPU, is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from allmlp.models.cost import measure
from allmlp.models.zoo import preset
from allmlp.plan.hardware import GPUS, Speed
from allmlp.plan.jobs import job
from allmlp.plan.time import training_flops
from paper_tables.published import Cell
from results.records import Record, study

MEASURED = r"""
resmlp_ablations | Mixer, 0.85 M: labels alone | CIFAR-10 | cifar10_distill_labels.jsonl          | accuracy %
resmlp_ablations | Mixer, 0.85 M: distillation | CIFAR-10 | cifar10_distill_hard.jsonl            | accuracy %
resmlp_dino | gMLP, 7.19 M, 84 epochs of CIFAR-10 | linear | cifar10_probe.jsonl | accuracy %
resmlp_dino | gMLP, 7.19 M, 84 epochs of CIFAR-10 | k-NN   | cifar10_dino.jsonl  | knn_accuracy %
gmlp_table3 gmlp_table4 gmlp_table6 | gMLP L12, 44 M, 0.23 G tokens                  | ppl | wiki_gmlp.jsonl                      | perplexity
gmlp_table3 gmlp_table4 gmlp_table6 | aMLP L11, 44 M, 0.11 G tokens                  | ppl | wiki_amlp.jsonl                      | perplexity
gmlp_table3 gmlp_table4 gmlp_table6 | BERT L9, 44 M, 0.17 G tokens                   | ppl | wiki_bert.jsonl                      | perplexity
gmlp_table3                         | aMLP L11, 256 wide, 82 M tokens                | ppl | wiki_table3.jsonl row=amlp           | perplexity
gmlp_table3                         | BERT L9, 256 wide, 82 M tokens                 | ppl | wiki_table3.jsonl row=bert           | perplexity
gmlp_table3                         | Additive gMLP L13, 256 wide, 82 M tokens       | ppl | wiki_table3.jsonl row=additive       | perplexity
gmlp_table3                         | Multiplicative gMLP L13, 256 wide, 82 M tokens | ppl | wiki_table3.jsonl row=multiplicative | perplexity
gmlp_table3                         | Split gMLP L12, 256 wide, 82 M tokens          | ppl | wiki_table3.jsonl row=split          | perplexity
gmlp_table3                         | Split gMLP L12, dense matrix, 256 wide         | ppl | wiki_table3.jsonl row=dense          | perplexity
gmlp_table3                         | Linear gMLP L13, 256 wide, 82 M tokens         | ppl | wiki_table3.jsonl row=linear         | perplexity
gmlp_table3                         | MLP-Mixer L13, 256 wide, 82 M tokens           | ppl | wiki_table3.jsonl row=mixer          | perplexity
gmlp_table3                         | BERT L9 + relative positions, 256 wide         | ppl | wiki_table3.jsonl row=relative       | perplexity
gmlp_table3                         | BERT L11 - attention, 256 wide, 82 M tokens    | ppl | wiki_table3.jsonl row=noattention    | perplexity
gmlp_table4 gmlp_table6 gmlp_finetuning | gMLP L12, 44 M, 0.23 G tokens      | SST-2 | sst2_gmlp.jsonl   | accuracy %
gmlp_table4 gmlp_table6                 | aMLP L11, 44 M, 0.11 G tokens      | SST-2 | sst2_amlp.jsonl   | accuracy %
gmlp_table4 gmlp_table6                 | BERT L9, 44 M, 0.17 G tokens       | SST-2 | sst2_bert.jsonl   | accuracy %
gmlp_table4 gmlp_finetuning             | MiniLM L6, 23 M, pretrained        | SST-2 | sst2_minilm.jsonl | accuracy %
gmlp_table4 gmlp_finetuning             | gMLP L18, 384 wide, MiniLM teacher | SST-2 | sst2_taught.jsonl | accuracy %
resmlp_translation | Transformer, 4 + 4 blocks, 9.47 M | Multi30k De-En | multi30k_transformer.jsonl             | bleu
resmlp_translation | ResMLP, 4 + 4 blocks, 7.40 M      | Multi30k De-En | multi30k_resmlp.jsonl                  | bleu
resmlp_translation | Transformer, 4 + 4 blocks, 8.42 M | Multi30k De-En | multi30k_transformer_4096.jsonl        | bleu
resmlp_translation | Transformer, 4 + 4 blocks, 8.42 M | Multi30k En-De | multi30k_transformer_en_de.jsonl       | bleu
resmlp_translation | ResMLP, 6 + 6 blocks, 9.01 M      | Multi30k De-En | multi30k_resmlp_4096.jsonl             | bleu
resmlp_translation | Transformer, 8.42 M, word dropout | Multi30k De-En | multi30k_transformer_words.jsonl       | bleu
resmlp_translation | ResMLP, 9.01 M, word dropout      | Multi30k De-En | multi30k_resmlp_words.jsonl            | bleu
resmlp_translation | ResMLP, 6 + 6 blocks, 9.01 M      | Multi30k En-De | multi30k_resmlp_en_de.jsonl            | bleu
resmlp_translation | Transformer, 8.42 M, word dropout | Multi30k En-De | multi30k_transformer_words_en_de.jsonl | bleu
resmlp_translation | ResMLP, 9.01 M, word dropout      | Multi30k En-De | multi30k_resmlp_words_en_de.jsonl      | bleu
gmlp_table5 | gMLP L12, 44.0 M, n = 128 | tokens/s | pretraining_speed.json model=gMLP         | tokens/s
gmlp_table5 | gMLP L12, 44.0 M, n = 128 | GiB      | pretraining_speed.json model=gMLP         | GiB
gmlp_table5 | aMLP L11, 43.9 M, n = 128 | tokens/s | pretraining_speed.json model=aMLP         | tokens/s
gmlp_table5 | aMLP L11, 43.9 M, n = 128 | GiB      | pretraining_speed.json model=aMLP         | GiB
gmlp_table5 | BERT L9, 44.1 M, n = 128  | tokens/s | pretraining_speed.json model=BERT         | tokens/s
gmlp_table5 | BERT L9, 44.1 M, n = 128  | GiB      | pretraining_speed.json model=BERT         | GiB
gmlp_table5 | HF BERT, 44.6 M, n = 128  | tokens/s | pretraining_speed.json model=transformers | tokens/s
gmlp_table5 | HF BERT, 44.6 M, n = 128  | GiB      | pretraining_speed.json model=transformers | GiB
gmlp_table5 | HF BERT, masked tokens | tokens/s | pretraining_speed.json model=transformers masked | tokens/s
gmlp_table5 | HF BERT, masked tokens | GiB      | pretraining_speed.json model=transformers masked | GiB
"""  # noqa: E501
"""Tables | row | column | file [key=value] | field of the log, times 100 with a %."""

CIFAR10 = {
    ("cifar10", "gmlp"): "gMLP, 7.19 M",
    ("cifar10", "vit"): "ViT, 7.93 M",
    ("cifar10", "resmlp"): "ResMLP, 6.39 M",
    ("cifar10", "mixer"): "Mixer, 6.53 M",
    ("cifar10", "resnet18"): "ResNet-18, 11.17 M",
    ("cifar10_staged", "staged"): "ResMLP, stages, 7.20 M",
    ("cifar10_staged", "mlp"): "plain MLP, 7.10 M",
}
"""Study and row -> model."""
ABLATIONS = {
    "linear": "S12",
    "layernorm": "S12: Aff -> LayerNorm",
    "class": "S12: average -> Class-MLP",
    "none": "S12: linear -> none",
    "mlp": "S12: linear -> MLP",
    "conv": "S12: linear -> conv 3x3",
    "depthwise": "S12: linear -> depth-wise",
    "separable": "S12: linear -> separable",
    "patch2": "S12/8",
}
"""Row of the study `resmlp_ablations` -> row of ResMLP's table."""
SPEEDS = ("gmlp", "vit", "resmlp", "mixer")
"""Rows of the study `cifar10` whose speed of training is used for plans."""
CIFAR10_TABLES = ("mixer_finetuning", "transformer_images", "transformer_small_data")
PRECISION = "bfloat16"
"""Of the speeds in the papers' tables."""
PRETRAINED = {"gMLP": "wiki_gmlp", "aMLP": "wiki_amlp", "BERT": "wiki_bert"}


class LoggedFigure(NamedTuple):
    tables: tuple[str, ...]
    row: str
    column: str
    value: float
    source: str
    """A file below docs/."""


def measurements(docs: Path) -> Iterator[LoggedFigure]:
    for (name, row), model in CIFAR10.items():
        found = study(name, row)
        label = f"{model}, 32 px, {found[0]['result']['seconds']:.0f} s, {len(found)} seeds"
        yield of_study(name, found, CIFAR10_TABLES, label)
    for row, label in ABLATIONS.items():
        if found := study("resmlp_ablations", row):
            yield of_study("resmlp_ablations", found, ("resmlp_ablations",), label)
    for line in MEASURED.strip().splitlines():
        tables, row, column, source, field = (part.strip() for part in line.split(" | "))
        name, _, which = source.partition(" ")
        value = last(docs / "logs" / name, which, field.removesuffix(" %")) * (100 if field.endswith("%") else 1)
        yield LoggedFigure(tuple(tables.split()), row, column, value, f"logs/{name}")


def of_study(name: str, found: list[Record], tables: tuple[str, ...], label: str) -> LoggedFigure:
    """The mean accuracy of these runs."""
    value = fmean(record["result"]["test"]["accuracy"] for record in found)
    return LoggedFigure(tables, label, "CIFAR-10", 100 * value, f"logs/study/{name}.jsonl")


def last(file: Path, which: str, field: str) -> float:
    """The last evaluation in a log; with several seeds, the mean over them."""
    text = file.read_text(encoding="utf8")
    if file.suffix == ".json":
        rows = json.loads(text)["rows"]
    else:
        rows = [row for row in map(json.loads, text.splitlines()) if row["kind"] == "eval"]
    key, _, wanted = which.partition("=")
    found = {row.get("seed"): row[field] for row in rows if not which or row[key] == wanted}
    return sum(found.values()) / len(found)


def speeds(docs: Path) -> Iterator[Speed]:
    """Training speeds of the recipes and of pretraining, and everything in the logs of `allmlp bench`."""
    for row in SPEEDS:
        recipe, source = f"cifar10_{row}", "docs/logs/study/cifar10.jsonl"
        made = job(recipe, samples=1, epochs=1, gpus=1)
        results = [record["result"] for record in study("cifar10", row)]
        rate = fmean(result["steps"] * made.batch_size / result["seconds"] for result in results)
        text = f"{recipe}, {measure(made.model).parameters / 1e6:.1f} M parameters, {rate:,.0f} images/s"
        flops, macs = rate * training_flops(made.model), measure(made.model).macs
        about = recipe, made.family, made.modality, "training", macs, made.batch_size, rate
        yield Speed(*about, flops, None, "h200", text, source)
    log = json.loads((docs / "logs" / "pretraining_speed.json").read_text(encoding="utf8"))
    for row in log["rows"]:
        if row["model"] in PRETRAINED:
            recipe = PRETRAINED[row["model"]]
            made = job(recipe, samples=1, epochs=1, gpus=1, batch_size=log["options"]["batch"])
            text = f"{recipe}, {row['parameters'] / 1e6:.1f} M parameters, {row['tokens/s']:,.0f} tokens/s"
            flops, memory = row["share of peak"] * row["peak TFLOP/s"] * 1e12, round(row["GiB"] * 2**30)
            about = recipe, made.family, made.modality, "training", measure(made.model).macs, made.batch_size
            yield Speed(*about, row["tokens/s"], flops, memory, "h200", text, "docs/logs/pretraining_speed.json")
    for file in sorted((docs / "logs").glob("bench*.json")):
        yield from benched(json.loads(file.read_text(encoding="utf8")), f"docs/logs/{file.name}")


class Attempt(NamedTuple):
    """One backend of `allmlp bench` on a model."""

    device: str
    cell: Cell
    eager: bool
    rate: float | None
    note: str
    """Why there is no rate."""


def attempts(files: Iterable[Path]) -> Iterator[Attempt]:
    """Everything in these logs that a table could show: backends of this library, or of the package of the model."""
    for file in files:
        log = json.loads(file.read_text(encoding="utf8"))
        for row in log["rows"]:
            package, _, mode = row["backend"].partition(" ")
            cell = Cell(sized(row["model"], log["options"]), row["task"], row["batch"])
            if comparable(log["options"]) and package == cell.package and mode != "fp8":
                device = log["environment"]["device"]
                yield Attempt(device, cell, mode == "eager", row["rate_per_s"], row["note"])


def comparable(options: dict[str, Any]) -> bool:
    return not options["scale"] and options["precision"] == PRECISION


def sized(model: str, options: dict[str, Any]) -> str:
    """NAME@SIZE if the models of a log did not have their own size."""
    size = options["img_size"] or options["seq_len"]
    return f"{model}@{size}" if size else model


def benched(log: dict[str, Any], source: str) -> Iterator[Speed]:
    """The fastest backend of this library, or of the package that has the model, per model, task and batch size."""
    options, device = log["options"], log["environment"]["device"]
    gpu = next((name for name, card in GPUS.items() if card.name in device), None)
    if gpu is None or not comparable(options):
        return
    best: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in log["rows"]:
        # Without FP8: the papers' tables compare equal numerics.
        ours = row["backend"].startswith("ours") and row["backend"] != "ours fp8"
        if row["rate_per_s"] and (ours or ":" in row["model"]):
            key = row["model"], row["task"], row["batch"]
            best[key] = max(best.get(key, row), row, key=lambda one: one["rate_per_s"])
    for (model, task, batch), row in best.items():
        modality, name = "image" if row["unit"] == "images" else "text", sized(model, options)
        text = f"{name}, {row['backend']}, batch {batch}, {row['rate_per_s']:,.0f} {row['unit']}/s"
        about = name, preset(model).family, modality, task, row["macs"], batch, row["rate_per_s"], row["flop_per_s"]
        yield Speed(*about, row["memory_bytes"], gpu, text, source, row["backend"].endswith(" eager"))
