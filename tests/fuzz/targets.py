"""What is fuzzed: each target makes a case from a random generator, by damaging files of our own or by drawing values.

A case writes into an empty folder and returns what to call in the sandbox.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import shutil
import string
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import PIL.Image
import torch
import typer
import zstandard
from safetensors.torch import save_file

import allmlp
from allmlp.cli import main
from allmlp.cli.app import app
from allmlp.data.detect import detect_data
from allmlp.data.preprocessing import PREPROCESSING_FILE, ImagePreprocessing, TextPreprocessing
from allmlp.data.tokenizer import TOKENIZER_FILE, TokenizerConfig, load_tokenizer
from allmlp.layers import ClassifierHead, FirstTokenPool
from allmlp.models.zoo import preset
from allmlp.optim import AdamW
from allmlp.plan.fits import check_training
from allmlp.prediction.inputs import Inputs
from allmlp.recipes import runs
from allmlp.spec import from_dict, hints, override_all, to_dict, to_json
from allmlp.weights.published import published_weights
from allmlp.weights.tensors import read

Case = Callable[[], object]
Target = Callable[[random.Random, Path], Case]

WORDS = "the cat sat on a mat and looked at two birds in an old tree while it rained all day".split()  # noqa: SIM905
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "1e308",
    "-1e308",
    "nan",
    "inf",
    "9" * 30,
    "9" * 5000,
    "1e-300",
    "0x10",
    "1,1",
    "1_0",
)
TEXTS = (
    "",
    " ",
    "\0",
    "\x1b[31m",
    "\ud800",
    "\u202e",
    "a\nb",
    "none",
    "{}",
    "[]",
    "~nobody",
    "x" * 5000,
    "ä" * 300,
    "../..",
)
SCHEMES = (
    "s3",
    "gs",
    "http",
    "https",
    "ftp",
    "hdfs",
    "file",
    "memory",
    "hf",
    "zip",
    "tar",
    "simplecache::s3",
    "reference",
)
SCHEMES += (
    "foo",
    "sftp",
    "smb",
    "git",
    "github",
    "data",
    "dask",
    "az",
    "abfs",
    "oci",
    "local",
    "jupyter",
    "",
    ":",
    "x" * 300,
)


# --- files of our own ---------------------------------------------------------------------------------------


@cache
def seeds() -> Path:
    """A folder with a model of each kind, images, tables and texts."""
    root = Path(mkdtemp(prefix="fuzz-"))
    allmlp.save(image_model(), root / "image")
    (root / "image" / PREPROCESSING_FILE).write_text(
        to_json(ImagePreprocessing((0.5,) * 3, (0.5,) * 3, ("ant", "bee", "cat"))), encoding="utf8"
    )
    generator = random.Random(0)
    lines = [" ".join(generator.choices(WORDS, k=8)) for _ in range(60)]
    tokenizer = TokenizerConfig(vocab_size=100).build(lines)
    allmlp.save(text_model(len(tokenizer)), root / "text")
    (root / "text" / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf8")
    (root / "text" / PREPROCESSING_FILE).write_text(
        to_json(TextPreprocessing("classes", 16, ("bad", "good"))), encoding="utf8"
    )
    (root / "tables").mkdir()
    rows = [(line, ("bad", "good")[number % 2]) for number, line in enumerate(lines)]
    plain = {
        "a.csv": "text,label\n" + "".join(f'"{line}",{label}\n' for line, label in rows),
        "b.tsv": "sentence\tlabel\n" + "".join(f"{line}\t{label}\n" for line, label in rows),
        "c.jsonl": "".join(json.dumps({"text": line, "label": label}) + "\n" for line, label in rows),
        "d.json": json.dumps([{"text": line, "label": label} for line, label in rows]),
        "e.txt": "\n\n".join(lines * 5),
        "f.tsv": "index\tquestion\tsentence\tlabel\n"
        + "".join(f"{number}\t{line}?\t{line}\t{label}\n" for number, (line, label) in enumerate(rows)),
    }
    for name, content in plain.items():
        data = content.encode()
        (root / "tables" / name).write_bytes(data)
        (root / "tables" / f"{name}.gz").write_bytes(gzip.compress(data))
        (root / "tables" / f"{name}.xz").write_bytes(lzma.compress(data))
        (root / "tables" / f"{name}.zst").write_bytes(zstandard.ZstdCompressor().compress(data))
    (root / "images").mkdir()
    picture = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 20, 3), dtype=np.uint8))
    for suffix in ("png", "jpg", "gif", "bmp", "webp", "tiff", "ppm"):
        picture.save(root / "images" / f"a.{suffix}")
    picture.convert("P").save(root / "images" / "p.png", transparency=0)
    state = {"a.weight": torch.randn(4, 4), "b": torch.arange(3)}
    (root / "tensors").mkdir()
    torch.save(state, root / "tensors" / "a.pth")
    torch.save(state, root / "tensors" / "old.pth", _use_new_zipfile_serialization=False)
    np.savez(root / "tensors" / "a.npz", **{name: value.numpy() for name, value in state.items()})
    np.savez_compressed(root / "tensors" / "b.npz", **{name: value.numpy() for name, value in state.items()})
    save_file(state, root / "tensors" / "a.safetensors")
    warm_up()
    return root


def warm_up() -> None:
    """Do in the parent what every case would do again."""
    for module in ("allmlp.prediction.output", "allmlp.prediction.stream", "allmlp.plan.estimate", "rich.progress"):
        import_module(module)
    typer.main.get_command(app)
    runs("digits_mixer")
    published_weights()


def image_model() -> Any:
    sizes = {"width": 16, "depth": 2, "block.token.hidden": 8, "block.channel.hidden": 16}
    return allmlp.create("mixer_s16", num_classes=3, img_size=8, patch_size=4, overrides=sizes, seed=0)


def text_model(vocab_size: int) -> Any:
    spec = preset("gmlp_base").spec.configure(vocab_size=vocab_size, seq_len=16)
    block = spec.block.replace(channel=spec.block.channel.replace(hidden=16))
    return allmlp.create(
        spec.replace(width=16, depth=2, block=block, pool=FirstTokenPool(), head=ClassifierHead(2)), seed=0
    )


# --- damage -------------------------------------------------------------------------------------------------


def damage(data: bytes, rng: random.Random) -> bytes:
    """Flip, insert, remove, repeat or cut bytes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        place = rng.randrange(len(found) + 1)
        size = rng.choice((1, 2, 4, 16, 256))
        kind = rng.randrange(6)
        if kind == 0 and found:
            found[place % len(found)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 1:
            found[place:place] = rng.randbytes(size)
        elif kind == 2:
            del found[place : place + size]
        elif kind == 3:
            found[place:place] = found[place : place + size] * rng.choice((1, 2, 50))
        elif kind == 4:
            del found[place:]
        else:
            other = rng.randrange(len(found) + 1)
            found[place : place + size] = found[other : other + size]
    return bytes(found)


def damage_json(value: Any, rng: random.Random) -> Any:
    """Replace one value somewhere inside."""
    if rng.random() < 0.2 or not isinstance(value, (dict, list)) or not value:
        numbers = [0, -1, 1, 2**24, 2**24 + 1, 10**30, 1e308, 1e-300, 0.5, 10**400]
        return rng.choice([*numbers, None, True, "", [], {}, {"kind": "Dense"}, *TEXTS, [value], {"a": value}])
    if isinstance(value, list):
        place = rng.randrange(len(value))
        return [*value[:place], damage_json(value[place], rng), *value[place + 1 :]]
    name = rng.choice(list(value))
    if rng.random() < 0.1:
        return {key: other for key, other in value.items() if key != name}
    return {**value, name: damage_json(value[name], rng)}


def encode_json(value: Any, rng: random.Random) -> bytes:
    text = json.dumps(value)
    return (
        damage(text.encode(), rng)
        if rng.random() < 0.2
        else text.encode(rng.choice(("utf8",) * 8 + ("utf16", "utf32")))
    )


# --- targets ------------------------------------------------------------------------------------------------


def weights(rng: random.Random, folder: Path) -> Case:
    if rng.random() < 0.5:
        file = rng.choice(sorted((seeds() / "tensors").iterdir()))
        target = folder / file.name
        target.write_bytes(damage(file.read_bytes(), rng))
        return lambda: read(target)
    model = folder / "model"
    shutil.copytree(seeds() / "image", model)
    file = model / "model.safetensors"
    if rng.random() < 0.5:
        file.write_bytes(damage(file.read_bytes(), rng))
    else:
        kinds = (torch.int64, torch.int8, torch.bool, torch.uint8, torch.float16, torch.float64, torch.complex64)
        state = allmlp.load(seeds() / "image").state_dict()
        save_file({name: tensor.to(rng.choice(kinds)) for name, tensor in state.items()}, file)
    return lambda: main(["predict", str(model), str(seeds() / "images" / "a.png")])


def configs(rng: random.Random, folder: Path) -> Case:
    kind = rng.choice(("image", "text"))
    model = folder / "model"
    shutil.copytree(seeds() / kind, model)
    file = model / rng.choice(("config.json", PREPROCESSING_FILE))
    file.write_bytes(encode_json(damage_json(json.loads(file.read_bytes()), rng), rng))
    command = rng.choice(("predict", "show"))
    given = str(seeds() / "images" / "a.png") if kind == "image" else "the cat"
    return lambda: main([command, str(model), *([given] if command == "predict" else [])])


def settings(rng: random.Random, folder: Path) -> Case:
    run = runs("digits_mixer")["digits_mixer"]
    if rng.random() < 0.3:
        changed = damage_json(to_dict(run), rng)
        return lambda: from_dict(changed, "run")
    paths = [name for name in hints(type(run)) if name not in ("model", "task", "data")]
    paths += [
        f"{part}.{name}"
        for part in ("model", "task", "data", "optim", "budget", "schedule")
        for name in hints(type(getattr(run, part)))
    ]
    path, value = rng.choice(paths), rng.choice(NUMBERS + TEXTS)
    if rng.random() < 0.2:
        options = rng.sample(("--samples", "--epochs", "--gpus", "--batch-size", "--mfu", "--sample-bytes"), 2)
        values = [text for option in options for text in (option, rng.choice(NUMBERS))]
        return lambda: main(["plan", "mixer_s32", "--samples", "1e6", "--epochs", "1", "--simulations", "2", *values])

    def case() -> None:
        changed = override_all(run, {path: value})
        if changed.model is not None:
            check_training(changed.model, changed.batch_size, AdamW(), torch.device("cpu"))
            if path.startswith("model."):
                allmlp.create(changed.model, seed=changed.seed)

    return case


def images(rng: random.Random, folder: Path) -> Case:
    file = rng.choice(sorted((seeds() / "images").iterdir()))
    names = ("a", "\x1b[31ma", "a\nb", "\udcff", "é")
    target = folder / f"{rng.choice(names)}{file.suffix}"
    kind = rng.random()
    if kind < 0.05:
        os.mkfifo(target)
    elif kind < 0.1:
        target.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev", "/dev/stdin", "missing")))
    elif kind < 0.2:
        side = rng.choice((1, 3000, 6000))
        picture = PIL.Image.new(rng.choice(("1", "L", "P", "RGB")), (side, rng.choice((1, 3000))))
        picture.save(target, format="PNG")
    else:
        target.write_bytes(damage(file.read_bytes(), rng))
    return lambda: main(["predict", str(seeds() / "image"), str(target)])


def texts(rng: random.Random, folder: Path) -> Case:
    file = rng.choice(sorted((seeds() / "tables").iterdir()))
    target = folder / file.name
    data = file.read_bytes()
    is_bomb = rng.random() < 0.05
    if is_bomb:
        bomb = rng.choice((b"a,b\n", b"\0", b"a b\n\n")) * 2**23
        packed = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
        data = packed.get(file.suffix, lambda text: text[: 2**20])(bomb)
    target.write_bytes(damage(data, rng) if rng.random() < 0.9 else data)
    os.environ["ALLMLP_CACHE"] = str(folder / "cache")
    if rng.random() < 0.3 and not is_bomb:  # millions of rows would be predicted, one by one
        return lambda: main(
            ["predict", str(seeds() / "text"), rng.choice((str(target), "a \ud800 b", "\x1b[31m", "x" * 5000))]
        )
    return lambda: detect_data(str(target)).load()


def tokenizers(rng: random.Random, folder: Path) -> Case:
    content = json.loads((seeds() / "text" / TOKENIZER_FILE).read_bytes())
    if rng.random() < 0.5:
        pattern = rng.choice(
            (
                {"Regex": rng.choice(("(a|aa)+$", "(a*)*b", "", ".", "(", "(?<=a*)b", "\\p{L}+", "[" * 50))},
                {"String": "a"},
            )
        )
        part = {"type": "Replace", "pattern": pattern, "content": rng.choice(("", "a", "aa", "a" * 1000))}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        if rng.random() < 0.5:
            content["normalizer"] = {"type": "Sequence", "normalizers": [part] * rng.choice((1, 2, 8))}
        else:
            content["pre_tokenizer"] = split
    else:
        content = damage_json(content, rng)
    file = folder / TOKENIZER_FILE
    file.write_bytes(encode_json(content, rng))

    def case() -> None:
        tokenizer = load_tokenizer(file)
        for text in ("the cat sat", "a" * 60 + "b", "\ud800", "x" * 5000):
            tokenizer.decode(tokenizer.encode([text])[0])

    return case


def places(rng: random.Random, folder: Path) -> Case:
    name = "".join(rng.choices(string.ascii_letters + "/.*?[]{}@:~%#&+ ,\x1b\0", k=rng.randrange(12)))
    place = rng.choice((f"{rng.choice(SCHEMES)}://{name}", f"~{name}", name, *TEXTS))
    for scheme in ("http", "ftp", "hdfs", "webhdfs", "github"):
        place = place.replace(f"{scheme}s://", f"{scheme}s://127.0.0.1:9/").replace(
            f"{scheme}://", f"{scheme}://127.0.0.1:9/"
        )
    kind = rng.randrange(3)
    inside = folder / "a" / "b" / "c" / "d"  # so that ../.. is not the whole file system
    inside.mkdir(parents=True)
    os.chdir(inside)
    if kind == 0:
        return lambda: detect_data(place).load()
    if kind == 1:
        return lambda: list(zip(Inputs([place], "images"), range(20)))
    return lambda: main(["predict", str(seeds() / "image"), place])


TARGETS: dict[str, Target] = {
    function.__name__: function for function in (weights, configs, settings, images, texts, tokenizers, places)
}


def run_case(name: str, seed: int, number: int, folder: Path) -> None:
    """The same case for the same numbers."""
    TARGETS[name](random.Random(f"{name} {seed} {number}"), folder)()
