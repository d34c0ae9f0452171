"""Malicious files are rejected with one line, without running code and with bounded memory."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import allmlp
from allmlp.layers import LayerNorm, LMHead
from allmlp.models.bert import bert
from allmlp.models.gmlp import gmlp
from allmlp.models.gpt2 import gpt2
from allmlp.models.llama import llama
from allmlp.models.mixer import mixer
from allmlp.models.vit import vit
from allmlp.spec import to_json
from allmlp.weights.convert import convert
from allmlp.weights.tensors import read

MIB = 2**20
HUGE = 2**29
"""Single-precision numbers in 2 GiB."""

CHILD = """
import json, resource, sys
from allmlp.errors import UserError
from allmlp.weights.convert import convert
from allmlp.weights.tensors import read
import allmlp

size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {room}, size + {room}))
before, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {{}}
for name in sys.argv[1:]:
    try:
        convert(name, "target")
    except UserError as reason:
        said[name] = str(reason)
said["grown"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps(said))
"""


def refused_with_little_memory(folder: Path, names: list[str], room: int = 192 * MIB) -> dict[str, str]:
    """The message for each file, from a process that may allocate `room` more bytes."""
    code = CHILD.format(room=room)
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("grown") < 128 * 1024, "in KiB"
    assert said.keys() == set(names) and not (folder / "target").exists()
    assert all("\n" not in text for text in said.values())
    return said


# --- memory ------------------------------------------------------------------------------------------------


def zeros(archive: zipfile.ZipFile, name: str, start: bytes, length: int) -> None:
    with archive.open(name, "w", force_zip64=True) as stream:
        stream.write(start)
        for _ in range(length // MIB):
            stream.write(bytes(MIB))


def array_header(shape: str, kind: str = "<f4") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def make_archives(folder: Path) -> dict[str, str]:
    with zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        zeros(archive, "stem/kernel.npy", array_header(f"({256 * MIB // 4},)"), 256 * MIB)
    with zipfile.ZipFile(folder / "claim.npz", "w") as archive:
        archive.writestr("stem/kernel.npy", array_header(f"({HUGE},)"))
    content = (folder / "bomb.npz").read_bytes()
    entry = content.rindex(b"PK\x01\x02")
    short = struct.pack("<I", len(array_header(f"({256 * MIB // 4},)")) + 256 * MIB)
    place = content.index(short, entry)
    # The zip directory declares a small size; the compressed stream is as long as before.
    (folder / "lie.npz").write_bytes(content[:place] + struct.pack("<I", 1000) + content[place + 4 :])
    with zipfile.ZipFile(folder / "bomb.pth", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        zeros(archive, "archive/data/0", b"", 256 * MIB)
    with zipfile.ZipFile(folder / "long.pth", "w") as archive:
        zeros(archive, "archive/data.pkl", b"\x80\x02", 17 * MIB)
    return {
        "bomb.npz": "declares far more data than a file of its size can hold; it was rejected",
        "claim.npz": f"stem/kernel declares the shape [{HUGE}], but has 0 bytes",
        "lie.npz": "is damaged or not a weights file: Bad CRC-32",
        "bomb.pth": "is compressed, which torch.save never does; it was rejected",
        "long.pth": f"has a pickle of {17 * MIB + 2:,} bytes; it was rejected",
    }


class Call:
    """A pickle that calls something."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def make_pickles(folder: Path) -> dict[str, str]:
    torch.save({"stem.proj.weight": torch.zeros(1).expand(HUGE)}, folder / "view.pth")
    stream = io.BytesIO()
    torch.save({"stem.proj.weight": torch.zeros(300)}, stream, _use_new_zipfile_serialization=False)
    few, many = b"M" + struct.pack("<H", 300), b"J" + struct.pack("<i", HUGE)
    assert few in stream.getvalue()
    (folder / "legacy.pth").write_bytes(stream.getvalue().replace(few, many))
    for name, zipped in (("bytes.pth", True), ("bytes_legacy.pth", False)):
        torch.save({"x": Call(bytearray, 2**31)}, folder / name, _use_new_zipfile_serialization=zipped)
    torch.save({"x": Call(torch.Tensor, HUGE)}, folder / "tensor.pth")
    (folder / "plain.pth").write_bytes(pickle.dumps({"x": Call(os.mkdir, str(folder / "harm"))}, protocol=4))
    torch.save({"x": Call(os.mkdir, str(folder / "harm"))}, folder / "code.pth")
    run = "loading it could run code, so it was rejected"
    return {
        "view.pth": "its tensors declare more elements than the file holds",
        "legacy.pth": f"it declares {HUGE:,} elements, more than the file holds",
        "bytes.pth": f"contains more than plain tensors (__builtin__.bytearray); {run}",
        "bytes_legacy.pth": f"contains more than plain tensors (__builtin__.bytearray); {run}",
        "tensor.pth": run,
        "plain.pth": run,
        "code.pth": f"contains more than plain tensors (posix.mkdir); {run}",
    }


