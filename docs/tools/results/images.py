"""Tables about images."""

from __future__ import annotations

from statistics import mean
from textwrap import indent

from allmlp.recipes.anysize import SIZES
from allmlp.study.statistics import paired_difference
from allmlp.study.summary import show_interval
from paper_tables.measurements import ABLATIONS
from paper_tables.vision import TABLES
from results.markdown import NOTHING, accuracy, log, percent, table
from results.records import LOGS, Record, document, epochs, evaluation, seeds, study
from results.studies import summary

FAMILIES = {
    "gmlp": ("gMLP", "`cifar10_gmlp`", "0.3 to 0.7 M: 90.9; with shifts and stages: 95.54 (5.9 M), 97.35 (79 M) [1]"),
    "resmlp": ("ResMLP", "`cifar10_resmlp`", "1.09 M: 88.12 [2]"),
    "mixer": ("MLP-Mixer", "`cifar10_mixer`", "0.3 to 0.7 M: 90.8 [3]"),
    "vit": ("ViT", "`cifar10_vit`", ""),
    "resnet18": ("ResNet-18", "`cifar10_resnet18`", "95.28, with Cutout 96.01 [4]"),
}
"""Rows of the study of CIFAR-10: model, recipe, published accuracy."""
STAGED = {
    "staged": ("{}, three stages", "`cifar10_{}_staged`"),
    "cyclemlp": ("CycleMLP, three stages", "`cifar10_cyclemlp`"),
    "mlp": ("plain MLP", "`cifar10_mlp`"),
}
"""Rows of the study of pyramids; the first is named by the family chosen on validation."""
DISTILLED = {
    "labels": "ResMLP, from labels alone",
    "hard": "ResMLP, hard distillation",
    "soft": "ResMLP, soft distillation",
    "teacher": "ResNet-18, the teacher",
}
"""Rows of the study of distillation."""
FLAT = ("gmlp", "resmlp")
"""Rows of the study of CIFAR-10 to compare them with."""
EARLIER = {
    "cifar10_gmlp": "gMLP, 6.5 minutes alone on the GPU; bundled in 8 bits",
    "cifar10_vit": "ViT, 8.75 minutes, GPU shared by three runs",
    "cifar10_resmlp": "ResMLP, 8.75 minutes, GPU shared by three runs",
    "cifar10_mixer": "MLP-Mixer, 8.75 minutes, GPU shared by three runs",
}
VARIANTS = {
    "layernorm": "Affine to LayerNorm",
    "class": "average pooling to Class-MLP",
    "none": "linear to none",
    "mlp": "linear to MLP",
    "conv": "linear to 3x3 convolution",
    "depthwise": "linear to depthwise 3x3",
    "separable": "linear to depthwise-separable 3x3",
    "patch2": "patch 4 to 2",
    "patch8": "patch 4 to 8",
}
"""Rows of the ablations but the first, the model as it is."""
WARMED = {"resmlp": "ResMLP", "resmlp, LayerNorm": "ResMLP with LayerNorm", "vit": "ViT, which has LayerNorm"}
"""Rows of the study of warm-up; each has another without."""
FEW_BITS = {
    "float": "full precision",
    "int8": "8 bits, rounded after training",
    "int8_trained": "8 bits, trained with rounded weights",
    "int4": "4 bits, rounded after training",
    "int4_trained": "4 bits, trained with rounded weights",
    "int4_noise": "4 bits, trained with Quant-Noise",
}
"""Rows of the study of few bits, once for each size."""


def cifar10() -> str:
    rows = [
        (model, recipe, *measured(study("cifar10", row)), published)
        for row, (model, recipe, published) in FAMILIES.items()
    ]
    floor = next((record for row in FAMILIES for record in study("cifar10", row)), None)
    if floor is not None:
        rows.append(("most frequent class", "", "", "", "", percent(floor["result"]["test"]["majority"]), ""))
    return table(("model", "recipe", "parameters", "n", "epochs", "test accuracy", "published, %"), rows)


def measured(found: list[Record]) -> tuple[str, str, str, str]:
    """Parameters, runs, epochs and accuracy."""
    parameters = f"{found[0]['result']['parameters'] / 1e6:.2f} M" if found else NOTHING
    passes = f"{mean(record['result']['epochs'] for record in found):.0f}" if found else NOTHING
    return parameters, str(len(found)), passes, accuracy(found)


