"""Evaluate a trained model on the test split of its run, or on other labeled data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp import parallel
from allmlp.accuracy import wilson_interval
from allmlp.data.cifar import Cifar10, Cifar100
from allmlp.data.class_names import ClassMatch, match_classes, model_class_names, read_class_table
from allmlp.data.columns import label_order
from allmlp.data.corpus import Corpus
from allmlp.data.dataset import Data, ImageDataset, Split, labels_of
from allmlp.data.detect import detect_data
from allmlp.data.digits import Digits
from allmlp.data.encoded_images import EncodedImages
from allmlp.data.flowers import Flowers102
from allmlp.data.image_files import ImageFiles, LabeledFile
from allmlp.data.image_folder import ImageFolder, folders, list_images, only_folder, split_folders
from allmlp.data.image_table import ImageTable
from allmlp.data.labeled_text import LabeledText, LabeledTextReader
from allmlp.data.mnist import Mnist
from allmlp.data.parallel_corpus import ParallelCorpus
from allmlp.data.pets import OxfordPets
from allmlp.data.sampler import eval_batches
from allmlp.data.shards import Shards, find, read_class_names
from allmlp.data.squad import Squad
from allmlp.data.tokenizer import TextData, load_tokenizer
from allmlp.device import sum_dtype
from allmlp.errors import UserError
from allmlp.files import RUN, expand_user
from allmlp.prediction import ImagePredictor, Predictor, TextPredictor, open_predictor
from allmlp.prediction.predictor import check_vocabulary
from allmlp.record import read_run
from allmlp.report.predictions import calibrate
from allmlp.run import Run
from allmlp.tasks.causal_lm import CausalLM
from allmlp.tasks.classify import ClassifyModule
from allmlp.tasks.classify_text import ClassifyTextModule
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.probe import KnnEval
from allmlp.tasks.question_answering import QuestionAnswering
from allmlp.tasks.task import Task
from allmlp.tasks.translate import Translation
from allmlp.threads import Threads
from allmlp.train_step import autocast
from allmlp.training import compute_dtype, evaluate
from allmlp.weights import folder

NAMED: dict[str, Data] = {
    "cifar10": Cifar10(),
    "cifar100": Cifar100(),
    "mnist": Mnist(),
    "fashion_mnist": Mnist(variant="fashion"),
    "digits": Digits(),
    "pets": OxfordPets(),
    "flowers102": Flowers102(),
}
"""Data by name, in their usual places."""
MIN_TOP5_CLASSES = 10
MAX_CONFUSED = 10
TINY = 1e-45
"""The smallest positive float32: the probability of an impossible class."""
LEFT_OUT, UNREADABLE = -1, -2
"""In place of a label: no class of the model stands for it; the image could not be decoded."""
Progress = Callable[[int, int], None]
"""Called with the number of examples so far and of all."""


class ClassResult(NamedTuple):
    """How a classifier does on one class."""

    name: str
    examples: int
    correct: int
    predicted: int
    """Examples of any class predicted as this one."""


class Confusion(NamedTuple):
    """Examples of a class that are taken for another one."""

    name: str
    predicted: str
    count: int
    examples: int
    """Of the class."""


@dataclass(frozen=True)
class Evaluation:
    model: str
    data: str
    """What was evaluated: "the test split of cifar10"."""
    examples: int
    metrics: dict[str, float]
    class_results: list[ClassResult] = field(default_factory=list)
    """Of a classifier, for each class with examples."""
    confusions: list[Confusion] = field(default_factory=list)
    """The most frequent ones."""
    skipped: list[str] = field(default_factory=list)
    """Files that could not be read."""
    left_out: int = 0
    """Examples of classes that the table of classes leaves out."""

    def to_json(self) -> dict[str, Any]:
        rows = {name: [row._asdict() for row in getattr(self, name)] for name in ("class_results", "confusions")}
        rest = {name: value for name, value in vars(self).items() if name not in ("metrics", *rows)}
        return rest | self.metrics | rows


class LabeledInputs(NamedTuple):
    """Examples to evaluate."""

    data: str
    class_names: tuple[str, ...]
    labels: Tensor
    """int64, n: index in `class_names`."""
    read: Callable[[range], list[Any]]
    """Indices -> inputs of a predictor."""
    corrupt: Callable[[], dict[int, str]] = dict
    """Index -> name and fault of each image that `read` could not decode."""


class ClassifierOutputs(NamedTuple):
    """What a classifier says about each example, n each."""

    labels: Tensor
    predicted: Tensor
    confidence: Tensor
    """Probability of the predicted class."""
    loss: Tensor
    """- log p(label)."""
    in_top5: Tensor

    def select(self, rows: Tensor) -> ClassifierOutputs:
        return ClassifierOutputs(*(values[rows] for values in self))


def evaluate_model(
    model: str,
    data: str | None = None,
    *,
    classes: str | None = None,
    knn: int | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Evaluate a run on its own test split, or any model on `data`: a path, a name of `NAMED`, a dataset of the Hub.

    Data without splits are evaluated as a whole. Their classes are matched with the model's by name; `classes` is a
    table for those with other names. `knn` evaluates the features of a run by so many nearest neighbors.
    """
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"models cannot be evaluated in {dtype}: use float32, bfloat16 or float16")
    with parallel.join(device) as world:
        if data is None:
            if classes is not None:
                raise UserError("--classes is for other data than the run's own: name them after the model")
            return evaluate_run(model, knn, world, dtype, batch_size, progress)
        if knn is not None:
            raise UserError("--knn compares with the training examples of a run: leave out the data")
        predictor = open_predictor(model, device=device, dtype=dtype)
        if predictor.task == "values":
            raise UserError(f"{model} is a regression, not a classifier")
        if isinstance(predictor, TextPredictor) and predictor.task != "classes":
            return evaluate_text_task(predictor, model, data, world, batch_size)
        inputs = text_inputs(data) if isinstance(predictor, TextPredictor) else image_inputs(data, predictor)
        table = read_class_table(classes) if classes else None
        num_classes = predictor.probabilities([inputs.read(range(1))[0]]).shape[1]
        names = predictor.preprocessing.class_names
        match = match_classes(inputs.class_names, model_class_names(names, num_classes), table)
        outputs = predictor_outputs(predictor, inputs, match, world, batch_size or 64, progress)
        kept = outputs.labels >= 0
        if not kept.any():
            raise UserError(f"{data} has no examples to evaluate")
        return summarize(
            model,
            inputs.data,
            outputs.select(kept),
            match.names,
            skipped=list(inputs.corrupt().values()),
            left_out=int((outputs.labels == LEFT_OUT).sum()),
        )


