"""Every study from its first run to its figure: tiny models, two steps a run, files in the official layouts."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import allmlp
from allmlp.bench import plots
from allmlp.cli import main
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.models.resnet import ResNet
from allmlp.spec import to_json
from allmlp.studies import studies
from allmlp.study import runner
from allmlp.study.definition import Study, Trial
from allmlp.study.figure import draw
from allmlp.study.runner import Runner
from allmlp.study.summary import final_table, summarize, write
from train.test_recipes import shrink

TINY = {
    "batch_size": "4",
    "budget": '{"kind": "Budget", "steps": 2}',
    "compile": "false",
    "grad_accum_steps": "1",
    "log_every": "1",
}
SENTENCE = "the old man reads a small red book in the quiet garden while two dogs sleep under green trees"
WORDS = SENTENCE.split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ as the recipes expect it."""
    root = tmp_path_factory.mktemp("studies")
    folder, noise = root / "data", np.random.default_rng(0)

    def cifar(labels: int, count: int) -> bytes:
        rows = noise.integers(0, 256, (count, labels + 3072), dtype=np.uint8)
        rows[:, :labels] = np.arange(count)[:, None] % 10
        return rows.tobytes()

    def sentence(length: int = 9) -> str:
        return " ".join(noise.choice(WORDS, length))

    def put(name: str, content: str | bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    for part in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        put(f"cifar10/cifar-10-batches-bin/{part}.bin", cifar(1, 40))
    for part in ("train", "test"):
        put(f"cifar100/cifar-100-binary/{part}.bin", cifar(2, 100))
    for split in ("train", "val"):
        for number, name in enumerate(("church", "tench")):
            (folder / "imagenette2-160" / split / name).mkdir(parents=True)
            for image in range(8):
                pixels = noise.integers(0, 256, (32, 32, 3), dtype=np.uint8) // (number + 1)
                Image.fromarray(pixels).save(folder / "imagenette2-160" / split / name / f"{image}{number}.png")
    convnet = ResNet((4, 4, 4, 4), (1, 1, 1, 1), (32, 32), num_classes=1000)
    allmlp.save(allmlp.create(convnet), root / "efficientnet_lite0")
    write_preprocessing(root / "efficientnet_lite0", ImagePreprocessing((0.5,) * 3, (0.5,) * 3))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    put("bert-base-uncased-vocab.txt", "\n".join([*special, *sorted(set(WORDS)), "?", "."]))
    write_bert(root / "minilm", (folder / "bert-base-uncased-vocab.txt").read_text().split())
    put("text/train.txt", "\n\n".join(sentence(60) for _ in range(80)))
    put("text/valid.txt", "\n\n".join(sentence(60) for _ in range(10)))
    for name in ("sst2/train", "sst2/dev", "sst2/test", "cola/train", "cola/dev"):
        put(f"{name}.tsv", "sentence\tlabel\n" + "".join(f"{sentence()}\t{row % 2}\n" for row in range(24)))
    for task, classes in {"mnli": 3, "rte": 2, "qnli": 2, "mrpc": 2}.items():
        for split in ("train", "dev", "test", "dev_matched", "dev_mismatched"):
            rows = "".join(f"{sentence()}\t{sentence()}\tclass{row % classes}\n" for row in range(24))
            put(f"{task}/{split}.tsv", f"sentence1\tsentence2\tlabel\n{rows}")
    rows = "".join(f"{sentence()}\t{sentence()}\tclass{row % 3}\n" for row in range(60))
    put("sick/sick.tsv", f"sentence1\tsentence2\tentailment\n{rows}")
    for split in ("train", "dev"):
        paragraphs = []
        for row in range(12):
            context, answer = sentence(40), WORDS[row]
            context = f"{context} {answer}"
            asked = {"text": answer, "answer_start": context.index(answer)}
            qas = [{"id": f"{split}{row}", "question": f"{sentence(4)}?", "answers": [asked]}]
            paragraphs.append({"context": context, "qas": qas})
        put(f"squad/{split}-v1.1.json", json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}))
    for split in ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2018_flickr"):
        pairs = [f"{sentence(3)}\t{sentence(3)}" for _ in range(40 if split == "train" else 4)]
        put(f"multi30k/{split}.tsv", "\n".join(["de\ten", *pairs]))
    return root


