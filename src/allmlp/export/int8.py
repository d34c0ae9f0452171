"""Eight-bit integers instead of floats in an ONNX file: a quarter of its size.

    Y = X W^T  becomes  s_x s_w (Xq - z) Wq^T

Wq and s_w are fixed, one scale for each output; X is quantised anew for every batch by its own range, so that no
pictures are needed to calibrate, and an answer depends a little on what else is in the batch. The products over tokens,
whose weights stand on the left, stay floats.
"""

from __future__ import annotations

import logging
from pathlib import Path

from allmlp.errors import require


def quantise(source: Path, target: Path) -> None:
    """Write the quantised model in `source` to `target`, with its metadata."""
    quantization = require("onnxruntime.quantization", "export")
    model = require("onnx", "export").load(source)
    # Shapes of weights are listed here too, and would be wrong after the quantiser has transposed some.
    del model.graph.value_info[:]
    log = logging.getLogger()
    before = log.level
    log.setLevel(logging.ERROR)  # it advises an optimisation that does nothing here
    try:
        quantization.quantize_dynamic(
            model,
            target,
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],  # the last looks tokens up
        )
    finally:
        log.setLevel(before)
