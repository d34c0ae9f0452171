"""What a path holds: every kind of data, and paths that hold none or two."""

from __future__ import annotations

import importlib.util
import json
import lzma
import sys
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image
from sample_images import encode, scene

from allmlp.data.cifar import Cifar10, Cifar100
from allmlp.data.corpus import Corpus
from allmlp.data.dataset import Data
from allmlp.data.detect import detect_data, split_of
from allmlp.data.hub_dataset import HubDataset
from allmlp.data.image_folder import ImageFolder
from allmlp.data.image_table import ImageTable
from allmlp.data.labeled_text import LabeledText
from allmlp.data.mnist import Mnist
from allmlp.data.parallel_corpus import ParallelCorpus
from allmlp.data.shards import Shards, find
from allmlp.data.squad import Squad
from allmlp.data.text_files import find_files
from allmlp.errors import UserError

REVIEWS = "text,label\n" + "".join(f"film number {n},{'good' if n % 2 else 'bad'}\n" for n in range(20))
WORDS = "".join(f"a story of {n} words\n\n" for n in range(20))
ANSWERS = "question,context,answer\nwho sat?,the cat sat,cat\n"
SQUAD = json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": []}]})


def squad(question: str) -> str:
    """SQuAD's JSON with one question."""
    answered = {"question": question, "id": question, "answers": [{"text": "cat", "answer_start": 4}]}
    return json.dumps({"version": "1.1", "data": [{"paragraphs": [{"context": "the cat sat", "qas": [answered]}]}]})


def make(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".png"):
            Image.new("RGB", (8, 8), (len(name), 0, 0)).save(file)
        else:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def images(*classes: str) -> dict[str, str | bytes]:
    return {f"{name}/{number}.png": "" for name in classes for number in range(4)}


def texts(*folders: str) -> dict[str, str | bytes]:
    return {f"{name}/{number}.txt": f"{name} {number}\n\nis a text\n" for name in folders for number in range(4)}


LISTED = "image,label\n" + "".join(f"{n}.png,{n % 2}\n" for n in range(4))

