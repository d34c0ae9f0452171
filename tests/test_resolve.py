"""What `allmlp train X` trains: recipes, runs in Python files, records of runs, data; and the plain options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.auto import TrainOptions
from allmlp.cli import main
from allmlp.data.dataset import Data
from allmlp.data.digits import Digits
from allmlp.data.image_folder import ImageFolder
from allmlp.models.encoder import Encoder
from allmlp.recipes import runs
from allmlp.resolve import choose, free_folder, resolve
from allmlp.run import Budget, Run
from allmlp.spec import to_dict
from allmlp.tasks.dino import Dino

EXPERIMENTS = """
from allmlp.recipes import runs

base = runs("digits_mixer")["digits_mixer"]

def longer():
    return base.replace(batch_size=7)

def table():
    return {"a": base, "b": longer()}

number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def images(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 4) -> Path:
    pil = pytest.importorskip("PIL.Image")
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pil.new("RGB", (12, 10), (60 * number, 9 * index, 100)).save(folder / name / f"{index}.png")
    return folder


def only(source: str, **options: object) -> Run:
    (found,) = resolve(source, device="cpu", **options).values()  # type: ignore[arg-type]
    return found.run


def test_recipes_come_first(here: Path) -> None:
    found = resolve("digits_mixer", overrides={"optim.lr": "0.5"})
    assert list(found) == ["digits_mixer"] and found["digits_mixer"].folder == Path("runs/digits_mixer")
    assert found["digits_mixer"].run.optim.lr == 0.5 and not found["digits_mixer"].reasons
    rows = resolve("cifar10_ablations", out=Path("here"))
    assert rows["cifar10_ablations/linear"].folder == Path("here/linear") and len(rows) == 10


@pytest.mark.slow
def test_a_name_that_is_both_is_refused_and_can_be_written_either_way(here: Path) -> None:
    images(here / "digits_mixer")
    with pytest.raises(allmlp.UserError, match=r"also a folder here: write recipe:digits_mixer or \./digits_mixer"):
        resolve("digits_mixer")
    assert only("recipe:digits_mixer") == runs("digits_mixer")["digits_mixer"]
    assert isinstance(only("./digits_mixer").data, ImageFolder)


def test_runs_in_a_python_file(here: Path) -> None:
    (here / "mine.py").write_text(EXPERIMENTS)
    base = runs("digits_mixer")["digits_mixer"]
    assert only("mine.py:base") == base
    assert only(f"{here}/mine.py:longer") == base.replace(batch_size=7)
    assert list(resolve("mine.py:table")) == ["table/a", "table/b"] and only("mine.py:table/b").batch_size == 7
    for name, message in (
        ("longr", "did you mean 'longer'"),
        ("table/c", "unknown row of table 'c'"),
        ("number", "is int, neither a Run nor a function that returns one"),
    ):
        with pytest.raises(allmlp.UserError, match=message):
            resolve(f"mine.py:{name}")
    with pytest.raises(allmlp.UserError, match=r"no\.py does not exist"):
        resolve("no.py:base")


def test_a_model_that_is_misspelled(here: Path) -> None:
    with pytest.raises(allmlp.UserError, match="mixr_nano was not found; did you mean 'mixer_nano'"):
        resolve("digits_mixer", options=TrainOptions(model="mixr_nano"))


def test_a_record_is_the_same_run_again(here: Path) -> None:
    run = runs("digits_mixer")["digits_mixer"].replace(seed=3)
    (here / "old").mkdir()
    (here / "old" / "run.json").write_text(json.dumps({"run": to_dict(run)}))
    assert only("old/run.json") == only("old") == only("./old/") == run
    assert resolve("old")["old"].folder == Path("runs/old")
    assert resolve("old", overrides={"seed": "4"}, out=Path("new"))["old"].folder == Path("new")
    with pytest.raises(allmlp.UserError, match=r"is the run itself.*--resume old"):
        resolve("old", out=Path("old"))


def test_data_by_name(here: Path) -> None:
    found = resolve("digits", device="cpu")["digits"]
    assert isinstance(found.run.data, Digits) and found.folder == Path("runs/digits")


