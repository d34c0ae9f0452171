"""Wheel and sdist: reproducible, complete and small, and they work where only what they declare is installed."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import allmlp
from data.sample_images import encode, scene

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "allmlp"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
TEXTS = [
    file for place in ("src", "docs", "examples") for file in (ROOT / place).rglob("*") if file.suffix in (".py", ".md")
]
MEBIBYTE = 2**20
COMMIT = "0123456789ab"


def build(source: Path, out: Path, *targets: str) -> list[Path]:
    """The files that hatchling makes of a source tree; without targets, sdist and wheel."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "ALLMLP_COMMIT": COMMIT}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *targets]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist of this checkout."""
    pytest.importorskip("hatchling")
    wheel, sdist = build(ROOT, tmp_path_factory.mktemp("dist"))
    return wheel, sdist


def contents(wheel: Path) -> dict[str, bytes]:
    """All files but RECORD, which lists them in the order of the archive."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.mark.slow
def test_the_build_is_reproducible(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Bit for bit, and a wheel built from the sdist has the same files."""
    wheel, sdist = built
    for first, second in zip(built, build(ROOT, tmp_path / "again"), strict=True):
        assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest(), first.name
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("allmlp-*")
    (again,) = build(unpacked, tmp_path / "from_sdist", "-t", "wheel")
    assert contents(again) == contents(wheel)


@pytest.mark.slow
def test_the_wheel_is_complete_and_small(built: tuple[Path, Path]) -> None:
    assert all(file.stat().st_size < 30 * MEBIBYTE for file in built)
    found = contents(built[0])
    tracked = [file for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert {f"allmlp/{file.relative_to(SOURCE).as_posix()}" for file in tracked} <= set(found)
    weights = [file for file in (ROOT / "weights").rglob("*") if file.is_file()]
    assert len(weights) > 10 and all(f"allmlp/{file.relative_to(ROOT).as_posix()}" in found for file in weights)
    assert found["allmlp/COMMIT"].decode() == f"{COMMIT}\n"
    foreign = [name for name in found if not re.match(r"allmlp(-[\d.]+\.dist-info)?/", name)]
    assert not foreign, f"installed beside the package: {foreign}"


@cache
def requirements(*extras: str) -> set[str]:
    """The packages that `allmlp[extras]` brings, with those that the installed ones of them need."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for texts in (PROJECT["dependencies"], *map(EXTRAS.get, extras)) for text in texts]
    while waiting:
        one = waiting.pop()
        package = str(canonicalize_name(one.name)), frozenset(one.extras)
        if package in found:
            continue
        found.add(package)
        try:
            texts = metadata.requires(one.name) or ()
        except metadata.PackageNotFoundError:
            continue
        for needed in map(Requirement, texts):
            if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in (*one.extras, "")):
                waiting.append(needed)
    return {name for name, _ in found}


def environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """The command of a new environment with the wheel and links to exactly what it declares."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in requirements(*extras):
        for file in metadata.distribution(package).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    options = ["--quiet", "--no-compile", "--no-index", "--no-deps"]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True, timeout=200)
    return folder / "bin" / "allmlp"


