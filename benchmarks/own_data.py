"""`allmlp train DATA` on small real datasets, beside simpler ways to the same end.

python benchmarks/own_data.py data                              all datasets, five seeds
python benchmarks/own_data.py data --datasets imagenette sst2 --seeds 1 --methods ours probe
python benchmarks/own_data.py data --cuts cuts --methods        cut out the examples, for another machine

`data` holds imagenette/ (tar shards), cifar10/ and cifar100/ (as published, or packed), and nlp/ with cola-train,
cola-dev, sst2-dev, sst2-test, sick, mrpc-train and mrpc-test (.tsv.xz). A seed decides which examples are cut out, and
the validation split; the test examples are the same for all seeds. All examples of cifar10 are from its test split, and
those of sst2 from its dev and test splits, since bundled models, the starts of `ours`, were trained on the others.

ours     allmlp train DATA, with nothing else given
probe    logistic regression on the frozen features of each bundled model for such data, one of which `ours` starts from
trainer  the Trainer of transformers with its defaults, from the same start
simple   images: ResNet-18 from random weights, with the settings of `allmlp train DATA --model resnet18_cifar`;
         texts: TF-IDF and logistic regression

Rows are written after every cell, and cells that a file already holds are not measured again. Without methods only the
accuracy of the most frequent class is written.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.auto import choose_run
from allmlp.data.cifar import Cifar10, Cifar100
from allmlp.data.dataset import Data, Dataset, Split, labels_of
from allmlp.data.decode import Decode
from allmlp.data.detect import detect_data
from allmlp.data.labeled_text import LabeledTextDataset
from allmlp.data.sampler import eval_batches
from allmlp.data.shards import Shards
from allmlp.data.tables import read_table
from allmlp.device import own_device
from allmlp.errors import require
from allmlp.files import write_json_atomically
from allmlp.head_init import HeadInit
from allmlp.models.torchvision import define_missing_operators
from allmlp.models.zoo import create
from allmlp.provenance import commit, environment
from allmlp.record import read_record
from allmlp.run import Run
from allmlp.tasks.classify import majority_accuracy
from allmlp.tasks.task import TaskModule
from allmlp.tasks.tfidf import tfidf_correct
from allmlp.training import train
from allmlp.weights.start import open_start, transfer

TEST_EXAMPLES = 300
METHODS = ("ours", "probe", "trainer", "simple")


class Images(NamedTuple):
    """Some classes of a dataset, and training examples of each."""

    data: Callable[[Path], Data]
    classes: tuple[str, ...]
    per_class: int
    from_test: bool = False
    """Training examples are from one half of the test split, test examples from the other."""

    def cut(self, source: Path, folder: Path, seed: int) -> None:
        found = self.data(source).load()
        splits = {"train": found.test if self.from_test else found.train, "test": found.test}
        for part, split in splits.items():
            is_test, labels = part == "test", labels_of(split)
            for name in self.classes:
                members = (labels == found.class_names.index(name)).nonzero().flatten().tolist()  # type: ignore[attr-defined]
                half = len(members) // 2 if self.from_test else 0
                members = (members[half:] if is_test else members[:half]) if half else members
                count = TEST_EXAMPLES // len(self.classes) if is_test else self.per_class
                chosen = sorted(random.Random(0 if is_test else seed).sample(members, min(count, len(members))))
                (folder / part / name).mkdir(parents=True)
                for index, image in zip(chosen, split.fetch(torch.tensor(chosen)).images):
                    pixels = image.permute(1, 2, 0).contiguous().numpy()
                    require("PIL.Image", "train").fromarray(pixels).save(folder / part / name / f"{index}.png")


class Texts(NamedTuple):
    """Rows of tables; without a test file, a thousand rows of the last training file are for testing."""

    train: tuple[str, ...]
    test: str
    columns: tuple[str, ...]
    """The texts, then the label."""
    examples: int

    def cut(self, source: Path, folder: Path, seed: int) -> None:
        *others, rows = (list(read_table(source / file)) for file in self.train)
        tests = list(read_table(source / self.test)) if self.test else []
        if not tests:  # the same test rows for every seed
            random.Random(0).shuffle(rows)
            tests, rows = rows[:1000], rows[1000:]
        rows = [*rows, *(row for other in others for row in other)]
        folder.mkdir(parents=True)
        chosen = random.Random(seed).sample(rows, min(self.examples, len(rows)))
        for name, part in (("train", chosen), ("test", tests[:2000])):
            with open(folder / f"{name}.csv", "w", newline="", encoding="utf8") as file:
                writer = csv.writer(file)
                writer.writerow([*("text", "text_pair")[: len(self.columns) - 1], "label"])
                writer.writerows([row[column] for column in self.columns] for row in part)


def imagenette(folder: Path) -> Data:
    names = str(folder / "imagenette" / "classes.txt")
    return Shards(str(folder / "imagenette"), img_size=(128, 128), class_names_file=names, decode=Decode(crop_pct=1.0))


DATASETS: dict[str, Images | Texts] = {
    "imagenette": Images(imagenette, ("English springer", "garbage truck", "parachute"), 67),
    "cifar10": Images(
        lambda folder: Cifar10(str(folder / "cifar10")), ("bird", "cat", "deer", "dog", "frog"), 60, from_test=True
    ),
    "cifar100": Images(
        lambda folder: Cifar100(str(folder / "cifar100")),
        ("apple", "bed", "bicycle", "bottle", "butterfly", "castle", "cloud", "rose", "shark", "tank"),
        40,
    ),
    "cola": Texts(("nlp/cola-train.tsv.xz",), "nlp/cola-dev.tsv.xz", ("sentence", "label"), 2000),
    "sst2": Texts(("nlp/sst2-dev.tsv.xz", "nlp/sst2-test.tsv.xz"), "", ("sentence", "label"), 2000),
    "sick": Texts(("nlp/sick.tsv.xz",), "", ("sentence1", "sentence2", "entailment"), 2000),
    "mrpc": Texts(("nlp/mrpc-train.tsv.xz",), "nlp/mrpc-test.tsv.xz", ("sentence1", "sentence2", "label"), 2000),
}


STARTS = {Images: ("allmlp:image", "allmlp:cifar10"), Texts: ("allmlp:text",)}


# --- methods: the accuracy on the test split -----------------------------------------------------------------


class Cell(NamedTuple):
    data: Data
    run: Run
    """What is chosen for the data."""
    device: str
    seed: int


def ours(cell: Cell) -> float:
    with tempfile.TemporaryDirectory() as folder:
        train(cell.run, folder, cell.device)
        return read_record(Path(folder))["result"]["test"]["accuracy"]


def built(cell: Cell) -> tuple[Dataset, TaskModule]:
    """The data and the task with the start of the run, before training."""
    start = open_start(str(cell.run.init_from))
    dataset = cell.run.data.for_model(start.folder).load()
    device = own_device(cell.device)
    spec = cell.run.model or start.model.spec
    model = create(cell.run.task.configure_model(spec, dataset), seed=cell.seed, device=device)
    transfer(model, start)
    return dataset, cell.run.task.build(model, dataset).to(device)


def probe(cell: Cell) -> float:
    dataset, task = built(cell)
    HeadInit().initialize(task.model, task, dataset, cell.seed)
    task.eval()
    with torch.no_grad():
        correct, count = task.evaluate(task.model, eval_batches(dataset.test, 64, task.model.device))["accuracy"]
    return (correct / count).item()


class Labeled(nn.Module):
    """A task as the Trainer wants a model: named inputs, a dictionary with loss and logits."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(
        self, labels: Tensor, images: Tensor | None = None, ids: Tensor | None = None, segments: Any = None
    ) -> Any:
        task: Any = self.task
        inputs = (
            task.model(task.normalize(images)) if ids is None else task.logits(task.model, ids.long(), segments.long())
        )
        return {"loss": nn.functional.cross_entropy(inputs.float(), labels), "logits": inputs}


