"""A model in ONNX Runtime, on a CPU: in float32, or with int8 weights and activations, see `allmlp.export.int8`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.export.graphs import graphs
from allmlp.export.int8 import quantize
from allmlp.export.onnx import open_session, write_onnx
from allmlp.export.sample_inputs import SampleInputs
from allmlp.inference.model import FastModel, check_tensor, copy_frozen
from allmlp.layers.stem import PatchEmbed
from allmlp.models.encoder import EncoderModel
from allmlp.models.series_encoder import SeriesEncoder, SeriesEncoderModel

KINDS = {"tensor(float)": "float32", "tensor(bool)": "bool"}


class OnnxModel(FastModel):
    """The buffer `file` is an ONNX file. The number of threads is torch's when the model is converted or copied."""

    def __init__(self, model: EncoderModel | SeriesEncoderModel, int8: bool = False) -> None:
        super().__init__(torch.float32, model.device)
        if isinstance(model, EncoderModel) and not isinstance(model.spec.stem, PatchEmbed):
            raise UserError("fast() runs models of images and series in ONNX Runtime, not of texts: use another dtype")
        self.spec, self.int8 = model.spec, int8
        copy = copy_frozen(model, torch.float32)
        (graph, *_) = graphs(copy, SampleInputs(copy.dummy_inputs(2), "random values"))
        with tempfile.TemporaryDirectory() as folder:
            plain, small = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
            write_onnx(graph, plain, {})
            if int8:
                quantize(plain, small)
            content = bytearray((small if int8 else plain).read_bytes())
        self.file = nn.Buffer(torch.frombuffer(content, dtype=torch.uint8))
        self.open_session()
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.file.device

    @property
    def dtype_name(self) -> str:
        return "int8" if self.int8 else super().dtype_name

    def open_session(self) -> None:
        self.session = open_session(self.file.numpy().tobytes(), torch.get_num_threads())

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Like `forward` of the original, for images or series, without further arguments; only series may have a
        mask.
        """
        check_tensor(x)
        if given := [name for name, value in options.items() if value is not None and value is not False]:
            raise UserError(f"a model in ONNX Runtime does not take {given[0]}: call the original model")
        if isinstance(self.spec, SeriesEncoder):
            return self.run(self.compute, (x, torch.ones_like(x, dtype=torch.bool) if mask is None else mask))
        if mask is not None:
            raise UserError("a model of images takes no mask")
        return self.run(self.compute, (x,))

    def compute(self, *inputs: Tensor) -> Tensor:
        count, given = len(inputs[0]), {}
        for expected, x in zip(self.session.get_inputs(), inputs, strict=True):
            shape, kind = list(x.shape), str(x.dtype).removeprefix("torch.")
            if shape != [count, *expected.shape[1:]] or kind != KINDS[expected.type]:
                size = f"[B, {', '.join(map(str, expected.shape[1:]))}]"
                raise UserError(f"expected {expected.name}: {expected.type} of shape {size}, got {kind} {shape}")
            # An exported graph takes one example or more.
            given[expected.name] = (x if count else x.new_zeros(1, *shape[1:])).detach().numpy()
        (output,) = self.session.run(None, given)
        return torch.from_numpy(output)[:count]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        keys = super().load_state_dict(*args, **kwargs)
        self.open_session()
        return keys

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["session"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.open_session()
