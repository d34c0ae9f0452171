"""What an exported image model says to pictures, without torch and without allmlp.

    allmlp export weights/cifar10 cifar10.onnx             # on the machine that has the model
    pip install numpy onnxruntime pillow                   # on any other
    python onnx_predict.py cifar10.onnx photo.jpg ...

How a picture becomes an input, and what the classes are called, stands in the file's own metadata.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def read_picture(file: str, height: int, width: int, inputs: dict) -> np.ndarray:
    """The centre of a picture at the model's size, centred and scaled: c h w."""
    image = ImageOps.exif_transpose(Image.open(file)).convert("RGB" if len(inputs["mean"]) == 3 else "L")
    tall, broad = (math.floor(side / inputs["crop"]) for side in (height, width))
    if tall * image.width >= broad * image.height:
        broad = max(broad, tall * image.width // image.height)
    else:
        tall = max(tall, broad * image.height // image.width)
    across, down = image.width / broad, image.height / tall
    left, top = round((broad - width) / 2) * across, round((tall - height) / 2) * down
    box = (left, top, min(left + width * across, image.width), min(top + height * down, image.height))
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, box=box), dtype=np.float32) / 255
    mean, std = (np.array(inputs[name], dtype=np.float32) for name in ("mean", "std"))
    return ((pixels.reshape(height, width, -1) - mean) / std).transpose(2, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a file written by `allmlp export`")
    parser.add_argument("pictures", nargs="+")
    parser.add_argument("--top", type=int, default=3, help="how many classes to name")
    options = parser.parse_args()

    session = onnxruntime.InferenceSession(options.model, providers=["CPUExecutionProvider"])
    settings = session.get_modelmeta().custom_metadata_map
    if "inputs" not in settings or session.get_inputs()[0].name != "images":
        raise SystemExit(f"{options.model} does not say how to prepare a picture: it was exported without inputs.json")
    inputs = json.loads(settings["inputs"])
    _, _, height, width = session.get_inputs()[0].shape

    batch = np.stack([read_picture(file, height, width, inputs) for file in options.pictures])
    (scores,) = session.run(["scores"], {"images": batch})
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    names = inputs["classes"] or [str(number) for number in range(chances.shape[1])]
    for file, row in zip(options.pictures, chances):
        best = np.argsort(-row)[: options.top]
        print(f"{file}:", "  ".join(f"{names[number]} {row[number]:.1%}" for number in best))


if __name__ == "__main__":
    main()