def staged() -> str:
    found = {row: study("cifar10_staged", row) for row in STAGED}
    rows = [(*staged_names(row), *measured(records)) for row, records in found.items() if records]
    flat = [(f"{FAMILIES[row][0]}, isotropic", FAMILIES[row][1], *measured(study("cifar10", row))) for row in FLAT]
    published = [("Caterpillar-Mi, published", "", "5.9 M", "", "", "95.54 % (CIFAR-100: 79.41 %)")]
    return table(("model", "recipe", "parameters", "n", "epochs", "test accuracy"), rows + flat + published)


def staged_names(row: str) -> tuple[str, str]:
    """Model and recipe."""
    (model, recipe), found = STAGED[row], study("cifar10_staged", row)
    family = found[0]["candidate"] if found else "gMLP or ResMLP"
    return model.format(family), recipe.format(family.lower() if found else "*")


def distillation() -> str:
    found = summary("resmlp_distillation")
    assert found is not None, "its records are in docs/logs"
    lines = {line.row: line for line in found.lines}
    rows = [
        (
            what,
            *measured(study("resmlp_distillation", row)),
            show_interval(lines[row].difference, signed=True) if row in ("hard", "soft") else NOTHING,
        )
        for row, what in DISTILLED.items()
    ]
    return table(("training", "parameters", "n", "epochs", "test accuracy", "to labels alone"), rows)


def cifar10_short() -> str:
    found = {FAMILIES[row][:2]: study("cifar10", row) for row in FAMILIES}
    found[staged_names("staged")] = study("cifar10_staged", "staged")
    rows = []
    for (model, recipe), records in found.items():
        if records:
            parameters, seeds, _, result = measured(records)
            rows.append((f"{model}, {recipe}", parameters, seeds, result))
    header = ("CIFAR-10 from scratch, 300 s of one H200 each", "parameters", "seeds", "test accuracy")
    few = min(len(records) for records in found.values() if records) < 3
    note = "Too few seeds yet to tell small differences from chance." if few else "Mean ± half a 95 % interval."
    bundled = f"The bundled model is a gMLP after 6.5 minutes: {percent(evaluation('cifar10_gmlp')['accuracy'])}"
    return table(header, rows) + f"\n\n{note} {bundled} ([record](docs/logs/cifar10_gmlp.run.json))."


def cifar10_earlier() -> str:
    rows = [
        (what, f"{epochs(name):.0f}", percent(evaluation(name)["accuracy"]), log(name))
        for name, what in EARLIER.items()
    ]
    return table(("run", "epochs", "test accuracy", ""), rows)


def ablations() -> str:
    found = summary("resmlp_ablations")
    assert found is not None, "its records are in docs/logs"
    published, short = published_ablations(), {row: mean(short_ablation(row)) for row in ("linear", *VARIANTS)}
    plain = study("resmlp_ablations", "linear")
    rows = [("linear (the model)", str(len(plain)), accuracy(plain), NOTHING, NOTHING, NOTHING)]
    lines = {line.row: line for line in found.lines}
    for row, what in VARIANTS.items():
        records, label = study("resmlp_ablations", row), ABLATIONS.get(row)
        result = (accuracy(records), show_interval(lines[row].difference, signed=True)) if records else ("not run", "")
        theirs = f"{published[label] - published['S12']:+.1f}" if label else ""
        rows.append((what, str(len(records)), *result, f"{short[row] - short['linear']:+.1f}", theirs))
    header = ("variant", "n", "test accuracy", "change", "change after 12 epochs", "change on ImageNet, published")
    return table(header, rows)


def short_ablation(row: str) -> list[float]:
    """Accuracies in percent of the runs of 12 epochs, by seed."""
    name = "cifar10_ablations"
    return [100 * evaluation(name, row, seed)["accuracy"] for seed in seeds(name, row)]


def published_ablations() -> dict[str, float]:
    """Accuracies of ResMLP's table in percent, by its rows."""
    (paper,) = [entry for entry in TABLES if entry.name == "resmlp_ablations"]
    place = [column.name for column in paper.columns if column.published].index("val")
    return {row.label: float(row.cells[place]) for row in paper.rows}


def warmup() -> str:
    rows = []
    for row, what in WARMED.items():
        found = study("resmlp_warmup", row), study("resmlp_warmup", f"{row}, no warm-up")
        warm, cold = ({run["seed"]: 100 * run["result"]["test"]["accuracy"] for run in runs} for runs in found)
        change = show_interval(paired_difference(cold, warm), signed=True)
        rows.append((what, str(len(found[0])), *map(accuracy, found), change))
    return table(("model", "n", "with warm-up", "without", "change"), rows)


