"""Every recipe trains a few steps; recipes and the bundled model from the command line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import allmlp
from allmlp import training as loop
from allmlp.cli import main
from allmlp.data.corpus import Corpus, PassageDataset, Passages, TextDataset
from allmlp.data.dataset import Data, Dataset, ImageDataset, InMemory
from allmlp.data.flowers import Flowers102
from allmlp.data.labeled_text import LabeledTextDataset
from allmlp.data.parallel_corpus import TranslationDataset
from allmlp.data.pets import OxfordPets
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.data.series import SeriesDataset
from allmlp.data.series_table import SeriesTable
from allmlp.data.squad import SquadDataset
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.layers import ChannelMlp, Stage
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.models.huggingface import HuggingFaceImages
from allmlp.models.model import ModelSpec
from allmlp.models.resnet import ResNet
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.recipes import recipe, recipes, runs
from allmlp.run import Budget, Run
from allmlp.spec import Spec, from_dict, hints, to_dict
from allmlp.studies import studies
from allmlp.study.definition import Study
from allmlp.tasks.dino import Dino
from allmlp.tasks.distill import Distill
from allmlp.tasks.distill_classify_text import DistillClassifyText
from allmlp.tasks.distill_masked_lm import DistillMaskedLM
from allmlp.tasks.distill_question_answering import DistillQuestionAnswering
from allmlp.tasks.task import Task
from allmlp.weights.bundled import bundled
from data.official import write_flowers, write_pets


class Noise(Data):
    """Random images of any size, with ten classes."""

    channels: int
    img_size: tuple[int, int]
    examples: int = 20
    tested: int = 6
    """Images in the test split: evaluating a large model takes time."""

    def load(self) -> ImageDataset:
        images = noise(self.examples, self.channels, *self.img_size)
        labels = torch.arange(self.examples) % 10
        train, test = InMemory(images, labels), InMemory(images[: self.tested], labels[: self.tested])
        numbers = (0.5,) * self.channels
        return ImageDataset(train, test, tuple("abcdefghij"), numbers, numbers)


@cache
def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


RUNS = {name: run for recipe in recipes() for name, run in runs(recipe).items()}


@pytest.mark.parametrize("name", recipes())
def test_recipe_docstring_has_the_command(name: str) -> None:
    assert f"allmlp train {name}" in recipes()[name].text


PUBLISHED = {
    "imagenet_mixer_b16": {"batch_size": 4096, "budget.epochs": 300, "optim.lr": 1e-3, "optim.weight_decay": 0.1},
    "imagenet_resmlp_s12": {"batch_size": 2048, "optim.lr": 5e-3, "optim.weight_decay": 0.2, "aug_repeats": 3},
    "imagenet_gmlp_s16": {"batch_size": 4096, "budget.epochs": 300, "optim.lr": 1e-3, "optim.weight_decay": 0.05},
    "imagenet_resmlp_s12_dino": {"budget.epochs": 300, "optim.lr": 2e-3, "optim.weight_decay_end": 0.4},
    "imagenet_resmlp_s36": {"batch_size": 2048, "optim.lr": 5e-3, "optim.weight_decay": 0.2, "aug_repeats": 3},
    "imagenet_resmlp_s12_90epochs": {"budget.steps": 90 * 1_281_167 // 2048, "task.mix": None},
    "imagenet21k_resmlp_b24_8": {"budget.steps": 60 * 14_197_122 // 2048, "data.path": "imagenet21k"},
    "imagenet_resmlp_s24_distilled": {"task.teacher": "timm:regnety_160.deit_in1k", "task.distillation_type": "hard"},
    "imagenet_resmlp_s24_dino": {"budget.epochs": 300, "optim.lr": 2e-3, "optim.weight_decay_end": 0.4},
    "imagenet_deit/s16": {"optim.lr": 1e-3, "optim.weight_decay": 0.05, "ema_decay": 0.99996, "aug_repeats": 3},
    "imagenet_resnet/50": {"budget.epochs": 90, "optim.lr": 0.4, "optim.weight_decay": 1e-4},
    "finetune_mixer_b16/cifar10": {"batch_size": 512, "budget.steps": 10_000, "optim.lr": 0.03},
    "finetune_mixer_b16/pets": {"batch_size": 512, "budget.steps": 500, "optim.lr": 0.03},
    "vit_against_resnet50/flowers102_resnet50": {"budget.epochs": 100},
    "mlm_table3/split": {"batch_size": 2048, "budget.steps": 125_000, "optim.lr": 7e-4, "data.seq_len": 128},
    "mlm_table4/transformer_l48": {"batch_size": 2048, "budget.steps": 125_000, "optim.lr": 7e-4, "data.seq_len": 128},
    "mlm_table6/gmlp_base": {"batch_size": 256, "budget.steps": 1_000_000, "optim.lr": 1e-4, "data.seq_len": 512},
    "mnli_table6/amlp_large": {"batch_size": 32, "budget.epochs": 5, "optim.lr": 2e-5, "model.block.dropout": 0.1},
    "squad2_table6/bert_large": {"batch_size": 32, "budget.steps": 8000, "optim.lr": 5e-5, "data.seq_len": 512},
    "wmt14_en_de/resmlp_6": {"optim.lr": 0.2, "task.num_beams": 4, "task.length_penalty": 0.6},
    "wmt14_en_de/transformer": {"optim.lr": (512 * 4000) ** -0.5, "optim.betas": (0.9, 0.98)},
}
WARMUP_STEPS = {
    "imagenet_mixer_b16": 10_000,
    "imagenet_gmlp_s16": 10_000,
    "mlm_table3/split": 10_000,
    "mlm_table6/gmlp_base": 10_000,
    "squad2_table6/bert_large": 1000,
    "wmt14_en_de/resmlp_6": 32_000,
    "wmt14_en_de/transformer": 4000,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_has_the_published_hyperparameters(name: str) -> None:
    run = RUNS[name]
    for path, expected in PUBLISHED[name].items():
        found = attrgetter(path)(run)
        assert found == (pytest.approx(expected) if isinstance(expected, float) else expected), path
    if name in WARMUP_STEPS:
        steps = run.budget.steps or run.budget.epochs * 1_281_167 / run.batch_size
        assert run.schedule.warmup_fraction * steps == pytest.approx(WARMUP_STEPS[name])


# --- a few steps of every recipe ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files in every format that the recipes read, and a teacher with the classes of Noise."""
    folder = tmp_path_factory.mktemp("files")
    words = "one two three four five six seven eight nine ten"
    (folder / "prose.txt").write_text("\n\n".join([words] * 30))
    (folder / "labels.tsv").write_text(f"sentence\tlabel\tentailment\n{words}\t0\tyes\nten\t1\tno\n")
    (folder / "pairs.tsv").write_text(f"de\ten\tfr\n{words}\t{words}\t{words}\n" * 2)
    steps = [f"{n},{n % 24},{n % 5}" for n in range(200)]
    (folder / "series.csv").write_text("\n".join(["hour,load,temperature", *steps]))
    answer = {"text": "three", "answer_start": words.index("three")}
    question = {"id": "a", "question": "what follows two?", "answers": [answer], "is_impossible": False}
    entry = {"paragraphs": [{"context": words, "qas": [question]}]}
    (folder / "squad.json").write_text(json.dumps({"version": "1.1", "data": [entry]}))
    allmlp.save(allmlp.create("mixer_nano", overrides={"depth": 1}), folder / "teacher")
    write_preprocessing(folder / "teacher", ImagePreprocessing((0.5,) * 3, (0.5,) * 3, tuple("abcdefghij")))
    write_pets(folder / "OxfordPets")
    write_flowers(folder / "Flowers102")
    return folder