# --- the run's own data ------------------------------------------------------------------------------------


def evaluate_run(
    name: str,
    knn: int | None,
    world: parallel.World,
    dtype: torch.dtype | None,
    batch_size: int | None,
    progress: Progress,
) -> Evaluation:
    path = Path(name)
    if path.is_dir() and not (path / RUN).is_file():
        raise UserError(f"{name} is a model without a run, so it has no data of its own: name some, {name} DATA")
    run = read_run(path)
    run = run.replace(batch_size=batch_size or run.batch_size)
    task: Task = KnnEval(knn) if knn else run.task
    dataset = run.data.for_model(name).load().split_validation(run.val_size)
    task.check_dataset(dataset)
    model = folder.load(path, device=world.device, dtype=None)
    if isinstance(run.data, TextData):
        own, used = load_tokenizer(path), dataset.tokenizer  # type: ignore[attr-defined]
        check_vocabulary(model, own, name)
        if own.to_json() != used.to_json():
            place = run.data.tokenizer.path  # type: ignore[attr-defined]
            raise UserError(f"the tokenizer in {place} is no longer the one in {name} that the model was trained with")
    module: Any = task.build_evaluator(model, dataset).to(world.device).eval()
    split = dataset.test
    title = f"its {'held-out examples' if run.val_size else 'test split'}"
    floors = task.floors(dataset, split)
    if type(module).evaluate not in (ClassifyModule.evaluate, ClassifyTextModule.evaluate):
        return Evaluation(name, title, len(split), evaluate(module, model, split, world, run) | floors)
    compute = dtype or compute_dtype(run, world.device)
    class_names: tuple[str, ...] = dataset.class_names  # type: ignore[attr-defined]
    outputs, part = run_outputs(module, split, len(class_names), world, compute, run.batch_size, progress)
    found = summarize(name, title, outputs.select(part == 0), class_names)
    names = getattr(dataset, "test_names", ())
    others = {f"{names[k]}_accuracy": accuracy(outputs.select(part == k)) for k in part.unique().tolist() if k}
    found.metrics.update(others | floors)
    return found