FOLDERS: dict[str, tuple[dict[str, str | bytes], Data]] = {
    "class folders": (images("cat", "dog"), ImageFolder("D")),
    "splits of classes": (images("train/cat", "train/dog", "val/cat"), ImageFolder("D")),
    "all in one folder": (images("photos/cat", "photos/dog"), ImageFolder("D")),
    "classes and notes": ({**images("cat", "dog"), "prices.csv": REVIEWS, "notes.txt": WORDS}, ImageFolder("D")),
    "images and a table": (
        {**{f"images/{n}.png": "" for n in range(4)}, "labels.csv": LISTED},
        ImageTable("D/labels.csv"),
    ),
    "images without suffixes in a table": (
        {**{f"images/{n}.png": "" for n in range(4)}, "labels.csv": LISTED.replace("image", "id").replace(".png", "")},
        ImageTable("D/labels.csv"),
    ),
    "images of a contest": (
        {**images("train", "test"), "labels.csv": "image,label\ntrain/0.png,a\ntrain/1.png,b\n"},
        ImageTable("D/labels.csv"),
    ),
    "tables of images": (
        {**{f"{n}.png": "" for n in range(4)}, "train.csv": LISTED, "test.csv": LISTED},
        ImageTable("D/train.csv", test="D/test.csv"),
    ),
    "one table": ({"reviews.csv": REVIEWS, "README.txt": WORDS}, LabeledText("D/reviews.csv")),
    "train and dev": (
        {"train.tsv": REVIEWS, "dev.tsv": REVIEWS},
        LabeledText("D/train.tsv", "D/dev.tsv"),
    ),
    "train, dev and unlabeled test": (
        {"train.csv": REVIEWS, "dev.csv": REVIEWS, "test.csv": "index,text\n0,a film\n1,b film\n"},
        LabeledText("D/train.csv", "D/dev.csv"),
    ),
    "three splits in parts": (
        {"sst-train-0.csv": REVIEWS, "sst-train-1.csv": REVIEWS, "sst-val.csv": REVIEWS, "sst-test.csv": REVIEWS},
        LabeledText("D/sst-train-0.csv,D/sst-train-1.csv", "D/sst-test.csv", "D/sst-val.csv"),
    ),
    "aligned files": (
        {"train.de": WORDS, "train.en": WORDS, "dev.de": WORDS, "dev.en": WORDS, "README.md": WORDS},
        ParallelCorpus("D/train.de+D/train.en", source_lang="de", target_lang="en", val="D/dev.de+D/dev.en"),
    ),
    "aligned files of several sets": (
        {
            f"{name}.{language}": WORDS
            for name in ("newstest2014", "train-a", "train-b", "test_2016", "test_2017")
            for language in ("de", "en")
        },
        ParallelCorpus(
            "D/train-a.de+D/train-a.en,D/train-b.de+D/train-b.en",
            "D/test_2016.de+D/test_2016.en,D/test_2017.de+D/test_2017.en",
        ),
    ),
    "one file of questions": ({"x.csv": ANSWERS}, Squad("D/x.csv")),
    "questions": ({"train.csv": ANSWERS, "test.csv": ANSWERS}, Squad("D/train.csv", "D/test.csv")),
    "parts of questions": (
        {"train-0.csv": ANSWERS, "train-1.csv": ANSWERS, "validation-0.csv": ANSWERS},
        Squad("D/train-0.csv,D/train-1.csv", "D/validation-0.csv"),
    ),
    "parts for training": (
        {"train-0.csv": ANSWERS, "train-1.csv": ANSWERS},
        Squad("D/train-0.csv,D/train-1.csv"),
    ),
    "parts of SQuAD": (
        {f"{name}.json": squad(name) for name in ("train-1", "train-2", "dev-1", "dev-2")},
        Squad("D/train-1.json,D/train-2.json", "D/dev-1.json,D/dev-2.json"),
    ),
    "questions to develop and to test": (
        {f"{split}.csv": ANSWERS for split in ("train", "dev", "test")},
        Squad("D/train.csv", "D/test.csv"),
    ),
    "questions to test without answers": (
        {"train.csv": ANSWERS, "dev.csv": ANSWERS, "test.csv": "question,context,answer\nwho sat?,the cat sat,\n"},
        Squad("D/train.csv", "D/dev.csv"),
    ),
    "SQuAD": ({"train-v1.1.json": SQUAD, "dev-v1.1.json": SQUAD}, Squad("D/train-v1.1.json", "D/dev-v1.1.json")),
    "shards": (
        {"train-0.tar": b"", "val-0.tar": b"", "classes.txt": "a\nb"},
        Shards("D", class_names_file="D/classes.txt"),
    ),
    "CIFAR-10": ({"data_batch_1.bin": b"", "test_batch.bin": b""}, Cifar10("D")),
    "CIFAR-10, packed": ({"cifar10-train1.zip": b""}, Cifar10("D")),
    "folders beside their archive": ({"a/1.jpg": b"", "b/1.jpg": b"", "images.tar": b""}, ImageFolder("D")),
    "CIFAR-10, archive": ({"cifar-10-python.tar.gz": b""}, Cifar10("D")),
    "CIFAR-100": ({"cifar-100-python/train": b""}, Cifar100("D")),
    "CIFAR-100, extracted": ({"train": b"", "test": b"", "meta": b""}, Cifar100("D")),
    "MNIST": ({"train-images-idx3-ubyte.gz": b""}, Mnist("D")),
    "saved by datasets": ({"dataset_dict.json": "{}", "train/x.arrow": b""}, HubDataset("D")),
    "text": ({"a.txt": WORDS, "deep/b.txt": WORDS, "c.md": WORDS}, Corpus("D/**/*.md,D/**/*.txt")),
    "texts in folders of classes": (texts("neg", "pos"), LabeledText("D")),
    "splits of texts": (
        {**texts("train/neg", "train/pos", "train/unsup", "test/neg", "test/pos"), "imdbEr.txt": WORDS},
        LabeledText("D"),
    ),
    "classes and one other text": ({**texts("neg", "pos"), "notes.txt": WORDS}, LabeledText("D")),
    "text in splits": (texts("train", "test"), Corpus("D/**/*.txt")),
    "text in parts": ({**texts("a", "b"), "1.txt": WORDS, "2.txt": WORDS}, Corpus("D/**/*.txt")),
    "a text per folder": ({"a/1.txt": WORDS, "b/1.txt": WORDS, "c/1.txt": WORDS}, Corpus("D/**/*.txt")),
    "packed text": ({"a.txt.xz": lzma.compress(WORDS.encode())}, Corpus("D/**/*.txt.xz")),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, expected = FOLDERS[kind]
    monkeypatch.chdir(make(tmp_path / "D", files).parent)
    assert detect_data("D") == expected


JSON_LINES = "\n".join(json.dumps({"premise": f"it is {n}", "hypothesis": f"rain {n}", "y": n % 2}) for n in range(9))
FILES: dict[str, tuple[str, str, Data]] = {
    "labels.csv": ("labels.csv", REVIEWS, LabeledText("labels.csv")),
    "tabs": ("a.tsv", REVIEWS.replace(",", "\t"), LabeledText("a.tsv")),
    "JSON lines": ("a.jsonl", JSON_LINES, LabeledText("a.jsonl")),
    "unknown names": ("a.csv", REVIEWS.replace("text,label", "a,b"), LabeledText("a.csv")),
    "no header": ("a.csv", REVIEWS.replace("text,label\n", ""), LabeledText("a.csv")),
    "languages": (
        "a.csv",
        "id,en,de\n1,a dog,ein Hund\n2,a cat,eine Katze\n",
        ParallelCorpus("a.csv", source_lang="de"),
    ),
    "names of languages": (
        "a.csv",
        "English,German\na dog,ein Hund\na cat,eine Katze\n",
        ParallelCorpus("a.csv", source_lang="German", target_lang="English"),
    ),
    "source, target": (
        "a.jsonl",
        "\n".join(json.dumps({"target": f"it is {n}", "source": f"es ist {n}"}) for n in range(9)),
        ParallelCorpus("a.jsonl", source_lang="source", target_lang="target"),
    ),
    "only text": (
        "a.jsonl",
        "\n".join(json.dumps({"body": f"story {n}"}) for n in range(9)),
        Corpus("a.jsonl", text_field="body"),
    ),
    "questions": ("qa.csv", ANSWERS, Squad("qa.csv")),
    "text": ("book.txt", WORDS, Corpus("book.txt")),
    "text without a suffix": ("book", WORDS, Corpus("book")),
    "one shard": ("a.tar", "", Shards("a.tar")),
    "archive": ("cifar-100-python.tar.gz", "", Cifar100("cifar-100-python.tar.gz")),
}


@pytest.mark.parametrize("kind", FILES)
def test_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, content, expected = FILES[kind]
    monkeypatch.chdir(make(tmp_path, {name: content}))
    assert detect_data(name) == expected


def test_patterns_and_pairs_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path, {"a,1.csv": REVIEWS, "b[2].csv": REVIEWS, "x.de": WORDS, "x.en": WORDS}))
    assert detect_data("a,1.csv") == LabeledText("a,1.csv") and detect_data("b[2].csv") == LabeledText("b[2].csv")
    assert detect_data("b*.csv,b[[]2].csv") == LabeledText("b[2].csv,b[2].csv")
    assert detect_data("x.de+x.en") == ParallelCorpus("x.de+x.en")
    make(tmp_path, {"qa-1.csv": ANSWERS, "qa-2.csv": ANSWERS})
    questions = detect_data("qa-*.csv")
    assert isinstance(questions, Squad) and questions.train.count("qa-") == 2


