"""The run of `allmlp train DATA`: every setting is chosen from the data and the device, with its reason.

The settings are ordinary fields of the run: `--set FIELD=VALUE` changes one, and run.json repeats the run exactly.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from allmlp.auto_series import QUANTILES, data_settings, series_model
from allmlp.auto_start import adapt_data, compare_starts, fits, reads
from allmlp.data.augment import Augment, HorizontalFlip, Mixup, RandAugment, Translate
from allmlp.data.corpus import TextDataset
from allmlp.data.dataset import Data, Dataset, ImageDataset, InMemory, labels_of
from allmlp.data.labeled_text import LabeledTextDataset
from allmlp.data.parallel_corpus import ParallelCorpus, TranslationDataset
from allmlp.data.preprocessing import read_preprocessing
from allmlp.data.series import SeriesDataset
from allmlp.data.squad import SquadDataset
from allmlp.device import own_device
from allmlp.errors import UserError, plural
from allmlp.head_init import HeadInit
from allmlp.log import announced
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.models.model import ModelSpec
from allmlp.models.seq2seq import resmlp_seq2seq
from allmlp.models.zoo import preset, presets
from allmlp.optim import AdamW
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule, LinearSchedule, Schedule
from allmlp.spec import hints, override, override_all
from allmlp.tasks.causal_lm import CausalLM
from allmlp.tasks.classify import Classify
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.forecast import Forecast
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.question_answering import QuestionAnswering
from allmlp.tasks.task import Task
from allmlp.tasks.translate import Translation
from allmlp.weights.bundled import bundled_models
from allmlp.weights.start import Start, open_start

FEW, MANY = 2_000, 50_000
"""Below FEW examples: the strongest regularization. Above MANY, on a GPU: a larger model from random weights."""
MAX_CPU_FEATURES = 2_000
"""Maximum number of examples whose features are computed to fit a head on a CPU."""
UNEVEN = 10.0
"""Minimum ratio of the largest to the smallest class for balancing classes."""
VAL_FRACTION = 0.15
ORDER = (
    "init_from",
    "model",
    "data",
    "task",
    "head_init",
    "batch_size",
    "budget",
    "optim",
    "keep_best",
    "start_margin",
    "patience",
)
"""Order of the reasons; other fields come last."""
GIVEN = {"train_fraction", "train_per_class", *Run.aliases, "batch_size"}
"""Overrides that other settings depend on: those that select training examples, and the batch size."""
MAX_TFIDF = 50_000
"""Maximum number of training texts for fitting the TF-IDF baseline."""


class Reason(NamedTuple):
    field: str
    value: str
    why: str


class Choice(NamedTuple):
    run: Run
    reasons: list[Reason]

    def table(self) -> str:
        """Field, value and reason in aligned columns."""
        widths = [max(len(row[k]) for row in self.reasons) for k in (0, 1)]
        return "\n".join(f"{field:{widths[0]}}  {value:{widths[1]}}  {why}" for field, value, why in self.reasons)


class TrainOptions(NamedTuple):
    """Options of `allmlp train`; None means chosen automatically."""

    model: str | None = None
    epochs: float | None = None
    minutes: float | None = None
    size: int | None = None


def choose_run(
    data: Data,
    *,
    device: str | None = None,
    model: str | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    size: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Choice:
    """Choose a run for `data` on `device`. `model` is a name of `allmlp list`, trained from random weights, or a
    trained model to start from (`open_start`); `size` is the image size or the number of tokens. Of `overrides`, those
    in `GIVEN` are set, as the choice depends on them.
    """
    given = {name: value for name, value in (overrides or {}).items() if name in GIVEN}
    settings = Settings(data, own_device(device), TrainOptions(model, epochs, minutes, size), given)
    dataset = settings.dataset
    for kind, choose in CHOOSERS.items():
        if isinstance(dataset, kind):
            choose(settings)
            return Choice(settings.run, sorted(settings.reasons, key=rank))
    raise UserError(f"no settings are known for {type(data).__name__}: choose a recipe of `allmlp list recipes`")


def rank(reason: Reason) -> int:
    name = reason.field.partition(".")[0]
    return ORDER.index(name) if name in ORDER else len(ORDER)


class Settings:
    """The run under construction, and the reasons for its fields."""

    def __init__(self, data: Data, device: torch.device, options: TrainOptions, given: Mapping[str, Any]) -> None:
        self.run = override_all(Run(model=None, task=Classify(), data=data), given)
        self.device, self.options, self.given, self.reasons = device, options, given, list[Reason]()
        with announced("reading the data", is_main()):
            self.dataset: Dataset = self.run.select(data.load())

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def examples(self) -> int:
        return len(self.dataset.train)

    def set(self, field: str, value: Any, why: str, shown: str = "") -> None:
        self.run = override(self.run, field, value) if "." in field else self.run.replace(**{field: value})
        if why:
            self.reasons.append(Reason(field, shown or show(value), why))

    def reload(self) -> None:
        """Load the data again after a change of their settings or of `init_from`."""
        data = self.run.data
        if self.run.init_from:
            data = data.for_model(open_start(self.run.init_from).folder)
        self.dataset = self.run.select(data.load())

    def has(self, field: str) -> bool:
        """Whether the data have this field."""
        return field in hints(type(self.run.data))


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def show(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2:
        return "x".join(f"{part:g}" for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- what all kinds of data share -------------------------------------------------------------------------


def choose_validation(settings: Settings) -> None:
    """Hold out a validation split if the data have none, and keep the weights that are best on it."""
    if settings.dataset.validation is None and getattr(settings.run.data, "val_fraction", 0.0) is None:
        settings.set("data.val_fraction", VAL_FRACTION, "the data have a test split, but none for validation")
        settings.reload()
    if settings.dataset.validation is not None:
        count = plural(len(settings.dataset.validation), "validation example")
        settings.set("keep_best", True, f"the best weights on {count} are kept and tested")
        settings.set("patience", 6, "evaluations without improvement before the run ends")


def choose_margin(settings: Settings) -> None:
    """Keep the fitted head unless training improves it by more than chance on the validation split."""
    size = len(settings.dataset.validation or ())
    if size:
        # Standard error if a tenth of the predictions change at random, for better or worse. Two of them, since the
        # best of many evaluations is compared.
        margin = round(2 * (0.1 / size) ** 0.5, 3)
        settings.set("start_margin", margin, "minimum gain to replace the start: two standard errors")


def choose_budget(settings: Settings, epochs: float, minutes: float) -> None:
    """Set the budget; `minutes` apply on a CPU only, so that a first result does not take hours."""
    options = settings.options
    if options.epochs is not None or options.minutes is not None:
        budget, why = Budget(epochs=options.epochs, minutes=options.minutes), "as given"
    else:
        budget = Budget(epochs=epochs, minutes=minutes if settings.on_cpu else None)
        limited = "; limited on a CPU; --minutes changes it" if settings.on_cpu else ""
        why = f"for {settings.examples:,} examples{limited}"
    settings.set("budget", budget, why, show_budget(budget))


def show_budget(budget: Budget) -> str:
    parts = [plural(budget.epochs, "epoch", form="g")] if budget.epochs else []
    parts += [f"{budget.minutes:g} min"] if budget.minutes else []
    return ", ".join(parts)


def choose_batch(settings: Settings, batch_size: int) -> None:
    """Set the batch size, and log, evaluate and save every epoch unless epochs are very short."""
    size = settings.run.batch_size if "batch_size" in settings.given else max(min(batch_size, settings.examples), 1)
    why = "all examples" if size == settings.examples else "small batches for few examples or a CPU"
    settings.set("batch_size", size, why if size < 128 else "enough examples for large batches")
    steps = max(-(-settings.examples // size), 5)
    settings.run = settings.run.replace(eval_every=steps, save_every=steps, log_every=max(steps // 2, 1))


def choose_schedule(settings: Settings, schedule: Schedule) -> None:
    """Set the schedule, and compile where the length of the run repays it."""
    settings.run = settings.run.replace(schedule=schedule, max_grad_norm=1.0)
    budget = settings.run.budget
    steps = (budget.epochs or 10) * settings.examples / settings.run.batch_size
    pays = not settings.on_cpu and steps > 2000
    why = "not on a CPU" if settings.on_cpu else f"about {steps:,.0f} steps " + ("repay it" if pays else "are too few")
    settings.set("compile", pays, why)


def choose_balance(settings: Settings, num_classes: int) -> None:
    labels = labels_of(settings.dataset.train)
    counts = labels[labels >= 0].bincount(minlength=num_classes)
    ratio = counts.max().item() / max(counts.min().item(), 1)
    if ratio >= UNEVEN:
        why = f"the largest class has {ratio:,.0f} times the examples of the smallest"
        settings.set("task.class_balance", 0.5, why)


def named_model(settings: Settings, bundled: bool = True) -> Start | None:
    """Set the requested model, else the best of the bundled ones if `bundled`; returns the trained model."""
    name = settings.options.model
    if name is not None and name in presets() and not os.path.exists(name):
        settings.set("model", preset(name).spec, "as given, from random weights", name)
        return None
    if name is not None:
        start = open_start(name)
        if start.preprocessing is not None and not fits(start.preprocessing, settings.dataset):
            hint = "; a model of `allmlp list` is trained from random weights"
            raise UserError(f"{name} does not read these data: it is a model for {reads(start.preprocessing)}{hint}")
        settings.set("init_from", name, "as given")
        return start
    paths = bundled_models() if bundled else {}
    fitting = [name for name, path in paths.items() if fits(read_preprocessing(path), settings.dataset)]
    return best_start(settings, [open_start(name) for name in fitting])


def best_start(settings: Settings, starts: list[Start]) -> Start | None:
    """Set and return the start whose frozen features classify held-out examples best."""
    if not starts:
        return None
    if len(starts) == 1 or not isinstance(settings.run.task, (Classify, ClassifyText)):
        settings.set("init_from", starts[0].name, "the bundled model")
        return starts[0]
    with announced("comparing the trained models that come with the package", is_main()):
        best, why = compare_starts(settings.run, settings.dataset, starts, settings.device)
    settings.set("init_from", best.name, why)
    return best


def choose_fine_tuning(settings: Settings, lr: float, layer_decay: float) -> None:
    """Fit the head first, then train everything, the lower layers more slowly."""
    head_init = HeadInit(max_examples=MAX_CPU_FEATURES) if settings.on_cpu else HeadInit()
    settings.set("head_init", head_init, "fits the head to the frozen features first", "logistic regression")
    choose_margin(settings)
    settings.set("optim", AdamW(lr=lr, weight_decay=0.05, layer_decay=layer_decay), "")
    why = f"AdamW; low, for a trained model; each lower block {layer_decay:g} times as fast"
    settings.reasons.append(Reason("optim.lr", show(lr), why))


# --- images ------------------------------------------------------------------------------------------------


def choose_images(settings: Settings) -> None:
    choose_validation(settings)
    dataset = settings.dataset
    assert isinstance(dataset, ImageDataset)
    few, many = settings.examples < FEW, settings.examples > MANY and not settings.on_cpu
    start = named_model(settings, bundled=not many)
    spec = settings.run.model if start is None else start.model.spec
    size = image_size(settings, spec)
    if start is not None:
        settings.run = adapt_data(settings.run, start, size)
        if size != start.model.spec.input_size:
            settings.run = settings.run.replace(model=start.model.spec.configure(img_size=size))
    elif spec is None:
        model = image_model(settings, size, many)
        size = model.input_size or size
        why = f"{settings.examples:,} examples are enough" if many else "no available trained model reads such images"
        settings.set("model", model, f"random weights: {why}", f"gMLP, {model.depth} blocks")
    else:
        settings.run = settings.run.replace(model=spec.configure(img_size=size, in_chans=len(dataset.mean)))
    if settings.has("img_size"):
        why = "as given" if settings.options.size else "the size of the model"
        settings.set("data.img_size", size, why if start or spec else "for this many examples on this device")
    choose_augmentation(settings, min(size), start is not None)
    choose_balance(settings, len(dataset.class_names))
    if start is not None:
        choose_batch(settings, 16 if few else 32 if settings.on_cpu else 128)
        choose_budget(settings, 20 if few else 10, 3 if few else 15)
        choose_fine_tuning(settings, 1e-4, 0.75)
    else:
        choose_batch(settings, 32 if few else 64 if settings.on_cpu else 1024 if many else 128)
        choose_budget(settings, 100 if few or not many else 60, 4 if few else 30)
        settings.set("optim", AdamW(lr=1e-3, weight_decay=0.05), "trains random weights well", "AdamW")
    choose_schedule(settings, CosineSchedule(warmup_fraction=0.1))


def image_size(settings: Settings, spec: ModelSpec | None) -> tuple[int, int]:
    train = settings.dataset.train
    if settings.options.size is not None:
        return settings.options.size, settings.options.size
    if spec is not None and spec.input_size is not None:
        return spec.input_size
    if isinstance(train, InMemory):
        height, width = train.examples.images.shape[2:]
        return height, width
    side = 64 if settings.on_cpu else 224 if settings.examples > MANY else 128
    return side, side


def image_model(settings: Settings, size: tuple[int, int], many: bool) -> Encoder:
    """A gMLP sized by the number of examples, with 16 to 400 patches if images are large enough. Images that no such
    patch size divides are enlarged slightly.
    """
    least = max(int(math.prod(size) ** 0.5) // 14, 2)

    def whole(patch: int) -> tuple[int, int]:
        return -(-size[0] // patch) * patch, -(-size[1] // patch) * patch

    patch = min(range(least, 2 * least), key=lambda patch: math.prod(whole(patch)))
    depth, width = (30, 256) if many else (6, 96) if settings.examples < FEW or settings.on_cpu else (12, 192)
    classes, colors = len(settings.dataset.class_names), len(settings.dataset.mean)  # type: ignore[attr-defined]
    model = gmlp(depth, width, patch, patch, classes)
    return model.configure(img_size=whole(patch), in_chans=colors, drop_path=0.1)


def choose_augmentation(settings: Settings, size: int, trained: bool) -> None:
    gray = len(settings.dataset.mean) == 1  # type: ignore[attr-defined]
    flip = () if gray else (HorizontalFlip(),)  # gray images are often digits or letters
    shift = (Translate(max(size // 8, 1)),) if isinstance(settings.dataset.train, InMemory) else ()
    policy = () if gray or (trained and settings.examples < FEW) else (RandAugment(2, 9),)
    task = Classify(augment=Augment((*flip, *shift, *policy)))
    if not trained and settings.examples >= 500:
        task = task.replace(label_smoothing=0.1, mix=Mixup(mixup_alpha=0.8, cutmix_alpha=1.0))
    names = [*(type(part).__name__ for part in task.augment.transforms), *(["Mixup"] if task.mix else [])]
    if settings.has("decode"):
        settings.run = override(settings.run, "data.decode.scale", (0.35 if trained else 0.2, 1.0))
        names.append("random crops")
    why = "light, for a trained model and few images" if not policy else "against overfitting"
    settings.set("task", task, "")
    settings.reasons.append(Reason("task.augment", ", ".join(names) or "none", why))


# --- texts -------------------------------------------------------------------------------------------------


def choose_labeled_texts(settings: Settings) -> None:
    settings.run = settings.run.replace(task=ClassifyText())
    choose_validation(settings)
    dataset = settings.dataset
    assert isinstance(dataset, LabeledTextDataset)
    few = settings.examples < FEW
    start = named_model(settings)
    choose_seq_len(settings, start)
    simple = settings.examples <= MAX_TFIDF and importlib.util.find_spec("sklearn") is not None
    task = ClassifyText(dropout=0.1 if start else 0.5, tfidf=simple)
    settings.run = settings.run.replace(task=task)
    if simple:
        settings.reasons.append(
            Reason("task.tfidf", "true", "TF-IDF with logistic regression is reported for comparison")
        )
    choose_balance(settings, len(dataset.class_names))
    if start is not None:
        choose_batch(settings, 16 if few else 32)
        choose_budget(settings, 10 if few else 4, 3)
        choose_fine_tuning(settings, 2e-4, 0.8)
    else:
        if settings.run.model is None:
            model = gmlp_text(2, 96, 192, seq_len=settings.run.data.seq_len)  # type: ignore[attr-defined]
            settings.set("model", model, "no trained text model is available: a small one", "gMLP, 2 blocks")
        choose_batch(settings, 32)
        choose_budget(settings, 20, 3)
        settings.set("optim", AdamW(lr=2e-3, weight_decay=0.1), "trains random weights well", "AdamW")
    choose_schedule(settings, LinearSchedule(warmup_fraction=0.1))


def choose_seq_len(settings: Settings, start: Start | None) -> None:
    """Enough tokens for 95 % of the texts, in steps of 16, at most 512; fewer are faster."""
    most = 512 if start is None else start.model.spec.stem.seq_len  # type: ignore[attr-defined]
    if settings.options.size is not None:
        settings.set("data.seq_len", settings.options.size, "as given")
        settings.reload()
        return
    settings.run = override(settings.run, "data.seq_len", most)
    settings.reload()
    pad = settings.dataset.tokenizer.pad_token_id  # type: ignore[attr-defined]
    lengths = (settings.dataset.train.fetch(torch.arange(min(settings.examples, 10_000))).ids != pad).sum(1)
    needed = int(torch.quantile(lengths.float(), 0.95).item())
    fitted = min(max(-(-needed // 16) * 16, 16), most)
    full = int((lengths == most).sum())
    why = f"95 % of the texts have at most {needed} tokens"
    if needed == most:
        why = (
            f"{'the maximum of the model' if start else 'the maximum'}; {full / len(lengths):.0%} of the texts reach it"
        )
    settings.set("data.seq_len", fitted, why)
    settings.reload()


def choose_plain_text(settings: Settings) -> None:
    start = named_model(settings, bundled=False)
    spec = settings.run.model if start is None else start.model.spec
    if settings.options.size is not None:
        settings.set("data.seq_len", settings.options.size, "as given")
    if spec is None:
        seq_len = settings.run.data.seq_len  # type: ignore[attr-defined]
        spec = gmlp_text(4, 128, 512, seq_len) if settings.on_cpu else gmlp_text(12, 256, 1536, seq_len)
        settings.set("model", spec, "by the device", f"gMLP, {spec.depth} blocks")
    causal = isinstance(spec, Encoder) and spec.block.causal
    task: Task = CausalLM() if causal else MaskedLM()
    why = "the model is causal" if causal else "texts without labels; --model gmlp_causal_tiny generates text instead"
    settings.set("task", task, why, type(task).__name__)
    choose_batch(settings, 32 if settings.on_cpu else 256)
    choose_budget(settings, 10 if settings.examples < MANY else 3, 15)
    settings.set("optim", AdamW(lr=2e-3, weight_decay=0.05), "AdamW is cheap on every device", "AdamW")
    choose_schedule(settings, LinearSchedule(warmup_fraction=0.1))


def choose_translation(settings: Settings) -> None:
    start = named_model(settings, bundled=False)
    data = settings.run.data
    assert isinstance(data, ParallelCorpus)
    if "+" not in data.path:  # else the files are the languages
        why = "columns of the table; data.source_lang and data.target_lang name others"
        settings.reasons.append(Reason("data", f"{data.source_lang} to {data.target_lang}", why))
    if settings.options.size is not None:
        settings.set("data.seq_len", settings.options.size, "as given")
    if start is None and settings.run.model is None:
        depth, width = (2, 128) if settings.on_cpu else (6, 256)
        model = resmlp_seq2seq(depth, width, 4, settings.run.data.seq_len)  # type: ignore[attr-defined]
        settings.set("model", model, "by the device", f"ResMLP, {depth} blocks")
    settings.set("task", Translation(word_dropout=0.2), "words are dropped against overfitting", "Translation")
    choose_batch(settings, 32 if settings.on_cpu else 256)
    choose_budget(settings, 40 if settings.examples < MANY else 10, 15)
    settings.set("optim", AdamW(lr=2e-3, weight_decay=0.05, betas=(0.9, 0.98)), "AdamW, on every device", "AdamW")
    choose_schedule(settings, CosineSchedule(warmup_fraction=0.1))


def choose_questions(settings: Settings) -> None:
    start = named_model(settings)
    if start is None:
        raise UserError("answers to questions need a trained text model to start from: --model FOLDER")
    settings.set("task", QuestionAnswering(), "answers are spans of the text", "QuestionAnswering")
    settings.reload()
    choose_batch(settings, 16 if settings.on_cpu else 32)
    choose_budget(settings, 3, 15)
    settings.set("optim", AdamW(lr=5e-5, weight_decay=0.01), "low, for a trained model", "AdamW")
    choose_schedule(settings, LinearSchedule(warmup_fraction=0.1))


def choose_series(settings: Settings) -> None:
    assert isinstance(settings.dataset, SeriesDataset)
    for field, value, why in data_settings(settings.dataset, settings.run.data, settings.options.size):
        settings.set(field, value, why)
    settings.reload()
    choose_validation(settings)
    few = settings.examples < FEW
    if named_model(settings, bundled=False) is None and settings.run.model is None:
        settings.set("model", *series_model(settings.dataset, few))
    settings.set("task", Forecast(quantiles=QUANTILES), "forecasts with their uncertainty", "Forecast of quantiles")
    choose_batch(settings, 32 if few else 64 if settings.on_cpu else 256)
    choose_budget(settings, 50 if few else 20, 3)
    settings.set("optim", AdamW(lr=1e-3, weight_decay=0.01), "AdamW is cheap on every device", "AdamW")
    settings.run = settings.run.replace(max_grad_norm=1.0, precision="float32")


CHOOSERS: dict[type[Dataset], Callable[[Settings], None]] = {
    ImageDataset: choose_images,
    LabeledTextDataset: choose_labeled_texts,
    TextDataset: choose_plain_text,
    TranslationDataset: choose_translation,
    SquadDataset: choose_questions,
    SeriesDataset: choose_series,
}
