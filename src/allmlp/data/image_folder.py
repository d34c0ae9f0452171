"""A folder of images with one subfolder per class."""

from __future__ import annotations

import os
from pathlib import Path

from allmlp.data.columns import SPLIT_NAMES, is_image_name
from allmlp.data.dataset import ImageDataset
from allmlp.data.decode import SUFFIXES
from allmlp.data.image_files import FileSplit, ImageFileData, LabeledFile
from allmlp.data.splits import listing
from allmlp.errors import UserError, did_you_mean, one_line, plural
from allmlp.files import expand_user

UNLABELED_FOLDERS = ("unlabeled", "unlabelled", "unsorted", "unsup", "__macosx")


class ImageFolder(ImageFileData):
    """PATH/CLASS/..., or PATH/train/CLASS/... with PATH/val/CLASS/... or PATH/test/CLASS/... or both.

    The split folders may also be called training, valid, validation, dev or testing; `val` and `test` name others. If
    only one of val and test is there, it is the test split. Images outside of class folders, folders without images and
    folders called unlabeled are left out. Missing splits are created as in `ImageFileData`.
    """

    def load(self) -> ImageDataset:
        root = expand_user(self.path)
        if not root.is_dir():
            raise UserError(f"{root} is not a folder: set data.path to the folder of images")
        while inner := only_folder(root):
            root = inner
        split_paths = split_folders(root)
        train = split_paths.get("train", root)
        held_out = {name: folder for name, folder in split_paths.items() if name != "train"} if train != root else {}
        for name, requested in (("validation", self.val), ("test", self.test)):
            if requested:
                held_out[name] = root / requested
                if not (root / requested).is_dir():
                    raise UserError(
                        f"{root} has no {name} folder {requested!r}{did_you_mean(requested, folders(root))}"
                    )
        if "test" not in held_out and "validation" in held_out:
            held_out["test"] = held_out.pop("validation")
        notes = [] if train == root else unused_folders(root, [train, *held_out.values()])
        for name, folder in [*held_out.items()]:
            if not folders(folder) and any(map(is_image_name, os.listdir(folder))):
                notes.append(f"{folder} has no folders of classes and is not used")
                del held_out[name]
        classes, listed = list_classes(train, [*held_out.values()], notes)
        splits = {"train": FileSplit(train, listed)}
        for name in [name for name in ("validation", "test") if name in held_out]:
            notes += other_folders(held_out[name], classes, train)
            splits[name] = FileSplit(held_out[name], list_images(held_out[name], classes, notes))
            if not splits[name].files:
                raise UserError(f"{held_out[name]} has no images ({', '.join(sorted(SUFFIXES))})")
        return self.build(splits, classes, notes)


def split_folders(root: Path) -> dict[str, Path]:
    """Folders of the splits "train", "validation" and "test"; empty if a folder of that name seems to be a class."""
    paths: dict[str, Path] = {}
    for name in folders(root):
        split = SPLIT_NAMES.get(name.casefold())
        if split and split not in paths:
            paths[split] = root / name
    return paths if "train" in paths and folders(paths["train"]) else {}


def only_folder(root: Path) -> Path | None:
    """The only folder in `root`, if it has subfolders and there are no images beside it or directly in it."""
    inner = [root / name for name in folders(root)]
    if len(inner) != 1 or not folders(inner[0]) or any(map(is_image_name, [*os.listdir(root), *os.listdir(inner[0])])):
        return None
    return inner[0]


