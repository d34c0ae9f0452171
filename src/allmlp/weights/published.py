"""Published weights that can be loaded by name: URL, license, normalization and accuracy.

Top-1 is on ImageNet's validation images, from timm's result tables (224 pixels, crop 0.875). Licenses are those of the
repositories that publish the weights. Hexadecimal digits at the end of a file name are the start of its SHA-256.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

APACHE = "Apache-2.0"
MIB = 2**20


class NormalizationStats(NamedTuple):
    """Mean and standard deviation of pixels in [0, 1], and the fraction of the short side that is kept."""

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float = 0.875


HALF = NormalizationStats("-1 to 1", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PLAIN = NormalizationStats("0 to 1", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
IMAGENET = NormalizationStats("ImageNet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
WIDE = IMAGENET._replace(crop_pct=0.9)
"""ImageNet statistics with the crop of FAIR's README."""


class PublishedWeights(NamedTuple):
    name: str
    """Preset, publisher and training data; `@timm` marks a copy in timm's format."""
    source: str
    """Its format, as in `allmlp convert --to`."""
    description: str
    normalization: NormalizationStats
    license: str | None
    """None if it is not known."""
    file: str
    """Empty if it is on the Hub only."""
    url: str = ""
    hub: str = ""
    """Its repository on the Hugging Face Hub."""
    top1: float | None = None
    sha256: str = ""
    """The first digits, if known."""
    size: int | None = None
    """Bytes, to a hundredth of a MiB."""
    note: str = ""


ONLY_1K = (
    "timm calls it goog_in21k_ft_in1k, but it was trained on ImageNet-1k only, according to an author of MLP-Mixer "
    "(timm issue 651); timm uses the exact GELU, so outputs differ by 3e-4 from Google's"
)
WRONG_NAME = "timm's old name ending in _in21k now refers to the ImageNet-1k weights"
NO_HEAD = "its head is not a trained classifier"
SUPERVISED = f"{NO_HEAD}; timm's old name ending in _dino now refers to the supervised weights"
PATCHES = "published as B24, but with 8x8 patches; the paper's B24 has 16x16"

GOOGLE = {
    "in1k": ("imagenet1k", "ImageNet-1k only", {"B_16": 228.47, "L_16": 794.29}),
    "in21k": ("imagenet21k", "ImageNet-21k", {"B_16": 289.61, "L_16": 875.78}),
    "sam": ("sam", "with SAM", {"B_16": 228.47, "B_32": 230.04}),
    "gsam": ("gsam", "with GSAM", {"B_16": 228.47, "B_32": 230.04, "S_16": 70.71, "S_32": 72.91, "S_8": 78.79}),
}
"""Tag -> Google's folder, the training, and the files with their size in MiB."""
MIXERS = {"B_16": 76.616, "L_16": 72.084}

FAIR = {
    "in1k": ("no_dist", "fb_in1k", "ImageNet-1k"),
    "distilled": ("dist", "fb_distilled_in1k", "distilled from RegNetY"),
    "in22k": ("22k", "fb_in22k_ft_in1k", "ImageNet-22k then 1k"),
    "dino": ("dino", "fb_dino", "DINO, no classifier"),
}
"""Tag -> suffix of FAIR's file, timm's tag, the training."""
RESMLPS: dict[str, tuple[str, str, str, dict[str, float | None]]] = {
    "s12": ("resmlp_12", "resmlp_12_224", "ResMLP-S12", {"in1k": 76.660, "distilled": 77.948, "dino": None}),
    "s24": ("resmlp_24", "resmlp_24_224", "ResMLP-S24", {"in1k": 79.380, "distilled": 80.766, "dino": None}),
    "s36": ("resmlp_36", "resmlp_36_224", "ResMLP-S36", {"in1k": 79.772, "distilled": 81.150}),
    "b24_8": (
        "resmlpB_24",
        "resmlp_big_24_224",
        "ResMLP-B24/8",
        {"in1k": 81.034, "distilled": 83.594, "in22k": 84.414},
    ),
}
"""Size -> FAIR's name, timm's name, the paper's name, and top-1 by tag."""

