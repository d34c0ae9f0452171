"""Folders of parts: split over processes, and continued where they were stopped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import allmlp
from allmlp.prediction import ImagePredictor
from data.sample_images import encode, scene
from folders import image_folder
from prediction.conftest import Command

pq = pytest.importorskip("pyarrow.parquet")

COUNT, SIZE = 11, 2
OPTIONS = ("--device", "cpu", "--part-size", SIZE, "--batch-size", 1)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Eleven images: five parts of two, and one of one."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(COUNT):
        (folder / f"{number:02}.png").write_bytes(encode(scene(10 + number, 12, number)))
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("part-*.parquet")) for row in pq.read_table(file).to_pylist()]


def stamps(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in sorted(folder.iterdir())}


def test_parts_hold_the_answers_in_order(images: Path, many: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    code, _, _ = command("predict", images, many, "--out", f"{out}/", *OPTIONS)
    assert code == 0 and [*stamps(out)] == [f"part-{number:06}.parquet" for number in range(6)]
    expected = allmlp.predict(images, many, top_k=1, device="cpu", batch_size=1)
    assert [(row["label"], row["probability"]) for row in rows(out)] == [(p.label, p.probability) for (p,) in expected]
    assert [Path(row["input"]).name for row in rows(out)] == [f"{number:02}.png" for number in range(COUNT)]


def test_each_process_writes_its_share(
    images: Path, many: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert command("predict", images, many, "--out", f"{whole}/", *OPTIONS)[0] == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        assert command("predict", images, many, "--out", f"{out}/", *OPTIONS)[0] == 0
        assert [int(name[5:11]) % 2 for name in stamps(out)].count(1 - rank) == (0 if rank else 3)
    assert rows(out) == rows(whole)
    (many / "00.png").write_bytes(b"broken")  # an exit code would make torchrun end the other processes
    code, _, err = command("predict", images, many, "--out", tmp_path / "broken/", *OPTIONS)
    assert code == 0 and "; 1 skipped; " in err
    assert [bool(row["error"]) for row in rows(tmp_path / "broken")] == [True] + [False] * 5
    for arguments in (("--out", tmp_path / "a.csv"), ()):
        code, _, err = command("predict", images, many, *arguments)
        assert code == 2 and "a folder to write parts to: --out FOLDER/" in err


def test_what_is_done_is_not_done_again(
    images: Path, many: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = ("predict", images, many, "--out", f"{out}/", *OPTIONS)
    outputs, calls = ImagePredictor.outputs, 0

    def watch(self: ImagePredictor, *more: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return outputs(self, *more, **options)

    monkeypatch.setattr(ImagePredictor, "outputs", watch)
    assert command(*arguments)[0] == 130
    before = stamps(out)
    assert len(before) == 2, "the third part was not finished"
    assert command(*arguments)[0] == 0 and calls == 6 + COUNT - 4
    assert {name: stamp for name, stamp in stamps(out).items() if name in before} == before and len(stamps(out)) == 6
    code, _, err = command(*arguments)
    assert code == 0 and f"0 images; {COUNT} done before" in err and calls == 6 + COUNT - 4
    # A part whose inputs changed, or which is damaged, is made again; one that is not needed any more goes.
    before = stamps(out)
    (many / "04.png").rename(many / "04b.png")
    (out / "part-000004.parquet").write_bytes(b"damaged")
    for number in (9, 10):
        (many / f"{number:02}.png").unlink()
    assert command(*arguments)[0] == 0
    after = stamps(out)
    assert {name for name in after if after[name] != before[name]} == {"part-000002.parquet", "part-000004.parquet"}
    assert len(after) == 5 and [Path(row["input"]).name for row in rows(out)][4] == "04b.png"


def test_answers_of_another_model_are_not_mixed(images: Path, many: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    assert command("predict", images, many, "--out", f"{out}/", *OPTIONS)[0] == 0
    before = stamps(out)
    other = shutil.copytree(images, tmp_path / "other")
    assert command("predict", other, many, "--out", f"{out}/", *OPTIONS)[0] == 0, "the same model in another folder"
    image_folder(other, mixer=True)
    for changed, word in (
        (("predict", other, many, *OPTIONS), "other settings (model)"),
        (("predict", images, many, *OPTIONS, "--top-k", 2), "other settings (options)"),
        (("predict", images, many, *OPTIONS, "--dtype", "bfloat16"), "other settings (precision)"),
        (("embed", images, many, *OPTIONS), "other settings (command, options)"),
    ):
        code, _, err = command(*changed, "--out", f"{out}/")
        assert code == 2 and word in err and err.count("\n") == 1, err
    assert stamps(out) == before


def test_a_damaged_first_part_is_made_again(images: Path, many: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    arguments = ("predict", images, many, "--out", f"{out}/", *OPTIONS)
    assert command(*arguments)[0] == 0
    before, whole = stamps(out), rows(out)
    first = out / "part-000000.parquet"
    first.write_bytes(first.read_bytes()[:20])
    code, _, err = command(*arguments, "--top-k", 2)
    assert code == 2 and "other settings (options)" in err, "the other parts say how they were made"
    code, _, err = command(*arguments)
    assert code == 0 and "2 images" in err and f"{COUNT - 2} done before" in err
    assert rows(out) == whole and {name for name, stamp in stamps(out).items() if stamp != before[name]} == {first.name}


@pytest.mark.slow
def test_a_killed_process_is_started_again(images: Path, many: Path, tmp_path: Path, command: Command) -> None:
    """Process 1 waits when it opens its last input, so it cannot end before it is killed."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert command("predict", images, many, "--out", f"{whole}/", *OPTIONS)[0] == 0
    waiting = """
import sys, time
def wait(event, given):
    if event == "open" and str(given[0]).endswith("07.png"):
        time.sleep(600)
sys.addaudithook(wait)
from allmlp.cli import main
main(sys.argv[1:])
"""

    def start(rank: int, program: tuple[str, str] = ("-m", "allmlp")) -> subprocess.Popen[bytes]:
        arguments = ["predict", images, many, "--out", f"{out}/", *OPTIONS]
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        return subprocess.Popen([sys.executable, *program, *map(str, arguments)], env=environment)

    processes = [start(0), start(1, ("-c", waiting))]
    try:
        assert processes[0].wait(200) == 0
        deadline = time.monotonic() + 200
        while not (out / "part-000001.parquet").exists():
            assert time.monotonic() < deadline and processes[1].poll() is None
            time.sleep(0.05)
    finally:
        processes[1].kill()
        processes[1].wait()
    before = stamps(out)
    assert sorted(int(name[5:11]) for name in before if not name.startswith(".")) == [0, 1, 2, 4]
    assert start(1).wait(200) == 0
    after = stamps(out)
    assert {name: stamp for name, stamp in after.items() if name in before} == before
    assert rows(out) == rows(whole) and len(rows(out)) == COUNT
