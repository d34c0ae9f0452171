"""The models that come with the package: found by name, in float32, small enough, described by their cards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.data.preprocessing import read_preprocessing
from allmlp.weights import bundled as module
from allmlp.weights.bundled import BUNDLED, bundled, bundled_models, bundled_weights, model_path
from allmlp.weights.pretrained import pretrained
from allmlp.weights.start import open_start

MIB = 2**20
LIMITS = {"allmlp:text": 6 * MIB, "allmlp:image": 10 * MIB}


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.parametrize("name", bundled_models())
def test_a_bundled_model(name: str) -> None:
    folder = bundled(name)
    model = allmlp.load(folder)
    assert model.dtype == torch.float32, "a float tensor can be passed to it"
    with torch.inference_mode():
        output = model(*model.dummy_inputs())
    names = read_preprocessing(folder).class_names
    assert output.shape[-1] == len(names) and output.isfinite().all()
    assert size(folder) <= LIMITS.get(name, 10 * MIB)
    weights = allmlp.from_pretrained(name).state_dict(), open_start(name).model.state_dict()
    for key, tensor in model.state_dict().items():
        assert all(torch.equal(found[key].float(), tensor) for found in weights)


def test_all_together_are_small() -> None:
    assert sum(map(size, bundled_models().values())) <= 28 * MIB


def test_names() -> None:
    assert bundled() == bundled(BUNDLED) == model_path(BUNDLED) == bundled_models()[BUNDLED]
    assert model_path("runs/a") == Path("runs/a")
    assert pretrained(BUNDLED).preprocessing.class_names[0] == "airplane"
    with pytest.raises(allmlp.UserError, match="no bundled model allmlp:cifar1, only allmlp"):
        bundled("allmlp:cifar1")


CARD = "# A model\n\n| | |\n|---|---|\n| test accuracy | 12.30 % (one seed) |\n| size | 3 |\n"


@pytest.mark.parametrize("place", ["site-packages/allmlp/weights", "checkout/weights"])
def test_rows_come_from_the_cards(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an installed package and of a checkout."""
    folder = tmp_path / place / "a"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text(CARD)
    code = "site-packages/allmlp/weights" if place.startswith("site") else "checkout/src/allmlp/weights"
    monkeypatch.setattr(module, "__file__", str(tmp_path / code / "bundled.py"))
    assert bundled_models() == {"allmlp:a": folder}
    assert bundled_weights() == [("allmlp:a", "A model", "test accuracy 12.30 %", 2 + len(CARD))]


def test_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "a/b/c/bundled.py"))
    with pytest.raises(allmlp.UserError, match="no bundled model allmlp:cifar10, none at all: pass a model folder"):
        bundled()