RELEASES = "https://github.com/rwightman/pytorch-image-models/releases/download"
COPIES = {"b16": ("76587d61", "617b3de2"), "l16": ("92f9adc4", "846aa33c")}
"""Size of a Mixer -> the end of timm's file names for Google's ImageNet-1k and ImageNet-21k weights."""
TIMM: list[tuple[str, str, str, str, NormalizationStats, str | None, float | None]] = [
    (
        "mixer_b16.miil_in21k",
        "mixer_b16_224.miil_in21k",
        "v0.1-tresnet/mixer_b16_224_miil_in21k-2a558a71.pth",
        "Mixer-B/16, MIIL's ImageNet-21k",
        PLAIN,
        None,
        None,
    ),
    (
        "mixer_b16.miil_in1k",
        "mixer_b16_224.miil_in21k_ft_in1k",
        "v0.1-tresnet/mixer_b16_224_miil-9229a591.pth",
        "Mixer-B/16, MIIL's 21k then 1k",
        PLAIN,
        None,
        82.314,
    ),
    (
        "gmlp_s16.timm_in1k",
        "gmlp_s16_224.ra3_in1k",
        "v0.1-weights/gmlp_s16_224_raa-10536d42.pth",
        "gMLP-S, ImageNet-1k",
        HALF,
        APACHE,
        79.652,
    ),
]
"""Name, timm's name, its file, description, normalization, license, top-1."""


def google() -> list[PublishedWeights]:
    rows = []
    for tag, (folder, trained, files) in GOOGLE.items():
        for size, mib in files.items():
            letter, patch_size = size.split("_")
            name, title = f"mixer_{letter.lower()}{patch_size}.google_{tag}", f"Mixer-{letter}/{patch_size}, {trained}"
            file = f"Mixer-{size}.npz"
            url = f"https://storage.googleapis.com/mixer_models/{folder}/{file}"
            row = PublishedWeights(name, "google", title, HALF, APACHE, file, url, size=round(mib * MIB))
            rows.append(row._replace(top1=MIXERS.get(size)) if tag == "in1k" else row)
    return rows


def fair() -> list[PublishedWeights]:
    rows = []
    for size, (fair_name, timm_name, title, accuracies) in RESMLPS.items():
        for tag, top1 in accuracies.items():
            end, timm_tag, trained = FAIR[tag]
            notes = [NO_HEAD, SUPERVISED] if tag == "dino" else [PATCHES if size == "b24_8" else ""] * 2
            name, file = f"resmlp_{size}.fair_{tag}", f"{fair_name}_{end}.pth"
            row = PublishedWeights(name, "fair", f"{title}, {trained}", WIDE, APACHE, file, top1=top1, note=notes[0])
            copy = row._replace(name=f"{row.name}@timm", source="timm", normalization=IMAGENET, note=notes[1])
            row = row._replace(url=f"https://dl.fbaipublicfiles.com/deit/{file}")
            rows += [row, copy._replace(file="", hub=f"timm/{timm_name}.{timm_tag}")]
    return rows


def timm() -> list[PublishedWeights]:
    rows = [timm_row(*row) for row in TIMM]
    for size, (in1k, in21k) in COPIES.items():
        name, old, file = f"mixer_{size}.google_", f"mixer_{size}_224.goog_in21k", f"v0.1-vitjx/jx_mixer_{size}_224"
        title, top1 = f"Mixer-{size[0].upper()}/16, ImageNet", MIXERS[f"{size[0].upper()}_16"]
        whole = timm_row(f"{name}in21k@timm", old, f"{file}_in21k-{in21k}.pth", f"{title}-21k", note=WRONG_NAME)
        part = timm_row(
            f"{name}in1k@timm", f"{old}_ft_in1k", f"{file}-{in1k}.pth", f"{title}-1k only", top1=top1, note=ONLY_1K
        )
        rows += [part, whole]
    return rows


def timm_row(
    name: str,
    timm_name: str,
    path: str,
    description: str,
    normalization: NormalizationStats = HALF,
    license: str | None = APACHE,
    top1: float | None = None,
    note: str = "",
) -> PublishedWeights:
    file = path.partition("/")[2]
    digits = file.removesuffix(".pth").rpartition("-")[2]
    row = PublishedWeights(
        name, "timm", description, normalization, license, file, f"{RELEASES}/{path}", f"timm/{timm_name}", top1
    )
    return row._replace(sha256=digits, note=note)


@cache
def published_weights() -> dict[str, PublishedWeights]:
    """All published weights by name."""
    return {row.name: row for row in sorted([*google(), *fair(), *timm()])}


def find_weights(file: str) -> PublishedWeights | None:
    """The published weights with this file name or Hub repository.

    If several match (Google's files have equal names), the first one, provided that all have the same normalization.
    """
    rows = [row for row in published_weights().values() if file and file in (row.file, row.hub)]
    return rows[0] if rows and len({row.normalization for row in rows}) == 1 else None