def list_classes(root: Path, others: list[Path], notes: list[str]) -> tuple[tuple[str, ...], list[LabeledFile]]:
    """The classes, and the images, of a folder for training."""
    names = [name for name in folders(root) if root / name not in others]
    stray = [name for name in sorted(os.listdir(root)) if is_image_name(name) and not name.startswith(".")]
    if not names:
        table = "" if not stray else ", or give a table with the columns image and label (images.csv)"
        raise UserError(f"{root} has no subfolders: it needs one per class{table}")
    if stray:
        notes.append(f"{plural(len(stray), 'image is', 'images are')} outside of class folders in {root} and not used")
    classes, files = used_folders(root, names, notes)
    if not classes:
        raise UserError(f"{root} has no images ({', '.join(sorted(SUFFIXES))})")
    if all(name.casefold() in SPLIT_NAMES for name in classes):
        raise UserError(
            f"{root / classes[-1]} has no folders of classes: the images of each class must be in a folder of its own, "
            "or listed in a table with the columns image and label"
        )
    if len(classes) == 1:
        raise UserError(f"{root} has only one class, {classes[0]!r}: at least two are needed")
    return classes, files


def used_folders(root: Path, names: list[str], notes: list[str]) -> tuple[tuple[str, ...], list[LabeledFile]]:
    """The folders among `names` that are classes, since they contain images, and the images."""
    labeled = tuple(name for name in names if name.casefold() not in UNLABELED_FOLDERS)
    files = list_images(root, labeled, notes)
    filled = {Path(file).parts[0] for file, _ in files}
    empty = [name for name in names if name not in filled]
    if empty and filled:
        notes.append(f"{plural(len(empty), 'folder is', 'folders are')} not used as classes: {listing(empty)}")
    classes = tuple(name for name in names if name in filled)
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, [LabeledFile(file, numbers[Path(file).parts[0]]) for file, _ in files]


def unused_folders(root: Path, used: list[Path]) -> list[str]:
    """A note about folders beside those of the splits."""
    others = [name for name in folders(root) if not any(root / name in (folder, *folder.parents) for folder in used)]
    are = plural(len(others), "folder is", "folders are")
    return [f"{are} not used beside those of the splits: {listing(others)}"] if others else []


def other_folders(root: Path, classes: tuple[str, ...], train: Path) -> list[str]:
    """A note about folders of a held-out split that are not classes; one with images must be a class of `train`."""
    others = [name for name in folders(root) if name not in classes]
    for name in others:
        if name.casefold() not in UNLABELED_FOLDERS and list_images(root, (name,)):
            raise UserError(f"{root / name}: class {name!r} is not in {train}{did_you_mean(name, classes)}")
    are = plural(len(others), "folder is", "folders are")
    return [f"{are} not used as classes in {root}: {listing(others)}"] if others else []


def folders(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as reason:
        raise UserError(f"cannot read {path}: {one_line(reason)}") from None


def list_images(root: Path, classes: tuple[str, ...], notes: list[str] | None = None) -> list[LabeledFile]:
    """Path relative to `root` and label of every image in the class folders, sorted by name.

    Links to other folders are followed, but not those to `root`, and what is in it or around it.
    """
    labeled, others, base = [], list[str](), root.resolve()
    seen = {base, *base.parents}

    def refuse(reason: OSError) -> None:
        raise UserError(f"cannot read {reason.filename}: {one_line(reason)}")

    def is_new(path: Path) -> bool:
        target = path.resolve() if path.is_symlink() else path
        is_seen = path.is_symlink() and (target in seen or base in target.parents)
        seen.add(target)
        return not is_seen

    for label, name in enumerate(classes):
        top, images, strays = root / name, [], list[str]()
        for folder, inner, files in os.walk(top, onerror=refuse if top.exists() else None, followlinks=True):
            inner[:] = sorted(name for name in inner if not name.startswith(".") and is_new(Path(folder, name)))
            below = Path(folder).relative_to(root).as_posix()
            for file in sorted(file for file in files if not file.startswith(".")):
                (images if is_image_name(file) else strays).append(f"{below}/{file}")
        labeled += [LabeledFile(file, label) for file in images]
        others += strays if images else []
    if others and notes is not None:
        are = plural(len(others), "file is", "files are")
        notes.append(f"{are} not read, without the suffix of an image: {listing(others)}")
    return labeled
