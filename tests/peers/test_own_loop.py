"""Models in plain PyTorch, accelerate and DistributedDataParallel: the scripts of the guide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import allmlp
from peers.installed import EXAMPLES, example, peer

datasets = peer("sklearn.datasets")


def accuracy(folder: Path) -> float:
    """Of a model trained on digits / 16, on the digits."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16
    with torch.inference_mode():
        return (allmlp.load(folder).eval()(images).argmax(1) == torch.tensor(labels)).float().mean().item()


def torchrun(script: str, folder: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / f"{script}.py"), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_plain_pytorch(tmp_path: Path) -> None:
    """Trained, averaged, saved as a folder that predicts images, and exported."""
    folder = tmp_path / "digits"
    assert example("own_loop")(folder) > 0.5
    pixels, labels = datasets.load_digits(return_X_y=True)
    files = []
    for number in range(40):
        files.append(tmp_path / f"{number}.png")
        image = np.round(pixels[number] / 16 * 255).astype(np.uint8)
        Image.fromarray(image.reshape(8, 8)).save(files[-1])
    found = [best.label for best, *_ in allmlp.predict(folder, files)]
    assert np.mean([label == str(right) for label, right in zip(found, labels)]) > 0.5
    program = torch.export.load(folder / "digits.pt2").module()
    inputs = torch.rand(1, 1, 8, 8)
    torch.testing.assert_close(program(inputs), allmlp.load(folder).eval()(inputs))


def test_accelerate_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert example("accelerate_loop")(tmp_path / "digits") > 0.5
    assert accuracy(tmp_path / "digits") > 0.5


def test_accelerate_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert "on 2 processes" in torchrun("accelerate_loop", tmp_path / "digits") and accuracy(tmp_path / "digits") > 0.5


def test_ddp_in_two_processes(tmp_path: Path) -> None:
    torchrun("ddp_loop", tmp_path / "digits")
    assert accuracy(tmp_path / "digits") > 0.5