@torch.inference_mode()
def run_outputs(
    module: Any,
    split: Split,
    num_classes: int,
    world: parallel.World,
    dtype: torch.dtype,
    batch_size: int,
    progress: Progress,
) -> tuple[ClassifierOutputs, Tensor]:
    """The outputs for a split, and the test file that each example is from."""
    match = ClassMatch((), list(range(num_classes)), list(range(num_classes)))
    rows = torch.zeros(len(ClassifierOutputs._fields) + 1, len(split), dtype=torch.float64)
    own, wide = torch.arange(world.rank, len(split), world.size), sum_dtype(world.device)
    batches = eval_batches(split, batch_size, world.device, world.rank, world.size)
    threads = Threads(active=world.device.type == "cpu")
    for start, batch in zip(range(0, len(split), batch_size), batches):
        with threads, autocast(world.device, dtype), torch.compiler.set_stance("force_eager"):
            if isinstance(module, ClassifyModule):
                logits = module.model(module.normalize(batch.images))
            else:
                logits = module.logits(module.model, batch.ids.long(), batch.segments.long())
        part = getattr(batch, "test_set", torch.zeros_like(batch.labels))
        found = classifier_outputs(logits.float().softmax(1), batch.labels, match)
        rows[:, own[start : start + batch_size]] = torch.stack([values.to(wide) for values in (*found, part)]).cpu()
        progress(min((start + batch_size) * world.size, len(split)), len(split))
    *columns, part = gather(rows, world)
    return ClassifierOutputs(*columns), part.long()


# --- other data --------------------------------------------------------------------------------------------


def image_inputs(place: str, predictor: ImagePredictor) -> LabeledInputs:
    """All images of data without splits, or else the test split, as the model reads them."""
    data = find_data(place)
    decode = predictor.decoding.replace(on_corrupt="skip")
    if isinstance(data, ImageFolder | ImageTable):
        title, root, files, class_names = folder_images(data) if isinstance(data, ImageFolder) else table_images(data)
        if not files:
            raise UserError(f"{place} has no labeled images: it needs a folder for each class, or a table")
        split = ImageFiles(root, files, predictor.img_size, decode, data.num_workers)
    elif isinstance(data, Shards):
        shards = find(data.test or data.path)
        tests = [shard for shard in shards if Path(shard.path).name.startswith(("val", "test"))]
        sized = data.replace(img_size=predictor.img_size, decode=decode)
        split = sized.split(tests or shards)
        count = int(split.labels.max()) + 1
        class_names = (
            read_class_names(data.class_names_file) if data.class_names_file else tuple(map(str, range(count)))
        )
        title = f"the test shards of {place}" if tests and len(tests) < len(shards) else place
    else:
        if hasattr(data, "decode"):
            data = data.replace(img_size=predictor.img_size, decode=decode)
        dataset = data.load()
        if not isinstance(dataset, ImageDataset):
            raise UserError(f"{predictor.name} reads images, but {place} holds none")
        title, split, class_names = f"the test split of {place}", dataset.test, dataset.class_names

    def read(indices: range) -> list[Tensor]:
        images = split.fetch(torch.tensor(indices)).images
        return list(fit(images, predictor.img_size, predictor.decoding.crop_pct, predictor.decoding.channels))

    def corrupt() -> dict[int, str]:
        if not isinstance(split, EncodedImages):
            return {}
        return {index: f"{split.name(index)}: {reason}" for index, reason in split.corrupt.items()}

    return LabeledInputs(title, class_names, labels_of(split), read, corrupt)


def find_data(place: str) -> Data:
    if place in NAMED and not Path(place).exists():
        return NAMED[place]
    return detect_data(place)


