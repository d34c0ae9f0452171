"""Trained models by name: a folder, published weights, the Hugging Face Hub, timm and transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from allmlp.data.preprocessing import ImagePreprocessing, Preprocessing, image_preprocessing, known_preprocessing
from allmlp.errors import UserError, suggest_keywords
from allmlp.models.external import External
from allmlp.models.grid import Rule
from allmlp.models.model import Model
from allmlp.models.timm import PREFIX
from allmlp.models.zoo import preset
from allmlp.weights import folder
from allmlp.weights.bundled import BUNDLED, BUNDLED_PREFIX, model_path
from allmlp.weights.convert import build, is_model_folder, open_path, timm_pretrained
from allmlp.weights.fetch import HUB_PREFIX, locate
from allmlp.weights.published import published_weights


class Pretrained(NamedTuple):
    model: Model
    preprocessing: ImagePreprocessing


def pretrained(name: str, *, device: str | torch.device = "cpu") -> Pretrained:
    """An image classifier in evaluation mode, with its preprocessing.

    `name` is a model folder, a bundled model (`allmlp:cifar10`), a name of `allmlp list weights`,
    `hf:ORGANIZATION/NAME` on the Hub, or `timm:NAME` or `hf:NAME` for the network of that package.
    """
    path = model_path(name)
    if path.is_dir() or name in published_weights() or (name.startswith(HUB_PREFIX) and "/" in name):
        model, preprocessing = open_model(str(path), folder.ModelChanges(), device)
        is_image = isinstance(preprocessing, ImagePreprocessing)
        return Pretrained(model, preprocessing if is_image else image_preprocessing(path))
    if ":" not in name:
        raise UserError(f"{name} is not a folder; use a model folder, {BUNDLED}, timm:NAME or hf:NAME")
    external = pretrained_external(name)
    return external._replace(model=external.model.to(device))


def pretrained_external(name: str) -> Pretrained:
    """An image classifier of another package, `timm:NAME` or `hf:NAME`, with its published weights."""
    spec = preset(name).spec
    if not isinstance(spec, External):
        raise UserError(f"{name} is not an image classifier")
    trained = spec.pretrained()
    return Pretrained(trained.model.eval(), ImagePreprocessing(trained.mean, trained.std, crop_pct=trained.crop_pct))


@suggest_keywords
def from_pretrained(
    name: str | os.PathLike[str],
    *,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    seq_len: int | None = None,
    rule: Rule | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = torch.float32,
    dynamic: bool = False,
    overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Model:
    """Load a trained model by name, in evaluation mode.

    >>> model = allmlp.from_pretrained("mixer_b16.google_in1k", num_classes=10)
    >>> model = allmlp.from_pretrained("timm:gmlp_s16_224", img_size=256)

    `name` is a model folder, a bundled model (`allmlp:cifar10`), a weights file or folder of another library, a name of
    `allmlp list weights`, `timm:NAME`, or a model on the Hugging Face Hub (`ORGANIZATION/NAME`). The last five options
    are for the Hub, and the others are those of `allmlp.load`. `overrides` also sets fields that the weights of another
    library do not determine: {"block.token.num_heads": 4}.
    """
    hub = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "force_download": force_download,
    }
    changes = folder.ModelChanges(num_classes, img_size, seq_len, rule, dtype, dynamic)
    return open_model(os.fspath(name), changes, device, overrides, **hub)[0]


def open_model(
    name: str,
    changes: folder.ModelChanges,
    device: str | torch.device,
    overrides: Mapping[str, Any] | None = None,
    **hub: Any,
) -> tuple[Model, Preprocessing | None]:
    """The model called `name`, and its preprocessing if known."""
    name = os.fspath(model_path(name)) if name.startswith(BUNDLED_PREFIX) else name
    located = None if name.startswith(PREFIX) else locate(name, **hub)
    if located is not None and is_model_folder(located.path):
        preprocessing = known_preprocessing(located.path)
        model = folder.read_model(located.path, device, overrides)
        return changes.apply(model, preprocessing, located.path), preprocessing
    converted = timm_pretrained(name, overrides) if located is None else open_path(located.path, overrides)
    preprocessing = (located.preprocessing if located is not None else None) or converted.preprocessing
    path = None if located is None else located.path
    place = path.parent if path is not None and path.is_file() else path
    return changes.apply(build(converted, device), preprocessing, place), preprocessing
