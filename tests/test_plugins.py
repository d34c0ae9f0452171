"""A package outside of this one adds a mixer, a model, data, a task, an optimizer, a recipe and a study."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allmlp.cli import main

PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the package."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(PLUGIN)], check=True, timeout=200)
    return target


def allmlp(*arguments: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "allmlp", *arguments, path=path, cwd=cwd)


def python(*arguments: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    searched = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": searched, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


COMMANDS = """
from allmlp import training
from allmlp.cli import main

training.draw_curves = lambda out: []
for command in (
    "list shift",
    "train shift_stripes --out a --device cpu",
    "train shift_stripes --set model.block.token.distance=2 --out b --device cpu",
    "eval a --device cpu",
    "study shift_distances --minutes 0",
):
    try:
        main(command.split())
    except SystemExit as end:
        assert not end.code, command
"""


@pytest.mark.slow
def test_an_installed_package_is_found(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Listed, shown, trained, evaluated from its folder, all by the command, without a word about the package."""
    done = python("-c", COMMANDS, path=installed, cwd=tmp_path)
    assert done.returncode == 0 and "shift_tiny" in done.stdout and done.stdout.count("accuracy") >= 3, done.stderr
    assert "study shift_distances: 0 of 2 runs done" in done.stdout
    assert '"distance": 2' in (tmp_path / "b" / "run.json").read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:  # here, where it is not installed
        main(["train", "shift_stripes"])
    assert ended.value.code == 2 and "shift_stripes" in capsys.readouterr().err


@pytest.mark.slow
def test_a_module_is_imported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the current folder, with --import; one that is not there is an error."""
    (tmp_path / "mine.py").write_text((PLUGIN / "allmlp_shift.py").read_text())
    shown = allmlp("--import", "mine", "show", "shift_tiny", path=tmp_path, cwd=tmp_path)
    assert shown.returncode == 0 and "TokenShift" in shown.stdout, shown.stderr
    assert "next: allmlp --import mine bench shift_tiny" in shown.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("ALLMLP_IMPORT", "")  # where the command keeps the name
    with pytest.raises(SystemExit) as ended:
        main(["--import", "yours", "list", "shift"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: cannot import 'yours': ModuleNotFoundError: No module named 'yours'\n"


@pytest.mark.slow
def test_a_plug_in_that_fails_is_named_and_left_out(installed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    info = broken / "broken-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[allmlp.plugins]\nbad = bad_module\nworse = quits\n")
    (broken / "bad_module.py").write_text("raise RuntimeError('half installed')\n")
    (broken / "quits.py").write_text("raise SystemExit('no license')\n")
    both = Path(f"{broken}{os.pathsep}{installed}")
    listed = allmlp("list", "shift", path=both, cwd=tmp_path)
    assert listed.returncode == 0 and "shift_tiny" in listed.stdout, listed.stderr
    assert "plug-in bad is skipped: RuntimeError: half installed" in listed.stderr
    assert "plug-in worse is skipped: SystemExit: no license" in listed.stderr


SCRIPT = """
import allmlp, torch
from allmlp.models.preset import presets
from allmlp.recipes import recipes
before = presets()
import mine
assert "shift_tiny" not in before
assert allmlp.create("shift_tiny", num_classes=3)(torch.zeros(1, 3, 8, 8)).shape == (1, 3)
assert "shift_stripes" in recipes()
mine.PRESETS["mixer_b16"] = mine.PRESETS["shift_tiny"]
try:
    allmlp.create("shift_tiny")
except allmlp.UserError as error:
    assert str(error) == "mine.PRESETS: there is a model mixer_b16 already; use another name"
mine.PRESETS["mixer_b16"] = mine.PRESETS["shift_tiny"].spec
try:
    allmlp.create("shift_tiny")
except allmlp.UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_script_imports_a_module(tmp_path: Path) -> None:
    """Before or after the models were listed; mistakes in its table are named."""
    (tmp_path / "mine.py").write_text((PLUGIN / "allmlp_shift.py").read_text())
    done = python("-c", SCRIPT, path=tmp_path, cwd=tmp_path)
    assert done.stdout == "mine.PRESETS: mixer_b16 is Encoder, not Preset(spec, family)\n", done.stderr
