"""The image preprocessing of this library as an image processor of transformers."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_transforms import to_pil_image
from transformers.image_utils import make_flat_list_of_images

from allmlp.data.decode import Decode, as_tensor, crop_and_resize
from allmlp.errors import UserError, require


class AllMlpImageProcessor(BaseImageProcessor):
    """Resize (bicubic) and center crop in one step, then normalize."""

    def __init__(
        self,
        size: dict[str, int] | None = None,
        image_mean: list[float] | None = None,
        image_std: list[float] | None = None,
        crop_pct: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.size = size or {"height": 224, "width": 224}
        self.image_mean, self.image_std = image_mean or [0.5] * 3, image_std or [0.5] * 3
        self.crop_pct = crop_pct

    def preprocess(self, images: Any, return_tensors: Any = None, **options: Any) -> BatchFeature:
        """`pixel_values` of PIL images, arrays, tensors, paths or URLs."""
        if given := [name for name, value in options.items() if value is not None]:
            raise UserError(f"{given[0]} is not an option of a call: set size, image_mean, image_std, crop_pct")
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (self.image_mean, self.image_std))
        decode = Decode(crop_pct=self.crop_pct, color="rgb" if len(mean) == 3 else "gray")
        size = self.size["height"], self.size["width"]
        fetched: Any = self.fetch_images(open_files(images))
        fetched_images: Any = make_flat_list_of_images(fetched)
        opened = [one if hasattr(one, "getexif") else to_pil_image(one) for one in fetched_images]
        pixels = torch.stack([as_tensor(crop_and_resize(one, size, decode, None)) for one in opened])
        return BatchFeature({"pixel_values": (pixels.float().div(255) - mean) / std}, tensor_type=return_tensors)

    def to_dict(self) -> dict[str, Any]:
        """Omit the class, which the model's configuration names: a pipeline would look for a video class too."""
        hidden = ("image_processor_type", "auto_map")
        return {name: value for name, value in super().to_dict().items() if name not in hidden}


def open_files(images: Any) -> Any:
    """The same images, with those of local files opened: transformers would lose transparency and 16 bits."""
    if isinstance(images, (list, tuple)):
        return [*map(open_files, images)]
    is_file = isinstance(images, (str, os.PathLike)) and os.path.isfile(images)
    return require("PIL.Image", "train").open(images) if is_file else images
