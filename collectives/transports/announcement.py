"""Announcement: the host message that says how a message from a GPU's memory will follow.

    byte 0            8     16              24
         +------------+-----+---------------+
         | "GTKDEV/1" | way | message_bytes |     little-endian
         +------------+-----+---------------+

A host message is announced only if its bytes look like an announcement.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from ..errors import MismatchError
from ..vector import Array
from .transport import Transport

_FIELDS: Final = struct.Struct("<8sqq")
_MAGIC: Final = b"GTKDEV/1"
ANNOUNCEMENT_BYTES: Final = _FIELDS.size


class Way(IntEnum):
    """How the announced message is sent, and in which memory it ends."""

    NCCL = 0  # from GPU to GPU
    STAGED = 1  # as the next host message, into the receiver's GPU
    HOST = 2  # as the next host message, which stays one
    MPI = 3  # from GPU to GPU, as the next message of an MPI that is CUDA-aware


class Announcement(NamedTuple):
    """The way and size of the message that will follow."""

    way: Way
    message_bytes: int

    def encode(self) -> Array:
        """Return the host message, uint8 [ANNOUNCEMENT_BYTES]."""
        return np.frombuffer(_FIELDS.pack(_MAGIC, self.way, self.message_bytes), np.uint8)

    @classmethod
    def read(cls, message: Array) -> Announcement | None:
        """Parse a host message; None when it is no announcement."""
        if message.size != ANNOUNCEMENT_BYTES:
            return None
        magic, way, message_bytes = _FIELDS.unpack(message.data)
        if magic != _MAGIC or way not in tuple(Way) or message_bytes < 0:
            return None
        return cls(Way(way), message_bytes)


def require_same(host: Transport, own: str) -> None:
    """Compare the ranks' texts about the operation that they are about to do together.

    Raises MismatchError, on all of them alike, where they differ.
    """
    texts = host.gather_object(own)
    for rank, text in zip(host.ranks, texts, strict=True):
        if text != texts[0]:
            raise MismatchError(
                f"rank {rank} asks for {text} where rank {host.ranks[0]} asks for {texts[0]}; "
                "all ranks must ask for the same"
            )