def run(command: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ALLMLP_COMMIT")}
    return subprocess.run(
        [str(command), *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=200, check=False
    )


def run_all(command: Path, *lines: str, cwd: Path, then: str = "") -> list[str]:
    """What `allmlp` prints for each line of arguments; one process runs all, so that torch is imported once, and then
    the code `then`.
    """
    done = run(command.with_name("python"), "-c", RUN_ALL + then, *lines, cwd=cwd)
    assert done.returncode == 0, done.stderr
    _, *printed = done.stdout.split(SEPARATOR)
    assert len(printed) == len(lines)
    return printed


SEPARATOR = "<next command>"
RUN_ALL = f"""
import sys
from allmlp.cli import main

for line in sys.argv[1:]:
    print({SEPARATOR!r})
    try:
        main(line.split())
    except SystemExit as end:
        assert not end.code, line
"""
SMOKE = """
import allmlp, torch
assert "site-packages" in allmlp.__file__, allmlp.__file__
model = allmlp.load("allmlp:cifar10").eval()
assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
assert allmlp.create("gmlp_s16", num_classes=3)(torch.zeros(1, 3, 224, 224)).shape == (1, 3)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_it_works_with_nothing_but_its_dependencies(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Models, lists and the bundled weights; what needs an extra names it."""
    command = environment(tmp_path / "env", built[0])
    version = run(command, "--version", cwd=tmp_path)
    expected = f"allmlp {allmlp.__version__} (commit {COMMIT}, torch {metadata.version('torch')})\n"
    assert version.stdout == expected, version.stderr
    lines = "--help", "list", "list weights", "show resmlp_s12", "list recipes"
    assert all(printed.strip() for printed in run_all(command, *lines, cwd=tmp_path, then=SMOKE))
    (tmp_path / "photo.png").write_bytes(encode(scene(20, 20, seed=0)))
    refused = run(command, "predict", "photo.png", cwd=tmp_path)
    assert refused.returncode == 2 and re.fullmatch(r"error: .*pip install 'allmlp\[\w+\]'\n", refused.stderr), (
        refused.stderr
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_it_predicts_and_trains_with_its_extra(built: tuple[Path, Path], tmp_path: Path) -> None:
    command = environment(tmp_path / "env", built[0], "train")
    (tmp_path / "photo.png").write_bytes(encode(scene(20, 20, seed=0)))
    short = "--set budget.epochs=none --set budget.steps=2 --device cpu --out run"
    *answers, _ = run_all(
        command, "predict photo.png", "predict wonderful!", f"train digits_mixer {short}", cwd=tmp_path
    )
    assert all("%" in answer for answer in answers)
    assert f'"commit": "{COMMIT}"' in (tmp_path / "run" / "run.json").read_text(encoding="utf8")


REQUIRED = {
    found
    for file in SOURCE.rglob("*.py")
    for found in re.findall(r'\brequire\("([\w.]+)", "(\w+)"\)', file.read_text(encoding="utf8"))
}


def test_every_extra_that_is_named_exists() -> None:
    named = {
        extra.strip(): file
        for file in TEXTS
        for extras in re.findall(r"(?:allmlp|')\.?\[([\w, ]+)\]'", file.read_text(encoding="utf8"))
        for extra in extras.split(",")
    }
    assert len(named) > 5 and len(REQUIRED) > 20
    missing = {extra: str(file) for extra, file in named.items() if extra not in EXTRAS}
    missing |= {extra: module for module, extra in REQUIRED if extra not in EXTRAS}
    loosely = re.compile(r'\brequire\(\w+, "(\w+)"\)|\bextra `(\w+)`')
    missing |= {
        extra: str(file)
        for file in TEXTS
        for extra in ("".join(found) for found in loosely.findall(file.read_text(encoding="utf8")))
        if extra not in EXTRAS
    }
    assert not missing, f"pyproject.toml has no such extra: {missing}"


def test_the_table_of_extras_is_that_of_the_project() -> None:
    """docs/installation.md has a row for each extra, in order, with its packages."""
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf8").partition("## Extras")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    packages = {name: [re.split(r"[^\w.-]", line)[0] for line in lines] for name, lines in EXTRAS.items()}
    assert {row[0].strip("`"): row[3].split(", ") for row in rows} == packages
    assert [row[0].strip("`") for row in rows] == [*packages] and all(row[1] and row[2] for row in rows)
    always = [re.split(r"[^\w.-]", line)[0] for line in PROJECT["dependencies"]]
    assert f"need only {', '.join(always[:-1])} and {always[-1]}." in page


owners_of = cache(metadata.packages_distributions)


@pytest.mark.parametrize(("module", "extra"), sorted(REQUIRED))
def test_an_extra_installs_what_needs_it(module: str, extra: str) -> None:
    top = module.partition(".")[0]
    owners = {owner.lower().replace("_", "-") for owner in owners_of().get(top, ())}
    if not owners:
        pytest.skip(f"{top} is not installed")
    have = requirements(extra)
    assert owners & have, f"allmlp[{extra}] does not install {top}"