def images(run: Run, files: Path) -> Data:
    """Files in the official layout where the recipe reads these, else noise of the size that the model reads."""
    if isinstance(run.data, OxfordPets | Flowers102):
        return run.data.replace(path=str(files / type(run.data).__name__))
    with torch.device("meta"):
        (inputs,) = run.model.build().dummy_inputs()
    return Noise(inputs.shape[1], tuple(inputs.shape[2:]))


def prose(run: Run, files: Path) -> Data:
    tokenize = run.data.tokenizer.replace(vocab_size=120, path="")
    kind = Passages if run.task.dataset_type is PassageDataset else Corpus
    return kind(str(files / "prose.txt"), str(files / "prose.txt"), tokenize, run.data.seq_len, cache=str(files))


def sentences(run: Run, files: Path) -> Data:
    file, tokenize = str(files / "labels.tsv"), TokenizerConfig(vocab_size=120)
    changes = {"val": file} if run.data.val else {}
    return run.data.replace(path=file, test=file, tokenizer=tokenize, cache=str(files), **changes)


def questions(run: Run, files: Path) -> Data:
    file, tokenize = str(files / "squad.json"), TokenizerConfig(vocab_size=120)
    return run.data.replace(train=file, test=file, tokenizer=tokenize, cache=str(files))


def pairs(run: Run, files: Path) -> Data:
    file, tokenize = str(files / "pairs.tsv"), run.data.tokenizer.replace(vocab_size=300)
    changes = {"source_lang": "de", "target_lang": "en", "seq_len": 24, "cache": str(files)}
    changes |= {"val": file} if run.data.val else {}
    return run.data.replace(path=file, test=file, tokenizer=tokenize, **changes)


