"""Evaluate a trained model on the test split of its run, or on other labeled data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allmlp import parallel
from allmlp.accuracy import wilson_interval
from allmlp.backtest import Origin, by_origin, unseen_windows
from allmlp.data.class_names import ClassMatch, imagenet_numbers, match_classes, model_class_names, read_class_table
from allmlp.data.corpus import Corpus
from allmlp.data.dataset import Data, Dataset, Split
from allmlp.data.detect import detect_data
from allmlp.data.labeled_text import LabeledText
from allmlp.data.parallel_corpus import ParallelCorpus
from allmlp.data.prefetch import Moving, Transfer, read_ahead
from allmlp.data.sampler import eval_batches
from allmlp.data.series_table import SeriesTable
from allmlp.data.squad import Squad, WindowConfig
from allmlp.data.tables import is_table
from allmlp.data.tokenizer import TextData, TokenizerConfig, load_tokenizer
from allmlp.device import as_dtype, sum_dtype, warn_of_slow_format
from allmlp.errors import UserError
from allmlp.files import RUN, expand_user, finite
from allmlp.labeled_inputs import LabeledInputs, image_inputs, text_inputs
from allmlp.models.model import Model
from allmlp.prediction import Predictor, TextPredictor, open_predictor
from allmlp.prediction.forecast import Forecaster, series_folder
from allmlp.prediction.predictor import check_vocabulary
from allmlp.prediction.stream import Pixels
from allmlp.record import describe_data, read_run, warn_of_other_data
from allmlp.report.predictions import calibrate, logits_of
from allmlp.run import Run
from allmlp.spec import override_all
from allmlp.split_metrics import Metric, SplitMetrics
from allmlp.tasks.causal_lm import CausalLM
from allmlp.tasks.classify import ClassifyModule
from allmlp.tasks.classify_text import ClassifyTextModule
from allmlp.tasks.forecast import Forecast, ForecastModule
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.probe import KnnEval
from allmlp.tasks.question_answering import QuestionAnswering
from allmlp.tasks.task import Task
from allmlp.tasks.translate import Translation
from allmlp.threads import Threads
from allmlp.train_step import autocast
from allmlp.training import compute_dtype, evaluate
from allmlp.weights import folder

MIN_TOP5_CLASSES = 10
MAX_CONFUSED = 10
DATA_PREFIX = "data."
TINY = 1e-45
"""The smallest positive float32: the probability of an impossible class."""
LEFT_OUT, UNREADABLE = -1, -2
"""Special labels: the class is left out; the image could not be decoded."""
Progress = Callable[[int, int], None]
"""Called with the number of examples so far and the total."""


class ClassResult(NamedTuple):
    """Results of a classifier for one class."""

    name: str
    examples: int
    correct: int
    predicted: int
    """Examples of any class predicted as this one."""


class Confusion(NamedTuple):
    """Examples of one class predicted as another one."""

    name: str
    predicted: str
    count: int
    examples: int
    """Number of examples of the class."""


@dataclass(frozen=True)
class Evaluation:
    model: str
    data: str
    """Description of the data: "the test split of cifar10"."""
    examples: int
    metrics: dict[str, float]
    class_results: list[ClassResult] = field(default_factory=list)
    """Results for each class with examples, for a classifier."""
    confusions: list[Confusion] = field(default_factory=list)
    """The most frequent confusions."""
    skipped: list[str] = field(default_factory=list)
    """Files that could not be read."""
    left_out: int = 0
    """Examples of classes that the table of classes leaves out."""
    origins: list[Origin] = field(default_factory=list)
    """Errors of forecasts by part of the test period."""
    notes: tuple[str, ...] = ()
    """Notes about the data."""

    def to_json(self) -> dict[str, Any]:
        lists = "class_results", "confusions", "origins"
        rows = {name: [row._asdict() for row in getattr(self, name)] for name in lists}
        rest = {name: value for name, value in vars(self).items() if name not in ("metrics", *rows)}
        return finite(rest | self.metrics | rows)


class ClassifierOutputs(NamedTuple):
    """The outputs of a classifier for each example, n each."""

    labels: Tensor
    predicted: Tensor
    confidence: Tensor
    """Probability of the predicted class."""
    loss: Tensor
    """- log p(label)."""
    in_top5: Tensor
    logits: Tensor
    """n k, for metrics; n 0 if there are none."""

    def select(self, rows: Tensor) -> ClassifierOutputs:
        return ClassifierOutputs(*(values[rows] for values in self))


@dataclass(frozen=True)
class Setup:
    """Processes and options of an evaluation."""

    world: parallel.World
    dtype: torch.dtype | None = None
    """Precision, if it is not that of the run."""
    batch_size: int | None = None
    """Examples per batch, if they are not those of the run."""
    metrics: SplitMetrics = field(default_factory=SplitMetrics)
    """The user's metrics."""
    progress: Progress = lambda done, total: None
    data_fields: Mapping[str, Any] = field(default_factory=dict)
    """Changed fields of other data, such as the names of columns."""

    @property
    def keeps_logits(self) -> bool:
        return bool(self.metrics.functions)

    def apply(self, run: Run) -> Run:
        """The run with this batch size and precision."""
        run = run.replace(batch_size=self.batch_size or run.batch_size)
        return run if self.dtype is None else run.replace(precision=str(self.dtype).removeprefix("torch."))