def few_bits() -> str:
    found = summary("cifar10_quantized_sizes")
    assert found is not None, "its records are in docs/logs"
    rows = []
    for line in found.lines:
        runs = study("cifar10_quantized_sizes", line.row)
        size, what = f"{runs[0]['result']['parameters'] / 1e6:.1f} M", FEW_BITS[line.row.partition(",")[0]]
        rows.append(
            (size, what, str(len(runs)), accuracy(runs), show_interval(line.difference, signed=True) or NOTHING)
        )
    return table(("gMLP", "weights", "n", "test accuracy", "change"), rows)


def anysize() -> str:
    runs = {row: study("anysize", row) for row in ("gmlp_fixed", "gmlp_any")}
    metrics = [f"accuracy_{size}" for size in SIZES]
    rows = []
    for row, what in zip(runs, ("at 32 pixels", "at a random size in every step"), strict=True):
        rows.append((what, str(len(runs[row])), *(accuracy(runs[row], metric) for metric in metrics)))
    changes = []
    for metric in metrics:
        fixed, free = ({run["seed"]: 100 * run["result"]["test"][metric] for run in found} for found in runs.values())
        changes.append(show_interval(paired_difference(free, fixed), signed=True))
    rows.append(("change", "", *changes))
    return table(("trained", "n", *(f"at {size}" for size in SIZES)), rows)


def features() -> str:
    """DINO and distillation: one seed each."""
    runs = {
        "cifar10_dino": ("DINO, 20 nearest of 20,000 training images", "knn_accuracy"),
        "cifar10_probe": ("linear probe on it", "accuracy"),
        "cifar10_distill_labels": ("Mixer of 0.85 M, from labels", "accuracy"),
        "cifar10_distill_hard": ("the same, hard distillation from the gMLP", "accuracy"),
    }
    rows = [(what, percent(evaluation(name)[metric]), log(name)) for name, (what, metric) in runs.items()]
    return table(("run", "test accuracy", ""), rows)


def resized() -> str:
    plain = {(row["what"], row["img_size"]): percent(row["accuracy"]) for row in bundled("interpolate", "tile")}
    rows = []
    for rule, size in [*(("interpolate", size) for size in (24, 40, 48, 64)), ("tile", 64)]:
        tuned = evaluation("cifar10_resized", f"{size}{'_tile' if rule == 'tile' else ''}")["accuracy"]
        rows.append((f"{size}, {rule}", plain[rule, size], percent(tuned)))
    return table(("pixels", "without fine-tuning", "after three epochs of fine-tuning"), rows)


def quantized() -> str:
    rows = [
        (
            row["what"].replace("as it is", "PyTorch"),
            f"{row['images']:,}",
            percent(row["accuracy"]),
            f"{row['bytes'] / 1e6:.1f} MB" if "bytes" in row else "",
        )
        for row in bundled("as it is", "ONNX Runtime, float32", "ONNX Runtime, int8")
    ]
    return table(("", "first test images", "accuracy", "file"), rows)


def pruned() -> str:
    found = bundled("pruned")
    shares = [0.0, *sorted({row["removed"] for row in found})]
    whole = bundled("as it is")[0]["accuracy"]
    names = {"smallest": "the smallest of each matrix", "blocks": "blocks of 4 x 4", "rank": "low rank"}
    rows = []
    for method, what in names.items():
        values = {row["removed"]: row["accuracy"] for row in found if row["method"] == method} | {0.0: whole}
        rows.append((what, *(f"{100 * values[share]:.1f}" if share in values else "" for share in shares)))
    return table(("fraction removed", *(f"{share:g}" for share in shares)), rows)


def bundled(*whats: str) -> list[Record]:
    return [row for row in document("cifar10_bundled")["rows"] if row["what"] in whats]


def demo() -> str:
    """The end of what `make demo` has printed, on two cores of a Neoverse N1."""
    return indent((LOGS / "demo.txt").read_text(encoding="utf8").rstrip(), " " * 4)


BLOCKS = {
    "demo": demo,
    "cifar10": cifar10,
    "staged": staged,
    "distillation": distillation,
    "cifar10-short": cifar10_short,
    "cifar10-earlier": cifar10_earlier,
    "ablations": ablations,
    "warmup": warmup,
    "few-bits": few_bits,
    "anysize": anysize,
    "features": features,
    "resized": resized,
    "quantized": quantized,
    "pruned": pruned,
}