def write_bert(folder: Path, vocabulary: list[str]) -> None:
    """A small BERT as Hugging Face saves it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=512, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary))


class InProcess:
    """Stands for `subprocess.Popen`: runs `allmlp train` and `allmlp bench` in this process."""

    def __init__(self, command: list[str], stdout: Any, **_: Any) -> None:
        assert command[1:3] == ["-m", "allmlp.study.process"] and command[3] in ("train", "bench")
        self.returncode = 0
        with (
            open(stdout.name, "a", encoding="utf8") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            try:
                main(command[3:])
            except SystemExit as ended:
                self.returncode = int(ended.code or 0)

    def poll(self) -> int:
        return self.returncode

    wait = poll


def tiny(study: Study) -> Study:
    """Up to three rows, first those that start from others or have their setting, with what they need; one seed, two
    candidates, and few held-out examples. `train.test_recipes` tries every row.
    """
    kinds: dict[tuple[str, bool, bool], str] = {}
    for name, row in study.rows.items():
        kinds.setdefault((row.recipe.partition("/")[0], not row.starts, not row.like), name)
    chosen = [name for _, name in sorted(kinds.items(), key=lambda item: item[0][1:])][:3]
    kept = study.with_needed([*chosen, study.reference] if study.reference else chosen)
    rows = {
        name: replace(row, candidates=dict(list(row.candidates.items())[:2]), seeds=None)
        for name, row in study.rows.items()
        if name in kept
    }
    tuning = study.tuning and replace(study.tuning, val_size=8, overrides={})
    batch = 2 if study.inference_batch else None
    return replace(study, rows=rows, seeds=1, tuning=tuning, options=TINY, inference_batch=batch)


def small_trial(trial: Trial) -> Trial:
    """The run with one narrow block, and with few outputs where a head is as large as its task says."""
    run = trial.run
    changes = {} if run.model is None else {"model": to_json(shrink(run.model))}
    changes |= {"task.out_dim": "32"} if "task.out_dim" in trial.overrides else {}
    translates = hasattr(run.data, "source_lang")
    changes |= {"data.tokenizer.vocab_size": "300", "data.seq_len": "16", "task.num_beams": "1"} if translates else {}
    kept = {name: value for name, value in trial.overrides.items() if name.partition(".")[0] != "model"}
    return replace(trial, overrides={**kept, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("name", studies())
def test_a_study_from_its_first_run_to_its_figure(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib"), pytest.importorskip("tokenizers"), pytest.importorskip("sacrebleu")
    monkeypatch.chdir(data)
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=InProcess, STDOUT=None, DEVNULL=None))
    # Compiling and drawing take longer than all of this; test_study.py draws a figure of each kind.
    monkeypatch.setattr(runner, "BENCH", ("--backends", "ours-eager", "--seconds", "0.01"))
    monkeypatch.setattr(plots, "figures", lambda report: {})
    monkeypatch.setattr("allmlp.study.figure.save", lambda figure, file, kind: None)
    make, made = Study.trial, {}  # a study asks for its trials again after each run

    def trial(*arguments: Any) -> Trial:
        one = make(*arguments)
        key = (*one.key, *one.overrides.items())
        if key not in made:
            made[key] = small_trial(one)
        return made[key]

    monkeypatch.setattr(Study, "trial", trial)
    said: list[str] = []
    study, out = tiny(studies()[name].make()), tmp_path / "out"
    out.mkdir()
    now = Runner(study, out, {}, device="cpu", say=said.append).run()
    assert not now.ready and not now.later and not now.hopeless and not now.stale, said
    assert all("result" in record for record in now.records), said
    summary = summarize(now)
    header, *lines = final_table(summary)
    assert [line[0] for line in lines] == list(study.rows) and all(line.result is not None for line in summary.lines)
    assert {"floor", "unigram_perplexity"} & {*header}, header
    for metric in study.also:
        assert any(metric in line.others for line in summary.lines), f"no row has {metric}"
    assert "M multiply-adds" in header
    if study.inference_batch:
        assert "images/s of inference" in header and all(line.rate for line in summary.lines), said
        assert sum("inference" in record for record in now.records) == len({line.macs for line in summary.lines})
        assert set(summary.reached) == {line.curve[0] for line in summary.lines if line.curve}
    write(summary, out)
    assert draw(summary, out)
    for record in now.records:
        assert str(data) not in json.dumps(record["run"]), "a record must not depend on the machine"