def series(run: Run, files: Path) -> Data:
    return SeriesTable(str(files / "series.csv"), horizon=6, seq_len=48)


SMALL_DATA: dict[type[Dataset], Callable[[Run, Path], Data]] = {
    ImageDataset: images,
    TextDataset: prose,
    PassageDataset: prose,
    LabeledTextDataset: sentences,
    SquadDataset: questions,
    TranslationDataset: pairs,
    SeriesDataset: series,
}


def small_data(run: Run, files: Path) -> Data:
    """Small data of the type that the run's task reads."""
    kind = run.task.dataset_type
    if kind not in SMALL_DATA:
        pytest.fail(f"{type(run.task).__name__} reads {kind.__name__}, of which SMALL_DATA has no example: add one")
    if kind not in (ImageDataset, SeriesDataset):
        pytest.importorskip("tokenizers"), pytest.importorskip("sacrebleu")
    return SMALL_DATA[kind](run, files)


def small_task(task: Task, files: Path) -> Task:
    """The task with a small teacher or none, and small layers."""
    if isinstance(task, Distill):
        return task.replace(teacher=str(files / "teacher"))
    if isinstance(task, DistillMaskedLM):
        return task.replace(teacher="", embeddings_from="", alpha=0.0)
    if isinstance(task, DistillClassifyText):
        return task.classify
    if isinstance(task, DistillQuestionAnswering):
        return task.answer
    return task.replace(out_dim=64) if isinstance(task, Dino) else task


SMALL_SIZES: dict[type[Spec], dict[str, Any]] = {
    Encoder: {"width": 48, "depth": 1},
    Stage: {"width": 48, "depth": 1},
    ChannelMlp: {"hidden": 96},
    SeriesEncoder: {"depth": 1},
    ResNet: {"widths": (8, 16, 16, 16), "depths": (1, 1, 1, 1)},
}


def small_model(model: ModelSpec | None) -> ModelSpec:
    """One narrow block instead of many wide ones; a tiny gMLP where the recipe takes the model from `init_from`."""
    return shrink(model or gmlp_text(2, 32, 64))


def shrink(spec: Any) -> Any:
    if isinstance(spec, tuple):
        return tuple(map(shrink, spec))
    if not isinstance(spec, Spec):
        return spec
    if isinstance(spec, HuggingFaceImages):  # whose sizes are fixed
        return ResNet((4, 4, 4, 4), (1, 1, 1, 1), (32, 32), spec.in_chans, spec.num_classes)
    changes = {name: shrink(getattr(spec, name)) for name in hints(type(spec))}
    return spec.replace(**changes | SMALL_SIZES.get(type(spec), {}))


