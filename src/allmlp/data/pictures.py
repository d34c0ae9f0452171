"""Picture files as one batch, as a model is shown them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from allmlp.data.decode import Decode, picture
from allmlp.data.inputs import Inputs
from allmlp.errors import UserError


def read_pictures(files: Sequence[Path], size: tuple[int, int], inputs: Inputs) -> Tensor:
    """Each picture cropped and resized as it is evaluated: uint8, b c h w."""
    how = Decode(crop=inputs.crop, colour="rgb" if len(inputs.mean) == 3 else "grey")
    found = []
    for file in files:
        try:
            found.append(picture(file.read_bytes(), size, how))
        except UserError as reason:
            raise UserError(f"{file}: {reason}") from None
        except OSError as reason:
            raise UserError(f"cannot read {file}: {reason.strerror}") from None
    return torch.stack(found)
