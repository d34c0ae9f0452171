"""Every recipe says what it is and takes a step; the model that comes along answers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import allmlp
from allmlp import train as loop
from allmlp.cli import main
from allmlp.data.corpus import Corpus
from allmlp.data.docstrings import Docstrings
from allmlp.data.inputs import Inputs, write_inputs
from allmlp.data.pairs import Pairs
from allmlp.data.sentences import Sentences
from allmlp.data.source import Data, Dataset, Resident
from allmlp.data.squad import Squad
from allmlp.data.tokenizer import Tokenize
from allmlp.layers import Patches
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.predict import predict
from allmlp.recipes import recipe, recipes, runs
from allmlp.run import Budget, Run
from allmlp.spec import from_dict, override, to_dict
from allmlp.tasks.dino import Dino
from allmlp.tasks.distill import Distill
from allmlp.tasks.distill_sentences import DistillSentences
from allmlp.tasks.distill_text import DistillText
from allmlp.weights.pretrained import shipped


class Noise(Data):
    """Random pictures of any size."""

    channels: int
    image: tuple[int, int]

    def open(self) -> Dataset:
        images = torch.randint(0, 255, (20, self.channels, *self.image), dtype=torch.uint8)
        split = Resident(images, torch.arange(20) % 10)
        numbers = (0.5,) * self.channels
        return Dataset(split, split, tuple("abcdefghij"), numbers, numbers)


RUNS = {name: run for recipe in recipes() for name, run in runs(recipe).items()}
PICTURES = {name: run for name, run in RUNS.items() if run.task.reads is Dataset}
TEXTS = {name: run for name, run in RUNS.items() if name not in PICTURES}


@pytest.mark.parametrize("name", recipes())
def test_recipe_says_how_to_run_it(name: str) -> None:
    assert f"allmlp train {name}" in recipes()[name].text


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model that knows the classes of Noise."""
    folder = tmp_path_factory.mktemp("teacher")
    allmlp.save(allmlp.create("mixer_nano", overrides={"depth": 1}), folder)
    write_inputs(folder, Inputs((0.5,) * 3, (0.5,) * 3, tuple("abcdefghij")))
    return str(folder)