def rows_of(split: Split) -> list[dict[str, Tensor]]:
    examples = split.fetch(torch.arange(len(split)))
    wanted = [name for name in examples._fields if name in ("images", "ids", "segments", "labels")]
    return [{name: getattr(examples, name)[index] for name in wanted} for index in range(len(split))]


def trainer(cell: Cell) -> float:
    define_missing_operators()
    transformers = require("transformers", "baselines")
    torch.manual_seed(cell.seed)
    dataset, task = built(cell)
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, seed=cell.seed, use_cpu=cell.device == "cpu", report_to=[], save_strategy="no", disable_tqdm=True
        )
        made = transformers.Trainer(Labeled(task), options, train_dataset=rows_of(dataset.train))
        made.train()
        found = made.predict(rows_of(dataset.test))
    return float((found.predictions.argmax(-1) == found.label_ids).mean())


def simple(cell: Cell) -> float:
    dataset = cell.run.data.load()
    if isinstance(dataset, LabeledTextDataset):
        return tfidf_correct(dataset, dataset.test).double().mean().item()  # type: ignore[arg-type]
    return ours(cell._replace(run=choose_run(cell.data, device=cell.device, model="resnet18_cifar").run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with the data")
    parser.add_argument("--out", type=Path, default=Path("own_data.json"))
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--cuts", type=Path, help="keep the cut-out examples in this folder, and use those it holds")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"majority": {}, "rows": []}
    record.setdefault("environment", environment(own_device(arguments.device)))
    for seed in range(arguments.seeds):
        for name in arguments.datasets:
            measure(arguments, name, seed, record)
    print_table(record["rows"])


def measure(arguments: argparse.Namespace, name: str, seed: int, record: dict[str, Any]) -> None:
    """Measure what is missing of one dataset and seed."""
    done = {row["method"] for row in record["rows"] if (row["dataset"], row["seed"]) == (name, seed)}
    missing = [method for method in arguments.methods if method not in done]
    if not (missing or arguments.cuts) and name in record["majority"]:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.cuts or Path(temporary)) / f"{name}-{seed}"
        if not folder.exists():
            DATASETS[name].cut(arguments.source, folder, seed)
        data = detect_data(str(folder)).replace(split_seed=seed)
        dataset = data.load()
        record["majority"][name] = majority_accuracy(labels_of(dataset.train), labels_of(dataset.test))
        write_json_atomically(arguments.out, record)
        if not missing:
            return
        began, used = time.monotonic(), time.process_time()
        choice = choose_run(data, device=arguments.device)
        choosing = time.monotonic() - began, time.process_time() - used
        chosen = Cell(data, choice.run.replace(seed=seed), arguments.device, seed)
        sizes = choice.run.data.load()
        measures = {"ours": ours, "probe": probe, "trainer": trainer, "simple": simple}
        for method in missing:
            cells = {chosen.run.init_from: chosen}
            if method == "probe":
                cells = {start: started(chosen, start) for start in STARTS[type(DATASETS[name])]}
            for start, cell in cells.items():
                began, used = time.monotonic(), time.process_time()
                accuracy = measures[method](cell)
                seconds, cpu_seconds = time.monotonic() - began, time.process_time() - used
                if method == "ours":
                    seconds, cpu_seconds = seconds + choosing[0], cpu_seconds + choosing[1]
                row = {"dataset": name, "seed": seed, "method": method, "accuracy": accuracy}
                row |= {"start": None if method == "simple" else start, "train": len(sizes.train)}
                row |= {"validation": len(sizes.validation or ()), "test": len(sizes.test)}
                row |= {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
                row |= {"load": [round(value, 1) for value in os.getloadavg()]}
                row |= {"commit": commit()}
                record["rows"].append(row)
                print(row, flush=True)
            write_json_atomically(arguments.out, record)


def started(cell: Cell, start: str) -> Cell:
    """The cell as it would be if `ours` had chosen this start."""
    return cell._replace(run=choose_run(cell.data, device=cell.device, model=start).run.replace(seed=cell.seed))


def print_table(rows: list[dict[str, Any]]) -> None:
    """Mean accuracy, its standard deviation over the seeds, and mean processor time."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        probed = row["start"] if row["method"] == "probe" else ""
        groups.setdefault((row["dataset"], row["method"], probed), []).append(row)
    for (name, method, start), found in groups.items():
        values, seconds = [row["accuracy"] for row in found], [row["cpu_seconds"] for row in found]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        mean = f"{statistics.mean(values):.1%} +- {spread:.1%} (n={len(found)})"
        print(f"{name:12} {method:8} {start:15} {mean}  {statistics.mean(seconds):.0f} s")


if __name__ == "__main__":
    main()
