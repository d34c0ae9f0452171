"""Requests that schemathesis generates from the OpenAPI schema: schema and server agree, and no answer is a 500."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from allmlp.serve.batching import Batcher
from serve.folders import TASKS, image_folder, running, series_folder, text_folder

FOLDERS = {"images": image_folder, "series": series_folder}


@pytest.mark.slow
@pytest.mark.parametrize("task", [*FOLDERS, *TASKS])
def test_schema_and_server_agree(task: str, tmp_path: Path) -> None:
    """Without positive_data_acceptance: a schema cannot say that a body is an image, or that a text has a [MASK]."""
    folder = FOLDERS[task](tmp_path / task) if task in FOLDERS else text_folder(tmp_path / task, task)
    with running(folder, batcher=Batcher()) as port:
        options = ["--phases", "examples,coverage,fuzzing", "--max-examples", "5", "--seed", "1", "--warnings", "off"]
        options += ["--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--no-color"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) generated", done.stdout)[1]) > 100, done.stdout  # type: ignore[index]
