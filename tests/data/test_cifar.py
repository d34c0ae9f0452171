"""CIFAR in its official layouts: small files, damaged ones, and a pickle that would run code."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from allmlp.data import cifar, paths
from allmlp.data.cifar import Cifar10, Cifar100
from allmlp.data.dataset import ImageDataset, InMemory
from allmlp.errors import UserError

COUNT = 4
PARTS = [f"data_batch_{part}" for part in range(1, 6)] + ["test_batch"]


def batch(part: int, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(part)
    return source.integers(0, 256, (COUNT, 3072), dtype=np.uint8), source.integers(0, classes, COUNT)


def old_pickle(pixels: np.ndarray, **lists: list[int]) -> bytes:
    """As Python 2 wrote it: protocol 2, byte strings as strings, numpy's old module name."""
    text = b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    text += b"(K\x01" + f"I{len(pixels)}\nI3072\n".encode() + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    text += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    raw = pixels.tobytes()
    text += b"T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    for name, values in lists.items():
        text += b"U" + bytes([len(name)]) + name.encode() + b"](" + b"".join(b"K" + bytes([v]) for v in values) + b"e"
    return text + b"u."


def binary(folder: Path) -> None:
    for number, name in enumerate(PARTS):
        pixels, labels = batch(number)
        (folder / f"{name}.bin").write_bytes(np.c_[labels.astype(np.uint8), pixels].tobytes())


def python(folder: Path) -> None:
    for number, name in enumerate(PARTS):
        pixels, labels = batch(number)
        (folder / name).write_bytes(old_pickle(pixels, labels=labels.tolist()))


def new_python(folder: Path, protocol: int) -> None:
    for number, name in enumerate(PARTS):
        pixels, labels = batch(number)
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=protocol))


