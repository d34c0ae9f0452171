"""Detect the dataset at a path from names and contents of its files.

A folder is, in this order: a dataset in its official layout (CIFAR-10, CIFAR-100, MNIST, Oxford Pets, Flowers-102), a
dataset saved by the `datasets` package, tar shards, a table of images, folders of images, other tables, SQuAD files,
aligned files of two languages, folders of texts, plain text. A table is, in this order: images with labels,
translations, time series (times and numbers, no texts), labeled texts, plain text.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from allmlp.data.cifar import Cifar10, Cifar100
from allmlp.data.columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    SPLIT_NAMES,
    SPLITS,
    TEXT_COLUMNS,
    is_image_name,
    named_column,
    sample_columns,
)
from allmlp.data.corpus import Corpus
from allmlp.data.dataset import Data
from allmlp.data.digits import Digits
from allmlp.data.flowers import Flowers102, is_flowers
from allmlp.data.frequency import is_time
from allmlp.data.hub_dataset import HubDataset, embeds_images
from allmlp.data.image_folder import ImageFolder, folders, split_folders
from allmlp.data.image_table import LOOKED_UP, FileFinder, ImageTable, stem_column
from allmlp.data.labeled_text import LabeledText
from allmlp.data.mnist import Mnist
from allmlp.data.parallel_corpus import ParallelCorpus, split_pair
from allmlp.data.pets import OxfordPets, is_pets
from allmlp.data.series_columns import find_time, holds_numbers, plain_samples, refuse_times
from allmlp.data.series_table import SeriesTable
from allmlp.data.shards import Shards
from allmlp.data.squad import Squad, has_answers, is_squad, read, read_file
from allmlp.data.tables import COMPRESSED, is_table, read_table, table_suffix
from allmlp.data.text_files import file_system, find_encoding, find_files
from allmlp.data.text_folder import TextFolder
from allmlp.errors import UserError, command, one_line
from allmlp.files import expand_user

NAMED: dict[str, Data] = {
    "cifar10": Cifar10(),
    "cifar100": Cifar100(),
    "mnist": Mnist(),
    "fashion_mnist": Mnist(variant="fashion"),
    "digits": Digits(),
    "pets": OxfordPets(),
    "flowers102": Flowers102(),
}
"""Data by name, at their default locations."""
OFFICIAL = (
    (r"cifar-10-(batches|binary|python).*|data_batch_1(\.bin)?|cifar10-train1\.zip", Cifar10),
    (r"cifar-100-(binary|python).*|cifar100-train1\.zip", Cifar100),
    (r"train-images.idx3-ubyte(\.gz)?", Mnist),
)
"""Names of files and folders that identify each dataset."""
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
NOT_DATA = re.compile(r"readme|license|licence|copying|changelog|requirements|classes|labels\.txt|class_names", re.I)
"""Text files that come with data."""
LANGUAGES = frozenset(
    re.findall(
        r"\w+",
        """ar bg bn ca cs da de el en es et eu fa fi fr gl he hi hr hu is it ja ka ko lt lv mk ms mt nb nl pl pt ro ru
        sk sl sq sr sv sw ta th tr uk ur vi zh source target src tgt
        arabic chinese czech danish dutch english finnish french german greek hebrew hindi hungarian italian japanese
        korean norwegian polish portuguese romanian russian spanish swedish turkish ukrainian vietnamese""",
    )
)
"""Columns of a translation table, and suffixes of aligned files; not id and no, which have other meanings."""
SOURCE_FIRST = ("source", "src")


def detect_data(place: str) -> Data:
    """Detect the dataset at a file, folder, pattern or URL, two aligned files joined by +, hf:NAME on the Hub, or one
    of `NAMED`.
    """
    if place.startswith("hf:"):
        return detect_hub(place.removeprefix("hf:"))
    path = expand_user(place)
    if place in NAMED and not path.exists():
        return NAMED[place]
    if "://" not in place and path.is_dir():
        return detect_folder(path)
    if "+" in place and not path.exists() and all(expand_user(side).is_file() for side in split_pair(place)):
        source, target = (language_of(Path(side))[1] for side in split_pair(place))
        are_languages = source != target and {source, target} <= LANGUAGES
        return ParallelCorpus(place, source_lang=source, target_lang=target) if are_languages else ParallelCorpus(place)
    try:
        files = find_files(place)
    except UserError:
        if "://" in place:
            raise
        raise UserError(f"there is no file or folder {place}") from None
    return detect_files(files, place)


def detect_files(files: list[str], place: str) -> Data:
    """The dataset of files of one kind."""
    name = PurePosixPath(files[0]).name
    official = next((kind for pattern, kind in OFFICIAL if re.fullmatch(pattern, name)), None)
    if official:
        return official(place)
    if name.endswith(".tar"):
        return detect_shards(place, Path(files[0]).parent)
    if is_image_name(name):
        what = "an image" if len(files) == 1 else f"{len(files):,} images"
        raise UserError(
            f"{place} is {what}: training needs a folder with one folder of images per class, or a table with the "
            "columns image and label"
        )
    splits = {split_of(PurePosixPath(file).name) for file in files}
    named = len(splits) > 1 and "train" in splits and "" not in splits
    if all(map(has_answers, files)):
        questions = detect_squad(place, files) if named else None
        return questions or Squad(place if len(files) == 1 else ",".join(files))
    if is_table(name):
        tables = [PeekedTable(file) for file in files]
        return tables_in(place, tables) if named else detect_tables({"train": tables})
    find_encoding(files[0])  # which checks that it is text
    return Corpus(place)


# --- folders --------------------------------------------------------------------------------------------


def detect_folder(folder: Path) -> Data:
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    for pattern, kind in OFFICIAL:
        if any(re.fullmatch(pattern, name) for name in names):
            # torchvision has the files in FashionMNIST/raw.
            fashion = kind is Mnist and any("fashion" in part.casefold() for part in folder.resolve().parts[-2:])
            return Mnist(str(folder), "fashion") if fashion else kind(str(folder))
    if {"train", "test", "meta"} <= {name for name in names if (folder / name).is_file()}:
        return Cifar100(str(folder))
    if is_pets(folder):
        return OxfordPets(str(folder))
    if is_flowers(folder):
        return Flowers102(str(folder))
    if "dataset_dict.json" in names:
        return HubDataset(str(folder))
    with_images = [name for name in folders(folder) if mostly_images(folder / name)]
    if any(name.endswith(".tar") for name in names) and len(with_images) < 2:  # else an archive of these folders
        return detect_shards(str(folder), folder)
    files = [folder / name for name in names if (folder / name).is_file()]
    questions = [str(file) for file in files if has_answers(str(file))]
    tables = [PeekedTable(str(file)) for file in files if is_table(file) and str(file) not in questions]
    classes = [name for name in with_images if name.casefold() not in SPLIT_NAMES or split_folders(folder)]
    by_stem = len(classes) < 2 and (bool(with_images) or any(map(is_image_name, names)))
    listings = [table for table in tables if table.lists_images(by_stem) and table.label]
    if listings and len(classes) > 1:
        raise UserError(
            f"{folder} has folders of images and a table of images, {Path(listings[0].file).name}: for the table, name "
            f'it, {listings[0].file}; for the folders, set data={{"kind": "ImageFolder", "path": "{folder}"}}'
        )
    if listings:
        return tables_in(folder, listings)
    if any(map(is_image_name, names)) or (with_images and 2 * len(with_images) >= len(folders(folder))):
        return ImageFolder(str(folder))
    if tables:
        return tables_in(folder, tables)
    return (
        detect_squad(folder, questions)
        or detect_aligned(files)
        or (LabeledText(str(folder)) if TextFolder(folder).has_classes() else detect_text(folder))
    )


def detect_shards(place: str, folder: Path) -> Data:
    """Shards, with the names of the classes beside them."""
    beside = (folder / name for name in ("classes.txt", "class_names.txt"))
    return Shards(place, class_names_file=next((str(file) for file in beside if file.is_file()), ""))


def mostly_images(folder: Path) -> bool:
    """Whether at least half of the files below a folder are images."""
    names = list(walk(folder))
    return 0 < len(names) <= 2 * sum(map(is_image_name, names))


def tables_in(folder: object, tables: list[PeekedTable]) -> Data:
    """The dataset of tables in one folder, whose names indicate the split."""
    splits: dict[str, list[PeekedTable]] = {}
    for table in tables:
        splits.setdefault(split_of(Path(table.file).name), []).append(table)
    train = splits.get("train") or (tables if len(tables) == 1 else [])
    if not train or len({table.table.columns for table in train}) > 1:
        named = ", ".join(Path(table.file).name for table in tables[:4])
        raise UserError(
            f"{folder} has {len(tables)} tables, such as {named}: name one, or several as 'a.csv,b.csv', or call the "
            "tables of one dataset train, val and test"
        )
    return detect_tables({**splits, "train": train})


def split_of(name: str) -> str:
    """The split in a file name: sst2-train.tsv, dev.tsv, test_2016.csv.gz; empty if none or several."""
    splits = {SPLIT_NAMES[word] for word in re.split("[^a-z]+", name.casefold()) if word in SPLIT_NAMES}
    return splits.pop() if len(splits) == 1 else ""


def detect_squad(folder: object, files: list[str]) -> Data | None:
    if not files:
        return None
    if len(files) == 1:
        return Squad(files[0])
    parts: dict[str, list[str]] = {}
    for file in files:
        parts.setdefault(split_of(PurePosixPath(file).name), []).append(file)
    if "train" not in parts or (len(parts) > 1 and parts.keys() <= {"train", ""}):
        raise UserError(
            f"{folder} needs files of questions for training and testing, called after their split, such as train.json "
            "and dev.json"
        )
    for split_files in parts.values():
        refuse_versions(folder, list(filter(is_squad, split_files)))
    splits = {split: ",".join(split_files) for split, split_files in parts.items()}
    test, validation = splits.get("test", ""), splits.get("validation", "")
    if validation and not (test and any(question.answers for question in read(test))):
        test = validation  # questions for testing may be published without their answers
    return Squad(splits["train"], test)


def refuse_versions(folder: object, files: list[str]) -> None:
    """Files of a split are its parts, unless they have questions in common, such as v1.1 and v2.0 of SQuAD."""
    seen: dict[tuple[str, str], str] = {}
    for file in files if len(files) > 1 else ():
        questions = dict.fromkeys(((question.context, question.question) for question in read_file(file)), file)
        if both := next((name for name in questions if name in seen), None):
            raise UserError(
                f"{folder}: {PurePosixPath(seen[both]).name} and {PurePosixPath(file).name} have questions in common, "
                f"as versions of a dataset do: name those of one, {command('train', file, '--set', 'data.test=FILE')}"
            )
        seen |= questions


def detect_aligned(files: list[Path]) -> Data | None:
    """Aligned files of two languages, such as train.de and train.en."""
    stems: dict[str, dict[str, str]] = {}
    for file in files:
        stem, language = language_of(file)
        if language in LANGUAGES and not NOT_DATA.search(stem):
            stems.setdefault(stem, {})[language] = str(file)
    pairs = {stem: by_language for stem, by_language in stems.items() if len(by_language) == 2}
    if not pairs:
        return None
    languages = {tuple(sorted(by_language)) for by_language in pairs.values()}
    splits: dict[str, list[str]] = {}
    for stem in pairs:
        splits.setdefault(split_of(stem), []).append(stem)
    unnamed = splits.pop("", [])
    if "train" not in splits and len(unnamed) == 1:
        splits["train"] = unnamed
    if len(languages) > 1 or "train" not in splits:
        raise UserError(
            f"{files[0].parent} has aligned files of several kinds: join two by a plus sign, "
            f"{'+'.join(next(iter(pairs.values())).values())}, or call those of one dataset train, val and test"
        )
    source, target = direction([*languages.pop()])
    joined = {stem: f"{by_language[source]}+{by_language[target]}" for stem, by_language in pairs.items()}
    train, val, test = (",".join(joined[stem] for stem in splits.get(name, [])) for name in SPLITS)
    return ParallelCorpus(train, test, source_lang=source, target_lang=target, val=val)


def language_of(file: Path) -> tuple[str, str]:
    """Stem and language in a file name: train and de of train.de.gz."""
    name = PurePosixPath(file.stem if file.suffix in COMPRESSED else file.name)
    return name.stem, name.suffix[1:]


def direction(languages: list[str]) -> tuple[str, str]:
    """Source and target: by their names, else into English, else in order."""
    first, second, *_ = languages
    is_source, is_english = second.casefold() in SOURCE_FIRST, first.casefold() in ("en", "english")
    return (second, first) if is_source or is_english else (first, second)


def detect_text(folder: Path) -> Data:
    """Plain text, or an error that lists what a folder may contain."""
    suffixes = sorted({suffix for suffix in map(text_suffix, walk(folder)) if suffix})
    if not suffixes:
        raise UserError(
            f"{folder} has no known data: no folders of images, no table (.csv, .tsv, .jsonl, .parquet), no text (.txt)"
        )
    return Corpus(",".join(f"{glob.escape(str(folder))}/**/*{suffix}" for suffix in suffixes))


def walk(folder: Path) -> Iterator[str]:
    for _, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from names


def text_suffix(name: str) -> str:
    """.txt, .md, .txt.xz, ...; empty for other files."""
    if name.startswith(".") or NOT_DATA.match(name) or table_suffix(name) not in TEXT_SUFFIXES:
        return ""
    suffixes = PurePosixPath(name).suffixes
    return "".join(suffixes[-2:] if suffixes[-1].lower() in COMPRESSED else suffixes[-1:])


# --- tables ---------------------------------------------------------------------------------------------


class PeekedTable:
    """A table and a sample of its columns."""

    def __init__(self, file: str) -> None:
        self.file, self.table = file, read_table(file)
        self.samples = sample_columns(self.table)

    def named(self, names: tuple[str, ...]) -> str | None:
        return named_column(self.table.columns, "", names, self.file)

    @property
    def label(self) -> str | None:
        """A label column; any one if there are several."""
        return self.named(LABEL_COLUMNS) or next((sample.name for sample in self.samples if sample.is_label), None)

    def lists_images(self, by_stem: bool = False) -> bool:
        """Whether a column names existing image files; with `by_stem` also one of another name, without suffixes."""
        if "://" in self.file:
            return False
        column, finder = self.named(IMAGE_COLUMNS), FileFinder(Path(self.file).parent)
        chosen = [sample for sample in self.samples if sample.is_image or sample.name == column]
        if any(finder.find(value.strip()) for sample in chosen for value in sample.values[:LOOKED_UP]):
            return True
        return by_stem and stem_column(self.samples, finder) is not None


def detect_tables(splits: dict[str, list[PeekedTable]]) -> Data:
    """The dataset of tables by split: images, translations, labeled texts or plain text."""
    first = splits["train"][0]
    label, text, columns = first.label, first.named(TEXT_COLUMNS), first.table.columns
    if label:  # the test files of GLUE have no labels
        splits = {name: tables for name, tables in splits.items() if label in tables[0].table.columns}
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    files = {name: ",".join(table.file for table in tables) for name, tables in splits.items()}
    train, val, test = (files.get(name, "") for name in SPLITS)
    if first.lists_images():
        return ImageTable(train, test=test, val=val)
    languages = [sample.name for sample in first.samples if sample.name.casefold() in LANGUAGES and not sample.is_label]
    if len(languages) > 1 and first.named(LABEL_COLUMNS) in (None, *languages):
        source, target = direction(languages)
        return ParallelCorpus(train, test, source_lang=source, target_lang=target, val=val)
    texts = text or any(sample.is_text and not is_time(sample.values[0]) for sample in first.samples)
    samples = plain_samples(first.table)
    time = None if texts else find_time(samples)
    if time and any(sample.values and holds_numbers(sample) for sample in samples if sample.name != time):
        return SeriesTable(train)
    if label and texts:
        return LabeledText(train, test, val)
    if text and table_suffix(first.file) not in (".csv", ".tsv"):
        return Corpus(train, test, text_field=text)
    if any(sample.is_image for sample in first.samples) or first.lists_images(by_stem=True):
        return ImageTable(train, test=test, val=val)  # whose error says which files are missing
    if time:
        raise UserError(
            f"{first.file} has no column of numbers, such as 1234.5, to forecast besides {time!r}, among "
            f"{', '.join(columns)}"
        )
    if embeds_images(first.file):
        return detect_embedded(first.file, splits)
    refuse_times(first.file, samples)
    what = "labels, called label or with few different values" if texts else "texts, images or times"
    hint = "" if texts else ", or image and label, or write a row for each time and name them date"
    some = ", ".join([*columns[:10], *(["..."] if len(columns) > 10 else [])])
    raise UserError(f"{first.file} has no column of {what}, among {some}: name the columns text and label{hint}")


def detect_embedded(file: str, splits: dict[str, list[PeekedTable]]) -> Data:
    """Tables with the images themselves, which `datasets` reads by their folder."""
    folder, table_files = Path(file).parent, {table.file for tables in splits.values() for table in tables}
    if "://" in file or any(is_table(other) and str(other) not in table_files for other in folder.iterdir()):
        raise UserError(
            f"{file} holds the images themselves: put the tables of one dataset into a folder, and name that"
        )
    return HubDataset(str(folder))


# --- Hugging Face Hub -----------------------------------------------------------------------------------


def detect_hub(name: str) -> Data:
    """A dataset on the Hub: its tables if they contain texts, else the dataset by name."""
    try:
        system = file_system("hf://")[0]
        files = [system.unstrip_protocol(file) for file in sorted(system.find(f"datasets/{name}"))]
        if not files:
            raise FileNotFoundError("there is no such dataset")
    except Exception as reason:  # no network, no such dataset, huggingface_hub missing: many types
        raise UserError(
            f"cannot list the files of {name!r} on the Hugging Face Hub: {type(reason).__name__}: {one_line(reason)}; "
            "if offline, give the path of a local copy"
        ) from reason
    tables = [file for file in files if is_table(file)]
    splits: dict[str, list[PeekedTable]] = {}
    for file in tables:
        if split := "train" if len(tables) == 1 else split_of(PurePosixPath(file).name):
            splits.setdefault(split, []).append(PeekedTable(file))
    if "train" in splits and any(sample.is_text for sample in splits["train"][0].samples):
        subsets = list(dict.fromkeys(PurePosixPath(table.file).parent.name for table in splits["train"]))
        if len(subsets) > 1:
            raise UserError(
                f"{name!r} on the Hugging Face Hub has {len(subsets)} subsets, such as {', '.join(subsets[:4])}: name "
                f"one, hf:{name}/{subsets[0]}"
            )
        questions = [table.file for tables in splits.values() for table in tables if has_answers(table.file)]
        return detect_squad(name, questions) or detect_tables(splits)
    return HubDataset(name)