def test_what_is_nothing_of_it(here: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"'digits_mixr' is neither a recipe.*did you mean 'digits_mixer'"):
        resolve("digits_mixr")
    (here / "photos").mkdir()
    with pytest.raises(allmlp.UserError, match=r"'photo' is neither .*did you mean 'photos'"):
        resolve("photo")
    allmlp.save(allmlp.create("resmlp_nano"), here / "model")
    with pytest.raises(allmlp.UserError, match="model is a model: name the data to train it on"):
        resolve("model")


def test_plain_options_change_recipes_too(here: Path) -> None:
    base = runs("imagenette_mixer")["imagenette_mixer"]
    assert only("imagenette_mixer", options=TrainOptions(epochs=5)).budget == Budget(epochs=5)
    assert only("imagenette_mixer", options=TrainOptions(minutes=5)).budget == base.budget.replace(minutes=5)
    assert only("imagenette_mixer", options=TrainOptions(epochs=5, minutes=1)).budget == Budget(epochs=5, minutes=1)
    smaller = only("imagenette_mixer", options=TrainOptions(size=64))
    assert smaller.model is not None and smaller.model.input_size == (64, 64)
    assert smaller.data.img_size == (64, 64)  # type: ignore[attr-defined]
    other = only("imagenette_mixer", options=TrainOptions(model="resmlp_s12"))
    assert other.model is not None and other.model.input_size == (128, 128) and other.init_from is None
    start = only("imagenette_mixer", options=TrainOptions(model="allmlp:cifar10"))
    assert (start.model, start.init_from) == (None, "allmlp:cifar10")
    assert start.data.img_size == (32, 32)  # type: ignore[attr-defined]
    resized = only("imagenette_mixer", options=TrainOptions(model="allmlp:cifar10", size=48))
    assert isinstance(resized.model, Encoder) and resized.model.width == 256 and resized.model.input_size == (48, 48)
    assert only("sst2", options=TrainOptions(size=32)).data.seq_len == 32  # type: ignore[attr-defined]
    with pytest.raises(allmlp.UserError, match=r"data\.img_size 64x64 is not the model's 128x128: --size sets both"):
        only("imagenette_mixer", overrides={"data.img_size": "64"})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("budget.epohs", "3", "unknown Budget field 'epohs'; did you mean 'epochs'"),
        ("optim.lr", "fast", "optim.lr must be a number"),
        ("optim", "adam", "did you mean 'AdamW'"),
        ("batchsize", "3", "did you mean 'batch_size'"),
        ("optm.lr", "3", "unknown Run field 'optm'"),
    ],
)
def test_mistakes_are_found_before_models_are_compared(
    field: str, value: str, reason: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*args: object, **options: object) -> None:
        raise AssertionError("models are compared")

    monkeypatch.setattr("allmlp.resolve.choose_run", compare)
    images(here / "photos")
    with pytest.raises(allmlp.UserError, match=reason):
        resolve("photos", overrides={field: value}, device="cpu")
    for name, given in (("head_init.penalty", "1"), ("batch_growth.start", "500"), ("task.no", "1")):
        with pytest.raises(AssertionError, match="models are compared"):
            resolve("photos", overrides={name: given}, device="cpu")


def test_fields_of_a_model_that_is_a_start(here: Path) -> None:
    options = TrainOptions(model="allmlp:cifar10")
    with pytest.raises(
        allmlp.UserError, match=r"model\.depth: the run starts from allmlp:cifar10, as it is; --model NA"
    ):
        only("imagenette_mixer", options=options, overrides={"model.depth": "2"})
    with pytest.raises(allmlp.UserError, match=r"data\.img_size 33x33 is not the model's 32x32: --size sets both"):
        only("imagenette_mixer", options=options, overrides={"data.img_size": "33"})


@pytest.mark.slow
def test_data_have_a_folder_of_their_own(here: Path) -> None:
    images(here / "my photos.v2")
    (found,) = resolve("my photos.v2", device="cpu").values()
    assert found.folder == Path("runs/my_photos") and found.reasons
    assert "keep_best" in {reason.field for reason in found.reasons}
    changes = {"keep_best": "false", "patience": "none", "budget.steps": "3"}
    (set_,) = resolve("my photos.v2", overrides=changes, device="cpu").values()
    assert not {"keep_best", "patience", "budget"} & {reason.field for reason in set_.reasons}
    found.folder.mkdir(parents=True)
    (found.folder / "run.json").write_text(json.dumps({"run": to_dict(found.run)}))
    assert free_folder("my_photos", found.run) == Path("runs/my_photos")
    assert free_folder("my_photos", found.run.replace(seed=1)) == Path("runs/my_photos_2")


