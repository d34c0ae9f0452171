"""Dynamic int8 quantization of an ONNX file, to a quarter of its size.

    Y = X W^T  becomes  s_x s_w (Xq - z) Wq^T

Wq and s_w are fixed, with one scale per output channel. X is quantized by the range of each batch, so no calibration
data is needed, and outputs depend slightly on the rest of the batch. Products over tokens, with the weight on the left,
stay in float.
"""

from __future__ import annotations

import logging
from pathlib import Path

from allmlp.errors import require


def quantize(source: Path, target: Path) -> None:
    """Quantize the model `source` to the file `target`, with its metadata."""
    quantization = require("onnxruntime.quantization", "export")
    model = require("onnx", "export").load(source)
    # These include shapes of weights, which are wrong after the quantizer has transposed some.
    del model.graph.value_info[:]
    log = logging.getLogger()
    before = log.level
    log.setLevel(logging.ERROR)  # it recommends an optimization that has no effect here
    try:
        quantization.quantize_dynamic(
            model,
            target,
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],  # Gather: token embeddings
        )
    finally:
        log.setLevel(before)