def test_splits_that_a_pattern_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are all named after a split are used as in a folder; others are parts of one table."""
    splits, parts = ("train-1", "train-2", "test"), ("train-1", "more", "test")
    make(tmp_path, {f"reviews/{name}.csv": REVIEWS for name in splits})
    make(tmp_path, {f"questions/{name}.csv": ANSWERS for name in splits})
    monkeypatch.chdir(make(tmp_path, {f"mixed/{name}.csv": REVIEWS for name in parts}))
    assert detect_data("reviews/*.csv") == LabeledText("reviews/train-1.csv,reviews/train-2.csv", "reviews/test.csv")
    assert detect_data("questions/*.csv") == Squad("questions/train-1.csv,questions/train-2.csv", "questions/test.csv")
    assert detect_data("mixed/*.csv") == LabeledText("mixed/more.csv,mixed/test.csv,mixed/train-1.csv")


def test_what_is_detected_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the kinds whose files here are complete."""
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))
    complete = ("class folders", "images without suffixes in a table", "one table", "splits of texts", "aligned files")
    for kind in (*complete, "text"):
        root = make(tmp_path / kind / "D", FOLDERS[kind][0])
        for number, file in enumerate(root.rglob("*.png")):
            Image.new("RGB", (8, 8), (number, 0, 1)).save(file)
        monkeypatch.chdir(root.parent)
        data = detect_data("D")
        assert len(data.load().train) > 1 and len(data.load().test) > 0, kind
    make(tmp_path, {"a.csv": "en,de\n" + "".join(f"a dog {n},ein Hund {n}\n" for n in range(60))})
    data = detect_data(str(tmp_path / "a.csv")).load()
    assert len(data.train) == 58 and len(data.validation or ()) == len(data.test) == 1
    assert data.notes == ("split with seed 0: 58 train, 1 validation, 1 test",)


