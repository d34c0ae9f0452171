"""Assignment of the programs of a grid to tiles and examples."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_and_batch(tiles):
    """The tile of this program and its example, in int64, in a grid of tiles * batch programs.

    They are along the first axis of the grid, since the others have at most 2^16 - 1 programs.
    """
    return tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
