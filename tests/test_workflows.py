"""The workflows and forms of .github are valid, and what they name exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(file for file in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml")
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_the_published_schema(schema: str) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout


def read(file: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(file.read_text(encoding="utf8"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_names_what_exists(file: Path) -> None:
    """Targets of make, extras, and targets of the container file; it may only read, and it ends."""
    workflow, text = read(file), file.read_text(encoding="utf8")
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf8"), re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= set(targets)
    for extras in re.findall(r"-e \"?'?\.\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used), used


def test_the_matrix_is_what_we_say_we_support() -> None:
    matrix = read(GITHUB / "workflows" / "test.yml")["jobs"]["platforms"]["strategy"]["matrix"]
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert matrix["python"] == declared and f">={declared[0]}" == PROJECT["requires-python"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert any(name.endswith("-arm") for name in matrix["os"])
    (oldest,) = re.findall(r"torch==([\d.]+)\.\*", (GITHUB / "workflows" / "test.yml").read_text(encoding="utf8"))
    assert f"torch>={oldest}" in PROJECT["dependencies"]
    assert {row["os"] for row in matrix["include"] if row["torch"] == "oldest"} == set(matrix["os"])


def test_the_citation_has_the_version_of_the_package() -> None:
    from allmlp import __version__

    assert str(read(ROOT / "CITATION.cff")["version"]) == __version__
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf8")
