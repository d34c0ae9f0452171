"""The container file: what it copies exists, it does not run as root, and its commands and health check work."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import typer

from allmlp.cli import app, main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf8").replace("\\\n", "")
STAGES = {
    part.split()[2]: re.findall(r"^([A-Z]+) (.*)$", part, re.MULTILINE)
    for part in re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[1:]
}
ALLOWED = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf8"), re.MULTILINE)


def values(stage: str, instruction: str) -> list[str]:
    return [value for name, value in STAGES[stage] if name == instruction]


def test_what_is_copied_exists_and_is_in_the_context() -> None:
    """Also what the build reads: the readme, the license, the hook, the bundled models."""
    copied = [name for line in values("build", "COPY") for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied) and set(copied) == set(ALLOWED)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))
    project, wheel = settings["project"], settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {project["readme"], *project["license-files"], "hatch_build.py", *wheel["force-include"]} <= set(copied)
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", TEXT)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_it_does_not_run_as_root() -> None:
    assert values("base", "USER") == ["1000"] and not any(values(stage, "USER") for stage in ("train", "serve"))
    assert "HOME=/tmp" in values("base", "ENV")[0].split()
    assert not re.search(r"^ADD |curl .*\| *sh", TEXT, re.MULTILINE)


def test_its_commands_are_understood() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    program, name, *words = json.loads(values("serve", "ENTRYPOINT")[0])
    given = commands[name].make_context(name, words).params
    assert program == "allmlp" and given["host"] == "0.0.0.0" and str(given["port"]) == values("serve", "EXPOSE")[0]
    assert json.loads(values("train", "ENTRYPOINT")[0]) == ["allmlp"]


def test_it_can_be_stopped_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As process 1, to which a signal without a handler does nothing."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    try:
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["--version"])
        with pytest.raises(SystemExit, match=r"^143$"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check(status: int) -> None:
    """Fails while the server shuts down (503) and where none answers."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    (check,) = values("serve", "HEALTHCHECK")
    python, option, code = json.loads(check.partition("CMD ")[2])
    assert (python, option) == ("python", "-c")
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, "-c", code.replace(":8000", f":{server.server_port}")]
        assert (subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0) == (
            status == 200
        )
        server.shutdown()
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0


def test_the_workflow_builds_its_stages() -> None:
    workflow = (ROOT / ".github" / "workflows" / "container.yml").read_text(encoding="utf8")
    assert set(re.findall(r"--target (\w+)", workflow)) == {"serve", "train"} <= set(STAGES)
    assert set(re.findall(r"--build-arg (\w+)", workflow)) <= set(re.findall(r"^ARG (\w+)", TEXT, re.MULTILINE))
