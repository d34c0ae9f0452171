"""Small models with files for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from command import run
from data.sample_images import encode, scene
from folders import image_folder, text_folder

pytest.importorskip("tokenizers")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image classifier."""
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text classifier."""
    return text_folder(tmp_path_factory.mktemp("texts"), "classes")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seven images in two folders, with other files beside them."""
    folder = tmp_path / "photos"
    (folder / "b").mkdir(parents=True)
    for number in range(7):
        place = folder / "b" if number % 2 else folder
        (place / f"{number}.png").write_bytes(encode(scene(20 + 5 * number, 30, seed=number)))
    (folder / "notes.md").write_text("no image")
    (folder / ".hidden.png").write_bytes(b"x")
    return folder


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command; returns exit code, stdout and stderr."""
    return partial(run, capsys)
