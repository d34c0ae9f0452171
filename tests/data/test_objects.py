"""`Data.of`: training on datasets that exist only as Python objects."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import allmlp
from allmlp import checkpoint
from allmlp.data.dataset import Data, ImageDataset
from allmlp.data.labeled_text import LabeledTextDataset
from allmlp.data.objects import NEWEST
from allmlp.data.tokenizer import load_tokenizer
from allmlp.errors import UserError
from allmlp.models.gmlp import gmlp_text
from allmlp.optim import AdamW
from allmlp.record import read_run
from allmlp.run import Budget, Run
from allmlp.spec import from_json, to_json
from allmlp.tasks.classify_text import ClassifyText
from folders import image_folder, text_folder
from train import runs

pytest.importorskip("tokenizers")


class Squares(torch.utils.data.Dataset[Any]):
    """Images whose brightest quarter is their class; `form` is how they are given."""

    def __init__(self, form: str, examples: int = 48, size: int = 8) -> None:
        self.form, self.examples, self.size = form, examples, size

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> Any:
        label = index % 4
        pixels = np.random.default_rng(index).integers(0, 60, (self.size, self.size, 3)).astype(np.uint8)
        half = self.size // 2
        row, column = divmod(label, 2)
        pixels[half * row : half * (row + 1), half * column : half * (column + 1)] += 150
        if self.form == "pil":
            return Image.fromarray(pixels), label
        if self.form == "array":
            return {"image": pixels, "label": label}
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        return (tensor, label) if self.form == "uint8" else ((tensor.float() / 255 - 0.3) / 0.25, torch.tensor(label))


@pytest.fixture(autouse=True)
def forget() -> None:
    NEWEST.clear()


def run_on(data: Data) -> Run:
    run = runs.small()
    return run.replace(model=run.model.configure(in_chans=3), data=data)


@pytest.mark.parametrize("form", ["pil", "array", "uint8", "float"])
def test_our_loop_on_their_dataset(form: str, tmp_path: Path) -> None:
    """Trained, split without a test set, and saved as a model that predicts."""
    data = Data.of(Squares(form), class_names=["a", "b", "c", "d"])
    dataset = data.load()
    assert len(dataset.train) + len(dataset.validation or ()) + len(dataset.test) == 48
    assert dataset.train.fetch(torch.tensor([0])).images.shape == (1, 3, 8, 8)
    result = allmlp.train(run_on(data), tmp_path / "run")
    assert result["accuracy"] >= 0.0 and allmlp.load(tmp_path / "run").preprocessing.class_names == ("a", "b", "c", "d")


@pytest.mark.parametrize(("modes", "channels"), [("L" * 20, 1), ("L" + 19 * "R", 3), (19 * "L" + "R", 3)])
def test_gray_images_among_colored_ones(modes: str, channels: int) -> None:
    items = [(Image.new("RGB" if mode == "R" else "L", (8, 8)), number % 2) for number, mode in enumerate(modes)]
    data = Data.of(items).load()
    assert data.train.fetch(torch.arange(5)).images.shape == (5, channels, 8, 8) and len(data.mean) == channels


def test_a_run_resumes_with_the_same_objects(tmp_path: Path) -> None:
    """In a new process the objects are passed again; without them, one line says so."""
    out, dataset = tmp_path / "run", Squares("uint8")
    run = run_on(Data.of(dataset))
    expected = allmlp.train(run, out)
    shutil.rmtree(checkpoint.complete(out)[-1])
    NEWEST.clear()
    with pytest.raises(UserError, match="pass them again"):
        allmlp.train(read_run(out), out)
    assert allmlp.train(run_on(Data.of(dataset)), out) == expected


def test_labels_are_read_without_decoding() -> None:
    class Targets(Squares):
        targets = tuple(index % 4 for index in range(48))

        def __getitem__(self, index: int) -> Any:
            assert index == 0, "only the first item is looked at"
            return super().__getitem__(index)

    dataset = Data.of(Targets("uint8"), Squares("uint8")).load()
    assert dataset.class_names == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (iter([]), "no length or cannot be indexed"),
        ([], "is empty"),
        ([1, 2], "item 0 of list is int: expected"),
        ([{"picture": 1}], "has the keys picture: it needs image or text, and label"),
        ({"train": [1]}, r"dict is a mapping, of train: pass its splits, Data.of\(train, test\)"),
        ([(Image.new("RGB", (8, 8)), "cat")], "has the label 'cat'"),
        ([("path.png", 1)], r"item 0 of list has the name of an image file, path.png: return the image itself"),
        ([(object(), 1)], "an item holds object: expected a PIL image"),
        ([(torch.zeros(3, 8, 8), 0), ("text", 1)] * 20, "item 1 of list is str, but item 0 is an image"),
        ([(torch.zeros(3, 8, 8), 0.5)] * 20, "item 0 of list has the label 0.5: expected the number of a class"),
        ([(torch.zeros(3, 8, 8), 0), (torch.zeros(3, 8, 8), [0, 1])] * 20, r"item 1 of list has the label \[0, 1\]"),
        ([(torch.zeros(3, 8, 8), 0), (torch.zeros(3, 8, 9), 1)] * 20, r"item 1 of list is a tensor \[3, 8, 9\]"),
        ([(torch.zeros(3, 8, 8), 0)] * 20, "only one class"),
        ([(torch.zeros(3, 8, 8), 5)] * 20, "only one class"),
        (None, "NoneType has no length or cannot be indexed"),
        (
            [(Image.new("RGB", (8, 8)), 0), (torch.zeros(3, 8, 8), 1)] * 20,
            "item 1 of list is float32 with 3 channels, others are uint8 with 3 channels: all images must be alike",
        ),
        (
            [(torch.zeros(3, 8, 8), 0), (torch.zeros(1, 8, 8), 1)] * 20,
            "item 1 of list is float32 with 1 channels, others are float32 with 3 channels",
        ),
        (
            [(Image.new("RGB", (8, 8)), 0), (torch.zeros(5, 8, 8, dtype=torch.uint8), 1)] * 20,
            r"item 1 of list has pixels of the shape \[8, 8, 5\], which is not an image",
        ),
        ([(torch.zeros(3, 8, 8), -1), (torch.zeros(3, 8, 8), 1)] * 20, "item 0 of list has the label -1, but"),
    ],
)
def test_wrong_items_are_named(items: Any, message: str) -> None:
    def read() -> None:
        dataset = Data.of(items, name="list").load()
        dataset.train.fetch(torch.arange(len(dataset.train)))

    with pytest.raises(UserError, match=message):
        read()


def test_an_error_in_their_code_names_the_item() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise KeyError("gone")
            return super().__getitem__(index)

    with pytest.raises(UserError, match=r"item 3 of .*Broken: KeyError: 'gone'"):
        Data.of(Broken("uint8")).load()


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_classes_without_examples_are_noted(kind: str) -> None:
    """A mistaken number would make a model of many classes without a word."""
    texts = [(f"text {index}", index % 2 * 3) for index in range(24)]
    items = texts if kind == "texts" else [(torch.zeros(3, 8, 8), label) for _, label in texts]
    assert "2 of 4 classes have no example: 1, 2" in Data.of(items, name="list").load().notes


def test_a_test_split_of_another_form_is_named() -> None:
    test = Data.of(Squares("uint8"), Squares("float"), name="squares").load().test
    with pytest.raises(UserError, match="item 0 of squares is float32 with 3 channels, others are uint8"):
        test.fetch(torch.tensor([0]))


def test_labels_must_not_vary() -> None:
    class Changing(Squares):
        targets = (0, 1, 2, 3) * 12

        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image, (label + 1) % 4 if index == 5 else label

    with pytest.raises(UserError, match=r"item 5 of .*Changing has the label 2, but 1 before"):
        Data.of(Changing("uint8"), Squares("uint8")).load().train.fetch(torch.arange(8))
    Changing.target_transform = staticmethod(int)  # as torchvision's: the targets are those before it
    assert Data.of(Changing("uint8"), Squares("uint8")).load().train.labels[5] == 2


def test_datasets_of_one_name_are_told_apart() -> None:
    """Each spec and its copies have their own objects; a run that is read from its folder has the newest."""
    first, second = (Data.of([(torch.full((3, 8, 8), value), label % 2) for label in range(8)]) for value in (1.0, 2.0))
    for data, value in ((first, 1), (first.replace(split_seed=1), 1), (second, 2), (from_json(to_json(first)), 2)):
        assert (data.load().train.fetch(torch.tensor([0])).images == value).all()


def test_pixels_are_resized_to_the_model() -> None:
    """uint8 tensors of any size; float tensors are used as they are."""
    same = [Data.of(Squares(form)).load() for form in ("pil", "array", "uint8")]
    for uniforms in (None, torch.full((2, 4), 0.3)):
        images = [one.train.fetch(torch.arange(2), uniforms).images for one in same]
        assert torch.equal(images[0], images[1]) and torch.equal(images[0], images[2]), (
            "cropped alike, also at own size"
        )
    assert Data.of(Squares("uint8"), img_size=12).load().train.fetch(torch.tensor([0])).images.shape == (1, 3, 12, 12)
    with pytest.raises(UserError, match=r"item 0 of .* is a tensor \[3, 8, 8\], not \[C, 12, 12\]: resize"):
        Data.of(Squares("float"), img_size=12).load()


# --- texts ------------------------------------------------------------------------------------------------

WORDS = ("good", "awful")


def reviews(form: str = "tuple", count: int = 24) -> list[Any]:
    things = ("film", "book", "play", "song", "cake", "game")
    texts = [(f"the {things[i // 2 % 6]} number {i} was {WORDS[i % 2]}", i % 2) for i in range(count)]
    if form == "tuple":
        return texts
    if form == "pair":
        return [(text, f"indeed {number}", label) for number, (text, label) in enumerate(texts)]
    if form == "dict":
        return [{"review": text, "sentiment": WORDS[label]} for text, label in texts]
    return [{"sentence1": text, "sentence2": f"indeed {text}", "label": torch.tensor(label)} for text, label in texts]


class Table(torch.utils.data.Dataset[Any]):
    """As `datasets` has them: rows are mappings, columns are lists, classes have names."""

    class ClassLabel:
        names = ("bad", "fine")

    column_names = ("text", "label")
    features: dict[str, Any] = {"text": str, "label": ClassLabel()}  # noqa: RUF012

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        text, label = reviews()[index]
        return {"text": text, "label": 1 - label}


def text_run(data: Data) -> Run:
    return Run(
        model=gmlp_text(1, 16, 32, seq_len=16),
        task=ClassifyText(dropout=0.0),
        data=data,
        batch_size=8,
        budget=Budget(steps=12),
        optim=AdamW(lr=1e-2),
        eval_every=6,
        save_every=4,
    )


@pytest.mark.parametrize(
    ("items", "class_names"),
    [
        (reviews(), ("0", "1")),
        (reviews("pair"), ("0", "1")),
        (reviews("dict"), ("awful", "good")),
        (reviews("columns"), ("0", "1")),
        (Table(), ("bad", "fine")),
    ],
    ids=["tuples", "pairs", "mappings", "columns", "table"],
)
def test_texts(items: Any, class_names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained, split without a test set, and saved as a model that predicts."""
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path))
    data = Data.of(items, seq_len=16)
    dataset = data.load()
    assert isinstance(dataset, LabeledTextDataset) and dataset.class_names == class_names
    assert len(dataset.train) + len(dataset.validation or ()) + len(dataset.test) == 24
    for split in (dataset.train, dataset.test):
        ids, segments, labels, _ = split.fetch(torch.arange(len(split)))
        for row, second, label in zip(ids, segments, labels.tolist(), strict=True):
            text = dataset.tokenizer.decode(row.tolist())
            positive = class_names[label] in ("0", "good", "fine")
            assert (WORDS[0] in text) == positive and (WORDS[1] in text) != positive
            assert ("indeed" in text) == bool(second.any())
    out = tmp_path / "run"
    assert allmlp.train(text_run(data), out)["accuracy"] >= 0.0
    assert {one.label for one in allmlp.load(out).predict("the film was good")[0]} == set(class_names)