def packed(folder: Path, name: str = "cifar10", classes: int = 10) -> None:
    for number, part in enumerate([*(f"train{part}" for part in range(1, 6)), "test"]):
        pixels, labels = batch(number, classes)
        strips = pixels.reshape(2, COUNT // 2, 3, 32, 32).transpose(0, 1, 3, 4, 2).reshape(2, -1, 32, 3)
        labels = labels.astype(np.uint8)
        write_zip(
            folder / f"{name}-{part}.zip", strips, labels=labels, **({"coarse": labels // 5} if classes > 10 else {})
        )


def write_zip(file: Path, strips: np.ndarray, **arrays: np.ndarray) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            target = io.BytesIO()
            np.save(target, array, allow_pickle=True)
            archive.writestr(f"{name}.npy", target.getvalue())
        for number, strip in enumerate(strips):
            target = io.BytesIO()
            Image.fromarray(strip).save(target, "WEBP", lossless=True, exact=True)
            archive.writestr(f"{number:03}.webp", target.getvalue())


def archived(write: Callable[[Path], None], inside: str, name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        content = folder / "content"
        content.mkdir()
        write(content)
        with tarfile.open(folder / name, "w:gz") as tar:
            tar.add(content, inside)
        for file in content.iterdir():
            file.unlink()
        content.rmdir()

    return make


FORMS: dict[str, Callable[[Path], None]] = {
    "binary": binary,
    "python 2": python,
    "python 3, protocol 2": partial(new_python, protocol=2),
    "python 3, protocol 4": partial(new_python, protocol=4),
    "packed": packed,
    "binary.tar.gz": archived(binary, "cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    "python.tar.gz": archived(python, "cifar-10-batches-py", "cifar-10-python.tar.gz"),
}


def resident(split: object) -> InMemory:
    assert isinstance(split, InMemory)
    return split


def check(data: ImageDataset) -> None:
    pixels, labels = (np.concatenate(parts) for parts in zip(*map(batch, range(5))))
    train, test = resident(data.train), resident(data.test)
    assert torch.equal(train.examples.images, torch.from_numpy(pixels.reshape(-1, 3, 32, 32)))
    assert train.examples.labels.tolist() == labels.tolist() and train.examples.labels.dtype == torch.int64
    assert test.examples.labels.tolist() == batch(5)[1].tolist() and data.class_names[3] == "cat"


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    FORMS[form](folder)
    check(Cifar10(path=str(folder)).load())
    for variable in (tmp_path, folder):
        monkeypatch.setenv("ALLMLP_DATA", str(variable))
        check(Cifar10().load())
    if form.endswith(".tar.gz"):
        check(Cifar10(path=str(next(folder.iterdir()))).load())
        assert len(list(folder.iterdir())) == 1


def test_the_extracted_folder_is_found_below(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    binary(folder)
    check(Cifar10(path=str(tmp_path)).load())


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("labels", ["fine", "coarse"])
def test_cifar100(form: str, labels: str, tmp_path: Path) -> None:
    for number, name in enumerate(("train", "test")):
        pixels, fine = batch(number, 100)
        coarse = fine // 5
        if form == "binary":
            (tmp_path / f"{name}.bin").write_bytes(np.c_[coarse, fine, pixels].astype(np.uint8).tobytes())
        else:
            lists = {"fine_labels": fine.tolist(), "coarse_labels": coarse.tolist()}
            (tmp_path / name).write_bytes(old_pickle(pixels, **lists))
    data = Cifar100(path=str(tmp_path), labels=labels).load()  # type: ignore[arg-type]
    wanted = batch(0, 100)[1] // (1 if labels == "fine" else 5)
    assert resident(data.train).examples.labels.tolist() == wanted.tolist()
    assert torch.equal(resident(data.test).examples.images.flatten(1), torch.from_numpy(batch(1, 100)[0]))
    assert len(set(data.class_names)) == len(data.class_names) == (100 if labels == "fine" else 20)


@pytest.mark.parametrize("labels", ["fine", "coarse"])
def test_packed_cifar100(labels: str, tmp_path: Path) -> None:
    packed(tmp_path, "cifar100", 100)
    data = Cifar100(path=str(tmp_path), labels=labels).load()  # type: ignore[arg-type]
    pixels, fine = (np.concatenate(parts) for parts in zip(*(batch(number, 100) for number in range(5))))
    assert resident(data.train).examples.labels.tolist() == (fine // (1 if labels == "fine" else 5)).tolist()
    assert torch.equal(resident(data.train).examples.images.flatten(1), torch.from_numpy(pixels))


def test_names_are_sorted_as_published() -> None:
    assert list(cifar.FINE_CLASSES) == sorted(cifar.FINE_CLASSES) and list(cifar.COARSE_CLASSES) == sorted(
        cifar.COARSE_CLASSES
    )


# --- damaged --------------------------------------------------------------------------------------------


def test_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no cifar10 in .*: put cifar-10-binary.tar.gz there .*download=true"):
        Cifar10(path=str(tmp_path / "nowhere")).load()
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "1.jpg").touch()
    with pytest.raises(UserError, match=r"for its own images: --set data=ImageFolder --set data\.path=.*photos$"):
        Cifar10(path=str(tmp_path / "photos")).load()
    monkeypatch.delenv("ALLMLP_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no cifar100 in data/cifar100 or data:"):
        Cifar100().load()


def test_incomplete(tmp_path: Path) -> None:
    binary(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(UserError, match=r"incomplete, without data_batch_3.bin"):
        Cifar10(path=str(tmp_path)).load()


@pytest.mark.parametrize(
    ("form", "file", "message"),
    [
        ("binary", "data_batch_2.bin", r"data_batch_2.bin: its .* bytes are not a multiple of the record size"),
        ("python 2", "data_batch_2", r"data_batch_2: is not a CIFAR batch"),
        ("packed", "cifar10-train2.zip", r"cifar10-train2.zip: is damaged"),
        ("binary.tar.gz", "cifar-10-binary.tar.gz", r"is damaged or not a .tar.gz"),
    ],
)
@pytest.mark.parametrize("keep", [0, 0.4])
def test_truncated(form: str, file: str, message: str, keep: float, tmp_path: Path) -> None:
    FORMS[form](tmp_path)
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UserError, match=message):
        Cifar10(path=str(tmp_path)).load()


def test_a_label_out_of_range(tmp_path: Path) -> None:
    binary(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(UserError, match=r"test_batch.bin: has labels outside 0 to 9"):
        Cifar10(path=str(tmp_path)).load()


def test_packed_labels_are_never_unpickled(tmp_path: Path) -> None:
    packed(tmp_path)
    write_zip(tmp_path / "cifar10-test.zip", np.zeros((1, 32, 32, 3), np.uint8), labels=np.array([{}], dtype=object))
    with pytest.raises(UserError, match=r"cifar10-test.zip: is damaged: .*allow_pickle=False"):
        Cifar10(path=str(tmp_path)).load()


class Attack:
    """Unpickled plainly, this creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_code_is_refused(protocol: int, tmp_path: Path) -> None:
    python(tmp_path)
    mark = tmp_path / "mark"
    attack = pickle.dumps({"data": Attack(mark), "labels": [0]}, protocol=protocol)
    (tmp_path / "data_batch_4").write_bytes(attack)
    with pytest.raises(UserError, match=r"data_batch_4: refused: the pickle refers to (posix|nt).mkdir"):
        Cifar10(path=str(tmp_path)).load()
    assert not mark.exists()
    pickle.loads(attack)
    assert mark.exists()  # the attack was a real one


@pytest.mark.parametrize(
    "text",
    [
        b"cbuiltins\neval\n(V1+1\ntR.",
        b"cnumpy\nload\n(Vx\ntR.",
        b"cnumpy\nndarray.tofile\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.dump\x93.",
        b"Pname\n.",
        b"}.",
        b"N.",
        b"",
        b"(" * 1000,
        b"\x80\x04\x8a\xff.",
        b"r\xff\xff\xff\x7f.",
    ],
)
def test_odd_pickles(text: bytes) -> None:
    with pytest.raises(UserError):
        cifar.read_pickle(text, "labels")


# --- downloading ----------------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the URL that serves it."""
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_download(site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, url = site
    FORMS["binary.tar.gz"](folder)
    content = (folder / "cifar-10-binary.tar.gz").read_bytes()
    good = hashlib.md5(content).hexdigest()

    def served(md5: str) -> Callable[[str, str], cifar.Archive]:
        return lambda _, __: original(f"{url}/cifar-10-binary.tar.gz", md5)

    original, target = cifar.Archive, tmp_path / "deep" / "cifar10"
    monkeypatch.setattr(cifar, "Archive", served("0" * 32))
    with pytest.raises(UserError, match=f"has md5 {good} instead of 0000"):
        Cifar10(path=str(target), download=True).load()
    assert list(target.iterdir()) == []
    monkeypatch.setattr(cifar, "Archive", served(good))
    with pytest.raises(UserError, match="no cifar10 in"):
        Cifar10(path=str(target)).load()
    check(Cifar10(path=str(target), download=True).load())
    assert [file.name for file in target.iterdir()] == ["cifar-10-binary.tar.gz"]
    (folder / "cifar-10-binary.tar.gz").unlink()
    check(Cifar10(path=str(target), download=True).load())  # not downloaded again


def test_offline(site: tuple[Path, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot download .*/absent.tar.gz to .*404.*copy it there"):
        paths.download(f"{site[1]}/absent.tar.gz", "", tmp_path / "x" / "absent.tar.gz")
    with pytest.raises(UserError, match="cannot download"):
        paths.download("http://127.0.0.1:1/file", "", tmp_path / "y" / "file")
    assert not list((tmp_path / "y").iterdir())


def test_the_real_one() -> None:
    """All of CIFAR-10, exactly."""
    try:
        data = Cifar10().load() if os.environ.get("ALLMLP_DATA") else None
    except UserError:
        data = None
    if data is None:
        pytest.skip("no CIFAR-10 in $ALLMLP_DATA")
    pixels = {
        len(split): resident(split).examples.images.permute(0, 2, 3, 1).contiguous()
        for split in (data.train, data.test)
    }
    digests = {count: hashlib.sha256(images.numpy().tobytes()).hexdigest() for count, images in pixels.items()}
    assert digests == {
        50000: "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        10000: "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    }
    images = resident(data.train).examples.images.double() / 255
    assert images.mean((0, 2, 3)).tolist() == pytest.approx(data.mean)
    assert images.std((0, 2, 3)).tolist() == pytest.approx(data.std, rel=1e-5)