@pytest.mark.parametrize(
    ("files", "place", "message"),
    [
        ({}, "D", "D has no known data: no folders of images, no table"),
        ({"README.md": "x", "x.bin": b"\0"}, "D", "D has no known data"),
        ({}, "nowhere", "there is no file or folder nowhere"),
        ({"x.png": ""}, "D/x.png", "is an image: training needs a folder with one folder of images per class"),
        (images("cat", "dog"), "D/cat,D/dog", "is 8 images: training needs a folder"),
        ({"x.bin": b"a\0"}, "D/x.bin", "is not text"),
        ({"x.json": SQUAD, "y.json": SQUAD}, "D", "needs files of questions for training and testing"),
        (
            {"train-v1.1.json": squad("who?"), "train-v2.0.json": squad("who?"), "dev.json": squad("what?")},
            "D",
            r"D: train-v1\.1\.json and train-v2\.0\.json have questions in common, .* allmlp train D/train-v2\.0\.json",
        ),
        ({"a.csv": REVIEWS, "b.csv": REVIEWS}, "D", r"has 2 tables, such as a\.csv, b\.csv: name one, or several as"),
        ({"a-train.csv": REVIEWS, "b-train.csv": "x,label\n1 a,1\n"}, "D", "has 2 tables"),
        (
            {**images("cat", "dog"), "labels.csv": "image,label\ncat/0.png,x\ndog/0.png,y\n"},
            "D",
            r'folders of images and a table of images, labels\.csv: .*D/labels\.csv; .* data={"kind": "ImageFolder"',
        ),
        ({"a.csv": "x,y\n1,2.5\n2,3.5\n"}, "D/a.csv", "has no column of texts, images or times, among x, y"),
        (
            {"a.csv": "text\na b\nc d\n"},
            "D/a.csv",
            "has no column of labels, called label or with few different values",
        ),
        ({"a.csv": b""}, "D", r"a\.csv is empty"),
        ({"x.de": WORDS, "x.en": WORDS, "y.fr": WORDS, "y.en": WORDS}, "D", r"several kinds: join two by a plus sign"),
        ({"x.de": WORDS, "x.en": WORDS, "y.de": WORDS, "y.en": WORDS}, "D", r"several kinds: .*D/x.de\+D/x.en"),
    ],
)
def test_one_clear_line(
    files: dict[str, str | bytes], place: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "D").mkdir()
    monkeypatch.chdir(make(tmp_path / "D", files).parent)
    with pytest.raises(UserError, match=message) as error:
        detect_data(place)
    assert "\n" not in str(error.value)


def test_a_flat_folder_of_images_says_what_is_missing(tmp_path: Path) -> None:
    make(tmp_path, {"a.png": "", "b.png": ""})
    with pytest.raises(UserError, match="has no subfolders: it needs one per class, or give a table"):
        detect_data(str(tmp_path)).load()


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.csv", "train"),
        ("sst2-dev.tsv.xz", "validation"),
        ("test_2016.csv", "test"),
        ("training_testing.csv", ""),
    ],
)
def test_splits_by_file_name(name: str, split: str) -> None:
    assert split_of(name) == split


class FakeHub(MemoryFileSystem):
    """The Hub's file system, with files in memory."""

    protocol = "hf"
    store: dict[str, object] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("hf://"))