def evaluate_model(
    model: str,
    data: str | None = None,
    *,
    classes: str | None = None,
    knn: int | None = None,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    batch_size: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Evaluate a run on its own test split, or any model on `data`: a path, a name of `NAMED`, a dataset of the Hub.

    Data without splits are evaluated as a whole. Their classes are matched with the model's by name; `classes` is a
    table for those with other names. `knn` evaluates the features of a run by this many nearest neighbors.
    `metrics` are functions of logits and labels, as for training; on other data, the logits are log-probabilities of
    the distinguished classes. `overrides` changes fields of `data`, such as {"data.label_column": "rating"}.
    """
    dtype = None if dtype is None else as_dtype(dtype)
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"models cannot be evaluated in {dtype}: use float32, bfloat16 or float16")
    user_metrics, fields = SplitMetrics(metrics), data_fields(overrides or {}, data)
    with parallel.join(device) as world:
        setup = Setup(world, dtype, batch_size, user_metrics, progress, fields)
        warn_of_slow_format(world.device, dtype)
        if data is None:
            if classes is not None:
                raise UserError("--classes is for other data than the run's own: name them after the model")
            return evaluate_run(model, knn, setup)
        if knn is not None:
            raise UserError("--knn compares with the training examples of a run: leave out the data")
        if (place := series_folder(model)) is not None:
            if classes is not None:
                raise UserError(f"--classes is for classifiers: {model} forecasts time series")
            if fields:
                raise UserError(f"{model} forecasts time series, and reads a table by the columns of its training")
            return evaluate_series(model, place, data, setup)
        predictor = open_predictor(model, device=device, dtype=dtype)
        if predictor.task == "values":
            raise UserError(f"{model} is a regression, not a classifier")
        if isinstance(predictor, TextPredictor) and predictor.task != "classes":
            if user_metrics.functions:
                raise UserError(f"metrics are computed from the logits of a classifier, which {model} is not")
            return evaluate_text_task(predictor, model, data, setup)
        return evaluate_classifier(predictor, model, data, classes, setup)


def data_fields(overrides: Mapping[str, Any], data: str | None) -> dict[str, Any]:
    """The fields of `data` that are changed, by their names in it."""
    for name in overrides:
        if not name.startswith(DATA_PREFIX):
            raise UserError(f"an evaluation changes fields of its data, such as data.label_column, not {name}")
    if overrides and data is None:
        raise UserError("the data of a run are evaluated as they are: name other data after the model")
    return {name.removeprefix(DATA_PREFIX): value for name, value in overrides.items()}


# --- the run's own data ------------------------------------------------------------------------------------


def evaluate_run(name: str, knn: int | None, setup: Setup) -> Evaluation:
    path, world, metrics = Path(name), setup.world, setup.metrics
    if path.is_dir() and not (path / RUN).is_file():
        folder.read_spec(path)
    if not (path / RUN).is_file() and (path.is_dir() or ":" in name):  # allmlp:cifar10, timm:NAME
        raise UserError(f"{name} is a model without a run, so it has no data of its own: allmlp eval {name} DATA")
    run = setup.apply(read_run(path))
    warn_of_slow_format(world.device, compute_dtype(run, world.device))
    task: Task = KnnEval(knn) if knn else run.task
    dataset = run.select(run.data.for_model(name).load())
    task.check_dataset(dataset)
    if world.is_main:
        leak = ": examples of the model's training may be among those it is evaluated on"
        warn_of_other_data(path, describe_data(dataset), leak)
    model = folder.load(path, device=world.device, dtype=None)
    if isinstance(run.data, TextData):
        check_tokenizer(run.data, dataset, model, name)
    module: Any = task.build_evaluator(model, dataset).to(world.device).eval()
    metrics.check(module)
    split = dataset.test
    title = f"its {'held-out examples' if run.val_size else 'test split'}"
    floors = task.floors(dataset, split)
    if type(module).evaluate not in (ClassifyModule.evaluate, ClassifyTextModule.evaluate):
        results = evaluate(module, model, split, world, run, metrics)
        origins = by_origin(module, model, dataset) if isinstance(module, ForecastModule) else []  # type: ignore[arg-type]
        return Evaluation(name, title, len(split), results | floors, origins=origins)
    class_names: tuple[str, ...] = dataset.class_names  # type: ignore[attr-defined]
    outputs, part = run_outputs(module, split, len(class_names), run, setup)
    evaluation = summarize(name, title, outputs.select(part == 0), class_names)
    names = getattr(dataset, "test_names", ())
    others = {f"{names[k]}_accuracy": accuracy(outputs.select(part == k)) for k in part.unique().tolist() if k}
    evaluation.metrics.update(others | floors | own_metrics(setup, outputs, part, module.split_names))
    return evaluation


def check_tokenizer(data: TextData, dataset: Dataset, model: Model, name: str) -> None:
    """Raise UserError if the data are not read with the tokenizer that is saved with the model."""
    saved, used = load_tokenizer(Path(name)), dataset.tokenizer  # type: ignore[attr-defined]
    check_vocabulary(model, saved, name)
    if saved.to_json() != used.to_json():
        place = data.tokenizer.path  # type: ignore[attr-defined]
        raise UserError(f"the tokenizer in {place} is no longer the one in {name} that the model was trained with")


@torch.inference_mode()
def run_outputs(
    module: Any, split: Split, num_classes: int, run: Run, setup: Setup
) -> tuple[ClassifierOutputs, Tensor]:
    """Outputs for a split, with logits if metrics need them, and the index of the test file of each example."""
    world, batch_size, dtype = setup.world, run.batch_size, compute_dtype(run, setup.world.device)
    match = ClassMatch((), list(range(num_classes)), list(range(num_classes)))
    rows = torch.zeros(len(ClassifierOutputs._fields), len(split), dtype=torch.float64)
    kept = torch.zeros(len(split), num_classes if setup.keeps_logits else 0)
    indices, wide = torch.arange(world.rank, len(split), world.size), sum_dtype(world.device)
    batches = eval_batches(split, batch_size, world.device, world.rank, world.size)
    threads = Threads(active=world.device.type == "cpu")
    for start, batch in zip(range(0, len(split), batch_size), batches):
        with threads, autocast(world.device, dtype), torch.compiler.set_stance("force_eager"):
            logits = logits_of(module, module.model, batch)
        part = getattr(batch, "test_set", torch.zeros_like(batch.labels))
        outputs, _ = classifier_outputs(logits.float().softmax(1), batch.labels, match)
        batch_rows = torch.stack([values.to(wide) for values in (*outputs, part)])
        rows[:, indices[start : start + batch_size]] = batch_rows.cpu()
        if setup.keeps_logits:
            kept[indices[start : start + batch_size]] = logits.float().cpu()
        setup.progress(min((start + batch_size) * world.size, len(split)), len(split))
    *columns, part = gather(rows, world)
    return ClassifierOutputs(*columns, logits=gather(kept, world)), part.long()


# --- other data --------------------------------------------------------------------------------------------


def evaluate_classifier(predictor: Predictor, name: str, place: str, classes: str | None, setup: Setup) -> Evaluation:
    data = override_all(detect_for(predictor, place), setup.data_fields)
    if isinstance(predictor, TextPredictor):
        inputs = text_inputs(data, place, predictor.preprocessing)
    else:
        inputs = image_inputs(data, place, predictor)
    num_classes = predictor.probabilities(inputs.read(range(1))).shape[1]
    names = model_class_names(predictor.preprocessing.class_names, num_classes)
    numbers = {} if classes else imagenet_numbers(inputs.class_names, names)
    table = read_class_table(classes, inputs.class_names) if classes else numbers
    match = match_classes(inputs.class_names, names, table)
    outputs = predictor_outputs(predictor, inputs, match, setup)
    kept = outputs.select(outputs.labels >= 0)
    if not len(kept.labels):
        raise UserError(f"{place} has no examples to evaluate")
    evaluation = summarize(
        name,
        inputs.data,
        kept,
        match.names,
        skipped=list(inputs.corrupt().values()),
        left_out=int((outputs.labels == LEFT_OUT).sum()),
        notes=(*inputs.notes, *((imagenet_note(inputs.class_names, match),) if numbers else ())),
    )
    evaluation.metrics.update(own_metrics(setup, kept))
    return evaluation


def detect_for(predictor: Predictor, place: str) -> Data:
    """The data at `place`. For a model of texts an undetected table is one of texts: they may be as short as labels."""
    try:
        return detect_data(place)
    except UserError:
        if isinstance(predictor, TextPredictor) and is_table(place) and expand_user(place).is_file():
            return LabeledText(place)
        raise


def imagenet_note(class_names: Sequence[str], match: ClassMatch) -> str:
    example = f"{class_names[0]} is {match.names[match.labels[0]]}"
    return f"class names are read as numbers of ImageNet's classes, as in ImageNet-V2: {example}"


@torch.inference_mode()
def predictor_outputs(
    predictor: Predictor, inputs: LabeledInputs, match: ClassMatch, setup: Setup
) -> ClassifierOutputs:
    """Outputs for all inputs, gathered from all processes; with log-probabilities if metrics need them."""
    total, world, batch_size = len(inputs.labels), setup.world, setup.batch_size or 64
    rows = torch.zeros(len(ClassifierOutputs._fields) - 1, total, dtype=torch.float64)
    kept = torch.zeros(total, max(match.columns) + 1 if setup.keeps_logits else 0)
    labels, wide = torch.tensor(match.labels)[inputs.labels], sum_dtype(world.device)
    threads = Threads(active=world.device.type == "cpu")
    starts = range(world.rank * batch_size, total, world.size * batch_size)
    parts = [range(start, min(start + batch_size, total)) for start in starts]
    transfer = Transfer(world.device)

    def read(part: range) -> Any:
        images_or_texts = inputs.read(part)
        is_images = isinstance(images_or_texts, Tensor)
        return transfer.send(Pixels(images_or_texts)) if is_images else images_or_texts

    for indices, batch in zip(parts, read_ahead(read, parts), strict=True):
        decoded = transfer.receive(batch).images if isinstance(batch, Moving) else batch
        with threads:
            probabilities = predictor.probabilities(decoded)
        outputs, merged = classifier_outputs(probabilities, labels[indices].to(world.device), match)
        rows[:, indices] = torch.stack([values.to(wide) for values in outputs]).cpu()
        if setup.keeps_logits:
            kept[indices] = merged.float().clamp(min=TINY).log().cpu()
        rows[0, [index for index in inputs.corrupt() if index in indices]] = UNREADABLE
        setup.progress(indices.stop, total)
    return ClassifierOutputs(*gather(rows, world), logits=gather(kept, world))


def evaluate_series(name: str, place: Path, table: str, setup: Setup) -> Evaluation:
    """A back-test: the forecasts of values in a table that the model was not trained on."""
    world = setup.world
    forecaster = Forecaster(place, str(world.device))
    model, preprocessing = forecaster.model, forecaster.preprocessing
    dataset = unseen_windows(forecaster.read(table), preprocessing, forecaster.seq_len, forecaster.horizon, table)
    default = Run(None, Forecast(quantiles=forecaster.levels), SeriesTable(table), precision="float32")
    run = setup.apply(read_run(place) if (place / RUN).is_file() else default)
    module = run.task.build_evaluator(model, dataset).to(world.device).eval()
    setup.metrics.check(module)
    metrics = evaluate(module, model, dataset.test, world, run) | run.task.floors(dataset, dataset.test)
    assert isinstance(module, ForecastModule)
    origins = by_origin(module, model, dataset)
    return Evaluation(name, table, len(dataset.test), metrics, origins=origins, notes=dataset.notes)


def evaluate_text_task(predictor: TextPredictor, name: str, place: str, setup: Setup) -> Evaluation:
    """Metrics of a language, question-answering or translation model on the files at `place`."""
    task, data = default_evaluation(predictor)
    run = read_run(Path(name)) if (Path(name) / RUN).is_file() else Run(None, task, data, batch_size=32)
    if isinstance(run.data, Corpus | Squad | ParallelCorpus):
        data = run.data
    seq_len = predictor.preprocessing.seq_len
    data = override_all(data.replace(test=place, seq_len=seq_len), setup.data_fields)
    dataset = data.load_test(predictor.tokenizer)
    run.task.check_dataset(dataset)
    run = setup.apply(run)
    module = run.task.build_evaluator(predictor.original, dataset).to(setup.world.device)
    metrics = evaluate(module, predictor.original, dataset.test, setup.world, run)
    return Evaluation(name, place, len(dataset.test), metrics, notes=dataset.notes)


def default_evaluation(predictor: TextPredictor) -> tuple[Task, TextData]:
    """Task and data of a model without a run, or of a run on data without files."""
    if predictor.task == "text":
        return CausalLM() if predictor.causal else MaskedLM(), Corpus("")
    if predictor.task == "translation":
        source_lang, target_lang = ParallelCorpus.source_lang, ParallelCorpus.target_lang
        source = next(iter(predictor.preprocessing.text_columns), source_lang)
        target = target_lang if source != target_lang else source_lang
        return Translation(), ParallelCorpus("", source_lang=source, target_lang=target)
    return QuestionAnswering(), Squad(
        "", "", TokenizerConfig(), *WindowConfig.for_seq_len(predictor.preprocessing.seq_len)
    )


# --- figures -----------------------------------------------------------------------------------------------


def classifier_outputs(probabilities: Tensor, labels: Tensor, match: ClassMatch) -> tuple[tuple[Tensor, ...], Tensor]:
    """Outputs of one batch: the fields of `ClassifierOutputs` before the last, and the probabilities of the classes of
    `match`; from probabilities of the model's classes, b k, and labels as in `match`, negative if there is none.
    """
    columns = torch.tensor(match.columns, device=probabilities.device)
    size = int(columns.max()) + 1
    if size < len(columns):
        merged = probabilities.new_zeros(len(probabilities), size)
        probabilities = merged.index_add_(1, columns, probabilities)
    confidence, predicted = probabilities.max(1)
    label_probability = probabilities.gather(1, labels.clamp(min=0)[:, None])
    earlier = torch.arange(probabilities.shape[1], device=probabilities.device) < labels[:, None]  # as `predicted`, b k
    in_top5 = ((probabilities > label_probability) | ((probabilities == label_probability) & earlier)).sum(1) < 5
    return (labels, predicted, confidence, -label_probability[:, 0].clamp(min=TINY).log(), in_top5), probabilities


def gather(values: Tensor, world: parallel.World) -> Tensor:
    """Combine values of which every process has filled in its own rows, the others being zero."""
    if world.size == 1:
        return values
    return world.sum(values.to(sum_dtype(world.device)).to(world.device)).to("cpu", values.dtype)


def own_metrics(
    setup: Setup, outputs: ClassifierOutputs, part: Tensor | None = None, names: tuple[str, ...] = ("",)
) -> dict[str, float]:
    """The user's metrics; `part` is the index of each example's test file in `names`."""
    labels = outputs.labels.long()
    given = (outputs.logits, labels, torch.zeros_like(labels) if part is None else part)
    is_needed = setup.keeps_logits and setup.world.is_main
    return setup.world.broadcast(setup.metrics.compute(given, names) if is_needed else {})


def accuracy(outputs: ClassifierOutputs) -> float:
    return float((outputs.predicted == outputs.labels).double().mean())


def summarize(
    model: str,
    data: str,
    outputs: ClassifierOutputs,
    class_names: tuple[str, ...],
    skipped: list[str] | None = None,
    left_out: int = 0,
    notes: tuple[str, ...] = (),
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
    return Evaluation(model, data, total, metrics, results, confusions, skipped or [], left_out, notes=notes)
