"""The models that come with the package: found by name, in float32, small enough, described by their cards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import allmlp
from allmlp import training
from allmlp.bench.runner import spec_of
from allmlp.cli import main
from allmlp.data.labeled_text import LabeledText
from allmlp.data.preprocessing import TextPreprocessing, read_preprocessing, write_preprocessing
from allmlp.data.tokenizer import TOKENIZER_FILE, TokenizerConfig
from allmlp.layers import ClassifierHead, MeanPool
from allmlp.models.gmlp import gmlp_text
from allmlp.run import Budget, Run
from allmlp.tasks.classify_text import ClassifyText
from allmlp.weights import bundled as module
from allmlp.weights.bundled import BUNDLED, bundled, bundled_models, bundled_weights, model_path
from allmlp.weights.convert import convert
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


@pytest.fixture
def with_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the CIFAR-10 model and an untrained text classifier in 8 bits."""
    pytest.importorskip("tokenizers")
    images, folder = bundled(), tmp_path / "weights" / "text"
    tokenizer = TokenizerConfig(vocab_size=120).build(["a wonderful film", "a dull film"] * 20)
    spec = gmlp_text(2, 16, 32, seq_len=12, vocab_size=len(tokenizer))
    model = allmlp.create(spec.replace(pool=MeanPool(), head=ClassifierHead(2)), seed=0)
    allmlp.save(model, folder, dtype=torch.int8)
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf8")
    write_preprocessing(folder, TextPreprocessing("classes", 12, ("negative", "positive")))
    (tmp_path / "weights" / "cifar10").symlink_to(images)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "src/allmlp/weights/bundled.py"))
    return folder


def test_predict_chooses_the_model_by_the_input(with_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["predict", *arguments])
        assert not caught.value.code
        return capsys.readouterr().out

    image = with_text / "image.png"
    Image.new("RGB", (32, 32), "red").save(image)
    assert "positive" in answer("a wonderful film") and "negative" in answer("allmlp:text", "a dull film")
    assert "truck" in answer(str(image), "--top-k", "10")


def test_a_text_model_is_a_start(with_text: Path, tmp_path: Path) -> None:
    """Its tokenizer is used, and the head is new where the classes are others."""
    file = tmp_path / "labels.tsv"
    file.write_text("sentence\tlabel\n" + "a wonderful film\tx\na dull film\ty\nfilm\tz\n" * 4)
    run = Run(
        model=None,
        task=ClassifyText(),
        data=LabeledText(str(file), str(file), seq_len=12, cache=str(tmp_path)),
        batch_size=4,
        budget=Budget(steps=1),
        init_from="allmlp:text",
    )
    training.train(run, tmp_path / "run", "cpu")
    new, old = allmlp.load(tmp_path / "run"), allmlp.load(with_text)
    assert new.state_dict()["head.proj.weight"].shape == (3, 16)
    assert torch.allclose(
        new.state_dict()["blocks.0.channel.mix.up.weight"],
        old.state_dict()["blocks.0.channel.mix.up.weight"],
        atol=0.01,
    )
    assert (tmp_path / "run" / TOKENIZER_FILE).read_text() == (with_text / TOKENIZER_FILE).read_text()


def test_a_loaded_model_is_saved_with_its_preprocessing(with_text: Path, tmp_path: Path) -> None:
    """And its tokenizer, so that `predict` reads the new folder."""
    model = allmlp.load("allmlp:text")
    folder = allmlp.save(model, tmp_path / "copy")
    assert read_preprocessing(folder) == model.preprocessing
    assert (folder / TOKENIZER_FILE).read_bytes() == (with_text / TOKENIZER_FILE).read_bytes()
    assert allmlp.load(folder).predict("a dull film") == model.predict("a dull film")
    allmlp.save(allmlp.load(folder), folder)  # over itself
    assert (folder / TOKENIZER_FILE).read_bytes() == (with_text / TOKENIZER_FILE).read_bytes()
    short = allmlp.save(allmlp.load("allmlp:text", seq_len=8), tmp_path / "short")
    assert read_preprocessing(short) == model.preprocessing.replace(seq_len=8)
    fresh = allmlp.save(allmlp.create("mixer_nano"), tmp_path / "fresh")
    assert not (fresh / "preprocessing.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("average", BUNDLED, BUNDLED, "--out"),
        ("resize", BUNDLED, "--img-size", "64"),
        ("prune", BUNDLED, "--fraction", "0.5"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_new_models_have_the_preprocessing_of_a_bundled_one(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, str(tmp_path / "new")])
    assert not caught.value.code
    assert read_preprocessing(tmp_path / "new") == read_preprocessing(bundled())


def test_bundled_models_are_shown_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["show", BUNDLED, "--json"])
    assert not caught.value.code and "head.proj.weight" in capsys.readouterr().out
    assert spec_of(BUNDLED) == allmlp.load(BUNDLED).spec


def test_a_bundled_model_is_converted(tmp_path: Path) -> None:
    convert("allmlp:text", str(tmp_path / "text"))
    assert allmlp.predict(tmp_path / "text", "good") == allmlp.predict("allmlp:text", "good")
