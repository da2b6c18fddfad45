"""The checksum at the end of a message, where all messages are checked."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..errors import MessageError
from ..kernels import checksum
from ..vector import Array

CHECKSUM_BYTES: Final = 8


def checksum_of(message: Array) -> Array:
    """Return the checksum of uint8 [m], uint8 [8]."""
    return np.frombuffer(checksum(message).to_bytes(CHECKSUM_BYTES, "little"), np.uint8)


def append_checksum(message: Array) -> Array:
    """Return a copy of uint8 [m] with its checksum behind it, uint8 [m + 8]."""
    checked = np.empty(message.size + CHECKSUM_BYTES, np.uint8)
    checked[:-CHECKSUM_BYTES] = message
    checked[-CHECKSUM_BYTES:] = checksum_of(checked[:-CHECKSUM_BYTES])
    return checked


def strip_checksum(checked: Array, sender: int) -> Array:
    """Return the message before its checksum; raise MessageError, which names the sender."""
    message, sent = checked[:-CHECKSUM_BYTES], checked[-CHECKSUM_BYTES:]
    if sent.tobytes() != checksum_of(message).tobytes():
        raise MessageError(
            f"the message from rank {sender} is malformed: its {checked.size} bytes do not match "
            "their checksum; start again from the last checkpoint"
        )
    return message