def make_safetensors(folder: Path) -> dict[str, str]:
    header = json.dumps({"x": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}).encode()
    (folder / "claim.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "header.safetensors").write_bytes(struct.pack("<Q", 2**31) + b"{}")
    (folder / "sparse.safetensors").write_bytes(struct.pack("<Q", 2**31 - 8) + b"{")
    os.truncate(folder / "sparse.safetensors", 2**31)
    return {
        "claim.safetensors": "is damaged or not a safetensors file",
        "header.safetensors": "is damaged or not a weights file",
        "sparse.safetensors": "it declares a header of 2,147,483,640 bytes",
    }


def make_folders(folder: Path) -> dict[str, str]:
    deep = mixer(1, 8, patch_size=4, img_size=8, num_classes=3)
    allmlp.save(deep.build(), folder / "deep")
    (folder / "deep" / "config.json").write_text(to_json(deep.replace(depth=10_000)))
    allmlp.save(deep.build(), folder / "long")
    with (folder / "long" / "config.json").open("r+b") as stream:
        stream.truncate(2**31)
    (folder / "nested").mkdir()
    (folder / "nested" / "config.json").write_text('{"a":' * 100_000)
    save_file({"x": torch.zeros(1)}, folder / "nested" / "model.safetensors")
    return {
        "deep": "is already a model folder; choose a format with to=",
        "long": "is larger than 67,108,864 bytes; it is not read",
        "nested": "cannot read nested/config.json",
    }


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    expected: dict[str, str] = {}
    for make in (make_archives, make_pickles, make_safetensors, make_folders):
        expected |= make(tmp_path)
    said = refused_with_little_memory(tmp_path, list(expected))
    for name, words in expected.items():
        assert words in said[name], (name, said[name])
    assert not (tmp_path / "harm").exists()
    with pytest.raises(allmlp.UserError, match="missing"):
        allmlp.load(tmp_path / "deep")
    with pytest.raises(allmlp.UserError, match="is larger than 1,048,576 bytes"):
        allmlp.load(tmp_path / "long")


@pytest.mark.slow
@pytest.mark.parametrize(("to", "name"), [("google", "mixer.npz"), ("timm", "mixer.safetensors")])
def test_a_mixer_is_converted_within_one_and_a_half_times_its_size(to: str, name: str, tmp_path: Path) -> None:
    """Mixer-B/16, 240 MB, converted and back: the peak memory on top of what torch and the library take."""
    with torch.device("meta"):
        model = allmlp.create("mixer_b16")
    model.to_empty(device="cpu")
    for weight in model.parameters():
        nn.init.constant_(weight, 0.5)
    allmlp.save(model, tmp_path / "ours")
    size = (tmp_path / "ours" / "model.safetensors").stat().st_size
    del model
    code = """
import os, sys
from pathlib import Path
from allmlp.weights.convert import convert

def peak():
    # Not getrusage's maximum: that begins with what the parent had when it forked.
    (found,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(found) * 1024

name, to = sys.argv[1:]
for arguments in (["ours", name, to], [name, "again"]):
    if not os.fork():  # whose peak begins with what it has
        before = peak()
        convert(*arguments)
        print(peak() - before, flush=True)
        os._exit(0)
    assert not os.wait()[1]
"""
    command = [sys.executable, "-c", code, name, to]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    peaks = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert len(peaks) == 2 and max(peaks) < 1.5 * size, (size, done.stdout)


# --- damage ------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"patch_size": 4, "img_size": 8, "num_classes": 3}
LUCIDRAINS = {name: LayerNorm(1e-5) for name in ("norm", "block.norm", "block.channel.inner.norm")}
HEAD = LMHead(bias=True, transform=True)
GOOD: dict[str, tuple[Any, str]] = {
    "google": (mixer(1, 8, **SMALL), "weights.npz"),
    "timm": (gmlp(1, 8, **SMALL), "weights.safetensors"),
    "lucidrains": (allmlp.create(gmlp(1, 8, **SMALL), overrides=LUCIDRAINS).spec, "weights.pth"),
    "vit": (vit(1, 8, 2, **SMALL), "hf"),
    "bert": (bert(1, 8, 2, seq_len=4, vocab_size=9, head=HEAD), "hf"),
    "gpt2": (gpt2(1, 8, 2, seq_len=4, vocab_size=9), "hf"),
    "llama": (llama(1, 8, 12, 2, 1, seq_len=4, vocab_size=9), "hf"),
}


def make(kind: str, folder: Path) -> Path:
    """A valid file or folder of another library; returns its path."""
    spec, name = GOOD[kind]
    model = spec.build()
    for weight in model.parameters():
        nn.init.normal_(weight)
    allmlp.save(model, folder / "ours")
    return convert(str(folder / "ours"), str(folder / name), to="hf" if name == "hf" else kind)


LOADED = set[tuple[bytes, bytes]]()
"""Digests of the files of model folders that were loaded: many changes to a file change nothing in the model."""


def digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def tried(source: Path, target: Path) -> bool:
    """Whether it was converted; otherwise it was rejected with one line."""
    try:
        convert(str(source), str(target))
    except allmlp.UserError as reason:
        assert "\n" not in str(reason) and str(reason)
        return False
    made = digest(target / "config.json"), digest(target / "model.safetensors")
    if made not in LOADED:
        state = allmlp.load(target).state_dict()
        assert all(tensor.isfinite().all() for tensor in state.values())
        LOADED.add(made)
    return True


@pytest.mark.parametrize("kind", GOOD)
def test_bytes_are_changed(kind: str, tmp_path: Path) -> None:
    """Flip, remove or repeat some bytes of the weights and of the files next to them."""
    source, draw, outcomes = make(kind, tmp_path), random.Random(0), set()
    assert tried(source, tmp_path / "good")
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    for number in range(90):
        file = files[number % len(files)]
        content = file.read_bytes()
        spoilt = bytearray(content)
        # Half of the damage is done near the start, where the names are.
        place = draw.randrange(min(len(spoilt), 400) if number % 4 < 2 else len(spoilt))
        if number % 3 == 0:
            for offset in range(draw.randint(1, 3)):
                spoilt[(place + offset) % len(spoilt)] ^= draw.randint(1, 255)
        elif number % 3 == 1:
            del spoilt[place : place + draw.randint(1, 64)]
        else:
            spoilt[place:place] = spoilt[place : place + draw.randint(1, 64)]
        file.write_bytes(spoilt)
        outcomes.add(tried(source, tmp_path / "target"))
        file.write_bytes(content)
    assert False in outcomes and tried(source, tmp_path / "good")


JUNK: list[Any] = [None, True, -1, 0, 1e308, 10**400, "", "12x8", [], [[2, 2]], {"0": 1}, "\n"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "bert", "gpt2", "llama"])
def test_settings_are_changed(kind: str, tmp_path: Path) -> None:
    """Any content of a configuration gives the model or a one-line error."""
    source = make(kind, tmp_path)
    for file in sorted(source.glob("*.json")):
        good = json.loads(file.read_text())
        for name in [*good, "pretrained_cfg", "position_embedding_type", "is_decoder", "rope_parameters", "head_dim"]:
            for junk in JUNK:
                file.write_text(json.dumps(good | {name: junk}))
                tried(source, tmp_path / "target")
        file.write_text(json.dumps(good))
    assert tried(source, tmp_path / "good")


