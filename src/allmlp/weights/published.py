"""Published weights that can be read here, each called what it is: where it lies, its licence, pixels and accuracy.

Top-1 is on ImageNet's validation pictures, from timm's tables of results (224 pixels, crop 0.875). Licences are those
of the repositories that publish the weights. Where the name of a file ends in digits, these begin its SHA-256.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

APACHE = "Apache-2.0"
MIB = 2**20


class Pixels(NamedTuple):
    """How pixels divided by 255 are shifted and scaled, and the share of the short side that is kept."""

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 0.875


HALF = Pixels("-1 to 1", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PLAIN = Pixels("0 to 1", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
IMAGENET = Pixels("ImageNet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
WIDE = IMAGENET._replace(crop=0.9)
"""FAIR's README prescribes this crop."""


class Checkpoint(NamedTuple):
    name: str
    """The model here, who trained it on what, and `@timm` for a copy in timm's layout."""
    source: str
    """Whose layout it has, as in `allmlp convert --to`."""
    what: str
    pixels: Pixels
    licence: str | None
    """None where none is known."""
    file: str
    """Empty where it lies on the hub alone."""
    url: str = ""
    hub: str = ""
    """Its name on the Hugging Face hub."""
    top1: float | None = None
    sha256: str = ""
    """The first digits, where they are known."""
    size: int | None = None
    """Bytes, to a hundredth of a MiB."""
    note: str = ""


ONLY_1K = (
    "timm calls it goog_in21k_ft_in1k, but it has seen ImageNet-1k only: so says an author of Mixer, and no fine-tuned "
    "weights were published (timm issue 651); timm runs it with the exact GELU, 3e-4 off Google's own answers"
)
WRONG_NAME = "timm's former name with _in21k at its end now leads to the weights of ImageNet-1k"
NO_HEAD = "its head is no trained classifier"
SUPERVISED = f"{NO_HEAD}; timm's former name with _dino at its end now leads to the supervised weights"
PATCHES = "published as B24, but with patches of 8 pixels; the paper's B24 has 16"

GOOGLE = {
    "in1k": ("imagenet1k", "ImageNet-1k only", {"B_16": 228.47, "L_16": 794.29}),
    "in21k": ("imagenet21k", "ImageNet-21k", {"B_16": 289.61, "L_16": 875.78}),
    "sam": ("sam", "with SAM", {"B_16": 228.47, "B_32": 230.04}),
    "gsam": ("gsam", "with GSAM", {"B_16": 228.47, "B_32": 230.04, "S_16": 70.71, "S_32": 72.91, "S_8": 78.79}),
}
"""Our tag -> Google's folder, what its weights are, and its files with their size in MiB."""
MIXERS = {"B_16": 76.616, "L_16": 72.084}

FAIR = {
    "in1k": ("no_dist", "fb_in1k", "ImageNet-1k"),
    "distilled": ("dist", "fb_distilled_in1k", "distilled from RegNetY"),
    "in22k": ("22k", "fb_in22k_ft_in1k", "ImageNet-22k then 1k"),
    "dino": ("dino", "fb_dino", "DINO, no classifier"),
}
"""Our tag -> how FAIR's file ends, timm's tag, and what it is."""
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
"""Our size -> FAIR's name, timm's name, the paper's, and top-1 by tag."""