@pytest.mark.parametrize(("name", "run"), PICTURES.items(), ids=list(PICTURES))
def test_recipe_takes_a_step(name: str, run: Run, teacher: str, tmp_path: Path) -> None:
    """One step of the recipe as it is, but for depth, data, and models from elsewhere."""
    assert from_dict(to_dict(run)) == run
    stem = run.model.stem
    assert isinstance(stem, Patches)
    run = run.replace(data=Noise(stem.in_channels, stem.image), batch=4, accumulate=1, budget=Budget(steps=1))
    run = run.replace(compile=False, init_from=None, model=run.model.replace(depth=1))
    if isinstance(run.task, Distill):
        run = run.replace(task=run.task.replace(teacher=teacher))
    if isinstance(run.task, Dino):
        run = run.replace(task=run.task.replace(outputs=64))
    results = loop.train(run, tmp_path, "cpu")
    assert 0 <= results.get("accuracy", results.get("knn_accuracy", -1)) <= 1


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files in every layout the recipes read."""
    folder = tmp_path_factory.mktemp("texts")
    words = "one two three four five six seven eight nine ten"
    (folder / "prose.txt").write_text("\n\n".join([words] * 30))
    (folder / "labels.tsv").write_text(f"sentence\tlabel\tentailment\n{words}\t0\tyes\nten\t1\tno\n")
    (folder / "pairs.tsv").write_text(f"de\ten\tfr\n{words}\t{words}\t{words}\n" * 2)
    answer = {"text": "three", "answer_start": words.index("three")}
    question = {"id": "a", "question": "what follows two?", "answers": [answer], "is_impossible": False}
    entry = {"paragraphs": [{"context": words, "qas": [question]}]}
    (folder / "squad.json").write_text(json.dumps({"version": "1.1", "data": [entry]}))
    return folder


@pytest.mark.parametrize(("name", "run"), TEXTS.items(), ids=list(TEXTS))
def test_text_recipe_takes_a_step(name: str, run: Run, texts: Path, tmp_path: Path) -> None:
    """One step of the recipe as it is, but for depth, size of the vocabulary, and files."""
    pytest.importorskip("tokenizers"), pytest.importorskip("sacrebleu")
    assert from_dict(to_dict(run)) == run
    data, cache = run.data, str(tmp_path / "cache")
    if isinstance(data, (Corpus, Docstrings)):
        prose = str(texts / "prose.txt")
        data = Corpus(prose, prose, data.tokenize.replace(vocabulary=120, path=""), data.length, cache=cache)
    elif isinstance(data, Sentences):
        file = str(texts / "labels.tsv")
        data = data.replace(path=file, test=file, tokenize=Tokenize(vocabulary=120), cache=cache)
    elif isinstance(data, Squad):
        file = str(texts / "squad.json")
        data = data.replace(train=file, test=file, tokenize=Tokenize(vocabulary=120), cache=cache)
    else:
        assert isinstance(data, Pairs)
        file, columns = str(texts / "pairs.tsv"), {"source": "de", "target": "en"}
        smaller = data.tokenize.replace(vocabulary=300)
        data = data.replace(path=file, test=file, tokenize=smaller, length=24, cache=cache, **columns)
    model = run.model or gmlp_text(2, 32, 64)
    for path in ("depth", "encoder.depth", "decoder.depth"):
        if path in ("depth",) if isinstance(model, Encoder) else path != "depth":
            model = override(model, path, 1)
    if isinstance(run.task, DistillText):
        run = run.replace(task=run.task.replace(teacher="", embeddings="", share=0.0))
    if isinstance(run.task, DistillSentences):
        run = run.replace(task=run.task.labels)
    run = run.replace(model=model, data=data, batch=2, budget=Budget(steps=1), compile=False, init_from=None)
    assert all(math.isfinite(value) for value in loop.train(run, tmp_path / "run", "cpu").values())


def test_unknown_recipe() -> None:
    with pytest.raises(allmlp.UserError, match="unknown recipe 'digits_mixr'; did you mean 'digits_mixer'"):
        recipe("digits_mixr")


def test_list_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["list", "recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipes()) and max(map(len, lines)) <= 100


def test_train_eval_and_predict_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "run", tmp_path / "digit.png"
    Image.fromarray(np.zeros((12, 12), dtype=np.uint8)).save(picture)

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
    assert trained.split("accuracy")[1] == command("eval", str(out), "--device", "cpu").split("accuracy")[1]
    fresh = [sys.executable, "-m", "allmlp", "eval", str(out), "--device", "cpu"]
    again = subprocess.run(fresh, capture_output=True, text=True, timeout=100, check=True).stdout
    assert trained.split("accuracy")[1] == again.split("accuracy")[1]
    answers = json.loads(command("predict", str(out), str(picture), "--json"))[str(picture)]
    assert len(answers) == 5 and all(answer["name"] in "0123456789" for answer in answers)


def test_the_model_that_comes_along(tmp_path: Path) -> None:
    file = tmp_path / "sky.png"
    Image.fromarray(np.full((50, 80, 3), (120, 170, 230), dtype=np.uint8)).save(file)
    ((best, *others),) = predict(shipped(), [file])
    assert best.name in ("airplane", "bird", "ship") and len(others) == 4
    assert (shipped() / "model.safetensors").stat().st_size <= 16 * 2**20
    (tmp_path / "no.png").write_bytes(b"not a picture")
    with pytest.raises(allmlp.UserError, match=r"no\.png: not a picture"):
        predict(shipped(), [tmp_path / "no.png"])


@pytest.mark.parametrize("more", [["--set", "optim.lr=1"], ["--out", "elsewhere"]], ids=["a change", "another folder"])
def test_a_resumed_run_is_not_changed(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--resume", str(tmp_path), *more])
    assert caught.value.code == 2 and "--set and --out are for a new one" in capsys.readouterr().err