def test_given_splits_and_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path))
    parts = reviews()
    dataset = Data.of(parts[:12], parts[12:18], validation=parts[18:], class_names=["yes", "no", "unsure"]).load()
    assert [len(dataset.train), len(dataset.test), len(dataset.validation or ())] == [12, 6, 6]
    assert dataset.class_names == ("yes", "no", "unsure")
    assert dataset.train.fetch(torch.arange(12)).labels.tolist() == [0, 1] * 6


def test_the_tokenizer_of_the_start(tmp_path: Path) -> None:
    """A run that starts from a model has its tokenizer; another one can be given."""
    folder = text_folder(tmp_path / "model", "classes")
    data = Data.of(reviews(), seq_len=16)
    words = load_tokenizer(folder)
    assert (
        data.for_model(str(folder)).load().tokenizer == words == Data.of(reviews(), tokenizer=folder).load().tokenizer
    )
    run = text_run(data).replace(model=None, init_from=str(folder), budget=Budget(steps=2))
    allmlp.train(run, tmp_path / "run")
    assert load_tokenizer(tmp_path / "run") == words


def test_a_killed_run_on_texts_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps after the last checkpoint are the same as without the interruption, to the last bit."""
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path))
    expected = allmlp.train(text_run(Data.of(reviews(), seq_len=16)), tmp_path / "whole")
    out = tmp_path / "killed"

    class Kill(allmlp.Callback):
        def on_step(self, step: int, values: Any) -> None:
            if step == 7:
                raise KeyboardInterrupt

    run = text_run(Data.of(reviews(), seq_len=16)).replace(log_every=1)
    with pytest.raises(KeyboardInterrupt):
        allmlp.train(run, out, callbacks=[Kill()])
    NEWEST.clear()
    with pytest.raises(UserError, match="pass them again"):
        allmlp.train(read_run(out), out)
    again = text_run(Data.of(reviews(), seq_len=16)).replace(log_every=1)
    assert allmlp.train(again, out) == expected
    whole, killed = (allmlp.load(tmp_path / name).state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(whole[key], killed[key]) for key in whole)


@pytest.mark.slow
def test_settings_are_chosen_for_objects(tmp_path: Path) -> None:
    """`train(Data.of(...), out)`, as for a file."""
    texts, images = text_folder(tmp_path / "text", "classes"), image_folder(tmp_path / "image")
    allmlp.train(Data.of(reviews(count=40)), tmp_path / "a", model=str(texts), epochs=1, device="cpu")
    assert len(allmlp.load(tmp_path / "a").predict("it was good")[0]) == 2
    for form in ("pil", "uint8"):
        allmlp.train(Data.of(Squares(form)), tmp_path / form, model=str(images), epochs=1, device="cpu")
        assert allmlp.load(tmp_path / form).spec.input_size == (8, 12), "the images have the size of the model"


def test_what_cannot_be_trained_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"cannot train Table: give a name, a Run, or your dataset as Data.of\(dataset\)"
    ):
        allmlp.train(Table(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Data needs a folder"):
        allmlp.train(Data.of(reviews()))
    with pytest.raises(UserError, match="list has texts, for which there is no img_size"):
        Data.of(reviews(), img_size=8)
    with pytest.raises(UserError, match="Squares has images, for which there is no seq_len"):
        Data.of(Squares("pil"), seq_len=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: (5, 0)}, "item 3 of list has int as text: expected a string"),
        ({3: ("text", None, 0), 4: ("text", 7, 0)}, "item 4 of list has int as text"),
        ({3: "text"}, r"item 3 of list is str: expected \(image, label\), \(text, label\) or"),
        ({3: ("text", -1)}, "item 3 of list has the label -1, but there are 2 classes, 0 to 1"),
        ({3: ("text", 1.5)}, "item 3 of list has the label 1.5: expected the number of a class"),
        ({3: ("text", None)}, "item 3 of list has the label None"),
        ({3: ("text", 10**12)}, "item 3 of list has the label 1000000000000: expected the number of a class"),
        ({3: ("text", "good")}, "item 3 of list has the label 'good', item 0 0: use only numbers or only names"),
        ({3: {"text": "a"}}, "item 3 of list has the keys text: it needs"),
        (dict.fromkeys(range(24), ("text", 0)), "list has only one class"),
    ],
)
def test_wrong_texts_are_named(change: dict[int, Any], message: str) -> None:
    items = [change.get(index, item) for index, item in enumerate(reviews())]
    with pytest.raises(UserError, match=message):
        Data.of(items, name="list").load()


def test_labels_of_the_test_split_are_checked() -> None:
    with pytest.raises(UserError, match="item 1 of list has the label 2, but there are 2 classes"):
        Data.of(reviews(), [("text", 1), ("text", 2)], name="list").load()
    with pytest.raises(UserError, match=r"item 0 of list has the unknown label 'goood'; did you mean 'good'\?"):
        Data.of(reviews("dict"), [{"text": "a", "label": "goood"}], name="list").load()


def test_given_validation_images_are_used_without_a_test_set() -> None:
    given = [(np.full((8, 8, 3), index, dtype=np.uint8), index % 4) for index in range(8)]
    dataset = Data.of(Squares("array"), validation=given).load()
    assert dataset.validation is not None and len(dataset.validation) == 8
    assert len(dataset.train) + len(dataset.test) == 48 and len(dataset.test) == 7
    assert dataset.validation.fetch(torch.tensor([5])).images.unique().tolist() == [5]


def test_pixels_with_transparency_keep_their_colors() -> None:
    items = [(np.full((8, 8, 4), (200, 100, 0, 255), dtype=np.uint8), index % 2) for index in range(20)]
    for found in (items, [(torch.from_numpy(pixels).permute(2, 0, 1), label) for pixels, label in items]):
        images = Data.of(found).load().train.fetch(torch.tensor([0])).images
        assert images[0, :, 0, 0].tolist() == [200, 100, 0]


def test_images_that_are_opened_but_not_read() -> None:
    """They keep their size: a JPEG can be decoded at a fraction of it. One that is damaged is named."""

    def opened(size: int, end: int | None = None) -> Image.Image:
        content = io.BytesIO()
        Image.effect_noise((size, size), 50).convert("RGB").save(content, "JPEG")
        return Image.open(io.BytesIO(content.getvalue()[:end]))

    items = [(opened(64), index % 2) for index in range(8)]
    train = Data.of(items, items, img_size=8).load().train
    train.fetch(torch.arange(8), torch.full((8, 4), 0.9))
    assert {image.size for image, _ in items} == {(64, 64)}
    items[3] = opened(64, 1000), 1
    with pytest.raises(UserError, match=r"^item 3 of builtins.list: .*truncated"):
        train.fetch(torch.arange(8))


def test_tensors_are_float32_or_pixels() -> None:
    def of(dtype: torch.dtype) -> Any:
        return Data.of([(torch.ones(3, 8, 8, dtype=dtype), index % 2) for index in range(20)]).load().train

    assert of(torch.float64).fetch(torch.tensor([0])).images.dtype == torch.float32
    with pytest.raises(UserError, match=r"a tensor of torch\.int64: use uint8 for pixels, or a float tensor"):
        of(torch.int64)


def test_class_names_are_those_of_the_column_of_labels() -> None:
    """As in TREC, which has coarse classes before the fine ones."""

    class Table(list[Any]):
        features = {  # noqa: RUF012
            "coarse_label": SimpleNamespace(names=["a", "b"]),
            "fine_label": SimpleNamespace(names=[*"uvwxyz"]),
        }

    rows = [{"text": f"question {index}", "coarse_label": index % 2, "fine_label": index % 6} for index in range(48)]
    dataset = Data.of(Table(rows)).load()
    assert isinstance(dataset, LabeledTextDataset) and dataset.class_names == tuple("uvwxyz")


def test_class_names_are_not_those_of_another_column() -> None:
    class Table(list[Any]):
        features = {"topic": SimpleNamespace(names=["news", "sport", "art"]), "label": SimpleNamespace()}  # noqa: RUF012

    rows = [{"text": f"question {index}", "topic": index % 3, "label": index % 2} for index in range(48)]
    dataset = Data.of(Table(rows)).load()
    assert isinstance(dataset, LabeledTextDataset) and dataset.class_names == ("0", "1")


def test_classes_of_texts_with_one_name_are_refused() -> None:
    """The examples of the first became those of the second."""
    rows = [(f"the film {number} was {word}", label) for number in range(8) for label, word in enumerate("abc")]
    with pytest.raises(UserError, match=r"builtins\.list has two classes called 'crane': give them different"):
        Data.of(rows, class_names=["crane", "bird", "crane"]).load()


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"item 1 of builtins\.list has an empty text"):
        Data.of([("a fine film", 1), ("  ", 0), ("a bore", 0)]).load()


@pytest.mark.parametrize(
    "attributes",
    [
        {"features": torch.zeros(48, 3)},
        {"features": ["a", "b"]},
        {"classes": 4},
        {"classes": [index % 4 for index in range(48)]},
        {"column_names": None},
    ],
    ids=["tensor", "list", "number", "labels", "columns"],
)
def test_attributes_of_other_meanings(attributes: dict[str, Any]) -> None:
    """A dataset of one's own may call its arrays as torchvision and Hugging Face call class names and columns."""
    squares = Squares("pil")
    vars(squares).update(attributes)
    dataset = Data.of(squares).load()
    assert isinstance(dataset, ImageDataset) and dataset.class_names == tuple("0123")