def study_runs() -> dict[str, Run]:
    """The runs of studies that differ from each other in more than seed and length, and from all recipes."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:  # many rows are changes to the same recipe
        patch.setattr("allmlp.study.definition.runs", cache(runs))
        for name, declared in studies().items():
            study: Study = declared.make()
            for row in study.rows:
                for candidate in study.candidates(row):
                    trial = next(study.final_trials(row, candidate))
                    found[f"{name}:{row}:{candidate}"] = trial.run.replace(init_from=None, train_fraction=1.0)
    kept = {repr((run.model, run.task, run.optim, run.stem_init)): name for name, run in found.items()}
    known = {repr((run.model, run.task, run.optim, run.stem_init)) for run in RUNS.values()}
    return {name: found[name] for key, name in kept.items() if key not in known}


ALL_RUNS = RUNS | study_runs()


def a_few_small_steps(run: Run, files: Path) -> Run:
    """Three steps of a narrow block with other teachers; still with the data of the run."""
    changes: dict[str, Any] = {"model": small_model(run.model), "task": small_task(run.task, files)}
    changes |= {"batch_size": 4, "grad_accum_steps": 1, "budget": Budget(steps=3), "compile": False}
    changes |= {"log_every": 100, "eval_every": 100, "save_every": 100}
    return run.replace(**changes, init_from=None, lora=None)


def distinct_steps() -> dict[str, Run]:
    """Those of ALL_RUNS whose small steps differ: not those of models that differ in width and depth alone."""
    found: dict[str, str] = {}
    for name, run in ALL_RUNS.items():
        step, kind = a_few_small_steps(run, Path()), run.task.dataset_type
        if kind in SMALL_DATA and not isinstance(run.data, OxfordPets | Flowers102):
            # Of the data, what the run decides on; the size of images is that of the model.
            data = Noise(1, (1, 1)) if kind is ImageDataset else SMALL_DATA[kind](step, Path())
            step = step.replace(data=data)
        found.setdefault(repr(step), name)
    return {name: ALL_RUNS[name] for name in found.values()}


STEPS = distinct_steps()


def test_every_recipe_is_written_and_read() -> None:
    for name, run in ALL_RUNS.items():
        assert from_dict(to_dict(run)) == run, name


@pytest.mark.slow
@pytest.mark.parametrize(("name", "run"), STEPS.items(), ids=STEPS)
def test_recipe_trains_a_few_steps(name: str, run: Run, files: Path, tmp_path: Path) -> None:
    """With other data and teachers, and one narrow block; the task decides on the type of data and on the metrics."""
    run = a_few_small_steps(run, files)
    run = run.replace(data=small_data(run, files))
    metrics = loop.train(run, tmp_path, "cpu")
    assert metrics and all(math.isfinite(value) for value in metrics.values())
    assert all(0 <= value <= 1 for name, value in metrics.items() if name.endswith("accuracy"))
    assert loop.evaluate_checkpoint(tmp_path, "cpu") == pytest.approx(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("row", runs("few_shot_images"))
def test_few_shot_rows_start_from_the_bundled_encoder(row: str, tmp_path: Path) -> None:
    """All start from the same classifier; the probe keeps it, the frozen ones keep the encoder."""
    run = RUNS[row].replace(
        data=Noise(3, (128, 128), examples=10, tested=1), train_per_class=1, batch_size=2, budget=Budget(steps=1)
    )
    run = run.replace(head_init=run.head_init.replace(l2=(1.0,)))
    loop.train(run, tmp_path, "cpu")
    start, end = allmlp.load("allmlp:image").state_dict(), allmlp.load(tmp_path).state_dict()
    same = {name: torch.equal(end[name], weight) for name, weight in start.items() if "head" not in name}
    method = row.rpartition("/")[2]
    assert any(same.values()) == (method != "full") and all(same.values()) == (method in ("probe", "last_layer"))


def test_missing_small_data_are_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SMALL_DATA, ImageDataset)
    with pytest.raises(pytest.fail.Exception, match="Classify reads ImageDataset, of which SMALL_DATA has no example"):
        small_data(RUNS["digits_gmlp"], files)


# --- recipes and predictions from the command line ------------------------------------------------------------


def test_unknown_recipe() -> None:
    with pytest.raises(allmlp.UserError, match="unknown recipe 'digits_mixr'; did you mean 'digits_mixer'"):
        recipe("digits_mixr")


@pytest.mark.slow
def test_train_eval_and_predict_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, image = tmp_path / "run", tmp_path / "digit.png"
    Image.fromarray(np.zeros((12, 12), dtype=np.uint8)).save(image)

    def command(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        assert not caught.value.code
        return capsys.readouterr().out

    short = ["--set", "budget.steps=2", "--set", "budget.epochs=none", "--device", "cpu"]
    trained = command("train", "digits_resmlp", "--out", str(out), *short)
    assert trained.startswith("digits_resmlp accuracy")
    assert (
        trained.split("accuracy")[1] == command("train", "--resume", str(out), "--device", "cpu").split("accuracy")[1]
    )
    evaluated = json.loads(command("eval", str(out), "--device", "cpu", "--json"))
    assert f"accuracy {evaluated['accuracy']:.2%}" in trained
    fresh = [sys.executable, "-m", "allmlp", "eval", str(out), "--device", "cpu", "--json"]
    again = subprocess.run(fresh, capture_output=True, text=True, timeout=100, check=True).stdout
    assert json.loads(again)["accuracy"] == evaluated["accuracy"]
    (found,) = json.loads(command("predict", str(out), str(image), "--json"))
    predictions = found["predictions"]
    assert found["input"] == str(image)
    assert len(predictions) == 5 and all(prediction["label"] in "0123456789" for prediction in predictions)


def test_bundled_model(tmp_path: Path) -> None:
    file = tmp_path / "sky.png"
    Image.fromarray(np.full((50, 80, 3), (120, 170, 230), dtype=np.uint8)).save(file)
    ((best, *others),) = allmlp.predict(bundled(), [file])
    assert best.label in ("airplane", "bird", "ship") and len(others) == 4
    assert (bundled() / "model.safetensors").stat().st_size <= 16 * 2**20
    (tmp_path / "no.png").write_bytes(b"not an image")
    with pytest.raises(allmlp.UserError, match=r"no\.png: not an image"):
        allmlp.predict(bundled(), [tmp_path / "no.png"])


@pytest.mark.parametrize("more", [["--set", "optim.lr=1"], ["--out", "elsewhere"]], ids=["a change", "another folder"])
def test_resume_takes_no_other_options(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--resume", str(tmp_path), *more])
    assert caught.value.code == 2 and "it accepts only the options --device" in capsys.readouterr().err