class LabeledFiles(NamedTuple):
    title: str
    root: Path
    files: list[LabeledFile]
    class_names: tuple[str, ...]


def folder_images(data: ImageFolder) -> LabeledFiles:
    """The images of the test folder, or else of the validation folder, or else all; one class is enough."""
    root = expand_user(data.path)
    while inner := only_folder(root):
        root = inner
    held_out = split_folders(root)
    test = held_out.get("test") or held_out.get("validation") or root
    classes = tuple(folders(test))
    return LabeledFiles(
        data.path if test == root else f"the {test.name} folder of {data.path}",
        test,
        list_images(test, classes),
        classes,
    )


def table_images(data: ImageTable) -> LabeledFiles:
    """The images of the test table, or else of the rows of the test split, or else all."""
    rows, title = list(data.read(data.test or data.path, [])), data.test or data.path
    chosen = [row for row in rows if row[2] == "test"]
    if chosen and not data.test:
        title = f"the test split of {title}"
    classes = tuple(sorted({label for _, label, _ in chosen or rows}, key=label_order))
    files = [LabeledFile(file, classes.index(label)) for file, label, _ in chosen or rows]
    return LabeledFiles(title, data.root(), files, classes)


def fit(images: Tensor, size: tuple[int, int], crop_pct: float, channels: int) -> Tensor:
    """Images in memory as the model reads them: resized, cropped at the center, with its channels; uint8, b c h w."""
    height, width = images.shape[2:]
    if (height, width) != size:
        scale = max(size[0] / height, size[1] / width) / crop_pct
        resized = max(round(height * scale), size[0]), max(round(width * scale), size[1])
        large = F.interpolate(images.float(), resized, mode="bicubic", antialias=True)
        top, left = ((whole - part) // 2 for whole, part in zip(resized, size, strict=True))
        images = large[:, :, top : top + size[0], left : left + size[1]].round().clamp(0, 255).byte()
    if channels == 3:
        return images.expand(-1, 3, -1, -1)
    return images if images.shape[1] == 1 else images.float().mean(1, keepdim=True).round().byte()


def text_inputs(place: str) -> LabeledInputs:
    """All labeled texts of data without splits, or else those for testing."""
    data = find_data(place)
    if not isinstance(data, LabeledText):
        raise UserError(f"the model classifies texts, but {place} is not a table of texts with labels")
    rows, title = LabeledTextReader(data).read(data.test or data.path), place
    chosen = [row for row in rows if row.split == "test"]
    if data.test or chosen:
        title = f"the test split of {place}"
    rows = rows if data.test else chosen or rows
    if not rows:
        raise UserError(f"{place} has no labeled texts")
    class_names = tuple(sorted({row.label for row in rows}, key=label_order))
    numbers = {name: number for number, name in enumerate(class_names)}
    labels = torch.tensor([numbers[row.label] for row in rows])
    return LabeledInputs(title, class_names, labels, lambda indices: [rows[index][:2] for index in indices])


@torch.inference_mode()
def predictor_outputs(
    predictor: Predictor,
    inputs: LabeledInputs,
    match: ClassMatch,
    world: parallel.World,
    batch_size: int,
    progress: Progress,
) -> ClassifierOutputs:
    """The outputs for all inputs; those of other processes come from them."""
    total = len(inputs.labels)
    rows = torch.zeros(len(ClassifierOutputs._fields), total, dtype=torch.float64)
    labels, wide = torch.tensor(match.labels)[inputs.labels], sum_dtype(world.device)
    threads = Threads(active=world.device.type == "cpu")
    for start in range(world.rank * batch_size, total, world.size * batch_size):
        indices = range(start, min(start + batch_size, total))
        batch: list[Any] = inputs.read(indices)
        with threads:
            probabilities = predictor.probabilities(batch)
        found = classifier_outputs(probabilities, labels[indices].to(world.device), match)
        rows[:, indices] = torch.stack([values.to(wide) for values in found]).cpu()
        rows[0, [index for index in inputs.corrupt() if index in indices]] = UNREADABLE
        progress(indices.stop, total)
    return ClassifierOutputs(*gather(rows, world))


def evaluate_text_task(
    predictor: TextPredictor, name: str, place: str, world: parallel.World, batch_size: int | None
) -> Evaluation:
    """The metrics of a language model, of question answering or of a translation on the files at `place`."""
    defaults: dict[str, tuple[Task, Callable[[str, str], Data]]] = {
        "text": (CausalLM() if predictor.causal else MaskedLM(), Corpus),
        "span": (QuestionAnswering(), Squad),
        "translation": (Translation(), ParallelCorpus),
    }
    task, make = defaults[predictor.task]
    run = read_run(Path(name)) if (Path(name) / RUN).is_file() else Run(None, task, make(place, place), batch_size=32)
    train = "train" if isinstance(run.data, Squad) else "path"
    data = run.data.for_model(predictor.name)
    if not hasattr(data, "seq_len"):
        raise UserError(f"{name} was trained on {type(data).__name__}: it cannot be evaluated on other data")
    # The data for training are not needed, and may not be here.
    dataset = data.replace(**{train: place, "test": place, "seq_len": predictor.preprocessing.seq_len}).load()
    run.task.check_dataset(dataset)
    run = run.replace(batch_size=batch_size or run.batch_size)
    module = run.task.build_evaluator(predictor.original, dataset).to(world.device)
    metrics = evaluate(module, predictor.original, dataset.test, world, run)
    return Evaluation(name, place, len(dataset.test), metrics)


# --- figures -----------------------------------------------------------------------------------------------


def classifier_outputs(probabilities: Tensor, labels: Tensor, match: ClassMatch) -> ClassifierOutputs:
    """One batch: probabilities of the model's classes, b k, and labels as in `match`; below zero there is none."""
    columns = torch.tensor(match.columns, device=probabilities.device)
    size = int(columns.max()) + 1
    if size < len(columns):
        merged = probabilities.new_zeros(len(probabilities), size)
        probabilities = merged.index_add_(1, columns, probabilities)
    confidence, predicted = probabilities.max(1)
    own = probabilities.gather(1, labels.clamp(min=0)[:, None])
    in_top5 = (probabilities > own).sum(1) < 5
    return ClassifierOutputs(labels, predicted, confidence, -own[:, 0].clamp(min=TINY).log(), in_top5)


def gather(rows: Tensor, world: parallel.World) -> list[Tensor]:
    """Rows of which every process has filled in its columns."""
    return list(world.sum(rows.to(sum_dtype(world.device)).to(world.device)).cpu()) if world.size > 1 else list(rows)


def accuracy(outputs: ClassifierOutputs) -> float:
    return float((outputs.predicted == outputs.labels).double().mean())


def summarize(
    model: str,
    data: str,
    outputs: ClassifierOutputs,
    class_names: tuple[str, ...],
    skipped: list[str] | None = None,
    left_out: int = 0,
) -> Evaluation:
    labels, predicted = outputs.labels.long(), outputs.predicted.long()
    correct, total = predicted == labels, len(labels)
    low, high = wilson_interval(int(correct.sum()), total)
    counts, hits, guesses = (
        torch.bincount(values, minlength=len(class_names)).tolist() for values in (labels, labels[correct], predicted)
    )
    metrics = {"accuracy": accuracy(outputs), "accuracy_low": low, "accuracy_high": high}
    if len(class_names) >= MIN_TOP5_CLASSES:
        metrics["top5_accuracy"] = float(outputs.in_top5.mean())
    metrics["loss"] = float(outputs.loss.mean())
    metrics["calibration_error"] = calibrate(outputs.confidence, correct).error
    metrics["majority"] = max(counts) / total
    results = [ClassResult(name, *row) for name, *row in zip(class_names, counts, hits, guesses, strict=True) if row[0]]
    pairs, times = torch.stack([labels, predicted])[:, ~correct].unique(dim=1, return_counts=True)
    order = times.argsort(descending=True, stable=True)[:MAX_CONFUSED]
    confusions = [
        Confusion(class_names[label], class_names[other], count, counts[label])
        for (label, other), count in zip(pairs[:, order].T.tolist(), times[order].tolist(), strict=True)
    ]
    return Evaluation(model, data, total, metrics, results, confusions, skipped or [], left_out)
