"""The papers' own tests: ReaL labels and ImageNet-V2, and linear probes on several datasets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.cli import main
from allmlp.data.class_names import imagenet_classes, imagenet_numbers
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.evaluation import evaluate_model
from allmlp.models.mixer import mixer
from allmlp.prediction import open_predictor
from allmlp.real_labels import evaluate_real_labels
from allmlp.transfer import embed_split, load_images, probe_datasets
from data.official import write_flowers, write_pets
from data.sample_images import encode, scene
from folders import image_folder
from tiny import randomize


def image_model(folder: Path, num_classes: int) -> Path:
    model = allmlp.create(mixer(1, 16, patch_size=8, img_size=16).configure(num_classes=num_classes), seed=0)
    randomize(model)
    allmlp.save(model, folder)
    write_preprocessing(folder, ImagePreprocessing((0.5,) * 3, (0.5,) * 3))
    return folder


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of 1,000 classes without names."""
    return image_model(tmp_path_factory.mktemp("model"), 1000)


def test_real_labels(imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An image counts as correct if the prediction is any of its labels; images without labels do not count."""
    folder, wnids = tmp_path / "val", list(imagenet_classes())
    files = []
    for number in range(1, 7):
        place = folder / wnids[number]
        place.mkdir(parents=True)
        files.append(place / f"ILSVRC2012_val_{number:08d}.JPEG")
        files[-1].write_bytes(encode(scene(30, 30, 40 * number), "JPEG"))
    predicted = [
        int(wnids.index(row[0].label)) if row[0].label in wnids else int(row[0].label)
        for row in allmlp.predict(imagenet, files, device="cpu")
    ]
    other = [(label + 1) % 1000 for label in predicted]
    labels = [[predicted[0]], [other[1], predicted[1]], [other[2]], [], [other[4], (other[4] + 1) % 1000], []]
    (tmp_path / "real.json").write_text(json.dumps(labels))
    found = evaluate_real_labels(str(imagenet), str(folder), str(tmp_path / "real.json"), device="cpu", batch_size=2)
    assert found.examples == 4 and found.metrics["accuracy"] == 0.5
    with pytest.raises(SystemExit):
        main(["eval", str(imagenet), str(folder), "--real", str(tmp_path / "real.json"), "--device", "cpu"])
    printed = capsys.readouterr().out
    assert f"{folder}, ReaL labels: 4 examples" in printed and "accuracy  50.00% (95% interval" in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1], [1000]]", "is not the file real.json"),
        ('{"a": [1]}', "is not the file real.json"),
        ("[[1]", "cannot read"),
        ("[[1]]", "there are labels of 1 image only"),
        ("[[], []]", "has no image ILSVRC2012_val_"),
    ],
)
def test_files_that_are_not_real_labels(content: str, message: str, imagenet: Path, tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(content)
    (tmp_path / "ILSVRC2012_val_00000002.JPEG").write_bytes(encode(scene(), "JPEG"))
    with pytest.raises(allmlp.UserError, match=message):
        evaluate_real_labels(str(imagenet), str(tmp_path), str(tmp_path / "real.json"), device="cpu")


def test_imagenet_v2(tmp_path: Path) -> None:
    """Its folders are the numbers of the classes, which sort as 0, 1, 10, 11, 2, ..."""
    model, folder = image_model(tmp_path / "model", 12), tmp_path / "imagenetv2-matched-frequency-format-val"
    images = {number: encode(scene(30, 30, 20 * number), "JPEG") for number in range(12)}
    answers = [int(row[0].label) for row in allmlp.predict(model, [*images.values()], device="cpu")]
    for number, image in images.items():  # each in a folder of its own, ten also in that of their prediction
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "own.jpeg").write_bytes(image)
    for number in range(10):
        (folder / str(answers[number]) / f"{number}.jpeg").write_bytes(images[number])
    found = evaluate_model(str(model), str(folder), device="cpu")
    right = 10 + sum(answer == number for number, answer in enumerate(answers))
    assert found.examples == 22 and found.metrics["accuracy"] == pytest.approx(right / 22) and not found.notes


def test_some_classes_of_imagenet_v2(imagenet: Path, tmp_path: Path) -> None:
    """Numbers are those of ImageNet's classes if the model has these, however they are named."""
    image, names = encode(scene(30, 30, 7), "JPEG"), [", ".join(names) for names in imagenet_classes().values()]
    own = int(allmlp.predict(imagenet, [image], device="cpu")[0][0].label)
    for number in (0, own, 999):
        (tmp_path / str(number)).mkdir(exist_ok=True)
        (tmp_path / str(number) / "image.jpeg").write_bytes(image)
    found = evaluate_model(str(imagenet), str(tmp_path), device="cpu")
    correct = {row.name: row.correct for row in found.class_results}
    assert correct["tench"] == (own == 0) and sum(correct.values()) == 1 and found.metrics["accuracy"] < 1
    assert "as in ImageNet-V2: 0 is tench" in found.notes[0]
    assert imagenet_numbers(["0", "12"], names) == {"0": ["0"], "12": ["12"]}
    assert not imagenet_numbers(["0", "12"], names[::-1])
    assert not imagenet_numbers(["0", "1000"], names) and not imagenet_numbers(["00", "1"], names)


# --- linear probes on several datasets ------------------------------------------------------------------------


@pytest.mark.slow
def test_probes_on_several_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The official layouts by name, the accuracy of scikit-learn's regression within reach, and what is not here."""
    model = image_folder(tmp_path / "model")
    monkeypatch.setenv("ALLMLP_DATA", str(tmp_path / "data"))
    write_pets(tmp_path / "data" / "pets", each=5)
    write_flowers(tmp_path / "data" / "flowers102")
    left_out: list[str] = []
    results = probe_datasets(str(model), examples=60, seeds=2, device="cpu", missing=left_out.append)
    assert [result.data for result in results] == ["digits", "pets", "flowers102"]
    assert [name.partition(":")[0] for name in left_out] == ["cifar10", "cifar100", "mnist", "fashion_mnist"]
    digits, pets, _ = results
    assert (digits.train_examples, digits.classes, len(digits.accuracies)) == (60, 10, 2)
    assert digits.accuracy > 2 * digits.majority  # a random encoder keeps some of the pixels
    assert (pets.train_examples, pets.test_examples, pets.majority) == (12, 3, pytest.approx(1 / 3))
    with pytest.raises(SystemExit):
        main(["probe", str(model), "pets", "flowers102", "--device", "cpu"])
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split()[:4] == ["data", "classes", "train", "test"] and rows[1].split()[:4] == [
        "pets",
        "3",
        "12",
        "3",
    ]
    assert rows[3].startswith("mean of 2")


def test_a_probe_finds_separable_classes(tmp_path: Path) -> None:
    """Features are those of `allmlp embed`; on the examples that it was fitted on, the probe is nearly perfect."""
    model, folder = image_folder(tmp_path / "model"), write_pets(tmp_path / "pets", each=6)
    predictor = open_predictor(str(model), device="cpu")
    dataset = load_images(str(folder), predictor)  # type: ignore[arg-type]
    features = embed_split(predictor, dataset.train, 4)  # type: ignore[arg-type]
    files = [Path(dataset.train.name(index)) for index in range(len(dataset.train))]  # type: ignore[attr-defined]
    torch.testing.assert_close(features.values, torch.as_tensor(allmlp.embed(model, files, device="cpu")))
    assert features.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    files[4].write_bytes(b"no image")  # the next one, of another class, takes its place
    again = embed_split(predictor, dataset.train, 4)  # type: ignore[arg-type]
    torch.testing.assert_close(again.values[4], features.values[5])
    assert again.labels.tolist() == [0] * 4 + [1] * 6 + [2] * 5


def test_a_model_of_texts_is_refused() -> None:
    with pytest.raises(allmlp.UserError, match="reads texts: probes on several datasets are for image models"):
        probe_datasets("allmlp:text")