def test_datasets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", FakeHub)
    system = FakeHub()
    texts = arrow.table({"sentence": [f"a film {n}" for n in range(20)], "label": [n % 2 for n in range(20)]})
    pixels = arrow.table({"image": [{"bytes": b"", "path": None}], "label": [1]})
    for name, table in (("me/reviews", texts), ("me/photos", pixels)):
        for part in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"):
            with system.open(f"hf://datasets/{name}/data/{part}.parquet", "wb") as target:
                parquet.write_table(table, target)
    found = detect_data("hf:me/reviews")
    assert isinstance(found, LabeledText) and len(found.path.split(",")) == 2 and found.val == ""
    assert found.test.endswith("datasets/me/reviews/data/validation-00000-of-00001.parquet")
    if importlib.util.find_spec("tokenizers"):
        data = found.replace(cache=str(tmp_path)).load()
        assert len(data.train) == 40 and len(data.test) == 20 and data.class_names == ("0", "1")
    assert detect_data("hf:me/photos") == HubDataset("me/photos")
    answers = [{"text": ["cat"], "answer_start": [4]}]
    asked = arrow.table({"question": ["who sat there?"], "context": ["the cat sat"], "answers": answers})
    for part in ("train", "validation"):
        with system.open(f"hf://datasets/me/squad/plain_text/{part}-00000-of-00001.parquet", "wb") as target:
            parquet.write_table(asked, target)
    squad = detect_data("hf:me/squad")
    assert isinstance(squad, Squad) and squad.test.endswith("plain_text/validation-00000-of-00001.parquet")
    for subset in ("cola", "sst2"):
        for part in ("train", "test"):
            with system.open(f"hf://datasets/me/glue/{subset}/{part}-00000-of-00001.parquet", "wb") as target:
                parquet.write_table(texts, target)
    with pytest.raises(UserError, match=r"'me/glue' .* has 2 subsets, such as cola, sst2: name one, hf:me/glue/cola"):
        detect_data("hf:me/glue")
    only = detect_data("hf:me/glue/sst2")
    assert isinstance(only, LabeledText) and only.path.endswith("datasets/me/glue/sst2/train-00000-of-00001.parquet")
    with pytest.raises(UserError, match="cannot list the files of 'me/nothing' on the Hugging Face Hub"):
        detect_data("hf:me/nothing")


def test_parquet_tables_that_hold_images(tmp_path: Path) -> None:
    """A local copy of a dataset of the Hub: it had "no column of texts, images or times, among label"."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    table = arrow.table({"image": [{"bytes": b"", "path": None}] * 4, "label": [0, 1, 0, 1]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for part in ("train", "test"):
        parquet.write_table(table, tmp_path / f"{part}-00000-of-00001.parquet")
    assert detect_data(str(tmp_path)) == HubDataset(str(tmp_path))
    with pytest.raises(UserError, match=r"train-00000.* holds the images themselves: put the tables of one dataset"):
        detect_data(str(tmp_path / "train-00000-of-00001.parquet"))


@pytest.mark.parametrize("form", ["bytes", "struct"])
def test_parquet_tables_that_hold_images_without_saying_so(form: str, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = [data if form == "bytes" else {"bytes": data, "path": None} for data in [encode(scene(8, 8))] * 4]
    parquet.write_table(arrow.table({"pixels": cells, "label": [0, 1, 0, 1]}), tmp_path / "train.parquet")
    assert detect_data(str(tmp_path / "train.parquet")) == HubDataset(str(tmp_path))
    parquet.write_table(arrow.table({"pixels": [b"?"] * 4, "label": [0, 1, 0, 1]}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match="has no column of texts, images or times, among label"):
        detect_data(str(tmp_path / "train.parquet"))


@pytest.mark.parametrize("name", ["new data", "data [v2]", "a, b", "de+en", "{1..2}", "Bücher"])
def test_folders_of_any_name(name: str, tmp_path: Path) -> None:
    """Marks of patterns, lists, pairs and ranges in the name of a folder are only letters."""
    folder = tmp_path / name
    make(folder / "text", {"a.txt": WORDS, "b.md": WORDS})
    text = detect_data(str(folder / "text"))
    assert isinstance(text, Corpus)
    assert [Path(file).name for file in find_files(text.path)] == ["b.md", "a.txt"]
    make(folder / "tables", {"train_1.csv": REVIEWS, "train_2.csv": REVIEWS, "test.csv": REVIEWS})
    tables = detect_data(str(folder / "tables"))
    assert isinstance(tables, LabeledText) and len(find_files(tables.path)) == 2
    lines = "".join(f"line {n}\n" for n in range(100))
    make(folder / "pairs", {f"{part}.{side}": lines for part in ("train", "test") for side in ("de", "en")})
    pairs = detect_data(str(folder / "pairs"))
    assert isinstance(pairs, ParallelCorpus) and len(pairs.read_pairs(pairs.path)) == 100
    shards = make(folder / "shards", {**{f"train-{number}.tar": b"" for number in range(3)}, "classes.txt": "a\nb"})
    assert len(find(str(shards))) == 3
    one = str(shards / "train-0.tar")
    assert detect_data(one) == Shards(one, class_names_file=str(shards / "classes.txt"))
