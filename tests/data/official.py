"""Small files in the official layouts of Oxford Pets and Flowers-102."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from data.sample_images import encode, scene

BREEDS = {"Abyssinian": 1, "american_bulldog": 2, "Bombay": 3}


def write_pets(folder: Path, each: int = 4) -> Path:
    """`each` images of three breeds; the last of each is for testing."""
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    rows: dict[str, list[str]] = {"trainval.txt": [], "test.txt": []}
    for breed, number in BREEDS.items():
        for count in range(1, each + 1):
            name = f"{breed}_{count}"
            (folder / "images" / f"{name}.jpg").write_bytes(encode(scene(40, 30, 10 * number + count), "JPEG"))
            rows["test.txt" if count == each else "trainval.txt"].append(f"{name} {number} 1 {number}")
    for name, lines in rows.items():
        (folder / "annotations" / name).write_text("\n".join(lines) + "\n")
    header = "#Image CLASS-ID SPECIES BREED ID\n#ID: 1:37 Class ids\n"
    (folder / "annotations" / "list.txt").write_text(header + "\n".join([*rows["trainval.txt"], *rows["test.txt"]]))
    return folder


def write_flowers(folder: Path) -> Path:
    """Twelve images of three species: six for training, three for validation and three for testing."""
    (folder / "jpg").mkdir(parents=True)
    for number in range(1, 13):
        (folder / "jpg" / f"image_{number:05d}.jpg").write_bytes(encode(scene(30, 40, 5 * number), "JPEG"))
    write_mat(folder / "imagelabels.mat", {"labels": np.arange(12, dtype=np.uint8)[None] % 3 + 1})
    sets = {"trnid": range(7, 13), "valid": range(4, 7), "tstid": range(1, 4)}
    write_mat(
        folder / "setid.mat", {name: np.array([*numbers], dtype=np.uint16)[None] for name, numbers in sets.items()}
    )
    return folder


def write_mat(file: Path, arrays: dict[str, np.ndarray], compress: bool = True) -> None:
    """A MAT file of level 5, as MATLAB writes it; small names and numbers have short headers."""
    kinds = {"uint8": (9, 2), "uint16": (11, 4), "float64": (6, 9)}
    content = b"MATLAB 5.0 MAT-file, Platform: GLNXA64".ljust(124) + struct.pack("<H2s", 0x0100, b"IM")
    for name, array in arrays.items():
        array_class, number = kinds[array.dtype.name]
        matrix = element(6, struct.pack("<II", array_class, 0)) + element(5, struct.pack("<ii", *array.shape))
        matrix += element(1, name.encode()) + element(number, array.tobytes(order="F"))
        packed = struct.pack("<II", 14, len(matrix)) + matrix
        deflated = zlib.compress(packed)
        content += struct.pack("<II", 15, len(deflated)) + deflated if compress else packed
    file.write_bytes(content)


def element(kind: int, content: bytes) -> bytes:
    if len(content) <= 4:
        return struct.pack("<HH", kind, len(content)) + content.ljust(4, b"\0")
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)
