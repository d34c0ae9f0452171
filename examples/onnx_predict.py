"""Classify images with an exported model, without torch and without allmlp.

    allmlp export weights/cifar10 cifar10.onnx             # on the machine that has the model
    pip install numpy onnxruntime pillow                   # on any other
    python onnx_predict.py cifar10.onnx photo.jpg ...

The preprocessing and the class names are in the metadata of the file.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def read_image(file: str, height: int, width: int, preprocessing: dict) -> np.ndarray:
    """The center crop of an image at the model's size, normalized, [C, H, W]."""
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode.startswith("I"):  # of 16 bits the upper 8 are used
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.has_transparency_data:  # transparent pixels become white
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("RGB" if len(preprocessing["mean"]) == 3 else "L")
    tall, broad = (math.floor(side / preprocessing["crop_pct"]) for side in (height, width))
    if tall * image.width >= broad * image.height:
        broad = max(broad, tall * image.width // image.height)
    else:
        tall = max(tall, broad * image.height // image.width)
    across, down = image.width / broad, image.height / tall
    left, top = round((broad - width) / 2) * across, round((tall - height) / 2) * down
    box = (left, top, min(left + width * across, image.width), min(top + height * down, image.height))
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, box=box), dtype=np.float32) / 255
    mean, std = (np.array(preprocessing[name], dtype=np.float32) for name in ("mean", "std"))
    return ((pixels.reshape(height, width, -1) - mean) / std).transpose(2, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a file written by `allmlp export`")
    parser.add_argument("images", nargs="+")
    parser.add_argument("--top-k", type=int, default=3, help="number of classes to print")
    options = parser.parse_args()

    session = onnxruntime.InferenceSession(options.model, providers=["CPUExecutionProvider"])
    settings = session.get_modelmeta().custom_metadata_map
    if "preprocessing" not in settings or session.get_inputs()[0].name != "images":
        raise SystemExit(f"{options.model} has no image preprocessing: it was exported without preprocessing.json")
    preprocessing = json.loads(settings["preprocessing"])
    _, _, height, width = session.get_inputs()[0].shape

    batch = np.stack([read_image(file, height, width, preprocessing) for file in options.images])
    (logits,) = session.run(["logits"], {"images": batch})
    names = preprocessing["class_names"] or [str(number) for number in range(logits.shape[1])]
    if preprocessing["task"] == "values":  # a regression
        for file, row in zip(options.images, logits):
            print(f"{file}:", "  ".join(f"{name} {value:.6g}" for name, value in zip(names, row)))
        return
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    for file, row in zip(options.images, probabilities):
        best = np.argsort(-row)[: options.top_k]
        print(f"{file}:", "  ".join(f"{names[number]} {row[number]:.1%}" for number in best))


if __name__ == "__main__":
    main()
