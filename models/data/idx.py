"""IDX files, MNIST's format: a few sizes, then that many bytes; plain or gzip.

00 00 08 03        a zero, a zero, bytes (08), 3 dimensions
00 00 EA 60        60,000: the first size, its highest byte first
00 00 00 1C        28
00 00 00 1C        28
...                60,000 * 28 * 28 bytes
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Final

import numpy as np

from .binary_file import BinaryFile

MOST_BYTES: Final = 1 << 31
_BYTES: Final = 0x08


def read_idx(path: str | Path, dimensions: int) -> np.ndarray:
    """Return uint8 [...] with this number of dimensions.

    Raises MalformedFile, a ValueError that names file, byte and reason; OSError.
    """
    with BinaryFile(Path(path)) as file:
        zero, kind, count = struct.unpack(">HBB", file.read(4, "the header"))
        if zero or kind != _BYTES or count != dimensions:
            raise file.refuse(
                f"must begin with 0000{_BYTES:02x}{dimensions:02x}, bytes in {dimensions} "
                f"dimensions, got {zero:04x}{kind:02x}{count:02x}"
            )
        shape = struct.unpack(f">{count}I", file.read(4 * count, "the sizes"))
        announced = math.prod(shape)
        if not 1 <= announced <= MOST_BYTES:
            raise file.refuse(f"sizes {shape} are {announced} bytes; 1..{MOST_BYTES} are read")
        content = file.read(announced, f"sizes {shape}")
        file.end()
    return np.frombuffer(content, np.uint8).reshape(shape)
