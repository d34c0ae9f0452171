"""Requests that schemathesis generates from the OpenAPI schema: schema and server agree, and no answer is a 500."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from allmlp.serve.batching import Batcher
from folders import TASKS, image_folder, series_folder, text_folder
from serve.servers import running

FOLDERS = {"images": image_folder, "series": series_folder}


@pytest.mark.slow
@pytest.mark.parametrize("task", [*FOLDERS, *TASKS])
def test_schema_and_server_agree(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without positive_data_acceptance: a schema cannot say that a body is an image, or that a text has a [MASK]."""
    command = pytest.importorskip("schemathesis.cli", reason="schemathesis is not installed").schemathesis
    from click.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    folder = FOLDERS[task](tmp_path / task) if task in FOLDERS else text_folder(tmp_path / task, task)
    with running(folder, batcher=Batcher()) as port:
        options = ["--phases", "examples,coverage,fuzzing", "--max-examples", "5", "--seed", "1", "--warnings", "off"]
        options += ["--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--no-color"]
        done = CliRunner().invoke(command, ["run", f"http://127.0.0.1:{port}/openapi.json", *options])
    assert done.exit_code == 0, done.output[-5000:]
    assert int(re.search(r"(\d+) generated", done.output)[1]) > 100, done.output  # type: ignore[index]