def test_fields_of_the_data_are_set_before_they_are_read(here: Path) -> None:
    rows = [f"it is film {number},{'ab'[number % 2]},{'xyz'[number % 3]}" for number in range(60)]
    (here / "films.csv").write_text("\n".join(["words,one,two", *rows]))
    with pytest.raises(allmlp.UserError, match=r"set data\.label_column"):
        resolve("films.csv", device="cpu")
    found = only("films.csv", overrides={"data.label_column": "two", "data.cache": str(here)})
    assert found.data.load().class_names == ("x", "y", "z")  # type: ignore[attr-defined]


def test_another_task_has_no_head_to_fit(here: Path) -> None:
    images(here / "photos", count=20)
    ((run, _, plain),) = resolve("photos", TrainOptions(model="allmlp:image"), device="cpu").values()
    assert run.head_init is not None and run.start_margin > 0
    overrides = {"task": "Dino", "start_margin": "0.5"}
    ((run, _, reasons),) = resolve("photos", TrainOptions(model="allmlp:image"), overrides, "cpu").values()
    assert isinstance(run.task, Dino) and run.head_init is None and run.start_margin == 0.5
    fields = {reason.field for reason in plain} - {reason.field for reason in reasons}
    assert {"head_init", "start_margin"} <= fields
    run = only("photos", options=TrainOptions(model="allmlp:image"), overrides={"task.label_smoothing": "0"})
    assert run.head_init is not None


def test_another_task_on_data_of_the_users_own(here: Path) -> None:
    """As on files: the head is not fitted, and the crops have the size of the model."""
    items = [(torch.randint(256, (3, 32, 32), dtype=torch.uint8), i % 2) for i in range(20)]
    run, reasons = choose(Data.of(items, name="items"), TrainOptions("allmlp:cifar10"), {"task": "Dino"}, "cpu")
    assert isinstance(run.task, Dino) and run.task.crops.global_size == (32, 32) and run.head_init is None
    assert "task.crops" in {reason.field for reason in reasons}


def test_crops_have_the_size_of_the_model(here: Path) -> None:
    """They had 224 and 96 pixels for all images, and the model was trained at 224 whatever --size said."""
    images(here / "photos", count=20)
    dino = {"task": "Dino"}
    ((run, _, reasons),) = resolve("photos", TrainOptions("mixer_nano", size=24), dino, "cpu").values()
    assert isinstance(run.task, Dino) and run.task.crops.global_size == (24, 24) == run.data.img_size  # type: ignore[attr-defined]
    assert run.task.crops.local_size == (12, 12)  # 3 of 6 patches of 4 pixels
    assert run.task.configure_model(run.model, run.data.load()).input_size == (24, 24)  # type: ignore[arg-type]
    assert ("task.crops", "24x24, 12x12") in [(reason.field, reason.value) for reason in reasons]
    started = only("photos", options=TrainOptions("allmlp:image"), overrides=dino).task
    assert isinstance(started, Dino) and started.crops.global_size == (128, 128)
    assert started.crops.local_size == (48, 48) and started.crops.blur_sigma == (0.1, 1.14)
    given = {**dino, "task.crops.global_size": "48", "task.crops.num_local": "2"}
    crops = only("photos", options=TrainOptions("mixer_nano"), overrides=given).task.crops  # type: ignore[attr-defined]
    assert crops.global_size == (48, 48) and crops.num_local == 2
    assert Dino().sized_for(runs("imagenet_resmlp_s12_dino")["imagenet_resmlp_s12_dino"].model) == {  # type: ignore[arg-type]
        "global_size": (224, 224),
        "local_size": (96, 96),
        "blur_sigma": (0.1, 2.0),
    }


def test_train_alone_tells_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and all(line in out for line in ("allmlp train photos/", "allmlp list recipes"))
    for arguments in (["--epochs", "3"], ["digits_mixer", "--resume", "x"], ["--resume", "x", "--epochs", "3"]):
        with pytest.raises(SystemExit) as caught:
            main(["train", *arguments])
        assert caught.value.code == 2
