"""A pushed folder in a process that cannot import allmlp, and one whose modelling file was not pushed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from folders import image_folder, text_folder
from peers.installed import peer
from without_allmlp import PRELUDE

peer("transformers")

import allmlp.hf  # noqa: E402


def elsewhere(code: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"HF_MODULES_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PRELUDE + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250, check=False)


def push(folder: Path, out: Path) -> Path:
    """What `push_to_hub` uploads."""
    allmlp.hf.wrap(folder).save_pretrained(out)
    allmlp.hf.processor(folder).save_pretrained(out)
    return out


def test_training_and_pipeline_without_allmlp(tmp_path: Path) -> None:
    """Trainer and pipeline on a pushed text classifier; its checkpoint is a folder of ours."""
    folder = push(text_folder(tmp_path / "ours", "classes"), tmp_path / "pushed")
    code = """
model = transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
rows = [dict(tokenizer("the cat sat", padding="max_length", max_length=24), labels=n % 3) for n in range(4)]
arguments = transformers.TrainingArguments(sys.argv[2], max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
transformers.Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer).train()
again = transformers.pipeline("text-classification", sys.argv[2] + "/checkpoint-2", trust_remote_code=True)
print(json.dumps(again("a dog jumped", top_k=None)))
"""
    done = elsewhere(code, tmp_path / "cache", str(folder), str(tmp_path / "trained"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = {row["label"]: row["score"] for row in json.loads(done.stdout.splitlines()[-1])}
    ((*ours,),) = allmlp.predict(tmp_path / "trained" / "checkpoint-2", ["a dog jumped"])
    assert found == pytest.approx({one.label: one.probability for one in ours}, abs=1e-5)


def test_a_folder_without_the_modelling_file(tmp_path: Path) -> None:
    """Without allmlp, transformers' last line names the file; with it, the folder loads."""
    folder = push(image_folder(tmp_path / "ours"), tmp_path / "pushed")
    (folder / "modeling_allmlp.py").unlink()
    code = "transformers.AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True)"
    done = elsewhere(code, tmp_path / "cache", str(folder))
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and "does not appear to have a file named modeling_allmlp.py" in last
    for trust in (True, False):
        transformers = peer("transformers")
        loaded = transformers.AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=trust)
        assert type(loaded) is allmlp.hf.AllMlpForImageClassification
