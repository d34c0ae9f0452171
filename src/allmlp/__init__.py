"""All-MLP networks for images, language and time series: MLP-Mixer, ResMLP, gMLP, aMLP and their baselines.

>>> import allmlp
>>> model = allmlp.create("mixer_b16", num_classes=10)
>>> print(model.describe())

`__all__` is the public API; everything else may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from allmlp.matmul import choose_library

__version__ = "0.1.0"

choose_library()

# Names are imported on first use, so that the command line starts without loading torch.
_MODULES = {
    "Block": "allmlp.layers",
    "Cache": "allmlp.layers",
    "Callback": "allmlp.callbacks",
    "Cost": "allmlp.models.cost",
    "Data": "allmlp.data.dataset",
    "Encoder": "allmlp.models.encoder",
    "EncoderDecoder": "allmlp.models.encoder_decoder",
    "Model": "allmlp.models.model",
    "Preset": "allmlp.models.preset",
    "Run": "allmlp.run",
    "UserError": "allmlp.errors",
    "configure": "allmlp.models.zoo",
    "create": "allmlp.models.zoo",
    "embed": "allmlp.api",
    "evaluate": "allmlp.api",
    "fast": "allmlp.inference",
    "from_pretrained": "allmlp.weights.pretrained",
    "list_models": "allmlp.models.zoo",
    "load": "allmlp.weights.folder",
    "measure": "allmlp.models.cost",
    "nn": "allmlp.nn",
    "predict": "allmlp.api",
    "preset": "allmlp.models.preset",
    "push_to_hub": "allmlp.weights.hub",
    "resize_model": "allmlp.weights.resize",
    "save": "allmlp.weights.folder",
    "save_pretrained": "allmlp.weights.hub",
    "train": "allmlp.api",
    "transform": "allmlp.api",
}

__all__ = [
    "Block",
    "Cache",
    "Callback",
    "Cost",
    "Data",
    "Encoder",
    "EncoderDecoder",
    "Model",
    "Preset",
    "Run",
    "UserError",
    "__version__",
    "configure",
    "create",
    "embed",
    "evaluate",
    "fast",
    "from_pretrained",
    "list_models",
    "load",
    "measure",
    "nn",
    "predict",
    "preset",
    "push_to_hub",
    "resize_model",
    "save",
    "save_pretrained",
    "train",
    "transform",
]

if TYPE_CHECKING:
    from allmlp import nn
    from allmlp.api import embed, evaluate, predict, train, transform
    from allmlp.callbacks import Callback
    from allmlp.data.dataset import Data
    from allmlp.errors import UserError
    from allmlp.inference import fast
    from allmlp.layers import Block, Cache
    from allmlp.models.cost import Cost, measure
    from allmlp.models.encoder import Encoder
    from allmlp.models.encoder_decoder import EncoderDecoder
    from allmlp.models.model import Model
    from allmlp.models.preset import Preset, preset
    from allmlp.models.zoo import configure, create, list_models
    from allmlp.run import Run
    from allmlp.weights.folder import load, save
    from allmlp.weights.hub import push_to_hub, save_pretrained
    from allmlp.weights.pretrained import from_pretrained
    from allmlp.weights.resize import resize_model


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        module = importlib.import_module(_MODULES[name])
        return module if module.__name__ == f"allmlp.{name}" else getattr(module, name)
    raise AttributeError(f"module 'allmlp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