RELEASES = "https://github.com/rwightman/pytorch-image-models/releases/download"
TIMM: list[tuple[str, str, str, str, Pixels, str | None, float | None, str]] = [
    (
        "mixer_b16.google_in1k@timm",
        "mixer_b16_224.goog_in21k_ft_in1k",
        "v0.1-vitjx/jx_mixer_b16_224-76587d61.pth",
        "Mixer-B/16, ImageNet-1k only",
        HALF,
        APACHE,
        MIXERS["B_16"],
        ONLY_1K,
    ),
    (
        "mixer_l16.google_in1k@timm",
        "mixer_l16_224.goog_in21k_ft_in1k",
        "v0.1-vitjx/jx_mixer_l16_224-92f9adc4.pth",
        "Mixer-L/16, ImageNet-1k only",
        HALF,
        APACHE,
        MIXERS["L_16"],
        ONLY_1K,
    ),
    (
        "mixer_b16.google_in21k@timm",
        "mixer_b16_224.goog_in21k",
        "v0.1-vitjx/jx_mixer_b16_224_in21k-617b3de2.pth",
        "Mixer-B/16, ImageNet-21k",
        HALF,
        APACHE,
        None,
        WRONG_NAME,
    ),
    (
        "mixer_l16.google_in21k@timm",
        "mixer_l16_224.goog_in21k",
        "v0.1-vitjx/jx_mixer_l16_224_in21k-846aa33c.pth",
        "Mixer-L/16, ImageNet-21k",
        HALF,
        APACHE,
        None,
        WRONG_NAME,
    ),
    (
        "mixer_b16.miil_in21k",
        "mixer_b16_224.miil_in21k",
        "v0.1-tresnet/mixer_b16_224_miil_in21k-2a558a71.pth",
        "Mixer-B/16, MIIL's ImageNet-21k",
        PLAIN,
        None,
        None,
        "",
    ),
    (
        "mixer_b16.miil_in1k",
        "mixer_b16_224.miil_in21k_ft_in1k",
        "v0.1-tresnet/mixer_b16_224_miil-9229a591.pth",
        "Mixer-B/16, MIIL's 21k then 1k",
        PLAIN,
        None,
        82.314,
        "",
    ),
    (
        "gmlp_s16.timm_in1k",
        "gmlp_s16_224.ra3_in1k",
        "v0.1-weights/gmlp_s16_224_raa-10536d42.pth",
        "gMLP-S, ImageNet-1k",
        HALF,
        APACHE,
        79.652,
        "",
    ),
]
"""Our name, timm's, its file, and what is in it."""


def google() -> list[Checkpoint]:
    found = []
    for tag, (folder, trained, files) in GOOGLE.items():
        for size, mib in files.items():
            letter, patch = size.split("_")
            found.append(
                Checkpoint(
                    f"mixer_{letter.lower()}{patch}.google_{tag}",
                    "google",
                    f"Mixer-{letter}/{patch}, {trained}",
                    HALF,
                    APACHE,
                    f"Mixer-{size}.npz",
                    f"https://storage.googleapis.com/mixer_models/{folder}/Mixer-{size}.npz",
                    top1=MIXERS.get(size) if tag == "in1k" else None,
                    size=round(mib * MIB),
                )
            )
    return found


def fair() -> list[Checkpoint]:
    found = []
    for size, (theirs, timms, title, accuracies) in RESMLPS.items():
        for tag, top1 in accuracies.items():
            end, timms_tag, trained = FAIR[tag]
            notes = [NO_HEAD, SUPERVISED] if tag == "dino" else [PATCHES if size == "b24_8" else ""] * 2
            row = Checkpoint(
                f"resmlp_{size}.fair_{tag}",
                "fair",
                f"{title}, {trained}",
                WIDE,
                APACHE,
                f"{theirs}_{end}.pth",
                f"https://dl.fbaipublicfiles.com/deit/{theirs}_{end}.pth",
                top1=top1,
                note=notes[0],
            )
            copy = row._replace(name=f"{row.name}@timm", source="timm", pixels=IMAGENET, note=notes[1])
            found += [row, copy._replace(file="", url="", hub=f"timm/{timms}.{timms_tag}")]
    return found


def timm() -> list[Checkpoint]:
    found = []
    for name, theirs, path, what, pixels, licence, top1, note in TIMM:
        file = path.partition("/")[2]
        digits = file.removesuffix(".pth").rpartition("-")[2]
        row = Checkpoint(name, "timm", what, pixels, licence, file, f"{RELEASES}/{path}", f"timm/{theirs}", top1)
        found.append(row._replace(sha256=digits, note=note))
    return found


@cache
def checkpoints() -> dict[str, Checkpoint]:
    """All of them by name."""
    return {row.name: row for row in sorted([*google(), *fair(), *timm()])}


def known(file: str) -> Checkpoint | None:
    """The published weights that come as a file of this name, or lie under this name on the hub.

    Where several do (Google names its files alike), it is one that expects the same pixels as all the others.
    """
    rows = [row for row in checkpoints().values() if file and file in (row.file, row.hub)]
    return rows[0] if rows and len({row.pixels for row in rows}) == 1 else None