@pytest.mark.slow
@pytest.mark.parametrize("kind", GOOD)
def test_shapes_are_changed(kind: str, tmp_path: Path) -> None:
    """Each tensor in turn with a dimension less, empty, of the wrong dtype, renamed, or missing."""
    source = make(kind, tmp_path)
    tensors = read(source / "model.safetensors" if source.is_dir() else source)
    assert tried(source, tmp_path / "good")
    for name, tensor in list(tensors.items()):
        for change in (
            {name: torch.tensor(1.0)},
            {name: torch.zeros(0)},
            {name: torch.zeros(0, *tensor.shape[1:])},
            {name: tensor.flatten() if tensor.dim() > 1 else tensor[:-1]},
            {name: tensor[None]},
            {name: tensor.to(torch.int64)},
            {name: torch.full_like(tensor, torch.nan)},
            {name + "x": tensor},
            {name: None},
        ):
            spoilt = {key: value.clone() for key, value in (tensors | change).items() if value is not None}
            save_file(spoilt, tmp_path / "spoilt")
            assert not tried(tmp_path / "spoilt", tmp_path / "target"), (name, change)


def test_numbers_of_other_kinds(tmp_path: Path) -> None:
    """Half precision is supported; integers, and floats that only torch has, are rejected."""
    source = make("google", tmp_path)
    arrays = dict(np.load(source))
    for kind in ("float16", "float64", ">f4"):
        np.savez(tmp_path / "kind.npz", **{name: array.astype(kind) for name, array in arrays.items()})
        assert tried(tmp_path / "kind.npz", tmp_path / "target")
    for kind in ("int8", "int64", "complex64", "bool", "S4", "O", "longdouble"):
        np.savez(tmp_path / "kind.npz", **{name: np.zeros(array.shape, kind) for name, array in arrays.items()})
        plain = np.dtype(kind) == np.float64  # the size of a long double on some machines
        assert tried(tmp_path / "kind.npz", tmp_path / "other") == plain
    source = make("timm", tmp_path / "timm")
    state = load_file(source)
    save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in state.items()}, tmp_path / "eight")
    assert not tried(tmp_path / "eight", tmp_path / "other")
