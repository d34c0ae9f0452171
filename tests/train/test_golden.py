"""Losses of one recipe per task, compared with stored ones: a change to the numerics of training is a decision.

After such a change, write them anew:

    ALLMLP_WRITE_GOLDEN=1 pytest tests/train/test_golden.py

Everything is computed in float64, and no random numbers are drawn that differ between platforms (dropout's do), so that
the losses are the same on every CPU and with every version of torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allmlp import log
from allmlp import training as loop
from allmlp.data.corpus import Corpus, PassageDataset, Passages, TextDataset
from allmlp.data.dataset import Data, Dataset, ImageDataset
from allmlp.data.labeled_text import LabeledText, LabeledTextDataset
from allmlp.data.parallel_corpus import ParallelCorpus, TranslationDataset
from allmlp.data.series import SeriesDataset
from allmlp.data.series_table import SeriesTable
from allmlp.data.squad import Squad, SquadDataset
from allmlp.data.tokenizer import SPECIAL_TOKENS, TokenizerConfig
from allmlp.layers import ChannelMlp
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.recipes import runs
from allmlp.run import Budget, Run
from allmlp.spec import Spec, hints
from allmlp.tasks.task import Task
from allmlp.weights.folder import ModelChanges
from train.test_recipes import Noise

FILE = Path(__file__).parent / "golden.json"
STEPS = 5
RECIPES = {
    "Classify": "cifar10_resmlp",
    "ClassifyAnySize": "cifar10_anysize/gmlp_any",
    "ClassifyPermuted": "cifar10_permuted/mixer_patches",
    "ClassifyCorrupted": "cifar10_corrupted/resmlp",
    "Distill": "imagenet_resmlp_s12_distilled",
    "Dino": "cifar10_dino",
    "Probe": "cifar10_probe",
    "MaskedLM": "mlm_table3/split",
    "DistillMaskedLM": "wiki_gmlp_distilled/features",
    "CausalLM": "stdlib_causal",
    "ClassifyText": "sst2",
    "DistillClassifyText": "sst2_distilled",
    "QuestionAnswering": "squad2",
    "DistillQuestionAnswering": "squad1_distilled",
    "SpanSelection": "wiki_spans",
    "Translation": "multi30k_transformer",
    "Forecast": "ett_patchtsmixer/etth1_96",
    "MaskedPatches": "ett_pretraining",
}
TEACHERS = {
    "Distill": "Classify",
    "DistillMaskedLM": "MaskedLM",
    "DistillClassifyText": "ClassifyText",
    "DistillQuestionAnswering": "QuestionAnswering",
}
"""The model of one golden run is the teacher of another."""


def test_every_task_has_a_recipe() -> None:
    """Except for k-NN, which only evaluates; DINO is evaluated by it."""
    known = {name: cls for name, cls in Spec.kinds.items() if cls.__module__.startswith("allmlp.")}
    found = {name for name, cls in known.items() if issubclass(cls, Task)} - {"KnnEval"}
    assert not found - set(RECIPES), "add a recipe of these tasks to RECIPES, and write the losses anew (see above)"
    assert not set(RECIPES) - found


# --- small data with a fixed vocabulary: training a tokenizer is not deterministic ------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every format that the recipes read."""
    path = tmp_path_factory.mktemp("texts")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    (path / "vocab.txt").write_text("\n".join((*SPECIAL_TOKENS, *words, "##teen", "?")))
    # 7 generates the residues modulo 11: every sentence has the words in another order, some continued by ##teen.
    lines = [
        " ".join(words[start * 7**i % 11 - 1] + "teen" * (i % 4 == 3) for i in range(4 + start % 5))
        for start in range(1, 11)
    ]
    (path / "prose.txt").write_text("\n\n".join(lines))
    (path / "passages.txt").write_text("\n\n".join(f"{line} {line} {line}" for line in lines))
    rows = [f"{line}\t{line.count('o') % 2}" for line in lines]
    (path / "labels.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    pairs = [f"{line}\t{' '.join(reversed(line.split()))}" for line in lines]
    (path / "pairs.tsv").write_text("\n".join(["de\ten", *pairs]))
    questions = []
    for line in lines:
        answer = line.split()[2]
        impossible = line.count("o") % 3 == 0
        found = [] if impossible else [{"text": answer, "answer_start": line.index(f" {answer}") + 1}]
        question = {"id": line, "question": f"{line.split()[1]}?", "answers": found, "is_impossible": impossible}
        questions.append({"paragraphs": [{"context": line, "qas": [question]}]})
    steps = [f"2024-01-{1 + hour // 24:02} {hour % 24:02}:00,{hour % 7},{hour % 24 % 5}" for hour in range(200)]
    (path / "series.csv").write_text("\n".join(["hour,load,heat", *steps]))
    (path / "squad.json").write_text(json.dumps({"version": "2.0", "data": questions}))
    return path


def small_data(kind: type[Dataset], img_size: tuple[int, int] | None, texts: Path) -> Data:
    tokenizer = TokenizerConfig(path=str(texts / "vocab.txt"))
    names = {TextDataset: "prose.txt", LabeledTextDataset: "labels.tsv", SquadDataset: "squad.json"}
    names |= {PassageDataset: "passages.txt"}
    file = str(texts / names.get(kind, "pairs.tsv"))
    if kind is ImageDataset:
        assert img_size is not None
        return Noise(3, img_size, tested=20)
    if kind is TextDataset:
        return Corpus(file, file, tokenizer=tokenizer, seq_len=12, packing=False, cache=str(texts))
    if kind is PassageDataset:
        return Passages(file, file, tokenizer=tokenizer, seq_len=28, packing=False, cache=str(texts))
    if kind is LabeledTextDataset:
        return LabeledText(file, file, tokenizer=tokenizer, seq_len=16, cache=str(texts))
    if kind is SeriesDataset:
        return SeriesTable(str(texts / "series.csv"), horizon=4, seq_len=24)
    if kind is SquadDataset:
        return Squad(file, file, tokenizer=tokenizer, seq_len=12, doc_stride=4, max_query_length=4, cache=str(texts))
    assert kind is TranslationDataset
    languages = {"source_lang": "de", "target_lang": "en"}
    return ParallelCorpus(file, file, **languages, tokenizer=tokenizer, seq_len=16, cache=str(texts))


# --- the runs -----------------------------------------------------------------------------------------------


def shrink(spec: Any) -> Any:
    """The same configuration with two narrow blocks, without dropout."""
    if not isinstance(spec, Spec):
        return spec
    changes = {name: shrink(getattr(spec, name)) for name in hints(type(spec))}
    changes |= {"width": 16, "depth": 2} if isinstance(spec, (Encoder, SeriesEncoder)) else {}
    changes |= {"hidden": 24} if isinstance(spec, ChannelMlp) else {}
    changes |= {"question_length": 4} if "question_length" in changes else {}
    changes |= {name: 16 for name in ("hidden_dim", "out_dim", "bottleneck_dim") if name in changes}
    return spec.replace(**changes | ({"dropout": 0.0} if "dropout" in changes else {}))


class OnlyFloat64(TorchDispatchMode):
    """Fails where tensors are rounded to less than float64; scalars may be, for example the steps that AdamW counts."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.bfloat16) and tensor.ndim:
                raise AssertionError(f"{function} returns {tensor.dtype}")
        return result


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models are built, loaded and trained in float64. Losses are computed in `Tensor.float`, which is that here."""
    apply = ModelChanges.apply
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(ModelChanges, "apply", lambda self, *given: apply(self._replace(dtype=None), *given))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def trained() -> dict[str, Path]:
    """The folders of the runs so far, by task."""
    return {}


def small_run(name: str, texts: Path, teacher: Path | None = None) -> Run:
    """The recipe of a task, with a small model, few examples and few steps."""
    (run,) = runs(RECIPES[name]).values()
    model, task = shrink(run.model or gmlp_text(2, 16, 24)), shrink(run.task)
    if task.dataset_type is ImageDataset:
        model = model.configure(img_size=32)
    if teacher is not None:
        task = task.replace(teacher=str(teacher))
    run = run.replace(model=model, task=task, data=small_data(task.dataset_type, model.input_size, texts))
    # At this rate every parameter matters after a few steps.
    run = run.replace(batch_size=6, budget=Budget(steps=STEPS), optim=run.optim.replace(lr=0.02), log_every=1)
    return run.replace(compile=False, init_from=None)


def train(name: str, texts: Path, trained: dict[str, Path], out: Path) -> Path:
    """Train the recipe of a task, and the teacher's before."""
    if name in trained:
        return trained[name]
    teacher = train(TEACHERS[name], texts, trained, out) if name in TEACHERS else None
    run = small_run(name, texts, teacher)
    with OnlyFloat64():
        loop.train(run, out / name, "cpu")
    trained[name] = out / name
    return out / name


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("float64")
def test_losses_are_the_stored_ones(name: str, texts: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    if name == "Translation":
        pytest.importorskip("sacrebleu")
    records = log.read_metrics(train(name, texts, trained, tmp_path) / log.METRICS)
    found = {
        "recipe": RECIPES[name],
        "losses": [record["loss"] for record in records if record["kind"] == "train"],
        "evaluation": {key: value for key, value in records[-1].items() if key not in ("kind", "step", "time")},
    }
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    if os.environ.get("ALLMLP_WRITE_GOLDEN"):
        stored = {key: value for key, value in (stored | {name: found}).items() if key in RECIPES}
        FILE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        return
    assert found["recipe"] == stored.get(name, {}).get("recipe"), "write the losses anew (see above)"
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(stored[name]["losses"], rel=1e-6)
    assert found["evaluation"] == pytest.approx(stored[name]["evaluation"], rel=1e-6)
